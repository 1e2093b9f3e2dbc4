package pool

import (
	"errors"
	"io/fs"
	"os"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
)

// maxRecord is more than any record has, in bytes.
const maxRecord = 64 << 10

// readBeneath reads a small file below a directory in three system calls; the
// path may neither leave the directory nor go through a link (openat2(2)). The
// same through os.Root takes fourteen, on every call that looks a volume up.
func (p *Pool) readBeneath(dir *os.File, path string) ([]byte, error) {
	how := unix.OpenHow{Flags: uint64(p.Undelegated(unix.O_RDONLY | unix.O_CLOEXEC)), Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS}
	fd, err := openat2(dir, path, how)
	if err != nil {
		return nil, err
	}
	defer unix.Close(fd)
	return readAll(fd, path)
}

func openat2(dir *os.File, path string, how unix.OpenHow) (int, error) {
	fd, err := unix.Openat2(int(dir.Fd()), path, &how)
	for errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) { // a rename raced with it
		fd, err = unix.Openat2(int(dir.Fd()), path, &how)
	}
	if err != nil {
		return -1, &fs.PathError{Op: "openat2", Path: dir.Name() + "/" + path, Err: err}
	}
	return fd, nil
}

// openBeneath opens a path below a directory as how says.
func openBeneath(dir *os.File, path string, how unix.OpenHow) (*os.File, error) {
	fd, err := openat2(dir, path, how)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), dir.Name()+"/"+path), nil
}

func readAll(fd int, path string) ([]byte, error) {
	var out []byte
	buf := make([]byte, 4096)
	for len(out) <= maxRecord {
		n, err := unix.Read(fd, buf)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, &fs.PathError{Op: "read", Path: path, Err: err}
		}
		out = append(out, buf[:n]...)
		if n < len(buf) {
			return out, nil
		}
	}
	return nil, &fs.PathError{Op: "read", Path: path, Err: unix.EFBIG}
}

// statBeneath is lstat(2) of a path below a directory.
func statBeneath(dir *os.File, path string) (unix.Stat_t, error) {
	var st unix.Stat_t
	err := unix.Fstatat(int(dir.Fd()), path, &st, unix.AT_SYMLINK_NOFOLLOW)
	return st, err
}

// sortedNames lists a directory below root, without looking at what it lists.
func sortedNames(root *os.Root, dir string) ([]string, error) {
	d, err := root.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	slices.Sort(names)
	return names, err
}

// isNotExist tells whether there is no such file: nothing of that name, or
// something that is no directory above it.
func isNotExist(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR)
}

// openRootIn opens a directory that this process has just made in an open one.
func openRootIn(dir *os.File, name string) (*os.Root, error) {
	return os.OpenRoot("/proc/self/fd/" + strconv.Itoa(int(dir.Fd())) + "/" + name)
}
