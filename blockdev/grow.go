package blockdev

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ioctl numbers and structures that x/sys does not have (linux/fs/ext4/ext4.h,
// uapi/linux/btrfs.h, xfsprogs xfs_fs.h).
const (
	ext4IocResizeFS    = 0x40086610 // _IOW('f', 16, __u64)
	xfsIocFSGeometryV1 = 0x80705864 // _IOR('X', 100, struct xfs_fsop_geom_v1)
	xfsIocGrowData     = 0x4010586e // _IOW('X', 110, struct xfs_growfs_data)
	btrfsIocResize     = 0x50009403 // _IOW(0x94, 3, struct btrfs_ioctl_vol_args)
	btrfsIocDevStats   = 0xc4089434 // _IOWR(0x94, 52, struct btrfs_ioctl_get_dev_stats)
	btrfsIocDevInfo    = 0xd000941e // _IOWR(0x94, 30, struct btrfs_ioctl_dev_info_args)
)

// xfsGeometry is struct xfs_fsop_geom_v1.
type xfsGeometry struct {
	blockSize, rtExtSize, agBlocks, agCount uint32
	logBlocks, sectSize, inodeSize, imaxPct uint32
	dataBlocks, rtBlocks, rtExtents         uint64
	logStart                                uint64
	uuid                                    [16]byte
	sunit, swidth                           uint32
	version                                 int32
	flags, logSectSize, rtSectSize          uint32
	dirBlockSize                            uint32
	_                                       uint32
}

type xfsGrowData struct {
	newBlocks uint64
	imaxPct   uint32
	_         uint32
}

type btrfsVolArgs struct {
	fd   int64
	name [4088]byte
}

type btrfsDevInfo struct {
	devID      uint64
	uuid       [16]byte
	bytesUsed  uint64
	totalBytes uint64
	_          [379]uint64
	path       [1024]byte
}

type btrfsDevStats struct {
	devID, items, flags uint64
	values              [5]uint64 // write, read, flush, corruption and generation errors
	_                   [121]uint64
}

func ioctl(fd int, request uint, arg unsafe.Pointer) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(request), uintptr(arg))
	if errno != 0 {
		return errno
	}
	return nil
}

// GrowFilesystem makes a mounted filesystem as large as its device. root is a
// directory of it, device the open device. It is no error if
// there is nothing to do. ext4 wants CAP_SYS_RESOURCE.
func GrowFilesystem(root, device *os.File, fsType string) error {
	size, err := Size(device)
	if err != nil {
		return err
	}
	switch fsType {
	case "ext4":
		return growExt4(int(root.Fd()), device, size)
	case "xfs":
		return growXFS(int(root.Fd()), size)
	case "btrfs":
		return growBtrfs(int(root.Fd()), size)
	}
	return fmt.Errorf("growing %q: %w", fsType, ErrNoFS)
}

func growExt4(root int, device *os.File, size int64) error {
	// Through the device's page cache, where a mounted ext4 keeps its
	// superblock, so this is the state of now.
	sb, err := readExt4(device)
	if err != nil {
		return err
	}
	have, blocks := uint64(sb.Size/blockSize), uint64(size/blockSize)
	if have >= blocks {
		return nil
	}
	err = ioctl(root, ext4IocResizeFS, unsafe.Pointer(&blocks))
	// A tail too short for the tables of a block group is left unused, by
	// mke2fs as by the kernel.
	const minGroupBlocks = 2048
	tail := have%blocksPerGroup == 0 && blocks-have < minGroupBlocks
	if tail && (errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EPERM)) {
		return nil
	}
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("growing ext4: %w: the driver needs CAP_SYS_RESOURCE: run it privileged where the host has that, or use xfs", err)
	}
	if err != nil {
		return fmt.Errorf("growing ext4: EXT4_IOC_RESIZE_FS: %w", err)
	}
	return nil
}

func growXFS(root int, size int64) error {
	var geo xfsGeometry
	if err := ioctl(root, xfsIocFSGeometryV1, unsafe.Pointer(&geo)); err != nil {
		return fmt.Errorf("growing xfs: XFS_IOC_FSGEOMETRY_V1: %w", err)
	}
	blocks := uint64(size) / uint64(geo.blockSize)
	if blocks <= geo.dataBlocks {
		return nil
	}
	arg := xfsGrowData{newBlocks: blocks, imaxPct: geo.imaxPct}
	err := ioctl(root, xfsIocGrowData, unsafe.Pointer(&arg))
	// A tail too short for an allocation group of its own is left unused.
	const minGroupBlocks = 64
	if errors.Is(err, unix.EINVAL) && blocks-geo.dataBlocks < minGroupBlocks {
		return nil
	}
	if err != nil {
		return fmt.Errorf("growing xfs: XFS_IOC_FSGROWFSDATA: %w", err)
	}
	return nil
}

func growBtrfs(root int, size int64) error {
	info, err := btrfsDevice(root)
	if err != nil {
		return err
	}
	const sectorSize = 4096
	if int64(info.totalBytes)/sectorSize >= size/sectorSize {
		return nil
	}
	var arg btrfsVolArgs
	copy(arg.name[:], "1:max")
	if err := ioctl(root, btrfsIocResize, unsafe.Pointer(&arg)); err != nil {
		return fmt.Errorf("growing btrfs: BTRFS_IOC_RESIZE: %w", err)
	}
	return nil
}

func btrfsDevice(root int) (*btrfsDevInfo, error) {
	info := &btrfsDevInfo{devID: 1}
	if err := ioctl(root, btrfsIocDevInfo, unsafe.Pointer(info)); err != nil {
		return nil, fmt.Errorf("btrfs: BTRFS_IOC_DEV_INFO: %w", err)
	}
	return info, nil
}

// BtrfsDevice is the path of the device that a mounted btrfs is on; its st_dev
// does not tell.
func BtrfsDevice(root *os.File) (string, error) {
	info, err := btrfsDevice(int(root.Fd()))
	if err != nil {
		return "", err
	}
	return unix.ByteSliceToString(info.path[:]), nil
}

// BtrfsErrors counts the errors that a mounted btrfs has recorded of its device.
func BtrfsErrors(root *os.File) (uint64, error) {
	stats := btrfsDevStats{devID: 1}
	stats.items = uint64(len(stats.values))
	if err := ioctl(int(root.Fd()), btrfsIocDevStats, unsafe.Pointer(&stats)); err != nil {
		return 0, fmt.Errorf("btrfs: BTRFS_IOC_GET_DEV_STATS: %w", err)
	}
	var n uint64
	for _, v := range stats.values {
		n += v
	}
	return n, nil
}
