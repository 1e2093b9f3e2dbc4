package sys

import (
	"errors"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Ioctl requests of uapi/linux/fs.h and uapi/linux/fiemap.h that x/sys lacks.
const (
	fsIocFSGetXattr = 0x801c581f // FS_IOC_FSGETXATTR
	fsIocFSSetXattr = 0x401c5820 // FS_IOC_FSSETXATTR
	fsIocFiemap     = 0xc020660b // FS_IOC_FIEMAP
)

// Inode flags of chattr(1) (FS_*_FL, uapi/linux/fs.h).
const (
	FlagCompress   = 1 << 2
	FlagSync       = 1 << 3
	FlagNoDump     = 1 << 6
	FlagNoAtime    = 1 << 7
	FlagNoCompress = 1 << 10
	FlagDirSync    = 1 << 16
	FlagTopDir     = 1 << 17
	FlagNoCOW      = 1 << 23
)

// InodeFlags reads the flags of chattr(1) (ioctl_iflags(2)).
func InodeFlags(f *os.File) (int, error) {
	flags, err := unix.IoctlGetInt(int(f.Fd()), unix.FS_IOC_GETFLAGS)
	return flags, wrap("FS_IOC_GETFLAGS", f, err)
}

// SetInodeFlags replaces the flags of chattr(1) (ioctl_iflags(2)). On btrfs it resets the
// compression algorithm of the file; ChangeAttributes does not.
func SetInodeFlags(f *os.File, flags int) error {
	return wrap("FS_IOC_SETFLAGS", f, unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, flags))
}

// Attributes is struct fsxattr.
type Attributes struct {
	Flags, ExtentSize, Extents, Project, COWExtentSize uint32
	_                                                  [8]byte
}

// Flags of Attributes (FS_XFLAG_*, uapi/linux/fs.h).
const (
	AttrRealtime       = 1 << 0
	AttrImmutable      = 1 << 3
	AttrAppend         = 1 << 4
	AttrProjectInherit = 1 << 9
)

// GetAttributes reads the attributes of a file (ioctl_fsgetxattr(2)).
func GetAttributes(f *os.File) (a Attributes, err error) {
	err = ioctl(f, "FS_IOC_FSGETXATTR", fsIocFSGetXattr, unsafe.Pointer(&a))
	return a, err
}

// ChangeAttributes changes the attributes of a file (ioctl_fsgetxattr(2)), and reports whether any of
// them changed.
func ChangeAttributes(f *os.File, change func(*Attributes)) (changed bool, err error) {
	a, err := GetAttributes(f)
	if err != nil {
		return false, err
	}
	before := a
	if change(&a); a == before {
		return false, nil
	}
	err = ioctl(f, "FS_IOC_FSSETXATTR", fsIocFSSetXattr, unsafe.Pointer(&a))
	return err == nil, err
}

// MakeMutable clears the attributes immutable and append-only, and reports whether one of them was set. Each
// of them prevents removing, moving and linking a file.
func MakeMutable(f *os.File) (changed bool, err error) {
	return ChangeAttributes(f, func(a *Attributes) { a.Flags &^= AttrImmutable | AttrAppend })
}

// ShareBlocks makes the content of dst from an offset on that of src, with the same blocks (ioctl_ficlonerange(2)). The offset
// is a multiple of the block size of the filesystem, and at most the size of both files. If dst is larger than src, its rest
// does not change.
func ShareBlocks(dst, src *os.File, from int64) error {
	r := unix.FileCloneRange{Src_fd: int64(src.Fd()), Src_offset: uint64(from), Dest_offset: uint64(from)}
	return wrap("FICLONERANGE", dst, unix.IoctlFileCloneRange(int(dst.Fd()), &r))
}

