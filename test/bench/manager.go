package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/test/measure"
	"github.com/trivet-csi/trivet/volumemanager"
)

// manager is a volume manager with its directories.
type manager struct {
	*server
	root, manifests string
	// address is the host:port of its metrics.
	address string
}

// sharedObjects are the objects to which all claims refer.
const sharedObjects = `
apiVersion: storage.k8s.io/v1
kind: CSIDriver
metadata: {name: csi.trivet.dev}
spec: {attachRequired: true}
---
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: bench}
provisioner: csi.trivet.dev
parameters: {csi.storage.k8s.io/fstype: ext4}
`

// startManager starts a driver and a volume manager, and waits until the driver is registered.
func startManager(ctx context.Context, g *testbed, binary string) (*contender, *manager) {
	root := g.directory("manager")
	driver := startTrivet(ctx, g, binary, trivet, ext4Of(manySize), "--plugins-registry", filepath.Join(root, "plugins_registry"))
	m := &manager{root: root, manifests: g.directory("manifests"), address: freeAddress(ctx)}
	m.server = g.launch("manager", binary, func(string) []string {
		return []string{"volume-manager", "--root-dir", root, "--manifests", m.manifests, "--node-name", nodeID, "--http-address", m.address}
	})
	m.put(map[string]string{"sharedObjects": sharedObjects})
	m.await(ctx, func(s volumemanager.Status) bool { return len(s.Drivers) == 1 && s.Drivers[0].Problem == "" })
	return driver, m
}

// freeAddress returns a host:port on which no process listens.
func freeAddress(ctx context.Context) string {
	l := measure.Get((&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0"))
	measure.Must(l.Close())
	return l.Addr().String()
}

// suffix ends the names of the files with manifests.
const suffix = ".yaml"

// put renames manifests, by their names without suffix, into the manager's directory. It returns the
// time at which it began to rename.
func (m *manager) put(contents map[string]string) (start time.Time) {
	aside := m.manifests + ".new"
	measure.Must(os.MkdirAll(aside, 0o755))
	for name, content := range contents {
		measure.Must(os.WriteFile(filepath.Join(aside, name+suffix), []byte(content), 0o600))
	}
	start = time.Now()
	for name := range contents {
		measure.Must(os.Rename(filepath.Join(aside, name+suffix), m.file(name)))
	}
	return start
}

// remove removes manifests, and returns the time at which it began.
func (m *manager) remove(contents map[string]string) (start time.Time) {
	start = time.Now()
	for name := range contents {
		measure.Must(os.Remove(m.file(name)))
	}
	return start
}

func (m *manager) file(name string) string { return filepath.Join(m.manifests, name+suffix) }

// managerTimeout is the maximum time until the manager has mounted or removed all volumes.
const managerTimeout = 10 * time.Minute

// awaitPods waits until all pods have their volumes.
func (m *manager) awaitPods(ctx context.Context, pods []string) {
	for _, pod := range pods {
		s := measure.Get(volumemanager.AwaitPod(ctx, m.root, types.NamespacedName{Namespace: "default", Name: pod}, managerTimeout))
		if !s.Ready {
			measure.Must(fmt.Errorf("pod %s is not ready: %+v\n%s", pod, s.Volumes, m.Tail()))
		}
	}
}

// statusPause is the time between two requests for the status. It is long compared with poll,
// because each request costs the manager CPU time.
const statusPause = 25 * time.Millisecond

// await waits until done accepts the status that the manager reports.
func (m *manager) await(ctx context.Context, done func(volumemanager.Status) bool) {
	var failed error
	measure.Must(m.Await(ctx, "the volume manager", statusPause, managerTimeout, func() bool {
		s, err := volumemanager.ReadStatus(ctx, m.root)
		if err != nil && !errors.Is(err, volumemanager.ErrNotRunning) {
			failed = err
		}
		return failed != nil || err == nil && done(s)
	}))
	measure.Must(failed)
}

// awaitGone waits until no volume, claim or PersistentVolume is left.
func (m *manager) awaitGone(ctx context.Context) {
	m.await(ctx, func(s volumemanager.Status) bool {
		return len(s.Volumes) == 0 && len(s.Claims) == 0 && len(s.PersistentVolumes) == 0
	})
}

// configMapChecks returns how often the manager has checked the content of a mounted configMap again.
func (m *manager) configMapChecks(ctx context.Context) int {
	const counter = `trivet_volume_manager_operations_total{operation="volume_remount",plugin="kubernetes.io/configmap",status="success"}`
	return int(measure.Get(measure.Scrape(ctx, m.address))[counter])
}
