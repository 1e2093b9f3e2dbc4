package clone

import (
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
)

// IsSubvolume reports whether an open directory is the root of a btrfs subvolume.
func IsSubvolume(dir *os.File) (bool, error) {
	fsType, err := filesystemType(dir)
	if err != nil {
		return false, err
	}
	st, err := stat(dir)
	return err == nil && fsType == unix.BTRFS_SUPER_MAGIC && st.Ino == sys.BtrfsRootInode, err
}

// Subvolume creates the snapshot parent/name of the btrfs subvolume whose root is src (ioctl_btrfs(2),
// BTRFS_IOC_SNAP_CREATE_V2). The snapshot has the state of src at one moment, including dirty pages, and is
// durable. Both directories must be open for reading (not with O_PATH) and on one filesystem. The root of a
// writable snapshot is neither immutable nor append-only, so that it can be moved and its owner can change.
//
// The error is ErrNotSubvolume if src is not the root of a subvolume, fs.ErrExist if the name exists, and
// ErrUncopyable, with a path, if src contains subvolumes at any depth, because they would be empty directories
// in the snapshot.
func Subvolume(parent *os.File, name string, src *os.File, readOnly bool) error {
	ok, err := IsSubvolume(src)
	if err != nil {
		return err
	}
	if !ok {
		return fmt.Errorf("%s: %w", src.Name(), ErrNotSubvolume)
	}
	if err := requireNoSubvolumes(src); err != nil {
		return err
	}
	if err := sys.SnapshotSubvolume(parent, name, src, readOnly); err != nil {
		return err
	}
	// A tenant may have created a subvolume just before the snapshot.
	err = requireNoSubvolumes(src)
	if err == nil && !readOnly {
		err = unprotect(parent, name)
	}
	if err != nil {
		return errors.Join(err, sys.DestroySubvolume(parent, name))
	}
	return nil
}

// unprotect makes a directory neither immutable nor append-only.
func unprotect(parent *os.File, name string) error {
	dir, err := openat(parent, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer dir.Close()
	_, err = sys.MakeMutable(dir)
	return err
}

// requireNoSubvolumes returns ErrUncopyable if a subvolume contains others. It searches only for direct children,
// because deeper subvolumes are within a direct child.
func requireNoSubvolumes(src *os.File) error {
	refs, err := sys.SubvolumesWithin(src)
	if err != nil {
		return fmt.Errorf("%s: %w", src.Name(), err)
	}
	if len(refs) == 0 {
		return nil
	}
	return errNested(src.Name(), subvolumeName(src, refs[0]))
}

// errNested returns the error for a subvolume with a name in dir.
func errNested(dir, name string) error {
	return errUncopyable("%q contains the subvolume %s, and a copy would not contain it: replace the subvolume by a directory, or delete it (btrfs subvolume delete)", dir, name)
}

// subvolumeName returns the path of a subvolume within src, or its ID if the path is too long.
func subvolumeName(src *os.File, ref sys.SubvolumeRef) string {
	path, err := sys.SubvolumePath(src, ref)
	if err != nil {
		return strconv.FormatUint(ref.Tree, 10)
	}
	return strconv.Quote(path)
}
