package mount

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
)

// ErrLeadsOut means that a symbolic link in a path leads out of the directory.
var ErrLeadsOut = errors.New("a symbolic link in the path leads out of the volume")

// OpenBeneath opens a path below an open directory with O_PATH, for BindOpen. It follows only symbolic links
// that stay below the directory, even if another process changes them at the same time (openat2(2),
// RESOLVE_BENEATH). The error is ErrLeadsOut if the path contains another link, such as an absolute one.
func OpenBeneath(dir *os.File, path string) (*os.File, error) {
	return inside(sys.Open(dir, path, sys.Beneath, unix.O_PATH))
}

// MakeBeneath creates a directory with a mode in an open directory, and opens it with O_PATH. It opens
// an existing directory without changing it.
func MakeBeneath(dir *os.File, name string, mode os.FileMode) (*os.File, error) {
	err := mkdir(dir, name, mode)
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, &os.PathError{Op: "mkdirat", Path: dir.Name() + "/" + name, Err: err}
	}
	made, openErr := inside(sys.Open(dir, name, sys.NoLinks, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW))
	if err != nil || openErr != nil {
		return made, openErr
	}
	// mkdir(2) does not set set-group-ID, which a directory inherits from its parent.
	if err := os.Chmod(sys.Path(made), mode); err != nil {
		made.Close()
		return nil, err
	}
	return made, nil
}

// mkdir calls mkdirat(2) with the umask 0. The directory has its mode from the start, even if this process
// is killed before chmod(2). CLONE_FS of unshare(2) gives the thread its own umask.
func mkdir(dir *os.File, name string, mode os.FileMode) error {
	bits := uint32(mode.Perm())
	if mode&os.ModeSticky != 0 {
		bits |= unix.S_ISVTX
	}
	return sys.OnOwnThread(func() error {
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return os.NewSyscallError("unshare", err)
		}
		unix.Umask(0)
		return unix.Mkdirat(int(dir.Fd()), name, bits)
	})
}

// inside adds ErrLeadsOut to the error of a path that leads out of its directory.
func inside(f *os.File, err error) (*os.File, error) {
	if errors.Is(err, unix.EXDEV) {
		err = errors.Join(ErrLeadsOut, err)
	}
	return f, err
}

// BindOpen does the same as Bind with an open file or directory as the source. The target does not show the mounts
// below the directory.
func BindOpen(f *os.File, target string, o Options) error {
	return bindTree(int(f.Fd()), "", unix.AT_EMPTY_PATH, f.Name(), target, o)
}

// Clear removes all mounts at a path and then the path (RemoveTarget). It is no error if the path does
// not exist.
func Clear(path string) error {
	for {
		mounted, err := OnPath(path)
		if err != nil {
			return err
		}
		if mounted == nil {
			return RemoveTarget(path)
		}
		if err := Unmount(path); err != nil {
			return err
		}
	}
}