// WriteBack writes the dirty pages of a file to the filesystem, so that NextData finds them. On xfs and ext4,
// SEEK_DATA first looks up the extent and then, if it is unwritten, its pages. It misses data that is written back and
// evicted in between. On NFS, the server does that lookup, and WriteBack also makes the server write its pages
// (COMMIT). On other filesystems the data is not durable afterwards (sync_file_range(2)), which saves a flush of the
// disk for each file.
func WriteBack(f *os.File) error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return wrap("fstatfs", f, err)
	}
	if st.Type == unix.NFS_SUPER_MAGIC {
		return wrap("fdatasync", f, unix.Fdatasync(int(f.Fd())))
	}
	const all = unix.SYNC_FILE_RANGE_WAIT_BEFORE | unix.SYNC_FILE_RANGE_WRITE | unix.SYNC_FILE_RANGE_WAIT_AFTER
	err := unix.SyncFileRange(int(f.Fd()), 0, 0, all)
	if Unsupported(err) {
		return nil
	}
	return wrap("sync_file_range", f, err)
}

// WriteOut writes the dirty pages of a range of a file, and waits until the disk has them (sync_file_range(2)). They are not durable. An
// error of writing back is reported only once for an open file description.
func WriteOut(f *os.File, at, length int64) error {
	err := unix.SyncFileRange(int(f.Fd()), at, length, unix.SYNC_FILE_RANGE_WRITE|unix.SYNC_FILE_RANGE_WAIT_AFTER)
	if errors.Is(err, unix.ENOSYS) {
		return nil
	}
	return wrap("sync_file_range", f, err)
}

// NextData returns the first range with data between two offsets (lseek(2), SEEK_DATA). If the file has no
// data between them, it returns an empty range at end. In a file without information about holes, such as a
// block device, all bytes are data. Call WriteBack before, so that no data is missed.
func NextData(f *os.File, from, end int64) (start, stop int64, err error) {
	for from < end {
		start, err = unix.Seek(int(f.Fd()), from, unix.SEEK_DATA)
		switch {
		case errors.Is(err, unix.ENXIO), err == nil && start >= end:
			return end, end, nil
		case errors.Is(err, unix.EINVAL):
			return from, end, nil
		case err != nil:
			return 0, 0, wrap("SEEK_DATA", f, err)
		}
		stop, err = unix.Seek(int(f.Fd()), start, unix.SEEK_HOLE)
		// A hole at start is no end of the data: xfs and ext4 report unwritten blocks as data only while they are in the
		// page cache, and these blocks were evicted after SEEK_DATA.
		if err != nil || stop > start {
			return start, min(stop, end), wrap("SEEK_HOLE", f, err)
		}
	}
	return end, end, nil
}

// Extent is struct fiemap_extent.
type Extent struct {
	Logical, Physical, Length uint64
	_                         [2]uint64
	Flags                     uint32
	_                         [3]uint32
}

// Flags of an extent (FIEMAP_EXTENT_*, uapi/linux/fiemap.h).
const (
	ExtentLast       = 1 << 0
	ExtentUnknown    = 1 << 1
	ExtentDelalloc   = 1 << 2
	ExtentEncoded    = 1 << 3
	ExtentEncrypted  = 1 << 7
	ExtentNotAligned = 1 << 8
	ExtentInline     = 1 << 9
	ExtentTail       = 1 << 10
	ExtentUnwritten  = 1 << 11
	ExtentShared     = 1 << 13
)

// MaxExtents is the maximum number of extents of an ExtentMap.
const MaxExtents = 1024

// ExtentMap is struct fiemap with space for MaxExtents extents. It can be reused.
type ExtentMap struct {
	start, length  uint64
	flags          uint32
	mapped, wanted uint32
	_              uint32
	extents        [MaxExtents]Extent
}

// Read writes the dirty pages of a file (FIEMAP_FLAG_SYNC) and then returns its first extents between two
// offsets (kernel documentation, filesystems/fiemap.rst). The next call overwrites the returned extents.
func (m *ExtentMap) Read(f *os.File, from, end int64) ([]Extent, error) {
	const sync = 1 << 0 // FIEMAP_FLAG_SYNC
	m.start, m.length = uint64(from), uint64(end-from)
	m.flags, m.wanted, m.mapped = sync, MaxExtents, 0
	if err := ioctl(f, "FS_IOC_FIEMAP", fsIocFiemap, unsafe.Pointer(m)); err != nil {
		return nil, err
	}
	return m.extents[:m.mapped], nil
}
