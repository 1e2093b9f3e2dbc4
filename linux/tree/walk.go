package tree

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
)

// Entry is a name in a directory of a tree. It is valid until the handler returns.
type Entry struct {
	// Dir is the directory that contains the name, open for reading. It is nil for the root of a walk that
	// starts at an open directory.
	Dir  *os.File
	Name string
	// Type is the type in the directory entry (DT_*, readdir(3)).
	Type uint8
	// Node is the open file or directory, and Info its state. Only Walk sets them, and only if the entry is
	// not a mount point. Node is opened with O_PATH if it is not a directory.
	Node *os.File
	Info fs.FileInfo

	in *walk // the walk that visits the entry
}

// Mounted reports whether an entry of Walk is a mount point.
func (e *Entry) Mounted() bool { return e.Node == nil }

// Chown changes the owner and the group. -1 means no change. It does not follow a symbolic link.
func (e *Entry) Chown(uid, gid int) error { return os.Chown(sys.Path(e.Node), uid, gid) }

// Chmod changes the mode. Do not call it for a symbolic link, which has no mode.
func (e *Entry) Chmod(mode fs.FileMode) error { return os.Chmod(sys.Path(e.Node), mode) }

// Path returns the path from the root. A long path is shortened in the middle.
func (e *Entry) Path() string {
	const most = 400 // bytes
	names := make([]string, 0, len(e.in.levels)+1)
	for _, l := range e.in.levels {
		if l.name != "" {
			names = append(names, l.name)
		}
	}
	if e.Name != "" {
		names = append(names, e.Name)
	}
	path := strings.Join(names, "/")
	if len(path) > most {
		return path[:most/2] + "…" + path[len(path)-most/2:]
	}
	return path
}

// wrap adds the path to an error.
func (e *Entry) wrap(err error) error {
	if path := e.Path(); err != nil && path != "" {
		return fmt.Errorf("%q: %w", path, err)
	}
	return err
}

// Handler handles the entries of a tree.
type Handler interface {
	// Visit handles an entry. If it returns an open directory, the walk enters and closes that
	// directory.
	Visit(e *Entry) (*os.File, error)
	// Leave handles a directory after its content. The last call is for the root. If again is true, the walk
	// reads the directory once more.
	Leave(e *Entry, dir *os.File) (again bool, err error)
}

// Descend walks the tree of an open directory, which the caller closes. It ends with the first error,
// to which it adds the path from the root, or with ctx.Err().
func Descend(ctx context.Context, root *os.File, h Handler) error {
	return (&walk{handler: h}).from(ctx, root)
}

// walk holds the directories from the root to the current one on the heap, because a tenant may create a tree
// that is too deep for a recursive function.
type walk struct {
	handler Handler
	// tolerant means that the walk continues with the parent if a directory is removed while it is read.
	tolerant bool
	// dirs and levels have an element for each directory from the root to the current one.
	dirs   Stack
	levels []*level
}

// level is the state of a directory of the walk.
type level struct {
	name string
	list listing
}

// from walks a directory that the caller closes.
func (w *walk) from(ctx context.Context, root *os.File) error {
	dir, err := OpenDir(root, ".")
	if err != nil {
		return err
	}
	return w.run(ctx, &Entry{}, dir)
}

// run walks the directory of the entry root, which is open as dir, and closes it.
func (w *walk) run(ctx context.Context, root *Entry, dir *os.File) error {
	defer w.dirs.Close()
	root.in = w
	if err := w.push(&level{name: root.Name}, dir); err != nil {
		return err
	}
	for len(w.levels) > 0 {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := w.step(root); err != nil {
			return err
		}
	}
	return nil
}

// push makes dir the current directory.
func (w *walk) push(l *level, dir *os.File) error {
	w.levels = append(w.levels, l)
	if n := len(w.levels) - maxOpen; n > 0 {
		w.levels[n-1].list.forget()
	}
	return w.dirs.Push(dir)
}

// step handles the next entry of the current directory, or leaves the directory if there is none.
func (w *walk) step(root *Entry) error {
	dir := w.dirs.Top()
	name, kind, err := w.levels[len(w.levels)-1].list.next(dir)
	if errors.Is(err, io.EOF) || err != nil && w.tolerant && removed(dir, err) {
		return w.leave(root)
	}
	if err != nil {
		return (&Entry{in: w}).wrap(err)
	}
	e := &Entry{Dir: dir, Name: name, Type: kind, in: w}
	into, err := w.handler.Visit(e)
	if err != nil || into == nil {
		return e.wrap(err)
	}
	return e.wrap(w.push(&level{name: name}, into))
}

// leave calls Leave for the current directory, and makes its parent the current one.
func (w *walk) leave(root *Entry) error {
	n := len(w.levels) - 1
	l := w.levels[n]
	dir, err := w.dirs.Pop()
	if err != nil {
		return (&Entry{in: w}).wrap(err)
	}
	w.levels = w.levels[:n]
	e := root
	if n > 0 {
		e = &Entry{Dir: w.dirs.Top(), Name: l.name, Type: unix.DT_DIR, in: w}
	}
	again, err := w.handler.Leave(e, dir)
	if err != nil || !again {
		dir.Close()
		return e.wrap(err)
	}
	return e.wrap(w.push(&level{name: l.name}, dir))
}

// removed reports whether err is an error of reading a directory that was removed (getdents64(2)). On NFS the
// error is ESTALE.
func removed(dir *os.File, err error) bool {
	var st unix.Stat_t
	return errors.Is(err, unix.ESTALE) || unix.Fstat(int(dir.Fd()), &st) == nil && st.Nlink == 0
}

// Walk calls visit for every entry below an open directory, not for the directory itself. It visits a
// directory after its content. It may miss entries that are created or removed during the walk. It ends with
// the first error, to which it adds the path of the entry, or with ctx.Err().
func Walk(ctx context.Context, root *os.File, visit func(*Entry) error) error {
	err := (&walk{handler: visitor(visit), tolerant: true}).from(ctx, root)
	if err != nil {
		return fmt.Errorf("%s: %w", root.Name(), err)
	}
	return nil
}

// visitor is the handler of Walk.
type visitor func(*Entry) error

// Visit implements Handler.
func (v visitor) Visit(e *Entry) (*os.File, error) {
	fd, err := sys.OpenFD(e.Dir, e.Name, sys.OneMount, unix.O_PATH|unix.O_NOFOLLOW, 0)
	switch {
	case errors.Is(err, unix.ENOENT):
		return nil, nil
	case errors.Is(err, unix.EXDEV):
		return nil, v(e)
	case err != nil:
		return nil, err
	}
	e.Node = os.NewFile(uintptr(fd), e.Name)
	defer e.Node.Close()
	if e.Info, err = e.Node.Stat(); err != nil {
		return nil, err
	}
	if e.Info.IsDir() { // Leave calls v for the directory
		return OpenDir(e.Node, ".")
	}
	return nil, v(e)
}

// Leave implements Handler.
func (v visitor) Leave(e *Entry, dir *os.File) (again bool, err error) {
	if e.Dir == nil {
		return false, nil
	}
	e.Node = dir
	if e.Info, err = dir.Stat(); err != nil {
		return false, err
	}
	return false, v(e)
}
