//go:build vm

package sanity

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/onsi/gomega"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/backend/nfs"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// exports are the grounds, by the options of their pools.
var exports = map[string][]string{
	"nfs3":  {"nfsvers=3", "nolock"},
	"nfs41": {"nfsvers=4.1"},
	"nfs42": {"nfsvers=4.2"},
}

var exportKinds = []kind{
	directory("nfs3"),
	directory("nfs42"),
	imageOn("nfs41", filesystem("ext4")),
	imageOn("nfs42", filesystem("ext4")),
	imageOn("nfs42", filesystem("xfs")),
	imageOn("nfs42", kind{name: "block", accessType: "block"}),
}

// directory is a kind of volume that is a directory of an export.
func directory(ground string) kind {
	return kind{name: "directory", accessType: "mount", parameters: map[string]string{volume.ParamBackend: nfs.Name, volume.ParamPool: ground}}.on(ground)
}

// TestNFSSanity has one driver with a pool for each version of the protocol.
func TestNFSSanity(t *testing.T) {
	selected := chosen(t, exportKinds)
	server := nfsd.Start(t, nfsd.Options{})
	var pools []pool.Config
	suites := map[string]suite{}
	state := t.TempDir()
	endpoint := "unix://" + filepath.Join(state, "csi.sock")
	for _, k := range selected {
		if _, there := suites[k.ground]; there {
			continue
		}
		export := server.Export(t, k.ground)
		dir := server.Dir(export)
		pools = append(pools, pool.Config{
			Name: k.ground, NFS: &pool.NFS{Server: server.Address(), Export: export, MountOptions: exports[k.ground], Init: true},
		})
		suites[k.ground] = suite{dir, volume.ID{Backend: loop.Name, Pool: k.ground}, endpoint, endpoint}
		t.Cleanup(func() { wantNoOwners(t, dir) })
	}
	d := backendtest.StartWith(t, driver.Options{
		Endpoint: endpoint, NodeID: backendtest.Node, StateDir: state, Name: "csi.trivet.dev", Version: "test",
		Services: []string{"controller", "node"},
		Config:   driver.Config{Pools: pools, MaxVolumesPerNode: maxVolumes},
		Backends: []func(*pool.Set) backend.Backend{loop.New, nfs.New},
		Worker:   backendtest.Worker(),
	})
	for ground := range suites {
		awaitOpen(t, d, ground)
	}
	runKinds(t, selected, suites)
}

// awaitOpen waits for a pool: no driver does before it is ready.
func awaitOpen(t *testing.T, d *backendtest.Driver, name string) {
	t.Helper()
	open := func() error {
		_, err := d.Control.GetCapacity(t.Context(), &csi.GetCapacityRequest{Parameters: map[string]string{volume.ParamPool: name}})
		return err
	}
	gomega.NewWithT(t).Eventually(open, time.Minute).Should(gomega.Succeed(), "pool "+name)
}

// wantNoOwners: a driver that has ended owns nothing in a pool.
func wantNoOwners(t *testing.T, poolDir string) {
	t.Helper()
	left, err := os.ReadDir(filepath.Join(poolDir, ".trivet", "owners"))
	if err != nil || len(left) > 0 {
		t.Errorf("of the driver's processes there is %v, %v", left, err)
	}
}
