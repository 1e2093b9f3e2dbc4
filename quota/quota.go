package quota

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Kind is what keeps directories on a filesystem to their size.
type Kind string

// The kinds of limits. Those of projects hold who keeps to the project: an owner may
// give files of XFS another one, and ext4 exempts CAP_SYS_RESOURCE. Simple quotas count
// a subvolume's metadata as well, and hold everybody but who makes subvolumes with
// qgroups of its own choice (BTRFS_IOC_SUBVOL_CREATE_V2): that takes no capability. Where they refuse, writes fail with EDQUOT, or ENOSPC on
// XFS.
const (
	None  Kind = ""             // nothing
	XFS   Kind = "xfs-project"  // project quota of XFS
	Ext4  Kind = "ext4-project" // project quota of ext4
	Btrfs Kind = "btrfs-simple" // simple quotas of btrfs
)

// ErrBusy means: data still counts on the ID. btrfs frees what was removed in the
// background, and a file that is open counts until it is closed.
var ErrBusy = errors.New("data still counts on it")

// ErrDamaged means: what the filesystem has on record of projects and their limits cannot
// be read.
var ErrDamaged = errors.New("the quota file is damaged")

// dirMode is the mode of a directory that was just made.
const dirMode = 0o700

// Limit is what a directory is kept to.
type Limit struct {
	Bytes int64
	// Inodes is 0 for no limit. btrfs has none.
	Inodes int64
}

// Usage is what counts on an ID and the limit in force, as the kernel has it: it may
// have rounded that up to the filesystem's block. Zero is no limit.
type Usage struct {
	Bytes, Inodes int64
	Limit         Limit
}

// FS is a filesystem whose directories may be limited. It keeps a directory of it open.
type FS struct {
	kind   Kind
	why    string
	dir    *os.File
	limits limits
	// subvolumes is of any btrfs, limited or not.
	subvolumes *subvolumes
}

// limits is how a kind of filesystem limits directories.
type limits interface {
	check() error
	allocate(dir *os.File, l Limit, taken func(id uint64) bool) (uint64, error)
	set(id uint64, l Limit) error
	usage(id uint64) (Usage, error)
	id(dir *os.File) (uint64, error)
	release(id uint64) error
}

// Open looks at the filesystem that has dir, which stays the caller's.
func Open(dir *os.File) (*FS, error) {
	own, err := reopen(dir)
	if err != nil {
		return nil, err
	}
	f := &FS{dir: own}
	kind, err := f.find()
	if err != nil {
		own.Close()
		return nil, err
	}
	f.use(kind)
	return f, nil
}

// use has directories limited as a kind does, if that is in force.
func (f *FS) use(kind Kind) {
	if err := f.limits.check(); err != nil {
		f.why = err.Error()
		f.limits = nothing{f.why}
		return
	}
	f.kind = kind
}

// find finds out what can limit directories, whether or not it does.
func (f *FS) find() (kind Kind, err error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.dir.Fd()), &st); err != nil {
		return None, &os.PathError{Op: "fstatfs", Path: f.dir.Name(), Err: err}
	}
	switch st.Type {
	case unix.XFS_SUPER_MAGIC:
		kind = XFS
	case unix.EXT4_SUPER_MAGIC:
		kind = Ext4
	case unix.BTRFS_SUPER_MAGIC:
		f.subvolumes, err = newSubvolumes(f.dir)
		f.limits = f.subvolumes
		return Btrfs, err
	default:
		f.limits = nothing{fmt.Sprintf("a filesystem of type %#x (statfs(2)) cannot limit directories: use XFS, ext4 or btrfs", st.Type)}
		return None, nil
	}
	f.limits, err = newProjects(kind, f.dir)
	return kind, err
}

// Close lets go of the filesystem.
func (f *FS) Close() error { return f.dir.Close() }

// Kind is what limits directories.
func (f *FS) Kind() Kind { return f.kind }

