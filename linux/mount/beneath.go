package mount

import (
	"errors"
	"os"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
)

// ErrLeadsOut means: a symbolic link in a path leads out of the directory that it must stay in.
var ErrLeadsOut = errors.New("a symbolic link in it leads out of the volume")

// OpenBeneath opens a path below an open directory with O_PATH, to be bound (BindOpen).
// Links are followed only while they stay below the directory, even if another process changes them
// meanwhile (openat2(2), RESOLVE_BENEATH). Other links are ErrLeadsOut; all absolute ones
// are.
func OpenBeneath(dir *os.File, path string) (*os.File, error) {
	return inside(sys.Open(dir, path, sys.Beneath, unix.O_PATH))
}

// MakeBeneath creates a directory with mode in an open one, and opens it as OpenBeneath
// does. An existing directory is opened as it is.
func MakeBeneath(dir *os.File, name string, mode os.FileMode) (*os.File, error) {
	err := mkdir(dir, name, mode)
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, &os.PathError{Op: "mkdirat", Path: dir.Name() + "/" + name, Err: err}
	}
	made, openErr := inside(sys.Open(dir, name, sys.NoLinks, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW))
	if err != nil || openErr != nil {
		return made, openErr
	}
	// mkdir(2) does not set set-group-ID: a directory inherits it from its parent.
	if err := os.Chmod(sys.Path(made), mode); err != nil {
		made.Close()
		return nil, err
	}
	return made, nil
}

// mkdir is mkdirat(2) without the umask, so that a directory has its mode from the start:
// nothing would correct it if this process were killed before chmod(2). CLONE_FS of
// unshare(2) gives the thread a umask of its own.
func mkdir(dir *os.File, name string, mode os.FileMode) error {
	bits := uint32(mode.Perm())
	if mode&os.ModeSticky != 0 {
		bits |= unix.S_ISVTX
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			done <- os.NewSyscallError("unshare", err)
			return
		}
		unix.Umask(0)
		done <- unix.Mkdirat(int(dir.Fd()), name, bits)
	}()
	return <-done
}

// inside adds ErrLeadsOut to the error of a path that leads out of its directory.
func inside(f *os.File, err error) (*os.File, error) {
	if errors.Is(err, unix.EXDEV) {
		err = errors.Join(ErrLeadsOut, err)
	}
	return f, err
}

// BindOpen mounts an open file or directory at target, as Bind does, without the mounts
// below it.
func BindOpen(f *os.File, target string, o Options) error {
	return bindTree(int(f.Fd()), "", unix.AT_EMPTY_PATH, f.Name(), target, o)
}

// Clear unmounts everything at a path, one mount over the other, and removes the path
// (RemoveTarget). It is no error if the path does not exist.
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
