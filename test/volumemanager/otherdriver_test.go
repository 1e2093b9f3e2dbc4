package volumemanager

import (
	"fmt"
	"path/filepath"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/volumemanager"
)

// hostpath are the objects of csi-driver-host-path.
const hostpath = `
apiVersion: storage.k8s.io/v1
kind: CSIDriver
metadata: {name: hostpath.csi.k8s.io}
spec: {attachRequired: true, podInfoOnMount: true, fsGroupPolicy: File, volumeLifecycleModes: [Persistent, Ephemeral]}
---
apiVersion: storage.k8s.io/v1
kind: StorageClass
metadata: {name: hostpath}
provisioner: hostpath.csi.k8s.io
allowVolumeExpansion: true
`

// TestOtherDriver runs a third-party driver beside this project's, registered by an unmodified
// node-driver-registrar. The flags -other-driver and -other-registrar are their paths;
// docs/volume-manager.md names their versions.
func TestOtherDriver(t *testing.T) {
	testenv.Require(t, "other-driver")
	if *otherDriver == "" || *otherRegistrar == "" {
		t.Fatal("build both (docs/volume-manager.md) and set -other-driver and -other-registrar, or TRIVET_TEST_WITHOUT=other-driver")
	}
	g := newTrivet(t)
	data := t.TempDir()
	g.startOther(data)
	g.put("hostpath", hostpath)
	g.put("claims", claim("theirs", "hostpath", "1Mi", ""), claim("device", "hostpath", "4Mi", ", volumeMode: Block"), claim("ours", "xfs", "320Mi", ""))
	g.put("web", podOf("web", claimed("theirs"), claimed("device"), claimed("ours"), "{name: inline, csi: {driver: hostpath.csi.k8s.io}}"))
	p := g.await("web")
	for _, name := range []string{"theirs", "device", "ours", "inline"} {
		write(t, p[name].Path)
	}

	g.put("claims", claim("theirs", "hostpath", "2Mi", ""), claim("device", "hostpath", "4Mi", ", volumeMode: Block"), claim("ours", "xfs", "640Mi", ""),
		claim("copy", "hostpath", "2Mi", ", dataSource: {kind: PersistentVolumeClaim, name: theirs}"))
	g.claimHas("theirs", "2Mi")
	g.claimHas("ours", "640Mi")
	g.put("db", podOf("db", claimed("theirs"), claimed("copy")))
	p = g.await("db")
	wantWritten(t, "theirs", p["theirs"].Path)
	wantWritten(t, "copy", p["copy"].Path)

	g.wantNothing()
	must(t, g.poolHas(0))
	left, err := filepath.Glob(data + "/*-*-*") // each volume is a directory of its UUID
	if err != nil || len(left) > 0 {
		t.Errorf("volumes of the driver are not deleted: %q, %v", left, err)
	}
}

func (g *ground) startOther(data string) {
	g.t.Helper()
	socket := filepath.Join(g.dir, "other.sock")
	driver := g.start(nil, *otherDriver, "--endpoint", "unix://"+socket, "--nodeid", nodeName, "--statedir", data, "--enable-attach")
	// The registrar exits if the driver is not ready in time.
	registrar := g.start(nil, *otherRegistrar, "--csi-address", socket, "--kubelet-registration-path", socket, "--plugin-registration-path", g.registry)
	g.t.Cleanup(func() {
		registrar.kill()
		driver.kill()
	})
}

func (g *ground) claimHas(name, size string) {
	g.t.Helper()
	want := resource.MustParse(size)
	g.holds(func(s volumemanager.Status) error {
		for _, c := range s.Claims {
			if c.Name == name && c.Capacity == want.String() {
				return nil
			}
		}
		return fmt.Errorf("want %s of %s: %+v", size, name, s.Claims)
	})
}
