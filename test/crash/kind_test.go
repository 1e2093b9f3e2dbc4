package crash

import (
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
	ext4  = kind{targets.Volume("images-xfs", "ext4"), "ext4"}
	xfs   = kind{targets.Volume("images-xfs", "xfs"), "xfs"}
	btrfs = kind{targets.Volume("images-xfs", "btrfs"), "btrfs"}
	block = kind{targets.Volume("images-xfs", "block"), "block"}
	// directory is a directory of an export.
	directory = kind{targets.Volume("nfs", "dir"), "directory"}
	// local is a directory that its filesystem limits; nothing limits plain.
	local = kind{targets.Volume("directories-btrfs", "dir"), "local"}
	plain = kind{targets.Volume("directories-unlimited", "dir"), "plain"}
	sixth = kind{targets.Volume("sixth", "dir"), "sixth"}
	disk  = kind{targets.Volume("disks", "xfs"), "disk"}
)

// growth is by how much volumes are expanded, in bytes.
const growth = 32 << 20

// host starts a driver whose pool can hold the kind's volumes.
func (k kind) host(t *testing.T, armed crashpoint.Point) *host {
	t.Helper()
	if k.Has(backendtest.WholeDisk) {
		return newDiskHost(t, crashing, armed)
	}
	return newHostIn(t, k.Target().Medium(t, backendtest.Room{Total: poolFilesystem}).Dir, crashing, armed)
}
