package quota

import (
	"errors"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Numbers and structures that x/sys does not have: quotactl(2) and
// uapi/linux/dqblk_xfs.h, which ext4 answers too, and uapi/linux/fs.h.
const (
	prjQuota   = 2                         // PRJQUOTA
	qXGetQuota = 'X'<<8 + 3                // Q_XGETQUOTA
	qXSetQLim  = 'X'<<8 + 4                // Q_XSETQLIM
	qXGetStatV = 'X'<<8 + 8                // Q_XGETQSTATV
	statVer1   = 1                         // FS_QSTATV_VERSION1
	dquotVer   = 1                         // FS_DQUOT_VERSION
	projQuota  = 2                         // FS_PROJ_QUOTA
	accounted  = 1 << 4                    // FS_QUOTA_PDQ_ACCT
	enforced   = 1 << 5                    // FS_QUOTA_PDQ_ENFD
	allLimits  = 1<<0 | 1<<1 | 1<<2 | 1<<3 // FS_DQ_LIMIT_MASK without realtime

	// basicBlock is the unit of the limits and of what is used, in bytes.
	basicBlock = 512

	fsIocGetXattr = 0x801c581f // FS_IOC_FSGETXATTR
	fsIocSetXattr = 0x401c5820 // FS_IOC_FSSETXATTR
	flagImmutable = 1 << 3     // FS_XFLAG_IMMUTABLE
	flagAppend    = 1 << 4     // FS_XFLAG_APPEND
	flagInherit   = 1 << 9     // FS_XFLAG_PROJINHERIT
)

// quotaState is struct fs_quota_statv; only its flags are looked at.
type quotaState struct {
	version int8
	_       uint8
	flags   uint16
	_       [156]byte
}

// diskQuota is struct fs_disk_quota.
type diskQuota struct {
	version              int8
	flags                int8
	fields               uint16
	id                   uint32
	blockHard, blockSoft uint64
	inodeHard, inodeSoft uint64
	blocks, inodes       uint64
	_                    [56]byte
}

// fsXattr is struct fsxattr.
type fsXattr struct {
	flags, extentSize, extents, project, cowExtentSize uint32
	_                                                  [8]byte
}

// quotactl is quotactl_fd(2) for project quota.
func quotactl(dir *os.File, cmd uint32, id uint32, arg unsafe.Pointer) error {
	_, _, errno := unix.Syscall6(unix.SYS_QUOTACTL_FD, dir.Fd(), uintptr(cmd<<8|prjQuota), uintptr(id), uintptr(arg), 0, 0)
	runtime.KeepAlive(dir)
	if errno != 0 {
		return errno
	}
	return nil
}

// hasQuotactl tells whether the kernel has quotactl_fd(2) (Linux 5.14, CONFIG_QUOTA).
func hasQuotactl() bool {
	const noFile = ^uintptr(0)
	_, _, errno := unix.Syscall6(unix.SYS_QUOTACTL_FD, noFile, qXGetStatV<<8|prjQuota, 0, 0, 0, 0)
	return !errors.Is(errno, unix.ENOSYS)
}

func ioctl(f *os.File, request uint, arg unsafe.Pointer) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), uintptr(request), uintptr(arg))
	runtime.KeepAlive(f)
	if errno != 0 {
		return errno
	}
	return nil
}

// changeXattr changes the attributes of a file (ioctl_fsgetxattr(2)).
func changeXattr(f *os.File, change func(*fsXattr)) error {
	var x fsXattr
	if err := ioctl(f, fsIocGetXattr, unsafe.Pointer(&x)); err != nil {
		return os.NewSyscallError("FS_IOC_FSGETXATTR", err)
	}
	before := x
	change(&x)
	if x == before {
		return nil
	}
	return os.NewSyscallError("FS_IOC_FSSETXATTR", ioctl(f, fsIocSetXattr, unsafe.Pointer(&x)))
}

// reopen opens a directory that may be open by O_PATH alone, which ioctl(2) and
// fsync(2) refuse.
func reopen(dir *os.File) (*os.File, error) {
	return openat2(dir, ".", unix.OpenHow{Flags: unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC})
}

// openDir opens the directory of a name in parent: no link, and nothing mounted there.
func openDir(parent *os.File, name string) (*os.File, error) {
	return openat2(parent, name, unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	})
}

func openat2(dir *os.File, path string, how unix.OpenHow) (*os.File, error) {
	fd, err := unix.Openat2(int(dir.Fd()), path, &how)
	for errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) { // a rename raced with it
		fd, err = unix.Openat2(int(dir.Fd()), path, &how)
	}
	if err != nil {
		return nil, &os.PathError{Op: "openat2", Path: dir.Name() + "/" + path, Err: err}
	}
	return os.NewFile(uintptr(fd), dir.Name()), nil
}
