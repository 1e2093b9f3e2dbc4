package sys

import (
	"os"
	"unsafe"
)

// Requests of uapi/linux/fs.h, linux/fs/ext4/ext4.h and xfsprogs' xfs_fs.h.
const (
	fiFreeze           = 0xc0045877 // FIFREEZE, _IOWR('X', 119, int)
	fiThaw             = 0xc0045878 // FITHAW, _IOWR('X', 120, int)
	fiTrim             = 0xc0185879 // FITRIM, _IOWR('X', 121, struct fstrim_range)
	ext4IocResizeFS    = 0x40086610 // EXT4_IOC_RESIZE_FS, _IOW('f', 16, __u64)
	xfsIocFSGeometryV1 = 0x80705864 // XFS_IOC_FSGEOMETRY_V1, _IOR('X', 100, struct xfs_fsop_geom_v1)
	xfsIocGrowFSData   = 0x4010586e // XFS_IOC_FSGROWFSDATA, _IOW('X', 110, struct xfs_growfs_data)
)

// Freeze freezes the filesystem of an open directory (FIFREEZE). It returns when all dirty pages are written.
// No signal interrupts it. The error is EBUSY if the filesystem is already frozen.
func Freeze(root *os.File) error { return ioctl(root, "FIFREEZE", fiFreeze, nil) }

// Thaw ends a freeze (FITHAW). The error is EINVAL if the filesystem is not frozen.
func Thaw(root *os.File) error { return ioctl(root, "FITHAW", fiThaw, nil) }

// trimRange is struct fstrim_range.
type trimRange struct{ start, length, minLength uint64 }

// Trim discards the unused blocks in a range of the addresses of a filesystem (FITRIM), and returns the bytes that it has
// discarded. Only a signal that kills the process interrupts it. The error is EOPNOTSUPP if the device does not support
// discards, and EINVAL if the range begins after the last address of an ext4 or xfs.
func Trim(root *os.File, start, length uint64) (discarded uint64, err error) {
	arg := trimRange{start: start, length: length}
	err = ioctl(root, "FITRIM", fiTrim, unsafe.Pointer(&arg))
	return arg.length, err
}

// ResizeExt4 grows a mounted ext4 to a number of filesystem blocks (EXT4_IOC_RESIZE_FS). It needs
// CAP_SYS_RESOURCE.
func ResizeExt4(root *os.File, blocks uint64) error {
	return ioctl(root, "EXT4_IOC_RESIZE_FS", ext4IocResizeFS, unsafe.Pointer(&blocks))
}

// XFSReflink is set in XFSGeometry.Flags if files can share blocks (XFS_FSOP_GEOM_FLAGS_REFLINK).
const XFSReflink = 1 << 20

// XFSGeometry is struct xfs_fsop_geom_v1.
type XFSGeometry struct {
	BlockSize, rtExtSize, agBlocks, agCount uint32
	logBlocks, sectSize, inodeSize, imaxPct uint32
	DataBlocks, rtBlocks, rtExtents         uint64
	logStart                                uint64
	uuid                                    [16]byte
	sunit, swidth                           uint32
	version                                 int32
	Flags, logSectSize, rtSectSize          uint32
	dirBlockSize                            uint32
	_                                       uint32
}

// ReadXFSGeometry reads the geometry of a mounted XFS (ioctl_xfs_fsgeometry(2)).
func ReadXFSGeometry(root *os.File) (g XFSGeometry, err error) {
	err = ioctl(root, "XFS_IOC_FSGEOMETRY_V1", xfsIocFSGeometryV1, unsafe.Pointer(&g))
	return g, err
}

// xfsGrowData is struct xfs_growfs_data.
type xfsGrowData struct {
	newBlocks uint64
	imaxPct   uint32
	_         uint32
}

// GrowXFS grows the data section of a mounted XFS to a number of filesystem blocks (XFS_IOC_FSGROWFSDATA). g
// is the current geometry.
func GrowXFS(root *os.File, g XFSGeometry, blocks uint64) error {
	arg := xfsGrowData{newBlocks: blocks, imaxPct: g.imaxPct}
	return ioctl(root, "XFS_IOC_FSGROWFSDATA", xfsIocGrowFSData, unsafe.Pointer(&arg))
}
