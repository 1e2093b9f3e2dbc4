package clone

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/volume"
)

// Numbers and structures of uapi/linux/btrfs.h and btrfs_tree.h.
const (
	btrfsIocSnapDestroy   = 0x5000940f // _IOW(0x94, 15, struct btrfs_ioctl_vol_args)
	btrfsIocSnapCreateV2  = 0x50009417 // _IOW(0x94, 23, struct btrfs_ioctl_vol_args_v2)
	btrfsIocSubvolRootRef = 0xd000943d // _IOWR(0x94, 61, struct btrfs_ioctl_get_subvol_rootref_args)
	btrfsIocLookupUser    = 0xd000943e // _IOWR(0x94, 62, struct btrfs_ioctl_ino_lookup_user_args)

	rootDirInode   = 256    // BTRFS_FIRST_FREE_OBJECTID: the root directory of a subvolume
	subvolReadOnly = 1 << 1 // BTRFS_SUBVOL_RDONLY
)

type volArgs struct {
	fd   int64
	name [4088]byte
}

type volArgsV2 struct {
	fd             int64
	transID, flags uint64
	_              [4]uint64
	name           [4040]byte
}

type rootRefs struct {
	min  uint64
	refs [255]rootRef
	n    uint8
	_    [7]byte
}

// rootRef is a subvolume, and the directory of its parent that it is in.
type rootRef struct{ tree, dir uint64 }

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
	return err == nil && f.Type == unix.BTRFS_SUPER_MAGIC && st.Ino == rootDirInode, err
}

// Subvolume makes a snapshot of the btrfs subvolume that src is the root of, as name in
// the directory parent (ioctl_btrfs(2), BTRFS_IOC_SNAP_CREATE_V2). It has what src had at
// one instant, caches included, and is durable. Both are open for reading (not O_PATH),
// and on one filesystem.
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
	if err := requireNoneWithin(src); err != nil {
		return errors.Join(err, destroy(parent, name))
	}
	return nil
}

func snapshot(parent *os.File, name string, src *os.File, readOnly bool) error {
	args := volArgsV2{fd: int64(src.Fd())}
	if readOnly {
		args.flags = subvolReadOnly
	}
	return onName("BTRFS_IOC_SNAP_CREATE_V2", parent, name, args.name[:], func() error {
		return ioctl(parent, btrfsIocSnapCreateV2, unsafe.Pointer(&args))
	})
}

func destroy(parent *os.File, name string) error {
	var args volArgs
	return onName("BTRFS_IOC_SNAP_DESTROY", parent, name, args.name[:], func() error {
		return ioctl(parent, btrfsIocSnapDestroy, unsafe.Pointer(&args))
	})
}

// onName makes a call whose arguments have room for a name and a NUL.
func onName(op string, parent *os.File, name string, room []byte, call func() error) error {
	err := error(unix.ENAMETOOLONG)
	if copy(room[:len(room)-1], name) == len(name) {
		err = call()
	}
	if err != nil {
		return &fs.PathError{Op: op, Path: parent.Name() + "/" + name, Err: err}
	}
	return nil
}

// requireNoneWithin looks at the subvolumes that are directly in one: those deeper are in
// one of them.
func requireNoneWithin(src *os.File) error {
	var refs rootRefs
	err := ioctl(src, btrfsIocSubvolRootRef, unsafe.Pointer(&refs))
	if err != nil && !errors.Is(err, unix.EOVERFLOW) { // EOVERFLOW: there are more than fit
		return fail("BTRFS_IOC_GET_SUBVOL_ROOTREF", src, err)
	}
	if refs.n == 0 {
		return nil
	}
	return errNested(src.Name(), nameOf(src, refs.refs[0]))
}

func errNested(dir, name string) error {
	return volume.Errorf(ErrNested, "%q has the subvolume %s in it, which a copy would leave out: make a plain directory of it, or delete it (btrfs subvolume delete)", dir, name)
}

// nameOf is the path of a subvolume in another, or its number where that is too long.
func nameOf(src *os.File, ref rootRef) string {
	args := lookupUser{dir: ref.dir, tree: ref.tree}
	if err := ioctl(src, btrfsIocLookupUser, unsafe.Pointer(&args)); err != nil {
		return strconv.FormatUint(ref.tree, 10)
	}
	return strconv.Quote(unix.ByteSliceToString(args.path[:]) + unix.ByteSliceToString(args.name[:]))
}
