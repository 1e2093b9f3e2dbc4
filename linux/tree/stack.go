package tree

import (
	"errors"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
)

// maxOpen is the maximum number of directories of a Stack that are open at once.
const maxOpen = 64

// dirFlags are the flags of open(2) for every directory of a tree.
const dirFlags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW

// ErrMoved means that a directory was moved while its tree was walked.
var ErrMoved = errors.New("a directory was moved while its tree was read: retry when no process moves directories of the tree")

// OpenDir opens a directory in parent for reading. It follows no symbolic link (ELOOP, ENOTDIR) and enters no
// mount (EXDEV). If the caller owns the directory or has CAP_FOWNER, reading does not change the access time.
// The Name of the returned file is name and not a path, because the path of a deep directory is long.
func OpenDir(parent *os.File, name string) (*os.File, error) {
	return openDir(name, func(flags int) (int, error) {
		return sys.OpenFD(parent, name, sys.OneMount, flags, 0)
	})
}

// openDir opens a directory by calling open, which returns a descriptor, and gives the result a name. It calls
// open with O_NOATIME, and again without O_NOATIME if that is not permitted.
func openDir(name string, open func(flags int) (int, error)) (*os.File, error) {
	fd, err := open(dirFlags | unix.O_NOATIME)
	if errors.Is(err, unix.EPERM) { // only the owner and CAP_FOWNER may use O_NOATIME
		fd, err = open(dirFlags)
	}
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}

// Stack holds the directories from a root to the current directory. Each is a child of the previous one. Only
// the last maxOpen are open.
type Stack struct{ dirs []stacked }

// stacked is a directory of a Stack. file is nil while the directory is closed.
type stacked struct {
	file *os.File
	name string
	// length is the length of the path of the directory, relative to the root, with a slash at its end.
	length   int
	dev, ino uint64
}

// Push adds an open directory. The stack closes it, even if Push fails.
func (s *Stack) Push(dir *os.File) error {
	d := stacked{file: dir, name: dir.Name()}
	var st unix.Stat_t
	err := unix.Fstat(int(dir.Fd()), &st)
	d.dev, d.ino = st.Dev, st.Ino
	if n := len(s.dirs); n > 0 {
		d.length = s.dirs[n-1].length + len(d.name) + 1
	}
	s.dirs = append(s.dirs, d)
	if n := len(s.dirs) - maxOpen; n > 0 {
		s.dirs[n-1].file.Close()
		s.dirs[n-1].file = nil
	}
	return os.NewSyscallError("fstat", err)
}

// Top returns the current directory.
func (s *Stack) Top() *os.File { return s.dirs[len(s.dirs)-1].file }

// Path returns the path of a name in the current directory, relative to the root. It is empty if it is too long for system calls.
func (s *Stack) Path(name string) string {
	if s.dirs[len(s.dirs)-1].length+len(name) >= unix.PathMax {
		return ""
	}
	var path strings.Builder
	for _, d := range s.dirs[1:] {
		path.WriteString(d.name + "/")
	}
	path.WriteString(name)
	return path.String()
}

// Pop removes the current directory, which the caller must close, and opens its parent if the parent is
// closed. It returns ErrMoved if the current directory is now in another directory.
func (s *Stack) Pop() (*os.File, error) {
	top := s.Top()
	if n := len(s.dirs) - 2; n >= 0 && s.dirs[n].file == nil {
		if err := s.dirs[n].reopen(top); err != nil {
			return nil, err
		}
	}
	s.dirs = s.dirs[:len(s.dirs)-1]
	return top, nil
}

// reopen opens a directory as the parent of one of its children.
func (d *stacked) reopen(child *os.File) error {
	dir, err := openDir(d.name, func(flags int) (int, error) { return sys.OpenParent(child, flags) })
	if err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil || st.Dev != d.dev || st.Ino != d.ino {
		dir.Close()
		return errors.Join(ErrMoved, err)
	}
	d.file = dir
	return nil
}

// Close closes all directories.
func (s *Stack) Close() {
	for _, d := range s.dirs {
		d.file.Close()
	}
	s.dirs = nil
}
