package volumemanager

import (
	"fmt"
	"path/filepath"
	"testing"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/volumemanager"
)

// hostpath contains the manifests of csi-driver-host-path.
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

// TestOtherDriver runs a third-party driver beside this project's driver. An unmodified
// node-driver-registrar registers it. The flags -other-driver and -other-registrar contain the paths of
// the programs, which these commands build in clones of their repositories:
//
//	git checkout 1f2b2e64 && go build -ldflags '-X main.version=v1.18.0-8-g1f2b2e64' ./cmd/hostpathplugin
//	git checkout 3482d444 && go build ./cmd/csi-node-driver-registrar
func TestOtherDriver(t *testing.T) {
	testenv.Require(t, "other-driver")
	if *otherDriver == "" || *otherRegistrar == "" {
		t.Fatal("build a driver and a registrar (see the comment of this test) and set -other-driver and -other-registrar, or skip this test with TRIVET_TEST_WITHOUT=other-driver")
	}
	m := newMachineWithDriver(t)
	data := t.TempDir()
	m.startOther(data)
	m.put("hostpath", hostpath)
	m.put("claims", claim("theirs", "hostpath", "1Mi", ""), claim("device", "hostpath", "4Mi", ", volumeMode: Block"), claim("ours", "xfs", "320Mi", ""))
	m.put("web", podOf("web", claimed("theirs"), claimed("device"), claimed("ours"), "{name: inline, csi: {driver: hostpath.csi.k8s.io}}"))
	p := m.await("web")
	for _, name := range []string{"theirs", "device", "ours", "inline"} {
		write(t, p[name].Path)
	}

	m.put("claims", claim("theirs", "hostpath", "2Mi", ""), claim("device", "hostpath", "4Mi", ", volumeMode: Block"), claim("ours", "xfs", "640Mi", ""),
		claim("copy", "hostpath", "2Mi", ", dataSource: {kind: PersistentVolumeClaim, name: theirs}"))
	m.awaitClaimSize("theirs", "2Mi")
	m.awaitClaimSize("ours", "640Mi")
	m.put("db", podOf("db", claimed("theirs"), claimed("copy")))
	p = m.await("db")
	wantWritten(t, "theirs", p["theirs"].Path)
	wantWritten(t, "copy", p["copy"].Path)

	m.removeAll()
	must(t, m.checkPool(0))
	left, err := filepath.Glob(data + "/*-*-*") // each volume is a directory with a UUID as name
	if err != nil || len(left) > 0 {
		t.Errorf("volumes of the third-party driver: got %q, error %v; want none", left, err)
	}
}

// startOther starts the third-party driver, which stores its volumes in a directory, and its registrar.
func (m *machine) startOther(data string) {
	m.t.Helper()
	socket := filepath.Join(m.dir, "other.sock")
	driver := m.start(nil, *otherDriver, "--endpoint", "unix://"+socket, "--nodeid", nodeName, "--statedir", data, "--enable-attach")
	registrar := m.start(nil, *otherRegistrar, "--csi-address", socket, "--kubelet-registration-path", socket, "--plugin-registration-path", m.registry)
	m.t.Cleanup(func() {
		registrar.kill()
		driver.kill()
	})
}

// awaitClaimSize waits until a claim has a capacity.
func (m *machine) awaitClaimSize(name, size string) {
	m.t.Helper()
	want := resource.MustParse(size)
	m.awaitStatus(func(s volumemanager.Status) error {
		for _, c := range s.Claims {
			if c.Name == name && c.SizeBytes == want.Value() {
				return nil
			}
		}
		return fmt.Errorf("got claims %+v, want %s with capacity %s", s.Claims, name, size)
	})
}
