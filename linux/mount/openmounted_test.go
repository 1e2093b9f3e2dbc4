package mount_test

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/mount"
)

// TestOpenMounted: a filesystem is not opened at a path where another mount covers it.
func TestOpenMounted(t *testing.T) {
	for _, fsType := range []string{"ext4", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			at := testenv.Filesystem(t, fsType, "128M")
			device := testenv.Run(t, "findmnt", "-n", "-o", "SOURCE", at)
			for _, covered := range []bool{false, true} {
				if covered {
					if err := unix.Mount("none", at, "tmpfs", 0, ""); err != nil {
						t.Fatal(err)
					}
					t.Cleanup(func() { _ = unix.Unmount(at, 0) })
				}
				root, err := mount.OpenMounted(device)
				if err != nil || (root == nil) != covered {
					t.Errorf("covered %t: got root %v, %v; want nil only if covered", covered, root, err)
				}
				if root != nil {
					root.Close()
				}
			}
		})
	}
}
