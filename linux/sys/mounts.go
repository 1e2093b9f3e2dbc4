package sys

import (
	"errors"
	"math"
	"os"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Requests of uapi/linux/mount.h.
const (
	lsmtRoot          = math.MaxUint64 // LSMT_ROOT
	statmountSBBasic  = 1 << 0         // STATMOUNT_SB_BASIC
	statmountMntBasic = 1 << 1         // STATMOUNT_MNT_BASIC
	statmountMntRoot  = 1 << 3         // STATMOUNT_MNT_ROOT
	statmountMntPoint = 1 << 4         // STATMOUNT_MNT_POINT
	statmountFSType   = 1 << 5         // STATMOUNT_FS_TYPE
	statmountSBSource = 1 << 9         // STATMOUNT_SB_SOURCE, Linux 6.13

	statmountLine = statmountSBBasic | statmountMntBasic | statmountMntRoot | statmountMntPoint | statmountFSType
)

// mountIDRequest is struct mnt_id_req, in its first version.
type mountIDRequest struct {
	size      uint32
	_         uint32
	id, param uint64
}

// statmount is struct statmount. The strings follow it. The fields of the strings are their offsets.
type statmount struct {
	_                    uint64
	mask                 uint64
	major, minor         uint32 // sb_dev_major, sb_dev_minor
	magic                uint64 // sb_magic
	_, fsType            uint32
	_                    uint64 // mnt_id
	parent               uint64 // mnt_parent_id
	tableID, tableParent uint32 // mnt_id_old, mnt_parent_id_old
	_                    [5]uint64
	root, point          uint32 // mnt_root, mnt_point
	_                    uint64
	_, source            uint32 // sb_source
	_                    [48]uint64
}

// Mount is a mount. Its fields do not change while the mount exists.
type Mount struct {
	// ID is the unique ID, which the kernel does not use again. TableID is the ID in the mount table.
	ID      uint64
	TableID uint32
	// Major and Minor are the device number of the filesystem, as in the mount table. Magic is its type (statfs(2)).
	Major, Minor uint32
	Magic        uint64
}

// MountLine has the fields of a mount in the mount table (proc_pid_mountinfo(5)), without escapes.
type MountLine struct {
	Mount
	// Parent is the unique ID of the mount on which it is mounted. TableParent is the ID of that mount in the mount table.
	Parent      uint64
	TableParent uint32

	Root, Point, FSType string
	// Source is empty before Linux 6.13.
	Source string
}

// ListMounts returns the unique IDs of the mounts that this process can reach, in ascending order (listmount(2), Linux 6.8).
func ListMounts() ([]uint64, error) {
	ids, n := make([]uint64, 1024), 0
	for {
		request := mountIDRequest{size: uint32(unsafe.Sizeof(mountIDRequest{})), id: lsmtRoot}
		if n > 0 {
			request.param = ids[n-1] // the call continues after this mount
		}
		found, _, errno := unix.Syscall6(unix.SYS_LISTMOUNT, uintptr(unsafe.Pointer(&request)),
			uintptr(unsafe.Pointer(&ids[n])), uintptr(len(ids)-n), 0, 0, 0)
		if errno != 0 {
			return nil, os.NewSyscallError("listmount", errno)
		}
		n += int(found)
		if n < len(ids) {
			return ids[:n], nil
		}
		ids = slices.Concat(ids, make([]uint64, len(ids)))
	}
}

// StatMount returns the mount with a unique ID (statmount(2), Linux 6.8). The error is ENOENT if the mount is gone.
func StatMount(id uint64) (Mount, error) {
	var st statmount
	err := callStatmount(id, statmountSBBasic|statmountMntBasic, &st, unsafe.Sizeof(st))
	return st.mount(id), err
}

// StatMountLine does the same as StatMount, with the fields of the mount table. The error is EOPNOTSUPP if the kernel
// does not return one of them, except Source.
func StatMountLine(id uint64) (MountLine, error) {
	const fixed, most = unsafe.Sizeof(statmount{}), 1 << 20
	for size := uintptr(8 << 10); ; size *= 2 {
		words := make([]uint64, size/8) // has the alignment of struct statmount
		st := (*statmount)(unsafe.Pointer(&words[0]))
		err := callStatmount(id, statmountLine|statmountSBSource, st, size)
		if errors.Is(err, unix.EOVERFLOW) && size < most {
			continue
		}
		if err != nil {
			return MountLine{}, err
		}
		if st.mask&statmountLine != statmountLine {
			return MountLine{}, os.NewSyscallError("statmount", unix.EOPNOTSUPP)
		}
		texts := unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), size)[fixed:]
		text := func(offset uint32) string { return unix.ByteSliceToString(texts[offset:]) }
		line := MountLine{
			Mount: st.mount(id), Parent: st.parent, TableParent: st.tableParent,
			Root: text(st.root), Point: text(st.point), FSType: text(st.fsType),
		}
		if st.mask&statmountSBSource != 0 {
			line.Source = text(st.source)
		}
		return line, nil
	}
}

// mount returns the fields of the mount with a unique ID that do not change.
func (st *statmount) mount(id uint64) Mount {
	return Mount{ID: id, TableID: st.tableID, Major: st.major, Minor: st.minor, Magic: st.magic}
}

// callStatmount is statmount(2). st begins a buffer of size bytes.
func callStatmount(id, mask uint64, st *statmount, size uintptr) error {
	request := mountIDRequest{size: uint32(unsafe.Sizeof(mountIDRequest{})), id: id, param: mask}
	_, _, errno := unix.Syscall6(unix.SYS_STATMOUNT, uintptr(unsafe.Pointer(&request)), uintptr(unsafe.Pointer(st)), size, 0, 0, 0)
	if errno != 0 {
		return os.NewSyscallError("statmount", errno)
	}
	return nil
}
