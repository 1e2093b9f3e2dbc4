package sys

import (
	"errors"
	"io/fs"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// Scope limits how openat2(2) resolves a path below a directory. A path that leaves the directory fails with
// EXDEV in every exported scope, even if another process changes the path at the same time.
type Scope uint64

// The scopes, from the widest to the narrowest.
const (
	// Beneath follows symbolic links that stay below the directory, and enters mounts.
	Beneath Scope = unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS
	// NoLinks is Beneath, but a symbolic link in the path fails with ELOOP. O_PATH with O_NOFOLLOW opens the
	// link itself if it is the last part of the path.
	NoLinks = Beneath | unix.RESOLVE_NO_SYMLINKS
	// OneMount is NoLinks, but a mount point in the path fails with EXDEV.
	OneMount = NoLinks | unix.RESOLVE_NO_XDEV

	// absolute follows no symbolic link, and allows a path to leave the directory, by "/" or "..".
	absolute Scope = unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS
)

// Open opens an existing path below dir (openat2(2)).
func Open(dir *os.File, path string, scope Scope, flags int) (*os.File, error) {
	fd, err := OpenFD(dir, path, scope, flags, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), join(dir, path)), nil
}

// OpenFD does the same as Open, but returns a descriptor, because creating an os.File needs two more system calls.
// mode is the mode of a file that O_CREAT creates. Without O_CREAT it must be 0. O_CLOEXEC is always set. OpenFD
// repeats the call if a rename raced with it, or while the kernel breaks a lease.
func OpenFD(dir *os.File, path string, scope Scope, flags int, mode uint32) (int, error) {
	how := unix.OpenHow{Flags: uint64(flags | unix.O_CLOEXEC), Mode: uint64(mode), Resolve: uint64(scope)}
	for {
		fd, err := unix.Openat2(int(dir.Fd()), path, &how)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN):
			time.Sleep(time.Millisecond)
		case err != nil:
			return -1, &fs.PathError{Op: "openat2", Path: join(dir, path), Err: err}
		default:
			return fd, nil
		}
	}
}

// OpenFile opens an existing file by its path. os.OpenFile needs four more system calls, with which it tries to use epoll(7), also for a
// directory, a regular file or a block device.
func OpenFile(path string, flags int) (*os.File, error) {
	for {
		fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return nil, &fs.PathError{Op: "open", Path: path, Err: err}
		default:
			return os.NewFile(uintptr(fd), path), nil
		}
	}
}

// NonBlocking is a flag for regular files and directories that package os opens. Without it, package os sets and clears it with four more
// system calls. It does not change their reads and writes (open(2)). But while another process has a lease of an existing file, the open
// fails with EAGAIN.
const NonBlocking = unix.O_NONBLOCK

// OpenParent opens the parent of a directory. The error is EXDEV if the directory is the root of a mount. Another
// process may have moved the directory, so the caller must verify the parent.
func OpenParent(dir *os.File, flags int) (int, error) {
	return OpenFD(dir, "..", absolute|unix.RESOLVE_NO_XDEV, flags, 0)
}

// OpenDirectory opens a directory by its absolute path. The error is ELOOP if a part of the path is a symbolic
// link.
func OpenDirectory(path string) (*os.File, error) {
	top, err := OpenFile("/", unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return nil, err
	}
	defer top.Close()
	return Open(top, path, absolute, unix.O_RDONLY|unix.O_DIRECTORY)
}

// join returns the name of the file at a path below dir. path is absolute if dir is "/" (OpenDirectory).
func join(dir *os.File, path string) string {
	switch {
	case path == ".":
		return dir.Name()
	case dir.Name() == "/":
		return path
	}
	return dir.Name() + "/" + path
}

// Path returns a path of an open file that stays valid when the file is renamed or removed. It also works for
// files opened with O_PATH, including symbolic links (proc_pid_fd(5)).
func Path(f *os.File) string { return "/proc/self/fd/" + strconv.Itoa(int(f.Fd())) }
