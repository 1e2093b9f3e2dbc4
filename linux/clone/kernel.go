package clone

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/linux/sys"
)

// fail adds the operation and the name of the file to an error. It returns nil if err is nil.
func fail(op string, f *os.File, err error) error {
	if err == nil {
		return nil
	}
	return &fs.PathError{Op: op, Path: f.Name(), Err: err}
}

// sizeOf returns the size in bytes of a file or a block device.
func sizeOf(f *os.File) (int64, error) { return f.Seek(0, unix.SEEK_END) }

func stat(f *os.File) (st unix.Stat_t, err error) {
	err = unix.Fstat(int(f.Fd()), &st)
	return st, fail("fstat", f, err)
}

// filesystemType returns the type of the filesystem of a file (statfs(2)).
func filesystemType(f *os.File) (int64, error) {
	var st unix.Statfs_t
	err := unix.Fstatfs(int(f.Fd()), &st)
	return st.Type, fail("fstatfs", f, err)
}

// blockUnit is the unit of st_blocks in bytes (stat(3type)).
const blockUnit = 512

// openat opens a path that neither leaves dir nor crosses a symbolic link or a mount. The returned file has
// the name of dir, because the path of a deep file is long.
func openat(dir *os.File, path string, flags int, mode uint32) (*os.File, error) {
	fd, err := sys.OpenFD(dir, path, sys.OneMount, flags, mode)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), dir.Name()), nil
}

// readFlags are the flags of open(2) for reading a file without changing its access time.
const readFlags = unix.O_RDONLY | unix.O_NOATIME

// leaseBreak is the time that reopen waits for the holder of a lease. It is longer than the time after which
// the kernel breaks the lease (fcntl(2); lease-break-time in proc_sys_fs(5), by default 45 seconds).
const leaseBreak = time.Minute

// reopen opens the regular file or directory that node, opened with O_PATH, refers to, with flags of open(2). While another process has
// a write lease on the file, open(2) with O_NONBLOCK fails with EAGAIN, and reopen retries.
func reopen(ctx context.Context, node *os.File, flags int) (*os.File, error) {
	var fd int
	err := retry.For(ctx, leaseBreak, func() (again bool, err error) {
		fd, err = unix.Open(sys.Path(node), flags|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
		return errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR), err
	})
	if err != nil {
		return nil, fail("open", node, err)
	}
	return os.NewFile(uintptr(fd), node.Name()), nil
}
