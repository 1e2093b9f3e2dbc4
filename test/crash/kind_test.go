package crash

import (
	"slices"
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/backendtest/targets"
	"github.com/trivet-csi/trivet/internal/crashpoint"
)

// kind is a kind of volume of package targets. Its name is short, because a driver's socket
// is in a folder of that name.
type kind struct {
	backendtest.Kind
	name string
}

func (k kind) String() string { return k.name }

// kinds are the tested kinds of volume. A new kind is one line here: its powers choose its rows.
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

// The kinds of rows. Those on exports are in nfs_test.go.
var (
	one       = images("ext4")
	both      = images("ext4", rawDevice)
	raw       = images(rawDevice)
	growable  = images("xfs", rawDevice) // growing ext4 needs a capability that some machines lack
	formatted = with(backendtest.Image | backendtest.Filesystem)
	local     = with(backendtest.Directory | backendtest.NodeLocal)
	limited   = with(backendtest.Limited)
	unlimited = with(backendtest.Unlimited)
	disks     = with(backendtest.WholeDisk)
	// each is the first kind of each target of a node.
	each = slices.CompactFunc(with(backendtest.NodeLocal), func(a, b kind) bool { return a.Target().Name == b.Target().Name })
)

// with returns the kinds with some powers.
func with(needs backendtest.Power) []kind {
	return slices.DeleteFunc(slices.Clone(kinds), func(k kind) bool { return !k.Has(needs) })
}

// rawDevice is the filesystem of a raw device.
const rawDevice = ""

// images returns the kinds of disk images with some filesystems.
func images(fsTypes ...string) []kind {
	return slices.DeleteFunc(with(backendtest.Image), func(k kind) bool { return !slices.Contains(fsTypes, k.FSType) })
}

// growth is by how much volumes are expanded, in bytes.
const growth = 32 << 20

// host starts a driver whose pool can hold the kind's volumes.
func (k kind) host(t *testing.T, armed crashpoint.Point) *host {
	t.Helper()
	if k.Has(backendtest.WholeDisk) {
		return newDiskHost(t, k, armed)
	}
	return newHostIn(t, k.Target().Medium(t, backendtest.Room{Total: poolFilesystem}).Dir, crashing, armed)
}
