package crash

import (
	"slices"
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/backendtest/targets"
)

// kind is a kind of volume of package targets. Its name is a part of the names of tests.
type kind struct {
	backendtest.Kind
	name string
}

func (k kind) String() string { return k.name }

// kinds contains the tested kinds of volume. The features of a kind select the rows that test it.
var kinds = []kind{
	{targets.Volume("images-xfs", "ext4"), "ext4"},
	{targets.Volume("images-xfs", "block"), "block"},
	{targets.Volume("images-xfs", "xfs"), "xfs"},
	{targets.Volume("images-xfs", "btrfs"), "btrfs"},
	{targets.Volume("directories-btrfs", "dir"), "local"},
	{targets.Volume("directories-unlimited", "dir"), "plain"},
	{targets.Volume("sixth", "dir"), "sixth"},
	{targets.Volume("disks", "xfs"), "disk"},
	{targets.Volume("nfs", "dir"), "directory"},
}

// The kinds of rows. nfs_test.go contains those for pools on exports.
var (
	ext4             = images("ext4")
	ext4AndRaw       = images("ext4", rawDevice)
	raw              = images(rawDevice)
	growable         = images("xfs", rawDevice) // to grow an ext4 needs CAP_SYS_RESOURCE, which tests may lack
	filesystemImages = kindsWith(backendtest.Image | backendtest.Filesystem)
	local            = kindsWith(backendtest.Directory | backendtest.NodeLocal)
	limited          = kindsWith(backendtest.Limited)
	unlimited        = kindsWith(backendtest.Unlimited)
	disks            = kindsWith(backendtest.WholeDisk)
	// onePerTarget contains the first kind of each target whose pool is on a node.
	onePerTarget = slices.CompactFunc(kindsWith(backendtest.NodeLocal), func(a, b kind) bool { return a.Target().Name == b.Target().Name })
)

// kindsWith returns the kinds that have all the given features.
func kindsWith(needs backendtest.Feature) []kind {
	return slices.DeleteFunc(slices.Clone(kinds), func(k kind) bool { return !k.Has(needs) })
}

// rawDevice is the filesystem type of a block volume.
const rawDevice = ""

// images returns the kinds of disk images with the given filesystems.
func images(fsTypes ...string) []kind {
	return slices.DeleteFunc(kindsWith(backendtest.Image), func(k kind) bool { return !slices.Contains(fsTypes, k.FSType) })
}

// growth is the number of bytes by which volumes are expanded.
const growth = 32 << 20

// host starts a driver with a pool for volumes of the kind.
func (k kind) host(t *testing.T) *host {
	t.Helper()
	if k.Has(backendtest.WholeDisk) {
		return newDiskHost(t, k)
	}
	if k.Has(backendtest.Logical) {
		return newGroupHost(t, k)
	}
	return newHostWithPool(t, k.Target().Medium(t, backendtest.Room{Total: poolFilesystem}).Dir, crashing, "")
}
