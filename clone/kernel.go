package clone

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"runtime"
	"strconv"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/retry"
)

// Numbers and structures that x/sys does not have: uapi/linux/fs.h.
const (
	fsIocGetXattr = 0x801c581f // FS_IOC_FSGETXATTR
	fsIocSetXattr = 0x401c5820 // FS_IOC_FSSETXATTR

	xflagRealtime  = 1 << 0 // FS_XFLAG_REALTIME
	xflagImmutable = 1 << 3 // FS_XFLAG_IMMUTABLE
	xflagAppend    = 1 << 4 // FS_XFLAG_APPEND

	flagCompress   = 1 << 2  // FS_COMPR_FL
	flagSync       = 1 << 3  // FS_SYNC_FL
	flagNoDump     = 1 << 6  // FS_NODUMP_FL
	flagNoAtime    = 1 << 7  // FS_NOATIME_FL
	flagNoCompress = 1 << 10 // FS_NOCOMP_FL
	flagDirSync    = 1 << 16 // FS_DIRSYNC_FL
	flagTopDir     = 1 << 17 // FS_TOPDIR_FL
	flagNoCOW      = 1 << 23 // FS_NOCOW_FL
)

// fsXattr is struct fsxattr.
type fsXattr struct {
	flags, extentSize, extents, project, cowExtentSize uint32
	_                                                  [8]byte
}

func ioctl(f *os.File, request uint, arg unsafe.Pointer) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), uintptr(request), uintptr(arg))
	runtime.KeepAlive(f)
	if errno != 0 {
		return errno
	}
	return nil
}

// hasNone tells of an error that the filesystem does not know what it was asked for.
func hasNone(err error) bool {
	return errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOTTY) || errors.Is(err, unix.ENOSYS)
}

func fail(op string, f *os.File, err error) error {
	if err == nil {
		return nil
	}
	return &fs.PathError{Op: op, Path: f.Name(), Err: err}
}

// sizeOf is the size in bytes of a file or a block device.
func sizeOf(f *os.File) (int64, error) { return f.Seek(0, unix.SEEK_END) }

func stat(f *os.File) (st unix.Stat_t, err error) {
	err = unix.Fstat(int(f.Fd()), &st)
	return st, fail("fstat", f, err)
}

// blockUnit is the unit of st_blocks in bytes (stat(3type)).
const blockUnit = 512

// self is a path of an open file, also of one that is open by O_PATH alone, and of a
// symbolic link itself (proc_pid_fd(5)).
func self(f *os.File) string { return "/proc/self/fd/" + strconv.Itoa(int(f.Fd())) }

// openat opens a path that neither leaves dir nor goes through a link or a mount
// (openat2(2)).
func openat(dir *os.File, path string, flags, mode uint64) (*os.File, error) {
	return openat2(dir, path, unix.OpenHow{
		Flags: flags, Mode: mode,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
	})
}

func openat2(dir *os.File, path string, how unix.OpenHow) (*os.File, error) {
	how.Flags |= unix.O_CLOEXEC
	fd, err := unix.Openat2(int(dir.Fd()), path, &how)
	for errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) { // a rename raced with it
		fd, err = unix.Openat2(int(dir.Fd()), path, &how)
	}
	if err != nil {
		return nil, fail("openat2", dir, err)
	}
	return os.NewFile(uintptr(fd), dir.Name()), nil
}

// leaseBreak is more than the kernel lets a holder of a lease keep it (fcntl(2),
// proc_sys_fs(5), lease-break-time).
const leaseBreak = time.Minute

// reopen opens for reading the regular file that is open by O_PATH: no other, whatever
// has its name now.
func reopen(ctx context.Context, node *os.File) (*os.File, error) {
	var fd int
	err := retry.For(ctx, leaseBreak, func() (again bool, err error) {
		fd, err = unix.Open(self(node), unix.O_RDONLY|unix.O_NOATIME|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
		return errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR), err
	})
	if err != nil {
		return nil, fail("open", node, err)
	}
	return os.NewFile(uintptr(fd), node.Name()), nil
}
