package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager"
)

// manager is a volume manager and its directories.
type manager struct {
	*server
	root, manifests string
	// address is the host:port of its metrics.
	address string
}

// surroundings are the objects that all claims refer to.
const surroundings = `
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
func startManager(ctx context.Context, g *ground, binary string) (*contender, *manager, error) {
	root, err := g.folder("manager")
	if err != nil {
		return nil, nil, err
	}
	driver, err := startTrivet(ctx, g, binary, trivet, ext4Of(manySize), "--plugins-registry", filepath.Join(root, "plugins_registry"))
	if err != nil {
		return nil, nil, err
	}
	m := &manager{root: root}
	if m.manifests, err = g.folder("manifests"); err != nil {
		return nil, nil, err
	}
	if m.address, err = freeAddress(ctx); err != nil {
		return nil, nil, err
	}
	m.server, err = g.launch("manager", binary, func(string) []string {
		return []string{"volume-manager", "--root-dir", root, "--manifests", m.manifests, "--node-name", nodeID, "--http-address", m.address}
	})
	if err != nil {
		return nil, nil, err
	}
	if _, err := m.put(map[string]string{"surroundings": surroundings}); err != nil {
		return nil, nil, err
	}
	return driver, m, m.await(ctx, func(s volumemanager.Status) bool { return len(s.Drivers) == 1 && s.Drivers[0].Error == "" })
}

// freeAddress returns an address on which no process listens.
func freeAddress(ctx context.Context) (string, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

const suffix = ".yaml"

// put renames manifests into the directory, and returns the time of the begin.
func (m *manager) put(contents map[string]string) (start time.Time, err error) {
	aside := m.manifests + ".new"
	if err := os.MkdirAll(aside, 0o755); err != nil {
		return start, err
	}
	for name, content := range contents {
		if err := os.WriteFile(filepath.Join(aside, name+suffix), []byte(content), 0o600); err != nil {
			return start, err
		}
	}
	start = time.Now()
	for name := range contents {
		if err := os.Rename(filepath.Join(aside, name+suffix), m.file(name)); err != nil {
			return start, err
		}
	}
	return start, nil
}

// remove removes manifests, and returns the time of the begin.
func (m *manager) remove(contents map[string]string) (start time.Time, err error) {
	start = time.Now()
	for name := range contents {
		if err := os.Remove(m.file(name)); err != nil {
			return start, err
		}
	}
	return start, nil
}

func (m *manager) file(name string) string { return filepath.Join(m.manifests, name+suffix) }

// managerPatience is the maximum time until all pods have their volumes, or none is left.
const managerPatience = 10 * time.Minute

// awaitPods waits until all pods have their volumes.
func (m *manager) awaitPods(ctx context.Context, pods []string) error {
	for _, pod := range pods {
		s, err := volumemanager.AwaitPod(ctx, m.root, types.NamespacedName{Namespace: "default", Name: pod}, managerPatience)
		if err != nil {
			return err
		}
		if !s.Ready {
			return fmt.Errorf("pod %s is not ready: %+v\n%s", pod, s.Volumes, m.tail())
		}
	}
	return nil
}

// statusPause is the time between two requests for the status of all volumes, which cost the
// manager CPU time.
const statusPause = 25 * time.Millisecond

// await waits until the manager reports a state.
func (m *manager) await(ctx context.Context, done func(volumemanager.Status) bool) error {
	ctx, cancel := context.WithTimeout(ctx, managerPatience)
	defer cancel()
	for {
		s, err := volumemanager.ReadStatus(ctx, m.root)
		if err != nil && !errors.Is(err, volumemanager.ErrNotRunning) || err == nil && done(s) {
			return err
		}
		if err := m.pause(ctx); err != nil {
			return fmt.Errorf("waiting for the volume manager: %w: %+v", err, s)
		}
		time.Sleep(statusPause)
	}
}

// awaitGone waits until no pod and no claim is left.
func (m *manager) awaitGone(ctx context.Context) error {
	return m.await(ctx, func(s volumemanager.Status) bool {
		return len(s.Volumes) == 0 && len(s.Claims) == 0 && len(s.PersistentVolumes) == 0
	})
}

// remounts returns how often the content of configMaps was checked again.
func (m *manager) remounts(ctx context.Context) (int, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+m.address+"/metrics", nil)
	if err != nil {
		return 0, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return 0, err
	}
	const counter = `volume_manager_operations_total{operation="volume_remount",plugin="kubernetes.io/configmap",status="success"} `
	for line := range strings.Lines(string(text)) {
		if value, ok := strings.CutPrefix(line, counter); ok {
			n, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			return int(n), err
		}
	}
	return 0, nil
}
