//go:build vm

package blockdev_test

import (
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/blockdev"
)

// TestHeld: a blank disk is not free if the disk or its partition is a part of a device-mapper device. The
// device-mapper device cannot be claimed either.
func TestHeld(t *testing.T) {
	testenv.Run(t, "modprobe", "dm_mod")
	for name, partition := range map[string]string{"disk": "", "partition": "p1"} {
		t.Run(name, func(t *testing.T) {
			d, _ := newDisk(t)
			if partition != "" {
				testenv.Run(t, "addpart", d.Path, "1", "2048", "8192")
			}
			testenv.Run(t, "dmsetup", "create", name, "--table", "0 8192 linear "+d.Path+partition+" 0")
			t.Cleanup(func() { testenv.Run(t, "dmsetup", "remove", name) })
			requireReason(t, d, blockdev.DiskHeld, d.Name+partition+" is a part of dm-")
			requireNoClaim(t, d, blockdev.ErrDiskBusy)
			requireReason(t, findDisk(t, "/dev/mapper/"+name), blockdev.DiskUnsupported, "supports no partitions")
		})
	}
}
