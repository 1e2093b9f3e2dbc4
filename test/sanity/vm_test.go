//go:build vm

package sanity

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/backendtest/targets"
	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
)

// TestProjectSanity is TestSanity for directories that project quotas limit.
func TestProjectSanity(t *testing.T) {
	runSuites(t, alone(t, targets.ByName(t, "directories-xfs")), alone(t, targets.ByName(t, "directories-ext4")))
}

// TestRealDisksSanity is TestSanity for disks other than loop devices.
func TestRealDisksSanity(t *testing.T) {
	nvme := targets.ByName(t, "disks-nvme")
	nvme.Medium = backendtest.OnDisks(func(testing.TB, backendtest.Room) []string { return []string{"/dev/nvme?n1"} })
	runSuites(t, alone(t, nvme), alone(t, targets.ByName(t, "disks-scsi")), alone(t, targets.ByName(t, "disks-virtio")))
}

// TestNFSSanity is TestSanity for a pool of each NFS version.
func TestNFSSanity(t *testing.T) {
	server := nfsd.Start(t, nfsd.Options{})
	var suites []suite
	for _, one := range []struct {
		target, name string
		options      []string
	}{
		{"nfs", "nfs3", []string{"nfsvers=3", "nolock"}},
		{"nfs", "nfs42", []string{"nfsvers=4.2"}},
		{"images-nfs", "images-nfs41", []string{"nfsvers=4.1"}},
		{"images-nfs", "images-nfs42", []string{"nfsvers=4.2"}},
	} {
		target := targets.ByName(t, one.target)
		target.Name, target.Medium = one.name, targets.OnServer(server, one.name, one.options...)
		var s suite
		t.Cleanup(func() { wantNoOwners(t, s.pool) }) // after the driver has ended
		s = alone(t, target)
		suites = append(suites, s)
	}
	runSuites(t, suites...)
}

// wantNoOwners fails the test if a driver that has ended owns a file in a pool.
func wantNoOwners(t *testing.T, poolDir string) {
	t.Helper()
	left, err := os.ReadDir(filepath.Join(poolDir, ".trivet", "owners"))
	if err != nil || len(left) > 0 {
		t.Errorf("of the driver's processes there is %v, %v", left, err)
	}
}
