package pool

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/volume"
)

// maxRecord is more than any record has, in bytes.
const maxRecord = 64 << 10

// readBeneath reads a small file below a directory in three system calls; the
// path may neither leave the directory nor go through a link (openat2(2)). The
// same through os.Root takes fourteen, on every call that looks a volume up.
func (p *Pool) readBeneath(dir *os.File, path string) ([]byte, error) {
	fd, err := openat2(dir, path, p.regular(unix.O_RDONLY, 0))
	if err != nil {
		return nil, irregular(dir, path, err)
	}
	defer unix.Close(fd)
	return readAll(fd, path)
}

// readOwn reads a small file that the driver made, with no more care for delegations
// than os.Root has.
func readOwn(root *os.Root, path string) ([]byte, error) {
	dir, err := root.Open(".")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	return new(Pool).readBeneath(dir, path)
}

// regular is how a file that the driver made is opened. Whoever can write to the
// export may have put a link, a pipe or a device in its place: that is neither
// followed nor waited for.
func (p *Pool) regular(flag int, mode uint64) unix.OpenHow {
	return unix.OpenHow{
		Flags: uint64(p.Undelegated(flag | unix.O_NONBLOCK | unix.O_NOCTTY | unix.O_CLOEXEC)), Mode: mode,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
	}
}

// errIrregular is of what is no regular file where the driver had made one.
var errIrregular = errors.New("it is not a regular file, so not what this driver made")

// irregular adds to an error of opening that there is something else than a file. What
// the kernel says of that depends on what it is, and on the flags.
func irregular(dir *os.File, path string, err error) error {
	if isGone(err) {
		return err
	}
	st, statErr := statBeneath(dir, path)
	if errors.Is(statErr, unix.ELOOP) || statErr == nil && st.Mode&unix.S_IFMT != unix.S_IFREG {
		return fmt.Errorf("%w (%w)", errIrregular, err)
	}
	return err
}

// openRegular opens a file that the driver made, or makes it.
func (p *Pool) openRegular(dir *os.File, path string, flag int, mode uint64) (*os.File, error) {
	f, err := openBeneath(dir, path, p.regular(flag, mode))
	if err != nil {
		return nil, irregular(dir, path, err)
	}
	if err := checkRegular(int(f.Fd())); err != nil {
		return nil, errors.Join(&fs.PathError{Op: "open", Path: f.Name(), Err: err}, f.Close())
	}
	return f, nil
}

// strange says what to do about a file of the pool's own that is not what the driver
// made.
func (p *Pool) strange(path string, err error) error {
	if errors.Is(err, errIrregular) || errors.Is(err, unix.EFBIG) || errors.Is(err, unix.ENOTDIR) {
		return volume.Errorf(volume.ErrPrecondition, "pool %q: %s/%s: %w: remove what is there", p.cfg.Name, p.cfg.place(), path, err)
	}
	return fmt.Errorf("pool %q: %w", p.cfg.Name, err)
}

// checkRegular refuses what is open and no regular file. What kind it is was known
// when it was opened: a server is not asked again.
func checkRegular(fd int) error {
	var st unix.Statx_t
	err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &st)
	if err == nil && st.Mode&unix.S_IFMT != unix.S_IFREG {
		err = errIrregular
	}
	return err
}

func openat2(dir *os.File, path string, how unix.OpenHow) (int, error) {
	fd, err := unix.Openat2(int(dir.Fd()), path, &how)
	// A rename raced with it, or a lease has to be given back first.
	for ; errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN); time.Sleep(time.Millisecond) {
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
	if err := checkRegular(fd); err != nil {
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
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

// statBeneath is lstat(2) of a path below a directory; no part of it may be a link.
func statBeneath(dir *os.File, path string) (st unix.Stat_t, err error) {
	at := int(dir.Fd())
	if folder, name, below := cutLast(path); below {
		if at, err = openat2(dir, folder, unix.OpenHow{
			Flags: unix.O_PATH | unix.O_DIRECTORY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS,
		}); err != nil {
			return st, err
		}
		defer unix.Close(at)
		path = name
	}
	err = unix.Fstatat(at, path, &st, unix.AT_SYMLINK_NOFOLLOW)
	return st, err
}

// cutLast divides a path before its last name; below is false for a name alone.
func cutLast(path string) (folder, name string, below bool) {
	i := strings.LastIndex(path, "/")
	if i < 0 {
		return "", path, false
	}
	return path[:i], path[i+1:], true
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

// namesIn is sortedNames for a directory below an open one, which is no link.
func namesIn(at *os.File, dir string) ([]string, error) {
	d, err := openDirBeneath(at, dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	slices.Sort(names)
	return names, err
}

// inodesIn is namesIn with the inode number of each, which a listing has anyway
// (getdents64(2)).
func inodesIn(at *os.File, dir string) (map[string]uint64, error) {
	d, err := openDirBeneath(at, dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	inodes := map[string]uint64{}
	buf := make([]byte, 32<<10)
	for {
		n, err := unix.ReadDirent(int(d.Fd()), buf)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, &fs.PathError{Op: "getdents64", Path: d.Name(), Err: err}
		}
		if n == 0 {
			return inodes, nil
		}
		addInodes(inodes, buf[:n])
	}
}

// addInodes reads what getdents64(2) returned.
func addInodes(inodes map[string]uint64, entries []byte) {
	const name = int(unsafe.Offsetof(unix.Dirent{}.Name))
	for len(entries) > name {
		e := entries[:binary.NativeEndian.Uint16(entries[unsafe.Offsetof(unix.Dirent{}.Reclen):])]
		entries = entries[len(e):]
		switch s := unix.ByteSliceToString(e[name:]); s {
		case ".", "..":
		default:
			inodes[s] = binary.NativeEndian.Uint64(e)
		}
	}
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
