package blockdev

import (
	"fmt"
	"os"
	"unsafe"
)

// xfsReflink is XFS_FSOP_GEOM_FLAGS_REFLINK (xfs_fs.h).
const xfsReflink = 1 << 20

// Reflinks tells whether files of a mounted filesystem can share blocks. root is a
// directory of it.
func Reflinks(root *os.File, fsType string) (bool, error) {
	switch fsType {
	case "btrfs":
		return true, nil
	case "xfs":
		var geo xfsGeometry
		if err := ioctl(int(root.Fd()), xfsIocFSGeometryV1, unsafe.Pointer(&geo)); err != nil {
			return false, fmt.Errorf("XFS_IOC_FSGEOMETRY_V1: %w", err)
		}
		return geo.flags&xfsReflink != 0, nil
	}
	return false, nil
}
