package tree

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// maxOpen is how many directories are kept open; those above are opened again on the way
// back.
const maxOpen = 64

// ErrMoved means: a directory was moved while it was walked.
var ErrMoved = errors.New("a directory was moved meanwhile: try again")

// Entry is something in a tree. It is good until the function returns that got it.
type Entry struct {
	// Dir is the directory that has it, open for reading.
	Dir  *os.File
	Name string
	// Node is open, by O_PATH alone if it is no directory, and Info says what it is.
	// Both are nil for what is mounted there.
	Node *os.File
	Info fs.FileInfo
}

// Mounted tells whether it is another mount's.
func (e *Entry) Mounted() bool { return e.Node == nil }

// Chown changes its owner and group; -1 leaves one as it is. Of a link it is the link's.
func (e *Entry) Chown(uid, gid int) error { return os.Chown(self(e.Node), uid, gid) }

// Chmod changes its mode. It is not for links, which have none.
func (e *Entry) Chmod(mode fs.FileMode) error { return os.Chmod(self(e.Node), mode) }

// self is a path of an open file, also of one that is open by O_PATH alone, and of a link
// itself (proc_pid_fd(5)).
func self(f *os.File) string { return "/proc/self/fd/" + strconv.Itoa(int(f.Fd())) }

// Walk calls visit for all that is in an open directory, not for the directory itself:
// first for what is in a directory, then for that. What comes or goes meanwhile may be
// left out. It ends with the first error, with its path, or with ctx.Err().
func Walk(ctx context.Context, root *os.File, visit func(*Entry) error) error {
	w := &walk{visit: visit, buf: make([]byte, 32<<10)}
	defer w.close()
	dir, err := openat(root, ".", unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	if err := w.push("", dir); err != nil {
		return err
	}
	for len(w.path) > 0 {
		err := ctx.Err()
		if err == nil {
			err = w.step()
		}
		if err != nil {
			return fmt.Errorf("%s: %w", w.at(root), err)
		}
	}
	return nil
}

// walk keeps the directories from the root to the one that is being read on the heap: a
// tenant may make more of them than a stack has room for.
type walk struct {
	visit func(*Entry) error
	path  []*directory
	buf   []byte
}

// directory is one that is being read. Dir is nil while too many others are open.
type directory struct {
	name     string
	dir      *os.File
	dev, ino uint64
	list     listing
}

func (w *walk) close() {
	for _, d := range w.path {
		d.dir.Close()
	}
}

// push goes into an open directory, which is the walk's from then on.
func (w *walk) push(name string, dir *os.File) error {
	d := &directory{name: name, dir: dir}
	w.path = append(w.path, d)
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return os.NewSyscallError("fstat", err)
	}
	d.dev, d.ino = st.Dev, st.Ino
	if n := len(w.path) - maxOpen; n > 0 {
		w.path[n-1].dir.Close()
		w.path[n-1].dir = nil
	}
	return nil
}

// step goes on to the next name, or up.
func (w *walk) step() error {
	d := w.path[len(w.path)-1]
	name, err := d.list.next(d.dir, w.buf)
	if errors.Is(err, io.EOF) {
		return w.leave(d)
	}
	if err != nil {
		return err
	}
	node, err := openat(d.dir, name, unix.O_PATH|unix.O_NOFOLLOW)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil
	case errors.Is(err, unix.EXDEV):
		return w.visit(&Entry{Dir: d.dir, Name: name})
	case err != nil:
		return fmt.Errorf("%q: %w", name, err)
	}
	defer node.Close()
	return w.enter(&Entry{Dir: d.dir, Name: name, Node: node})
}

// enter goes into a directory, and visits all else.
func (w *walk) enter(e *Entry) (err error) {
	if e.Info, err = e.Node.Stat(); err != nil {
		return err
	}
	if !e.Info.IsDir() {
		return w.call(e)
	}
	dir, err := openat(e.Node, ".", unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return fmt.Errorf("%q: %w", e.Name, err)
	}
	return w.push(e.Name, dir)
}

