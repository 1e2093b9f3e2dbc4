// Package btrfs has the calls on subvolumes of btrfs that several packages make
// (ioctl_btrfs(2), uapi/linux/btrfs.h).
package btrfs

import (
	"errors"
	"os"
	"runtime"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

const (
	iocSubvolCreate  = 0x5000940e // _IOW(0x94, 14, struct btrfs_ioctl_vol_args)
	iocSnapDestroy   = 0x5000940f // _IOW(0x94, 15, struct btrfs_ioctl_vol_args)
	iocSubvolRootRef = 0xd000943d // _IOWR(0x94, 61, struct btrfs_ioctl_get_subvol_rootref_args)
)

// RootInode is that of the root directory of every subvolume (BTRFS_FIRST_FREE_OBJECTID).
const RootInode = 256

type volArgs struct {
	fd   int64
	name [4088]byte
}

type rootRefs struct {
	min  uint64
	refs [255]Ref
	n    uint8
	_    [7]byte
}

// Ref is a subvolume, and the directory of its parent that it is in, both by number.
type Ref struct{ Tree, Dir uint64 }

// Create makes a subvolume in a directory.
func Create(dir *os.File, name string) error {
	return named("BTRFS_IOC_SUBVOL_CREATE", dir, iocSubvolCreate, name)
}

// Destroy destroys a subvolume in a directory, which has none within it (ENOTEMPTY). Its
// space is freed in the background.
func Destroy(dir *os.File, name string) error {
	return named("BTRFS_IOC_SNAP_DESTROY", dir, iocSnapDestroy, name)
}

func named(op string, dir *os.File, request uint, name string) error {
	var args volArgs
	err := error(unix.ENAMETOOLONG)
	if copy(args.name[:len(args.name)-1], name) == len(name) {
		err = ioctl(dir, request, unsafe.Pointer(&args))
	}
	if err != nil {
		return &os.PathError{Op: op, Path: dir.Name() + "/" + name, Err: err}
	}
	return nil
}

// Within lists the subvolumes that are directly within the one whose root is open, up
// to 255.
func Within(root *os.File) ([]Ref, error) {
	var refs rootRefs
	err := ioctl(root, iocSubvolRootRef, unsafe.Pointer(&refs))
	if err != nil && !errors.Is(err, unix.EOVERFLOW) { // EOVERFLOW: there are more
		return nil, os.NewSyscallError("BTRFS_IOC_GET_SUBVOL_ROOTREF", err)
	}
	return slices.Clone(refs.refs[:refs.n]), nil
}

func ioctl(f *os.File, request uint, arg unsafe.Pointer) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), uintptr(request), uintptr(arg))
	runtime.KeepAlive(f)
	if errno != 0 {
		return errno
	}
	return nil
}
