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

// TestProjectSanity runs the suite for directories that project quotas limit.
func TestProjectSanity(t *testing.T) {
	runSuites(t, singleDriver(t, targets.ByName(t, "directories-xfs")), singleDriver(t, targets.ByName(t, "directories-ext4")))
}

// TestRealDisksSanity runs the suite for disks other than loop devices.
func TestRealDisksSanity(t *testing.T) {
	nvme := targets.ByName(t, "disks-nvme")
	nvme.Medium = backendtest.OnDisks(func(testing.TB, backendtest.Room) []string { return []string{"/dev/nvme?n1"} })
	runSuites(t, singleDriver(t, nvme), singleDriver(t, targets.ByName(t, "disks-scsi")), singleDriver(t, targets.ByName(t, "disks-virtio")))
}

// TestGroupSanity runs the suite for logical volumes.
func TestGroupSanity(t *testing.T) { runSuites(t, singleDriver(t, targets.ByName(t, "group"))) }

// TestThinSanity runs the suite for logical volumes in thin pools.
func TestThinSanity(t *testing.T) { runSuites(t, singleDriver(t, targets.ByName(t, "thin"))) }

// TestEncryptedSanity runs the suite for encrypted images.
func TestEncryptedSanity(t *testing.T) {
	runSuites(t, singleDriver(t, targets.ByName(t, "images-encrypted")))
}

// TestEncryptedNFSSanity runs the suite for encrypted images on exports.
func TestEncryptedNFSSanity(t *testing.T) {
	target := targets.ByName(t, "images-nfs-encrypted")
	target.Prepare, target.Medium = nil, targets.OnServer(nfsd.Start(t, nfsd.Options{}), target.Name)
	runSuites(t, onExport(t, target))
}

// TestEncryptedDisksSanity runs the suite for encrypted disks.
func TestEncryptedDisksSanity(t *testing.T) {
	runSuites(t, singleDriver(t, targets.ByName(t, "disks-encrypted")))
}

// TestEncryptedGroupSanity runs the suite for encrypted logical volumes.
func TestEncryptedGroupSanity(t *testing.T) {
	runSuites(t, singleDriver(t, targets.ByName(t, "group-encrypted")), singleDriver(t, targets.ByName(t, "thin-encrypted")))
}

// TestNFSSanity runs the suite for pools on exports, with several NFS versions.
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
		target.Name, target.Prepare, target.Medium = one.name, nil, targets.OnServer(server, one.name, one.options...)
		suites = append(suites, onExport(t, target))
	}
	runSuites(t, suites...)
}

// onExport is singleDriver for a target with a pool on an export.
func onExport(t *testing.T, target backendtest.Target) suite {
	t.Helper()
	var s suite
	t.Cleanup(func() { wantNoOwners(t, s.pool) }) // after the driver has ended
	s = singleDriver(t, target)
	return s
}

// wantNoOwners fails the test if a driver that has ended left an owner file in a pool.
func wantNoOwners(t *testing.T, poolDir string) {
	t.Helper()
	left, err := os.ReadDir(filepath.Join(poolDir, ".trivet", "owners"))
	if err != nil || len(left) > 0 {
		t.Errorf("got owner files %v and error %v, want none", left, err)
	}
}