// leave visits a directory after what is in it.
func (w *walk) leave(d *directory) (err error) {
	if len(w.path) == 1 {
		d.dir.Close()
		w.path = nil
		return nil
	}
	above := w.path[len(w.path)-2]
	if above.dir == nil {
		if above.dir, err = above.reopen(d.dir); err != nil {
			return err
		}
	}
	w.path = w.path[:len(w.path)-1]
	defer d.dir.Close()
	e := &Entry{Dir: above.dir, Name: d.name, Node: d.dir}
	if e.Info, err = d.dir.Stat(); err != nil {
		return err
	}
	return w.call(e)
}

func (w *walk) call(e *Entry) error {
	if err := w.visit(e); err != nil {
		return fmt.Errorf("%q: %w", e.Name, err)
	}
	return nil
}

// reopen opens the directory that below is in, if it still is the one that it was in: else
// it may be anywhere.
func (d *directory) reopen(below *os.File) (*os.File, error) {
	dir, err := openat2(below, "..", unix.OpenHow{
		Flags: unix.O_RDONLY | unix.O_DIRECTORY, Resolve: unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_XDEV,
	})
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil || st.Dev != d.dev || st.Ino != d.ino {
		dir.Close()
		return nil, errors.Join(ErrMoved, err)
	}
	return dir, nil
}

// at is the path of the directory that is being read, without its middle where nobody
// would read it.
func (w *walk) at(root *os.File) string {
	const ends = 20
	names := make([]string, 0, len(w.path))
	for _, d := range w.path[min(1, len(w.path)):] {
		names = append(names, d.name)
	}
	if len(names) > 2*ends {
		names = slices.Concat(names[:ends], []string{"…"}, names[len(names)-ends:])
	}
	return strings.Join(append([]string{root.Name()}, names...), "/")
}

// listing reads the names in a directory. It goes on behind the last ones also in a
// directory that was opened anew: an offset of a directory is good in every open file of
// it.
type listing struct {
	names  []string
	offset int64
}

// next is the next name, io.EOF behind the last.
func (l *listing) next(dir *os.File, buf []byte) (string, error) {
	for len(l.names) == 0 {
		err := l.fill(dir, buf)
		if err != nil && removed(dir) {
			err = io.EOF
		}
		if err != nil {
			return "", err
		}
	}
	name := l.names[0]
	l.names = l.names[1:]
	return name, nil
}

// removed tells whether an open directory is in no other any more: it has no names then,
// and reading them fails (getdents(2)).
func removed(dir *os.File) bool {
	var st unix.Stat_t
	return unix.Fstat(int(dir.Fd()), &st) == nil && st.Nlink == 0
}

func (l *listing) fill(dir *os.File, buf []byte) error {
	fd := int(dir.Fd())
	if _, err := unix.Seek(fd, l.offset, unix.SEEK_SET); err != nil {
		return os.NewSyscallError("lseek", err)
	}
	n, err := unix.ReadDirent(fd, buf)
	for errors.Is(err, unix.EINTR) {
		n, err = unix.ReadDirent(fd, buf)
	}
	switch {
	case err != nil:
		return os.NewSyscallError("getdents64", err)
	case n == 0:
		return io.EOF
	}
	_, _, l.names = unix.ParseDirent(buf[:n], -1, nil)
	l.offset, err = unix.Seek(fd, 0, unix.SEEK_CUR)
	return os.NewSyscallError("lseek", err)
}

// Open opens a directory by its absolute path. ELOOP if a part of the path is a symbolic
// link.
func Open(path string) (*os.File, error) {
	top, err := os.Open("/")
	if err != nil {
		return nil, err
	}
	defer top.Close()
	return openat2(top, path, unix.OpenHow{Flags: unix.O_RDONLY | unix.O_DIRECTORY, Resolve: unix.RESOLVE_NO_SYMLINKS})
}

// openat opens a name in a directory: nothing that is mounted there, and no link but by
// O_PATH.
func openat(dir *os.File, name string, flags uint64) (*os.File, error) {
	return openat2(dir, name, unix.OpenHow{
		Flags:   flags,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV,
	})
}

func openat2(dir *os.File, name string, how unix.OpenHow) (*os.File, error) {
	how.Flags |= unix.O_CLOEXEC
	fd, err := unix.Openat2(int(dir.Fd()), name, &how)
	for errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) { // a rename raced with it
		fd, err = unix.Openat2(int(dir.Fd()), name, &how)
	}
	if err != nil {
		return nil, os.NewSyscallError("openat2", err)
	}
	return os.NewFile(uintptr(fd), name), nil
}
