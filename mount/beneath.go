package mount

import (
	"errors"
	"os"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"
)

// ErrLeadsOut means: a path goes through a symbolic link out of the directory that it has
// to stay in.
var ErrLeadsOut = errors.New("a symbolic link in it leads out of the volume")

// OpenBeneath opens what stands at a path below an open directory, by O_PATH: to be bound
// (BindOpen), nothing more. Links are followed as far as they stay below it, whatever
// somebody changes meanwhile (openat2(2), RESOLVE_BENEATH); ErrLeadsOut for others, which
// all absolute ones are.
func OpenBeneath(dir *os.File, path string) (*os.File, error) {
	return openBeneath(dir, path, unix.O_PATH, 0)
}

// MakeBeneath makes a directory in an open one, with mode, and opens it as OpenBeneath
// does. One that is there already is opened as it is.
func MakeBeneath(dir *os.File, name string, mode os.FileMode) (*os.File, error) {
	err := mkdir(dir, name, mode)
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return nil, &os.PathError{Op: "mkdirat", Path: dir.Name() + "/" + name, Err: err}
	}
	made, openErr := openBeneath(dir, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW, unix.RESOLVE_NO_SYMLINKS)
	if err != nil || openErr != nil {
		return made, openErr
	}
	// Set-group-ID is not mkdir(2)'s to give: a directory has it from the one that it is in.
	if err := os.Chmod("/proc/self/fd/"+strconv.Itoa(int(made.Fd())), mode); err != nil {
		made.Close()
		return nil, err
	}
	return made, nil
}

// mkdir is mkdirat(2) without the umask, so that a directory has its mode at once: nobody
// would mend that of one whose maker was killed. The umask is the thread's alone once it
// shares none (unshare(2), CLONE_FS).
func mkdir(dir *os.File, name string, mode os.FileMode) error {
	bits := uint32(mode.Perm())
	if mode&os.ModeSticky != 0 {
		bits |= unix.S_ISVTX
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with this goroutine
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			done <- os.NewSyscallError("unshare", err)
			return
		}
		unix.Umask(0)
		done <- unix.Mkdirat(int(dir.Fd()), name, bits)
	}()
	return <-done
}

func openBeneath(dir *os.File, path string, flags, resolve uint64) (*os.File, error) {
	how := unix.OpenHow{Flags: flags | unix.O_CLOEXEC, Resolve: resolve | unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS}
	fd, err := unix.Openat2(int(dir.Fd()), path, &how)
	for errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) { // a rename raced with it
		fd, err = unix.Openat2(int(dir.Fd()), path, &how)
	}
	if errors.Is(err, unix.EXDEV) {
		err = errors.Join(ErrLeadsOut, err)
	}
	if err != nil {
		return nil, &os.PathError{Op: "openat2", Path: dir.Name() + "/" + path, Err: err}
	}
	return os.NewFile(uintptr(fd), dir.Name()+"/"+path), nil
}

// BindOpen mounts an open file or directory at target, as Bind does. What is mounted below
// it does not come along.
func BindOpen(f *os.File, target string, o Options) error {
	return bindTree(int(f.Fd()), "", unix.AT_EMPTY_PATH, f.Name(), target, o)
}

// Clear unmounts all that is mounted at a path, one over the other, and removes the path
// (RemoveTarget). It is no error if nothing is there.
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
