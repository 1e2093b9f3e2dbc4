package main

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Names of filesystems.
const (
	btrfs = "btrfs"
	ext4  = "ext4"
	xfs   = "xfs"
)

// Numbers of uapi/linux/btrfs.h and btrfs_tree.h.
const (
	subvolCreate = 0x5000940e // BTRFS_IOC_SUBVOL_CREATE
	inoLookup    = 0xd0009412 // BTRFS_IOC_INO_LOOKUP
	quotaCtl     = 0xc0109428 // BTRFS_IOC_QUOTA_CTL
	qgroupAssign = 0x40189429 // BTRFS_IOC_QGROUP_ASSIGN
	qgroupCreate = 0x4010942a // BTRFS_IOC_QGROUP_CREATE
	qgroupLimit  = 0x8030942b // BTRFS_IOC_QGROUP_LIMIT

	enableSimple  = 4       // BTRFS_QUOTA_CTL_ENABLE_SIMPLE_QUOTA
	rootDirectory = 256     // BTRFS_FIRST_FREE_OBJECTID
	maxReferenced = 1       // BTRFS_QGROUP_LIMIT_MAX_RFER
	firstLevel    = 1 << 48 // qgroup 1/0
)

var errNoSimpleQuotas = errors.New("the kernel has no simple quotas of btrfs (Linux 6.7)")

// enableSimpleQuotas enables the quotas of a btrfs.
func enableSimpleQuotas(path string) error {
	if _, err := os.Stat("/sys/fs/btrfs/features/simple_quota"); err != nil {
		return errNoSimpleQuotas
	}
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	defer dir.Close()
	args := [2]uint64{enableSimple}
	return ioctl(dir, quotaCtl, unsafe.Pointer(&args))
}

// makeSubvolume creates a subvolume in a directory, with a qgroup that limits it to a size in
// bytes.
func makeSubvolume(parent *os.File, name string, size int64) error {
	var args struct {
		fd   int64
		name [4088]byte
	}
	copy(args.name[:], name)
	if err := ioctl(parent, subvolCreate, unsafe.Pointer(&args)); err != nil {
		return err
	}
	made, err := os.Open(parent.Name() + "/" + name)
	if err != nil {
		return err
	}
	defer made.Close()
	var lookup struct {
		tree, object uint64
		name         [4080]byte
	}
	lookup.object = rootDirectory
	if err := ioctl(made, inoLookup, unsafe.Pointer(&lookup)); err != nil {
		return err
	}
	group := firstLevel | lookup.tree
	create, assign, limit := [2]uint64{1, group}, [3]uint64{1, lookup.tree, group}, [6]uint64{group, maxReferenced, uint64(size)}
	return errors.Join(
		ioctl(parent, qgroupCreate, unsafe.Pointer(&create)),
		ioctl(parent, qgroupAssign, unsafe.Pointer(&assign)),
		ioctl(parent, qgroupLimit, unsafe.Pointer(&limit)))
}

func ioctl(f *os.File, request uintptr, arg unsafe.Pointer) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(arg))
	runtime.KeepAlive(f)
	if errno != 0 {
		return fmt.Errorf("ioctl %#x of %s: %w", request, f.Name(), errno)
	}
	return nil
}
