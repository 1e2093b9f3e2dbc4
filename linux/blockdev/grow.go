package blockdev

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
)

// GrowFilesystem makes a mounted filesystem as large as its device. root is a directory of the filesystem. It
// is no error if the filesystem already has that size. ext4 needs CAP_SYS_RESOURCE.
func GrowFilesystem(root, device *os.File, fsType string) error {
	size, err := Size(device)
	if err == nil {
		switch fsType {
		case "ext4":
			err = growExt4(root, device, size)
		case "xfs":
			err = growXFS(root, size)
		case "btrfs":
			err = growBtrfs(root, size)
		default:
			err = ErrNoFS
		}
	}
	if err != nil {
		return fmt.Errorf("growing %s: %w", fsType, err)
	}
	return nil
}

// growExt4 grows a mounted ext4 to a device of size bytes.
func growExt4(root, device *os.File, size int64) error {
	// A mounted ext4 keeps its superblock in the page cache of the device, so ReadSuperblock reads the current state.
	sb, err := ReadSuperblock(device, "ext4")
	if err != nil {
		return err
	}
	have, blocks := uint64(sb.Size/sb.blockSize), uint64(size/sb.blockSize) // another program may have used smaller blocks
	if have >= blocks {
		return nil
	}
	err = sys.ResizeExt4(root, blocks)
	// mke2fs and the kernel do not use a tail that is too short for the tables of a block group.
	const minGroupBlocks = 2048
	perGroup, first := uint64(8*sb.blockSize), uint64(0)
	if sb.blockSize == 1024 { // the first group begins after the boot block
		first = 1
	}
	tail := (have-first)%perGroup == 0 && blocks-have < minGroupBlocks
	if tail && (errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EPERM)) {
		return nil
	}
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("%w: the driver needs CAP_SYS_RESOURCE: run it privileged on a host that has this capability, or use xfs", err)
	}
	return err
}

// growXFS grows a mounted xfs to a device of size bytes.
func growXFS(root *os.File, size int64) error {
	geometry, err := sys.ReadXFSGeometry(root)
	if err != nil {
		return err
	}
	blocks := uint64(size) / uint64(geometry.BlockSize)
	if blocks <= geometry.DataBlocks {
		return nil
	}
	err = sys.GrowXFS(root, geometry, blocks)
	// The kernel does not use a tail that is too short for an allocation group.
	const minGroupBlocks = 64
	if errors.Is(err, unix.EINVAL) && blocks-geometry.DataBlocks < minGroupBlocks {
		return nil
	}
	return err
}

// growBtrfs grows a mounted btrfs to a device of size bytes.
func growBtrfs(root *os.File, size int64) error {
	_, have, err := sys.BtrfsDevice(root)
	const sectorSize = 4096
	if err != nil || have/sectorSize >= size/sectorSize {
		return err
	}
	return sys.GrowBtrfs(root)
}

// Reflinks reports whether files of a mounted filesystem can share blocks. root is a directory of the
// filesystem.
func Reflinks(root *os.File, fsType string) (bool, error) {
	switch fsType {
	case "btrfs":
		return true, nil
	case "xfs":
		geometry, err := sys.ReadXFSGeometry(root)
		return geometry.Flags&sys.XFSReflink != 0, err
	}
	return false, nil
}
