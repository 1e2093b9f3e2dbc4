package tree

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
)

// ErrMounted means that an entry is a mount point. Neither the entry nor the content of the mount was removed.
var ErrMounted = errors.New("a filesystem is mounted at this path: unmount it")

// Remove removes a file or a directory with its content from the open directory dir. A missing name is no
// error. Symbolic links are removed, not followed. Mount points and the content of mounts are not removed
// (ErrMounted). Remove skips each entry that it cannot remove, and returns the first error.
//
// Remove changes permissions and clears the attributes immutable and append-only if they prevent the
// removal.
func Remove(ctx context.Context, dir *os.File, name string) error {
	return Remover{}.Remove(ctx, dir, name)
}

// Empty removes the content of an open directory, as Remove does, and keeps the directory.
func Empty(ctx context.Context, dir *os.File) error {
	r := &removal{keepRoot: true, levels: make([]tally, 1)}
	if err := (&walk{handler: r, tolerant: true}).from(ctx, dir); err != nil {
		return fmt.Errorf("emptying %s: %w", dir.Name(), err)
	}
	return nil
}

// Remover removes trees in which some directories can be removed only as a whole, such as read-only subvolumes
// of btrfs.
type Remover struct {
	// Destroy removes a directory, with its content, in one operation. It is called after the
	// removal by unlinkat(2) has failed with EPERM or EROFS, and reports whether it removed the
	// directory. It is nil if the filesystem has no such operation.
	Destroy func(parent *os.File, name string) bool
}

// Remove does the same as the function Remove, and also calls r.Destroy.
func (r Remover) Remove(ctx context.Context, dir *os.File, name string) error {
	s := &removal{destroy: r.Destroy, levels: make([]tally, 1)}
	e := &Entry{Dir: dir, Name: name, in: &walk{}}
	into, err := s.Visit(e)
	if err == nil && into != nil {
		err = (&walk{handler: s, tolerant: true}).run(ctx, e, into)
	}
	if err == nil {
		err = s.levels[0].failed
	}
	if err != nil {
		return fmt.Errorf("removing from %s: %w", dir.Name(), err)
	}
	return nil
}

// removal is the Handler that removes entries.
type removal struct {
	destroy func(parent *os.File, name string) bool
	// keepRoot means that the root of the walk is kept, with its mode.
	keepRoot bool
	// levels has a tally for the directory that the caller opened, and for each directory below it down to
	// the current one.
	levels []tally
}

// tally is the number of entries that were removed from a directory, and the first failure.
type tally struct {
	removed int
	failed  error
}

// Visit implements Handler.
func (r *removal) Visit(e *Entry) (*os.File, error) {
	if e.Type != unix.DT_DIR { // the entry may still be a directory, because not every filesystem reports types
		if err := r.unlink(e, 0); !errors.Is(err, unix.EISDIR) {
			r.record(e, err)
			return nil, nil
		}
	}
	dir, err := OpenDir(e.Dir, e.Name)
	if errors.Is(err, unix.EACCES) && makeAccessible(e) == nil {
		dir, err = OpenDir(e.Dir, e.Name)
	}
	if err != nil {
		if errors.Is(err, unix.EXDEV) {
			err = ErrMounted
		}
		r.record(e, ignoreMissing(err))
		return nil, nil
	}
	r.levels = append(r.levels, tally{})
	return dir, nil
}

// Leave implements Handler. It requests another read of a directory that may not be empty, because
// reading may miss names while others are removed (readdir(3)).
func (r *removal) Leave(e *Entry, dir *os.File) (again bool, err error) {
	n := len(r.levels) - 1
	t := r.levels[n]
	if e.Dir == nil { // the root of Empty, which is kept
		r.levels[n] = tally{}
		return t.failed == nil && t.removed > 0, t.failed
	}
	err = r.unlink(e, unix.AT_REMOVEDIR)
	if err != nil && t.failed == nil && t.removed > 0 && errors.Is(err, unix.ENOTEMPTY) {
		r.levels[n] = tally{}
		return true, nil
	}
	r.levels = r.levels[:n]
	if err != nil && t.failed != nil {
		err = t.failed
	}
	if (errors.Is(err, unix.EROFS) || errors.Is(err, unix.EPERM)) && r.destroy != nil {
		dir.Close() // btrfs frees no space of a subvolume that is open
		if r.destroy(e.Dir, e.Name) {
			err = nil
		}
	}
	if t.failed != nil && err != nil {
		r.fail(err) // err already contains the path
		return false, nil
	}
	r.record(e, err)
	return false, nil
}

// record adds the result for an entry to the tally of its directory.
func (r *removal) record(e *Entry, err error) {
	if err != nil {
		r.fail(e.wrap(err))
		return
	}
	r.levels[len(r.levels)-1].removed++
}

// fail adds an error to the tally of the current directory.
func (r *removal) fail(err error) {
	if t := &r.levels[len(r.levels)-1]; t.failed == nil {
		t.failed = err
	}
}

// unlink removes an entry with unlinkat(2) and its flags. If permissions or attributes prevent the removal,
// unlink changes them and tries again. A directory must be empty.
func (r *removal) unlink(e *Entry, flags int) error {
	try := func() error {
		return ignoreMissing(os.NewSyscallError("unlinkat", unix.Unlinkat(int(e.Dir.Fd()), e.Name, flags)))
	}
	err := try()
	kept := r.keepRoot && len(e.in.levels) == 1                            // e.Dir is the root, whose mode must not change
	if errors.Is(err, unix.EACCES) && !kept && e.Dir.Chmod(0o700) == nil { // an NFS server may enforce the mode for root, too
		err = try()
	}
	if errors.Is(err, unix.EPERM) && makeMutable(e) {
		err = try()
	}
	if errors.Is(err, unix.EBUSY) && mountedAt(e) {
		err = ErrMounted
	}
	return err
}

// ignoreMissing returns nil if err means that another process has removed the entry. On NFS the error is
// ESTALE.
func ignoreMissing(err error) error {
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESTALE) {
		return nil
	}
	return err
}

// mountedAt reports whether an entry is a mount point.
func mountedAt(e *Entry) bool {
	fd, err := sys.OpenFD(e.Dir, e.Name, sys.OneMount, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if err == nil {
		unix.Close(fd)
	}
	return errors.Is(err, unix.EXDEV)
}

// makeAccessible gives a directory the mode 0700.
func makeAccessible(e *Entry) error {
	f, err := sys.Open(e.Dir, e.Name, sys.OneMount, unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer f.Close()
	return os.Chmod(sys.Path(f), 0o700)
}

// makeMutable makes an entry and its directory mutable, and reports whether it changed one of them.
func makeMutable(e *Entry) bool {
	changed, _ := sys.MakeMutable(e.Dir)
	return MakeMutable(e.Dir, e.Name) || changed
}

// MakeMutable clears the attributes immutable and append-only of a file or directory in dir, and
// reports whether one was set.
func MakeMutable(dir *os.File, name string) bool {
	var st unix.Stat_t
	err := unix.Fstatat(int(dir.Fd()), name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if kind := st.Mode & unix.S_IFMT; err != nil || kind != unix.S_IFREG && kind != unix.S_IFDIR {
		return false // opening a device or a pipe can have side effects
	}
	f, err := sys.Open(dir, name, sys.OneMount, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY)
	if err != nil {
		return false
	}
	defer f.Close()
	changed, _ := sys.MakeMutable(f)
	return changed
}
