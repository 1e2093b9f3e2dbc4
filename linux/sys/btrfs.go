package sys

import (
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"os"
	"runtime"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Requests of ioctl_btrfs(2) and uapi/linux/btrfs.h.
const (
	btrfsResize          = 0x50009403 // _IOW(0x94, 3, struct btrfs_ioctl_vol_args)
	btrfsSubvolCreate    = 0x5000940e // _IOW(0x94, 14, struct btrfs_ioctl_vol_args)
	btrfsSnapDestroy     = 0x5000940f // _IOW(0x94, 15, struct btrfs_ioctl_vol_args)
	btrfsTreeSearch      = 0xd0009411 // _IOWR(0x94, 17, struct btrfs_ioctl_search_args)
	btrfsInoLookup       = 0xd0009412 // _IOWR(0x94, 18, struct btrfs_ioctl_ino_lookup_args)
	btrfsWaitSync        = 0x40089416 // _IOW(0x94, 22, __u64)
	btrfsSnapCreateV2    = 0x50009417 // _IOW(0x94, 23, struct btrfs_ioctl_vol_args_v2)
	btrfsStartSync       = 0x80089418 // _IOR(0x94, 24, __u64)
	btrfsSubvolSetFlags  = 0x4008941a // _IOW(0x94, 26, __u64)
	btrfsDevInfo         = 0xd000941e // _IOWR(0x94, 30, struct btrfs_ioctl_dev_info_args)
	btrfsFSInfo          = 0x8400941f // _IOR(0x94, 31, struct btrfs_ioctl_fs_info_args)
	btrfsInoPaths        = 0xc0389423 // _IOWR(0x94, 35, struct btrfs_ioctl_ino_path_args)
	btrfsQgroupAssign    = 0x40189429 // _IOW(0x94, 41, struct btrfs_ioctl_qgroup_assign_args)
	btrfsQgroupCreate    = 0x4010942a // _IOW(0x94, 42, struct btrfs_ioctl_qgroup_create_args)
	btrfsQgroupLimit     = 0x8030942b // _IOR(0x94, 43, struct btrfs_ioctl_qgroup_limit_args)
	btrfsGetDevStats     = 0xc4089434 // _IOWR(0x94, 52, struct btrfs_ioctl_get_dev_stats)
	btrfsSubvolInfo      = 0x81f8943c // _IOR(0x94, 60, struct btrfs_ioctl_get_subvol_info_args)
	btrfsSubvolRootRef   = 0xd000943d // _IOWR(0x94, 61, struct btrfs_ioctl_get_subvol_rootref_args)
	btrfsInoLookupUser   = 0xd000943e // _IOWR(0x94, 62, struct btrfs_ioctl_ino_lookup_user_args)
	btrfsSnapReadOnly    = 1 << 1     // BTRFS_SUBVOL_RDONLY
	btrfsRootReadOnly    = 1 << 0     // BTRFS_ROOT_SUBVOL_RDONLY
	btrfsLimitReferenced = 1 << 0     // BTRFS_QGROUP_LIMIT_MAX_RFER
)

// BtrfsRootInode is the inode of the root directory of every subvolume
// (BTRFS_FIRST_FREE_OBJECTID).
const BtrfsRootInode = 256

// The arguments of the requests, with the layout that the kernel defines (uapi/linux/btrfs.h).
type (
	volArgs struct {
		fd   int64
		name [4088]byte
	}
	volArgsV2 struct {
		fd             int64
		transID, flags uint64
		_              [4]uint64
		name           [4040]byte
	}
	rootRefs struct {
		min  uint64
		refs [255]SubvolumeRef
		n    uint8
		_    [7]byte
	}
	// subvolInfo omits the UUIDs, transactions and times after the flags.
	subvolInfo struct {
		tree        uint64
		name        [256]byte
		parent, dir uint64
		generation  uint64
		flags       uint64
		_           [208]byte
	}
	inoLookup struct {
		tree, object uint64
		name         [4080]byte
	}
	// inoPaths has the address of the result, which is inodeNames.
	inoPaths struct {
		inode, size uint64
		_           [4]uint64
		result      uintptr
	}
	// inodeNames has n offsets from the begin of buf, and the paths at these offsets.
	inodeNames struct {
		left, missing, n, missed uint32
		buf                      [4080]byte
	}
	lookupUser struct {
		dir, tree uint64
		name      [256]byte
		path      [3824]byte
	}
	devInfo struct {
		devID      uint64
		uuid       [16]byte
		bytesUsed  uint64
		totalBytes uint64
		_          [379]uint64
		path       [1024]byte
	}
	devStats struct {
		devID, items, flags uint64
		values              [5]uint64 // write, read, flush, corruption and generation errors
		_                   [121]uint64
	}
	fsInfo struct {
		maxID, devices uint64
		id             [16]byte
		_              [992]byte
	}
	searchArgs struct {
		key BtrfsKeys
		n   uint32 // the maximum number of items, and after the call the number of items in buf
		_   uint32
		_   [4]uint64
		buf [3992]byte
	}
)

// CreateSubvolume creates a subvolume in a directory.
func CreateSubvolume(dir *os.File, name string) error {
	var args volArgs
	return namedCall(dir, "BTRFS_IOC_SUBVOL_CREATE", btrfsSubvolCreate, name, args.name[:], unsafe.Pointer(&args))
}

// DestroySubvolume removes a subvolume from a directory. The error is ENOTEMPTY if the subvolume contains others. The
// kernel frees the space of the subvolume in the background.
func DestroySubvolume(dir *os.File, name string) error {
	var args volArgs
	return namedCall(dir, "BTRFS_IOC_SNAP_DESTROY", btrfsSnapDestroy, name, args.name[:], unsafe.Pointer(&args))
}

// SnapshotSubvolume creates a snapshot of the subvolume whose root is src. The snapshot is called name in dir.
func SnapshotSubvolume(dir *os.File, name string, src *os.File, readOnly bool) error {
	args := volArgsV2{fd: int64(src.Fd())}
	if readOnly {
		args.flags = btrfsSnapReadOnly
	}
	return namedCall(dir, "BTRFS_IOC_SNAP_CREATE_V2", btrfsSnapCreateV2, name, args.name[:], unsafe.Pointer(&args))
}

// namedCall copies name to field, which is a part of args, and calls ioctl(2) on dir. Its errors contain the
// path dir/name.
func namedCall(dir *os.File, op string, request uint, name string, field []byte, args unsafe.Pointer) error {
	err := error(unix.ENAMETOOLONG)
	if len(name) < len(field) {
		copy(field, name)
		err = errors.Unwrap(ioctl(dir, op, request, args))
	}
	if err != nil {
		return &fs.PathError{Op: op, Path: join(dir, name), Err: err}
	}
	return nil
}

// SubvolumeRef identifies a subvolume and the directory of the parent subvolume that contains it.
type SubvolumeRef struct{ Tree, Dir uint64 }

// SubvolumesWithin lists up to 255 direct children of the subvolume whose root is open.
func SubvolumesWithin(root *os.File) ([]SubvolumeRef, error) {
	var refs rootRefs
	err := ioctl(root, "BTRFS_IOC_GET_SUBVOL_ROOTREF", btrfsSubvolRootRef, unsafe.Pointer(&refs))
	if err != nil && !errors.Is(err, unix.EOVERFLOW) { // EOVERFLOW: more than 255 children
		return nil, err
	}
	return slices.Clone(refs.refs[:refs.n]), nil
}

// SubvolumePath returns the path of a subvolume below the root of the subvolume that contains it.
func SubvolumePath(root *os.File, ref SubvolumeRef) (string, error) {
	args := lookupUser{dir: ref.Dir, tree: ref.Tree}
	if err := ioctl(root, "BTRFS_IOC_INO_LOOKUP_USER", btrfsInoLookupUser, unsafe.Pointer(&args)); err != nil {
		return "", err
	}
	return unix.ByteSliceToString(args.path[:]) + unix.ByteSliceToString(args.name[:]), nil
}

// InodePath returns a path, below the root of the subvolume that is open, of the file with an inode number. It is empty if no file
// has this number, or if the path is too long.
func InodePath(root *os.File, inode uint64) (string, error) {
	names := new(inodeNames)
	args := inoPaths{inode: inode, size: uint64(unsafe.Sizeof(*names)), result: uintptr(unsafe.Pointer(names))}
	var pinned runtime.Pinner
	pinned.Pin(names)
	defer pinned.Unpin()
	err := ioctl(root, "BTRFS_IOC_INO_PATHS", btrfsInoPaths, unsafe.Pointer(&args))
	if errors.Is(err, unix.ENOENT) || err == nil && names.n == 0 {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	at := binary.NativeEndian.Uint64(names.buf[:])
	if at >= uint64(len(names.buf)) {
		return "", nil
	}
	return unix.ByteSliceToString(names.buf[at:]), nil
}

// SubvolumeID returns the ID of the subvolume that contains an open file.
func SubvolumeID(f *os.File) (uint64, error) {
	args := inoLookup{object: BtrfsRootInode}
	err := ioctl(f, "BTRFS_IOC_INO_LOOKUP", btrfsInoLookup, unsafe.Pointer(&args))
	return args.tree, err
}

// SubvolumeInfo returns the name of the subvolume whose root is open. readOnly means that the
// subvolume is read-only.
func SubvolumeInfo(root *os.File) (name string, readOnly bool, err error) {
	var info subvolInfo
	err = ioctl(root, "BTRFS_IOC_GET_SUBVOL_INFO", btrfsSubvolInfo, unsafe.Pointer(&info))
	return unix.ByteSliceToString(info.name[:]), info.flags&btrfsRootReadOnly != 0, err
}

// MakeSubvolumeWritable clears the flags of the subvolume whose root is open. The kernel has only one such
// flag: read-only.
func MakeSubvolumeWritable(root *os.File) error {
	var flags uint64
	return ioctl(root, "BTRFS_IOC_SUBVOL_SETFLAGS", btrfsSubvolSetFlags, unsafe.Pointer(&flags))
}

// BtrfsUUID returns the UUID of a mounted btrfs.
func BtrfsUUID(root *os.File) ([16]byte, error) {
	var info fsInfo
	err := ioctl(root, "BTRFS_IOC_FS_INFO", btrfsFSInfo, unsafe.Pointer(&info))
	return info.id, err
}

// BtrfsDevice returns the path and the size in bytes of the first device of a mounted btrfs.
func BtrfsDevice(root *os.File) (path string, size int64, err error) {
	info := devInfo{devID: 1}
	err = ioctl(root, "BTRFS_IOC_DEV_INFO", btrfsDevInfo, unsafe.Pointer(&info))
	return unix.ByteSliceToString(info.path[:]), int64(info.totalBytes), err
}

// BtrfsErrors returns the number of errors that a mounted btrfs has recorded for its first device.
func BtrfsErrors(root *os.File) (n uint64, err error) {
	stats := devStats{devID: 1}
	stats.items = uint64(len(stats.values))
	if err := ioctl(root, "BTRFS_IOC_GET_DEV_STATS", btrfsGetDevStats, unsafe.Pointer(&stats)); err != nil {
		return 0, err
	}
	for _, v := range stats.values {
		n += v
	}
	return n, nil
}

// GrowBtrfs makes a mounted btrfs as large as its first device.
func GrowBtrfs(root *os.File) error {
	var args volArgs
	copy(args.name[:], "1:max")
	return ioctl(root, "BTRFS_IOC_RESIZE", btrfsResize, unsafe.Pointer(&args))
}

// CreateQgroup creates a qgroup. The error is EEXIST if the qgroup exists, ENOTCONN if quotas are off.
func CreateQgroup(root *os.File, id uint64) error {
	const create = 1
	return ioctl(root, "BTRFS_IOC_QGROUP_CREATE", btrfsQgroupCreate, unsafe.Pointer(&[2]uint64{create, id}))
}

// RemoveQgroup deletes a qgroup and its assignments to other qgroups. The error is EBUSY if the qgroup has members or
// belongs to a subvolume, and ENOENT if the qgroup does not exist.
func RemoveQgroup(root *os.File, id uint64) error {
	const remove = 0
	return ioctl(root, "BTRFS_IOC_QGROUP_CREATE", btrfsQgroupCreate, unsafe.Pointer(&[2]uint64{remove, id}))
}

// AssignQgroup adds the qgroup member to the qgroup group. The error is EEXIST if member is already in group.
func AssignQgroup(root *os.File, member, group uint64) error {
	const assign = 1
	return ioctl(root, "BTRFS_IOC_QGROUP_ASSIGN", btrfsQgroupAssign, unsafe.Pointer(&[3]uint64{assign, member, group}))
}

// UnassignQgroup removes the qgroup member from the qgroup group. The error is ENOENT if member is not in group.
func UnassignQgroup(root *os.File, member, group uint64) error {
	const remove = 0
	return ioctl(root, "BTRFS_IOC_QGROUP_ASSIGN", btrfsQgroupAssign, unsafe.Pointer(&[3]uint64{remove, member, group}))
}

// NoQgroupLimit is the argument bytes of LimitQgroup that clears the limit (CLEAR_VALUE, fs/btrfs/qgroup.c).
const NoQgroupLimit = ^uint64(0)

// LimitQgroup limits the bytes that a qgroup references.
func LimitQgroup(root *os.File, id, bytes uint64) error {
	args := [6]uint64{id, btrfsLimitReferenced, bytes}
	return ioctl(root, "BTRFS_IOC_QGROUP_LIMIT", btrfsQgroupLimit, unsafe.Pointer(&args))
}

// StartBtrfsCommit starts the commit of the running transaction and returns the transaction ID.
func StartBtrfsCommit(root *os.File) (transaction uint64, err error) {
	err = ioctl(root, "BTRFS_IOC_START_SYNC", btrfsStartSync, unsafe.Pointer(&transaction))
	return transaction, err
}

// WaitBtrfsCommit returns when a transaction is committed.
func WaitBtrfsCommit(root *os.File, transaction uint64) error {
	return ioctl(root, "BTRFS_IOC_WAIT_SYNC", btrfsWaitSync, unsafe.Pointer(&transaction))
}

// BtrfsKeys is a range of keys to search for. It has the fields of struct btrfs_ioctl_search_key up to
// max_type.
type BtrfsKeys struct {
	Tree                 uint64
	MinObject, MaxObject uint64
	MinOffset, MaxOffset uint64
	MinTrans, MaxTrans   uint64
	MinType, MaxType     uint32
}

// BtrfsItem is an item of a btrfs tree. Offset is a part of its key, Data is its content.
type BtrfsItem struct {
	Offset uint64
	Data   []byte
}

// SearchBtrfs returns the items of a mounted btrfs whose keys are in a range. If not all of them fit in one
// buffer, it returns the first ones.
func SearchBtrfs(root *os.File, keys BtrfsKeys) ([]BtrfsItem, error) {
	args := searchArgs{key: keys, n: ^uint32(0)}
	if err := ioctl(root, "BTRFS_IOC_TREE_SEARCH", btrfsTreeSearch, unsafe.Pointer(&args)); err != nil {
		return nil, err
	}
	return parseItems(args.buf[:], args.n)
}

// parseItems reads n items, each a struct btrfs_ioctl_search_header and its content.
func parseItems(b []byte, n uint32) (found []BtrfsItem, err error) {
	const header = 32 // bytes: the offset is at byte 16, and the size of the content at byte 28
	for range n {
		if len(b) < header {
			return nil, io.ErrUnexpectedEOF
		}
		size := uint64(binary.NativeEndian.Uint32(b[28:]))
		if size > uint64(len(b)-header) {
			return nil, io.ErrUnexpectedEOF
		}
		found = append(found, BtrfsItem{binary.NativeEndian.Uint64(b[16:]), b[header : header+size]})
		b = b[header+size:]
	}
	return found, nil
}