// Why says why the kind is None, and what to do about it.
func (f *FS) Why() string { return f.why }

// Check tells whether limits are in force now, as the kernel has it: somebody may have
// switched them off. The error says what to do about it.
func (f *FS) Check() error { return f.limits.check() }

// MakeDir makes a directory that is to be limited, with mode 0700: a subvolume where
// there are any, limited or not.
func (f *FS) MakeDir(parent *os.File, name string) error {
	if f.subvolumes != nil {
		return f.subvolumes.makeDir(parent, name)
	}
	return mkdir(parent, name)
}

// Allocate limits a directory that MakeDir has made, and that is empty, by an ID of its
// own, and makes that durable. No ID is chosen that anything on the filesystem has, or
// taken knows; that is called with a lock held. After an error nothing is limited, and
// the directory may carry an ID all the same: remove it.
func (f *FS) Allocate(dir *os.File, l Limit, taken func(id uint64) bool) (id uint64, err error) {
	if err := l.check(); err != nil {
		return 0, err
	}
	dir, err = reopen(dir)
	if err != nil {
		return 0, err
	}
	defer dir.Close()
	return f.limits.allocate(dir, l, taken)
}

// check refuses what the kernel takes for no limit.
func (l Limit) check() error {
	if l.Bytes <= 0 || l.Inodes < 0 {
		return fmt.Errorf("a limit of %d bytes and %d inodes: give 1 byte at least, and 0 inodes for no limit of them", l.Bytes, l.Inodes)
	}
	return nil
}

// Set makes a limit what it says, whatever became of it, and makes that durable.
func (f *FS) Set(id uint64, l Limit) error {
	if err := l.check(); err != nil {
		return err
	}
	return f.limits.set(id, l)
}

// Usage is what counts on an ID. One that nothing is known of has none.
func (f *FS) Usage(id uint64) (Usage, error) { return f.limits.usage(id) }

// ID is what Allocate gave a directory; 0 for none.
func (f *FS) ID(dir *os.File) (uint64, error) {
	dir, err := reopen(dir)
	if err != nil {
		return 0, err
	}
	defer dir.Close()
	return f.limits.id(dir)
}

// Has tells whether a directory carries an ID, also while nothing limits that.
func (f *FS) Has(dir *os.File, id uint64) (bool, error) {
	own, err := reopen(dir)
	if err != nil {
		return false, err
	}
	defer own.Close()
	carries := f.limits.id
	if f.subvolumes != nil {
		carries = subvolume
	}
	have, err := carries(own)
	return err == nil && have == id, err
}

// Release gives an ID back whose data is gone: ErrBusy if some is left. It is no error
// if nothing is known of the ID.
func (f *FS) Release(id uint64) error { return f.limits.release(id) }

// RemoveDir destroys a directory with all that is in it, where the filesystem can do so
// at once: a subvolume of btrfs, with those within it. For others done is false, and
// nothing has changed. What is mounted there is not touched (EXDEV).
func (f *FS) RemoveDir(parent *os.File, name string) (done bool, err error) {
	if f.subvolumes == nil {
		return false, nil
	}
	return f.subvolumes.removeDir(parent, name)
}

// nothing limits no directory.
type nothing struct{ why string }

func (n nothing) check() error { return errors.New(n.why) }

func (n nothing) allocate(*os.File, Limit, func(uint64) bool) (uint64, error) { return 0, n.check() }

func (n nothing) set(uint64, Limit) error { return n.check() }

func (n nothing) usage(uint64) (Usage, error) { return Usage{}, n.check() }

func (n nothing) id(*os.File) (uint64, error) { return 0, nil }

func (n nothing) release(uint64) error { return nil }

func mkdir(parent *os.File, name string) error {
	if err := unix.Mkdirat(int(parent.Fd()), name, dirMode); err != nil {
		return &os.PathError{Op: "mkdirat", Path: parent.Name() + "/" + name, Err: err}
	}
	return nil
}
