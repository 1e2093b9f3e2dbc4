package mount

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/internal/location"
	"github.com/trivet-csi/trivet/linux/sys"
)

// DirectorySource is a directory of a filesystem of this node.
type DirectorySource struct {
	// Base is an open directory above the source. The caller closes it. It is nil if the
	// directory is not available.
	Base *os.File
	// Path is relative to Base. The directories at Path and below it belong to the source.
	Path string
	// AnyPath means that the source may also be at another path than Path. Owns then also accepts mounts of
	// directories below Base that are not below the parent directory of Path. Matcher ignores AnyPath.
	AnyPath bool
	// Dir is the source directory, opened with O_PATH. Only Mount needs it.
	Dir *os.File
	// Dev and Ino are st_dev and st_ino of the directory. They are 0 if it does not exist. A btrfs subvolume
	// has its own st_dev, which the mount table does not show.
	Dev, Ino uint64
	// Hold keeps the directory available until Close closes Hold. It may be nil.
	Hold io.Closer
}

var _ Source = (*DirectorySource)(nil)

// String implements Source.
func (d *DirectorySource) String() string { return d.Path }

// Close implements Source.
func (d *DirectorySource) Close() error {
	if d.Hold == nil {
		return nil
	}
	return d.Hold.Close()
}

// Mount implements Source. The target does not show the mounts below the directory.
func (d *DirectorySource) Mount(_ context.Context, target string, o Options) error {
	if flags := o.FilesystemFlags(); len(flags) > 0 {
		err := fmt.Errorf("%w: %s is an option of a filesystem, and the source is a directory", ErrBadOption, strings.Join(flags, ","))
		return &Error{Op: "bind", Source: d.Path, Target: target, Err: err}
	}
	crashpoint.Here(crashpoint.StageMounted)
	return bindTree(int(d.Dir.Fd()), "", unix.AT_EMPTY_PATH, d.Path, target, o)
}

// Attributes implements Source. A bind mount has the attributes of the mount that contains Base.
func (d *DirectorySource) Attributes(o Options) (Options, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(d.Base.Fd()), &st); err != nil {
		return o, &Error{Op: "statfs", Target: d.Base.Name(), Err: err}
	}
	return o.With(st.Flags), nil
}

// Shows implements Source.
func (d *DirectorySource) Shows(path string) (bool, error) {
	at, err := Inspect(path)
	return at.IsMount && d.Ino != 0 && at.Dev == d.Dev && at.Ino == d.Ino, err
}

// Owns implements Source.
func (d *DirectorySource) Owns(path string) (bool, error) {
	if ok, err := d.Shows(path); ok || err != nil && !IsBroken(err) {
		return ok, err
	}
	e, err := OnPath(path)
	if err != nil || e == nil {
		return false, err
	}
	table, err := wholeTable()
	if err != nil {
		return false, err
	}
	matches, err := d.matcher(table, d.AnyPath)
	return err == nil && matches(e), err
}

// Matcher implements Source.
func (d *DirectorySource) Matcher(table []*Entry) (func(*Entry) bool, error) {
	return d.matcher(table, false)
}

// matcher returns a function that compares the root of a mount (the field Root of Entry) with the path of the
// directory on the filesystem that contains Base. This path is the same in every mount of the filesystem and
// in every container. If the directory was removed, the root has the suffix "//deleted".
func (d *DirectorySource) matcher(table []*Entry, anyPath bool) (func(*Entry) bool, error) {
	if d.Base == nil {
		return d.hasPath, nil
	}
	_, base, err := location.In(table, d.Base)
	if errors.Is(err, unix.ENOENT) {
		return d.hasPath, nil
	}
	if err != nil {
		return nil, err
	}
	own := path.Join(base.Path, d.Path)
	return func(e *Entry) bool {
		switch {
		case e.Major != base.Major || e.Minor != base.Minor:
			return false
		case anyPath && e.Root != base.Path && location.IsBelow(e.Root, base.Path) &&
			!location.IsBelow(e.Root, path.Dir(own)):
			return true
		}
		return location.IsBelow(e.Root, own)
	}, nil
}

// hasPath reports whether the root of a mount contains Path, on any filesystem. It is used if the filesystem
// of the directory is unknown.
func (d *DirectorySource) hasPath(e *Entry) bool {
	return strings.Contains(e.Root+"/", "/"+d.Path+"/")
}

// Problems implements Source.
func (d *DirectorySource) Problems() ([]Problem, error) { return unreachable(d) }

// Grow implements Source.
func (*DirectorySource) Grow() error { return nil }

// Unmount implements Source.
func (*DirectorySource) Unmount(ctx context.Context, path string, _ Abandon) error {
	return UnmountIdle(ctx, path)
}

// UnmountLast implements Source. The filesystem of the directory stays mounted and has all writes.
func (*DirectorySource) UnmountLast(ctx context.Context, path string, _ Abandon) error {
	return UnmountIdle(ctx, path)
}

// unreachable reports a mounted directory that cannot be read.
func unreachable(s Source) ([]Problem, error) {
	mounts, err := Of(s)
	if err != nil || len(mounts) == 0 {
		return nil, err
	}
	if err := CheckReadable(mounts[0].Mountpoint); err != nil {
		m := mounts[0]
		return []Problem{{Unreachable, fmt.Sprintf("%s at %s does not answer: %v", m.Source, m.Mountpoint, ExplainStale(err))}}, nil
	}
	return nil, nil
}

// CheckReadable returns an error if a directory cannot be read.
func CheckReadable(dir string) error {
	f, err := sys.OpenFile(dir, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.Readdirnames(1); !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}

// ErrStale means that the directory no longer exists on the server (ESTALE).
var ErrStale = errors.New("the directory was removed on the server, or another filesystem was exported in its place: restore the directory or the export on the server, and restart the pods that use it")

// ExplainStale adds ErrStale to an error that wraps ESTALE.
func ExplainStale(err error) error {
	if !errors.Is(err, unix.ESTALE) {
		return err
	}
	return fmt.Errorf("%w: %w", err, ErrStale)
}
