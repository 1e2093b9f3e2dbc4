package mount

import (
	"errors"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/location"
)

// Directory is a directory of a filesystem of this node.
type Directory struct {
	// Base is an open directory above it, which stays its owner's; nil if none is to be
	// had.
	Base *os.File
	// Path is where the volume's own lies below Base, and nothing of another's: what
	// is mounted from there, or from below it, is the volume's.
	Path string
	// Dir is open (O_PATH) where it is to be mounted; nil else.
	Dir *os.File
	// Dev and Ino are its st_dev and st_ino; 0 if it is not there. Those of a btrfs
	// subvolume are of it alone, unlike the device that the mount table has.
	Dev, Ino uint64
}

// At tells whether what was looked at is a mount of the directory.
func (d *Directory) At(i Info) bool {
	return i.IsMount && d.Ino != 0 && i.Dev == d.Dev && i.Ino == d.Ino
}

// Bind mounts the open directory at target, with attributes of the mount alone. What
// is mounted below it does not come along. The target never shows it without them.
func (d *Directory) Bind(target string, o Options) error {
	return bindTree(int(d.Dir.Fd()), "", unix.AT_EMPTY_PATH, d.Path, target, o)
}

// matcher tells which mounts of a table are of the directory. Where it lies on its
// filesystem is found by the mount that Base is on: the same in every mount of the
// filesystem, and in every container.
//
// A directory that was removed is shown with "//deleted" behind its path. With below
// the volume may be anywhere below Base, though not at it, nor where others of its kind
// are.
func (d *Directory) matcher(table []*Entry, below bool) (func(*Entry) bool, error) {
	if d.Base == nil {
		return d.anywhere, nil
	}
	_, base, err := location.In(table, d.Base)
	if errors.Is(err, unix.ENOENT) {
		return d.anywhere, nil
	}
	if err != nil {
		return nil, err
	}
	own := path.Join(base.Path, d.Path)
	return func(e *Entry) bool {
		switch {
		case e.Major != base.Major || e.Minor != base.Minor:
			return false
		case below && e.Root != base.Path && location.IsBelow(e.Root, base.Path) && !location.IsBelow(e.Root, path.Dir(own)):
			return true
		}
		return location.IsBelow(e.Root, own)
	}, nil
}

// anywhere tells whether a mount is of the directory's path on whatever filesystem:
// its own is not known any more.
func (d *Directory) anywhere(e *Entry) bool {
	return strings.Contains(e.Root+"/", "/"+d.Path+"/")
}

// Flags are those that statfs(2) shows of the mount that the directory is bound from.
func (d *Directory) Flags() (int64, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(d.Base.Fd()), &st); err != nil {
		return 0, &Error{Op: "statfs", Target: d.Base.Name(), Err: err}
	}
	return st.Flags, nil
}
