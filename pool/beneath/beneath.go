// Package beneath opens, reads, lists and moves files of the driver below a directory that others
// may write to. No path leaves its directory or follows a link.
package beneath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
	"github.com/trivet-csi/trivet/linux/tree"
	"github.com/trivet-csi/trivet/volume"
)

// maxRecord is the largest record that is read, in bytes.
const maxRecord = 64 << 10

// openFlags are set when a file is opened that should be a regular one. A tenant who can write to the
// directory may have replaced it with a pipe or a device, for which the open must not wait. A link is not
// followed (sys.NoLinks).
const openFlags = unix.O_NONBLOCK | unix.O_NOCTTY

// Files opens regular files.
type Files struct {
	// Flags are added to the flags of each open(2).
	Flags int
}

// Read reads a small file with three system calls; os.Root needs fourteen. Every lookup of a volume
// calls Read.
func (f Files) Read(dir *os.File, path string) ([]byte, error) {
	fd, err := sys.OpenFD(dir, path, sys.NoLinks, unix.O_RDONLY|openFlags|f.Flags, 0)
	if err != nil {
		return nil, irregular(dir, path, err)
	}
	defer unix.Close(fd)
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

// ReadRoot is Files.Read below root, with the flags of sys.NoDelegation.
func ReadRoot(root *os.Root, path string) ([]byte, error) {
	dir, err := root.Open(".")
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	flags, err := sys.NoDelegation(dir)
	if err != nil {
		return nil, err
	}
	return Files{Flags: flags}.Read(dir, path)
}

// ErrIrregular means that a path is not the regular file that the driver made there.
var ErrIrregular = errors.New("it is not a regular file, so this driver did not make it")

// irregular adds ErrIrregular to an error of opening a path that is not a regular file. The errno
// depends on the type of the file and on the flags.
func irregular(dir *os.File, path string, err error) error {
	if IsGone(err) {
		return err
	}
	st, statErr := Stat(dir, path)
	if errors.Is(statErr, unix.ELOOP) || statErr == nil && st.Mode&unix.S_IFMT != unix.S_IFREG {
		return fmt.Errorf("%w (%w)", ErrIrregular, err)
	}
	return err
}

// Open opens a regular file that the driver made, or creates it.
func (f Files) Open(dir *os.File, path string, flag int, mode uint32) (*os.File, error) {
	fd, err := sys.OpenFD(dir, path, sys.NoLinks, flag|openFlags|f.Flags, mode)
	if err != nil {
		return nil, irregular(dir, path, err)
	}
	file := os.NewFile(uintptr(fd), dir.Name()+"/"+path)
	if err := checkRegular(fd); err != nil {
		return nil, errors.Join(&fs.PathError{Op: "open", Path: file.Name(), Err: err}, file.Close())
	}
	return file, nil
}

// checkRegular refuses a descriptor that is not a regular file. The NFS client has the type since the
// open, so DONT_SYNC saves a request to the server.
func checkRegular(fd int) error {
	var st unix.Statx_t
	err := unix.Statx(fd, "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &st)
	if err == nil && st.Mode&unix.S_IFMT != unix.S_IFREG {
		err = ErrIrregular
	}
	return err
}

// Stat is lstat(2) of a file below a directory.
func Stat(dir *os.File, file string) (st unix.Stat_t, err error) {
	at := int(dir.Fd())
	folder, name := path.Split(file)
	if folder != "" {
		if at, err = sys.OpenFD(dir, folder, sys.NoLinks, unix.O_PATH|unix.O_DIRECTORY, 0); err != nil {
			return st, err
		}
		defer unix.Close(at)
	}
	if err = unix.Fstatat(at, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		err = &fs.PathError{Op: "lstat", Path: dir.Name() + "/" + file, Err: err}
	}
	return st, err
}

// Names lists a directory below an open one, sorted.
func Names(at *os.File, dir string) ([]string, error) {
	d, err := OpenDir(at, dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	names, err := d.Readdirnames(-1)
	slices.Sort(names)
	return names, err
}

// Inodes lists a directory with the inode number of each name, as getdents64(2) returns it.
func Inodes(at *os.File, dir string) (map[string]uint64, error) {
	d, err := OpenDir(at, dir)
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

// addInodes parses entries that getdents64(2) returned.
func addInodes(inodes map[string]uint64, entries []byte) {
	const nameOffset = int(unsafe.Offsetof(unix.Dirent{}.Name))
	for len(entries) > nameOffset {
		e := entries[:binary.NativeEndian.Uint16(entries[unsafe.Offsetof(unix.Dirent{}.Reclen):])]
		entries = entries[len(e):]
		switch s := unix.ByteSliceToString(e[nameOffset:]); s {
		case ".", "..":
		default:
			inodes[s] = binary.NativeEndian.Uint64(e)
		}
	}
}

// IsNotExist tells whether an error means that a file does not exist, because there is no such name
// or because a part of its path is not a directory.
func IsNotExist(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR)
}

// OpenRoot opens a directory in an open one. It follows links: name must be a directory that this
// process has just made, or ".".
func OpenRoot(dir *os.File, name string) (*os.Root, error) {
	return os.OpenRoot(sys.Path(dir) + "/" + name)
}

// OpenDir opens a directory in another one, also if its owner has removed the permissions.
// ErrPrecondition if a filesystem is mounted there.
func OpenDir(dir *os.File, name string) (*os.File, error) {
	const flags = unix.O_RDONLY | unix.O_DIRECTORY
	f, err := sys.Open(dir, name, sys.OneMount, flags)
	if errors.Is(err, unix.EACCES) && makeAccessible(dir, name) == nil {
		f, err = sys.Open(dir, name, sys.OneMount, flags)
	}
	if errors.Is(err, unix.EXDEV) {
		return nil, volume.Errorf(volume.ErrPrecondition, "%s/%s: %w", dir.Name(), name, tree.ErrMounted)
	}
	return f, err
}

// makeAccessible gives the owner of a directory all permissions.
func makeAccessible(dir *os.File, name string) error {
	f, err := sys.Open(dir, name, sys.OneMount, unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer f.Close()
	return os.Chmod(sys.Path(f), 0o700)
}

// IgnoreGone returns err, or nil if IsGone(err).
func IgnoreGone(err error) error {
	if IsGone(err) {
		return nil
	}
	return err
}

// IsGone is IsNotExist, and also true for a file that another NFS client removed while this node had
// it open (ESTALE).
func IsGone(err error) bool { return IsNotExist(err) || errors.Is(err, unix.ESTALE) }

// Rename moves a name from one open directory into another.
func Rename(from *os.File, name string, to *os.File, newName string) error {
	if err := unix.Renameat(int(from.Fd()), name, int(to.Fd()), newName); err != nil {
		return &os.LinkError{Op: "rename", Old: from.Name() + "/" + name, New: to.Name() + "/" + newName, Err: err}
	}
	return nil
}

// MoveUnique is Rename to a unique name. It succeeds if the new name exists, even if rename(2) failed,
// because over NFS the reply may be lost, and then the client's retransmission fails.
func MoveUnique(from *os.File, name string, to *os.File, newName string) error {
	err := Rename(from, name, to, newName)
	if err == nil {
		return nil
	}
	if _, statErr := Stat(to, newName); statErr == nil {
		return nil
	}
	return err
}
