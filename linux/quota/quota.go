package quota

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
)

// Kind is a mechanism that limits directories.
type Kind string

// The kinds of limits. A project quota can be evaded: the owner of a file on XFS may change its
// project, and ext4 exempts CAP_SYS_RESOURCE. A simple quota also counts the metadata of a subvolume.
// It can be evaded by creating a subvolume with chosen qgroups (BTRFS_IOC_SUBVOL_CREATE_V2), which
// needs no capability. A write beyond the limit fails with EDQUOT, or with ENOSPC on XFS.
const (
	None  Kind = ""
	XFS   Kind = "xfs-project"
	Ext4  Kind = "ext4-project"
	Btrfs Kind = "btrfs-simple"
)

// ErrBusy means that data still counts towards an ID. btrfs frees removed data in the background, and a
// removed file counts until it is closed.
var ErrBusy = errors.New("data still counts on the quota ID")

// ErrDamaged means that the file in which the filesystem stores the usage and the limits of projects cannot be
// read.
var ErrDamaged = errors.New("the quota file is damaged")

// dirMode is the mode of a new directory.
const dirMode = 0o700

// Limit is the limit of a directory.
type Limit struct {
	Bytes int64
	// Inodes is the maximum number of inodes, or 0 for no such limit. btrfs ignores it.
	Inodes int64
}

// Usage is the usage of an ID and its limit. The limit may be rounded up to a block of the filesystem. A limit
// of zero means no limit.
type Usage struct {
	Bytes, Inodes int64
	Limit         Limit
}

// FS is a filesystem that may limit directories. It holds a directory of the filesystem open.
type FS struct {
	kind Kind
	// reason is the result of Why.
	reason string
	dir    *os.File
	limits limits
	// subvolumes is set for every btrfs, even if the btrfs does not limit directories.
	subvolumes *subvolumes
}

// limits is the implementation of a Kind. Each method implements the method of FS with the same name.
type limits interface {
	check() error
	allocate(dir *os.File, l Limit, taken func(id uint64) bool) (uint64, error)
	set(id uint64, l Limit) error
	usage(id uint64) (Usage, error)
	id(dir *os.File) (uint64, error)
	release(id uint64) error
}

// Open examines the filesystem of dir, which the caller closes.
func Open(dir *os.File) (*FS, error) {
	own, err := reopen(dir)
	if err != nil {
		return nil, err
	}
	f := &FS{dir: own}
	kind, err := f.detect()
	if err != nil {
		own.Close()
		return nil, err
	}
	if err := f.limits.check(); err != nil {
		f.reason = err.Error()
		f.limits = unlimited{f.reason}
		return f, nil //nolint:nilerr // the directories have no limits, and the reason is recorded
	}
	f.kind = kind
	return f, nil
}

// detect sets f.limits and returns the kind that the type of the filesystem supports, even if limits are switched
// off.
func (f *FS) detect() (kind Kind, err error) {
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
		f.limits = unlimited{fmt.Sprintf("a filesystem of type %#x (statfs(2)) cannot limit directories: use XFS, ext4 or btrfs", st.Type)}
		return None, nil
	}
	f.limits, err = newProjects(kind, f.dir)
	return kind, err
}

// Close closes the directory that the FS holds.
func (f *FS) Close() error { return f.dir.Close() }

// Kind returns the kind of limits that was in force when the FS was opened.
func (f *FS) Kind() Kind { return f.kind }

// Why returns the reason why Kind returns None, and the remedy.
func (f *FS) Why() string { return f.reason }

// Check returns an error with the remedy if limits are not in force now. An administrator may have switched
// them off.
func (f *FS) Check() error { return f.limits.check() }

// MakeDir creates a directory with mode 0700 that Allocate can limit. On btrfs it creates a
// subvolume, even if limits are not in force.
func (f *FS) MakeDir(parent *os.File, name string) error {
	if f.subvolumes != nil {
		return f.subvolumes.makeDir(parent, name)
	}
	if err := unix.Mkdirat(int(parent.Fd()), name, dirMode); err != nil {
		return &os.PathError{Op: "mkdirat", Path: parent.Name() + "/" + name, Err: err}
	}
	return nil
}

// Allocate gives an empty directory, which MakeDir has created, a new ID, and durably sets the limit of the
// ID. It chooses no ID that is in use on the filesystem or for which taken returns true. It holds a lock while
// it calls taken. If Allocate fails, the directory has no limit but may have an ID, so the caller must remove
// the directory.
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

// check rejects values that the kernel treats as no limit.
func (l Limit) check() error {
	if l.Bytes <= 0 || l.Inodes < 0 {
		return fmt.Errorf("invalid limit of %d bytes and %d inodes: use at least 1 byte, and at least 0 inodes, where 0 means no limit", l.Bytes, l.Inodes)
	}
	return nil
}

// Set durably replaces the limit of an ID.
func (f *FS) Set(id uint64, l Limit) error {
	if err := l.check(); err != nil {
		return err
	}
	return f.limits.set(id, l)
}

// Usage returns the usage and the limit of an ID. They are zero for an unknown ID.
func (f *FS) Usage(id uint64) (Usage, error) { return f.limits.usage(id) }

// ID returns the ID that Allocate gave a directory, or 0 if the directory has none.
func (f *FS) ID(dir *os.File) (uint64, error) { return readID(dir, f.limits.id) }

// readID calls read with dir opened for reading.
func readID(dir *os.File, read func(dir *os.File) (uint64, error)) (uint64, error) {
	dir, err := reopen(dir)
	if err != nil {
		return 0, err
	}
	defer dir.Close()
	return read(dir)
}

// Has reports whether the ID of a directory is id, even if limits are not in force.
func (f *FS) Has(dir *os.File, id uint64) (bool, error) {
	read := f.limits.id
	if f.subvolumes != nil {
		read = subvolume
	}
	current, err := readID(dir, read)
	return err == nil && current == id, err
}

// Release frees an ID whose data was removed. The error is ErrBusy if data still counts towards the ID. An unknown ID
// is no error.
func (f *FS) Release(id uint64) error { return f.limits.release(id) }

// RemoveDir destroys a btrfs subvolume, its content and the subvolumes in it without a walk of the files. For
// any other directory it changes nothing, and done is false. The error is EXDEV if the directory is a mount point.
func (f *FS) RemoveDir(parent *os.File, name string) (done bool, err error) {
	if f.subvolumes == nil {
		return false, nil
	}
	return f.subvolumes.removeDir(parent, name)
}

// unlimited implements limits for filesystems that do not limit directories.
type unlimited struct{ reason string }

func (n unlimited) check() error { return errors.New(n.reason) }

func (n unlimited) allocate(*os.File, Limit, func(uint64) bool) (uint64, error) { return 0, n.check() }

func (n unlimited) set(uint64, Limit) error { return n.check() }

func (n unlimited) usage(uint64) (Usage, error) { return Usage{}, n.check() }

func (n unlimited) id(*os.File) (uint64, error) { return 0, nil }

func (n unlimited) release(uint64) error { return nil }

// reopen opens a directory for reading. The caller may have opened it with O_PATH, which is not enough
// for ioctl(2) and fsync(2).
func reopen(dir *os.File) (*os.File, error) { return openDir(dir, ".") }

// openDir opens a directory in parent. It follows no link and enters no mount.
func openDir(parent *os.File, name string) (*os.File, error) {
	return sys.Open(parent, name, sys.OneMount, unix.O_RDONLY|unix.O_DIRECTORY)
}
