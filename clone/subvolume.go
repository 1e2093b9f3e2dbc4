package clone

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/btrfs"
	"github.com/trivet-csi/trivet/volume"
)

// Numbers and structures of uapi/linux/btrfs.h and btrfs_tree.h.
const (
	btrfsIocSnapCreateV2 = 0x50009417 // _IOW(0x94, 23, struct btrfs_ioctl_vol_args_v2)
	btrfsIocLookupUser   = 0xd000943e // _IOWR(0x94, 62, struct btrfs_ioctl_ino_lookup_user_args)

	subvolReadOnly = 1 << 1 // BTRFS_SUBVOL_RDONLY
)

type volArgsV2 struct {
	fd             int64
	transID, flags uint64
	_              [4]uint64
	name           [4040]byte
}

type lookupUser struct {
	dir, tree uint64
	name      [256]byte
	path      [3824]byte
}

// ErrNotSubvolume means: a directory is not the root of a btrfs subvolume.
var ErrNotSubvolume = errors.New("not a btrfs subvolume")

// ErrNested is the volume.ErrPrecondition of a directory that has a subvolume somewhere
// in it.
var ErrNested = fmt.Errorf("%w: nested subvolume", volume.ErrPrecondition)

// IsSubvolume tells whether an open directory is the root of a btrfs subvolume.
func IsSubvolume(dir *os.File) (bool, error) {
	var f unix.Statfs_t
	if err := unix.Fstatfs(int(dir.Fd()), &f); err != nil {
		return false, fail("fstatfs", dir, err)
	}
	st, err := stat(dir)
	return err == nil && f.Type == unix.BTRFS_SUPER_MAGIC && st.Ino == btrfs.RootInode, err
}

// Subvolume makes a snapshot of the btrfs subvolume that src is the root of, as name in
// the directory parent (ioctl_btrfs(2), BTRFS_IOC_SNAP_CREATE_V2). It has what src had at
// one instant, caches included, and is durable. Both are open for reading (not O_PATH),
// and on one filesystem. One that can be written to is itself not immutable or append-only:
// it could be neither moved nor given an owner.
//
// ErrNotSubvolume if src is none; ErrNested, which names one, if subvolumes are in it at
// any depth: a snapshot has empty directories in their places. fs.ErrExist if there is
// something of that name.
func Subvolume(parent *os.File, name string, src *os.File, readOnly bool) error {
	ok, err := IsSubvolume(src)
	if err != nil {
		return err
	}
	if !ok {
		return fmt.Errorf("%s: %w", src.Name(), ErrNotSubvolume)
	}
	if err := requireNoneWithin(src); err != nil {
		return err
	}
	if err := snapshot(parent, name, src, readOnly); err != nil {
		return err
	}
	// Its tenant may have made one just before the snapshot.
	err = requireNoneWithin(src)
	if err == nil && !readOnly {
		err = unlock(parent, name)
	}
	if err != nil {
		return errors.Join(err, btrfs.Destroy(parent, name))
	}
	return nil
}

func unlock(parent *os.File, name string) error {
	dir, err := openat(parent, name, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer dir.Close()
	return setLocks(dir, xflagImmutable|xflagAppend, 0)
}

func snapshot(parent *os.File, name string, src *os.File, readOnly bool) error {
	args := volArgsV2{fd: int64(src.Fd())}
	if readOnly {
		args.flags = subvolReadOnly
	}
	err := error(unix.ENAMETOOLONG)
	if copy(args.name[:len(args.name)-1], name) == len(name) {
		err = ioctl(parent, btrfsIocSnapCreateV2, unsafe.Pointer(&args))
	}
	if err != nil {
		return &fs.PathError{Op: "BTRFS_IOC_SNAP_CREATE_V2", Path: parent.Name() + "/" + name, Err: err}
	}
	return nil
}

// requireNoneWithin looks at the subvolumes that are directly in one: those deeper are in
// one of them.
func requireNoneWithin(src *os.File) error {
	refs, err := btrfs.Within(src)
	if err != nil {
		return fmt.Errorf("%s: %w", src.Name(), err)
	}
	if len(refs) == 0 {
		return nil
	}
	return errNested(src.Name(), nameOf(src, refs[0]))
}

func errNested(dir, name string) error {
	return volume.Errorf(ErrNested, "%q has the subvolume %s in it, which a copy would leave out: make a plain directory of it, or delete it (btrfs subvolume delete)", dir, name)
}

// nameOf is the path of a subvolume in another, or its number where that is too long.
func nameOf(src *os.File, ref btrfs.Ref) string {
	args := lookupUser{dir: ref.Dir, tree: ref.Tree}
	if err := ioctl(src, btrfsIocLookupUser, unsafe.Pointer(&args)); err != nil {
		return strconv.FormatUint(ref.Tree, 10)
	}
	return strconv.Quote(unix.ByteSliceToString(args.path[:]) + unix.ByteSliceToString(args.name[:]))
}
