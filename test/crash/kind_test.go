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

// The kinds. A new kind of volume is one line here, and one in the list of rows that it is
// for.
var (
	ext4  = kindOf("ext4", "images-xfs", "ext4")
	xfs   = kindOf("xfs", "images-xfs", "xfs")
	btrfs = kindOf("btrfs", "images-xfs", "btrfs")
	block = kindOf("block", "images-xfs", "block")
	// directory is a directory of an export.
	directory = kindOf("directory", "nfs", "dir")
	// local is a directory that its filesystem limits; nothing limits plain.
	local = kindOf("local", "directories-btrfs", "dir")
	plain = kindOf("plain", "directories-unlimited", "dir")
	sixth = kindOf("sixth", "sixth", "dir")
	disk  = kindOf("disk", "disks", "xfs")
)

// growth is by how much volumes are expanded, in bytes. btrfs grows to 256 MiB or more
// (BTRFS_IOC_RESIZE).
const growth = 96 << 20

// kindOf returns a kind of a target. The target's list of kinds has it under the name of.
func kindOf(name, target, of string) kind {
	i := slices.IndexFunc(targets.All, func(t backendtest.Target) bool { return t.Name == target })
	all := targets.All[i].Volumes()
	return kind{all[slices.IndexFunc(all, func(k backendtest.Kind) bool { return k.Name() == of })], name}
}

// host starts a driver whose pool can hold the kind's volumes.
func (k kind) host(t *testing.T, armed crashpoint.Point) *host {
	t.Helper()
	if k.Has(backendtest.WholeDisk) {
		return newDiskHost(t, crashing, armed)
	}
	return newHostIn(t, k.Target().Medium(t, backendtest.Room{Total: poolFilesystem}).Dir, crashing, armed)
}
