package quota

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/btrfs"
)

// Numbers and structures of uapi/linux/btrfs.h and btrfs_tree.h.
const (
	btrfsIocTreeSearch     = 0xd0009411 // _IOWR(0x94, 17, struct btrfs_ioctl_search_args)
	btrfsIocInoLookup      = 0xd0009412 // _IOWR(0x94, 18, struct btrfs_ioctl_ino_lookup_args)
	btrfsIocWaitSync       = 0x40089416 // _IOW(0x94, 22, __u64)
	btrfsIocStartSync      = 0x80089418 // _IOR(0x94, 24, __u64)
	btrfsIocSubvolSetFlags = 0x4008941a // _IOW(0x94, 26, __u64)
	btrfsIocFSInfo         = 0x8400941f // _IOR(0x94, 31, struct btrfs_ioctl_fs_info_args)
	btrfsIocQgroupAssign   = 0x40189429 // _IOW(0x94, 41, struct btrfs_ioctl_qgroup_assign_args)
	btrfsIocQgroupCreate   = 0x4010942a // _IOW(0x94, 42, struct btrfs_ioctl_qgroup_create_args)
	btrfsIocQgroupLimit    = 0x8030942b // _IOR(0x94, 43, struct btrfs_ioctl_qgroup_limit_args)
	btrfsIocSubvolInfo     = 0x81f8943c // _IOR(0x94, 60, struct btrfs_ioctl_get_subvol_info_args)

	quotaTree      = 8          // BTRFS_QUOTA_TREE_OBJECTID
	inodeItem      = 1          // BTRFS_INODE_ITEM_KEY
	qgroupRelation = 246        // BTRFS_QGROUP_RELATION_KEY
	maxReferenced  = 1 << 0     // BTRFS_QGROUP_LIMIT_MAX_RFER
	rootReadOnly   = 1 << 0     // BTRFS_ROOT_SUBVOL_RDONLY
	levelShift     = 48         // BTRFS_QGROUP_LEVEL_SHIFT
	noLimit        = ^uint64(0) // CLEAR_VALUE in fs/btrfs/qgroup.c
	fidRoot        = 0x4d       // FILEID_BTRFS_WITHOUT_PARENT
)

// subvolInfo has its times left out.
type subvolInfo struct {
	tree        uint64
	name        [256]byte
	parent, dir uint64
	generation  uint64
	flags       uint64
	_           [208]byte
}

type inoLookup struct {
	tree, object uint64
	name         [4080]byte
}

type fsInfo struct {
	maxID, devices uint64
	id             [16]byte
	_              [992]byte
}

type searchArgs struct {
	tree                 uint64
	minObject, maxObject uint64
	minOffset, maxOffset uint64
	minTrans, maxTrans   uint64
	minType, maxType, n  uint32
	_                    uint32
	_                    [4]uint64
	buf                  [3992]byte
}

// subvolumes limits directories that are subvolumes, by simple quotas. Volume N, which
// is the qgroup 0/N, is put into a qgroup 1/N, which has the limit: subvolumes that
// somebody makes within it come into 1/N by themselves.
type subvolumes struct {
	dir *os.File
	sys string // what sysfs shows of the filesystem
}

func newSubvolumes(dir *os.File) (*subvolumes, error) {
	var info fsInfo
	if err := ioctl(dir, btrfsIocFSInfo, unsafe.Pointer(&info)); err != nil {
		return nil, os.NewSyscallError("BTRFS_IOC_FS_INFO", err)
	}
	return &subvolumes{dir: dir, sys: "/sys/fs/btrfs/" + uuid(info.id)}, nil
}

func uuid(b [16]byte) string {
	s := hex.EncodeToString(b[:])
	return s[:8] + "-" + s[8:12] + "-" + s[12:16] + "-" + s[16:20] + "-" + s[20:]
}

func group(id uint64) uint64 { return 1<<levelShift | id }

func (s *subvolumes) check() error {
	if _, err := os.Stat(s.sys); err != nil {
		return fmt.Errorf("%w: give the driver the host's /sys", err)
	}
	if _, err := os.Stat("/sys/fs/btrfs/features/simple_quota"); err != nil {
		return errors.New("the kernel has no simple quotas of btrfs: run Linux 6.7 or newer")
	}
	mode, err := s.read("qgroups/mode")
	if errors.Is(err, fs.ErrNotExist) {
		return errors.New("this btrfs has quotas switched off: run btrfs quota enable --simple on it (btrfs-progs 6.7 or newer)")
	}
	if err != nil {
		return err
	}
	if mode != "squota" {
		return fmt.Errorf("this btrfs has quotas of mode %q, which cost too much to limit volumes by: run btrfs quota disable on it, then btrfs quota enable --simple (btrfs-progs 6.7 or newer)", mode)
	}
	return s.checkOverride()
}

func (s *subvolumes) checkOverride() error {
	override, err := s.read("quota_override")
	if err == nil && override != "0" {
		err = fmt.Errorf("%s/quota_override is %s, so that limits do not hold root: write 0 to it", s.sys, override)
	}
	return err
}

func (s *subvolumes) read(file string) (string, error) {
	b, err := os.ReadFile(s.sys + "/" + file)
	if errors.Is(err, unix.ENODEV) { // it was removed between open and read
		err = fs.ErrNotExist
	}
	return strings.TrimSpace(string(b)), err
}

// makeDir makes a subvolume, which is born with mode 0777 & ^umask.
func (s *subvolumes) makeDir(parent *os.File, name string) error {
	dir, err := reopen(parent)
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := btrfs.Create(dir, name); err != nil {
		return err
	}
	made, err := openDir(parent, name)
	if err != nil {
		return err
	}
	defer made.Close()
	return made.Chmod(dirMode)
}

// subvolume is the ID of the subvolume whose root directory dir is; 0 if it is none.
func subvolume(dir *os.File) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return 0, &os.PathError{Op: "fstat", Path: dir.Name(), Err: err}
	}
	if st.Ino != btrfs.RootInode {
		return 0, nil
	}
	args := inoLookup{object: btrfs.RootInode}
	err := ioctl(dir, btrfsIocInoLookup, unsafe.Pointer(&args))
	return args.tree, os.NewSyscallError("BTRFS_IOC_INO_LOOKUP", err)
}

// allocate takes the subvolume's ID for the qgroup's. btrfs gives the IDs of subvolumes
// again after a mount, so somebody may have a qgroup, or taken a record, of it.
func (s *subvolumes) allocate(dir *os.File, l Limit, taken func(id uint64) bool) (uint64, error) {
	id, err := subvolume(dir)
	if err == nil && id == 0 {
		err = fmt.Errorf("%s is not a subvolume: make the directory anew", dir.Name())
	}
	if err != nil {
		return 0, err
	}
	if taken(id) {
		return 0, fmt.Errorf("the ID %d of the subvolume %s is of another volume: make the directory anew", id, dir.Name())
	}
	if err := s.createGroup(group(id)); err != nil {
		return 0, fmt.Errorf("qgroup 1/%d: %w: make the directory anew", id, err)
	}
	if err := errors.Join(s.assign(id, group(id)), s.limit(id, uint64(l.Bytes)), s.commit()); err != nil {
		return 0, errors.Join(err, s.unassign(id, group(id)), s.removeGroup(group(id)))
	}
	return id, nil
}

// createGroup fails with EEXIST if there is one.
func (s *subvolumes) createGroup(qgroup uint64) error {
	args := [2]uint64{1, qgroup}
	return os.NewSyscallError("BTRFS_IOC_QGROUP_CREATE", ioctl(s.dir, btrfsIocQgroupCreate, unsafe.Pointer(&args)))
}

// removeGroup takes a qgroup out of those it is in, too. EBUSY if it has members, or is
// of a subvolume.
func (s *subvolumes) removeGroup(qgroup uint64) error {
	args := [2]uint64{0, qgroup}
	err := ioctl(s.dir, btrfsIocQgroupCreate, unsafe.Pointer(&args))
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return os.NewSyscallError("BTRFS_IOC_QGROUP_CREATE", err)
}

func (s *subvolumes) unassign(member, from uint64) error {
	args := [3]uint64{0, member, from}
	err := ioctl(s.dir, btrfsIocQgroupAssign, unsafe.Pointer(&args))
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	return os.NewSyscallError("BTRFS_IOC_QGROUP_ASSIGN", err)
}

func (s *subvolumes) assign(member, to uint64) error {
	args := [3]uint64{1, member, to}
	err := ioctl(s.dir, btrfsIocQgroupAssign, unsafe.Pointer(&args))
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	return os.NewSyscallError("BTRFS_IOC_QGROUP_ASSIGN", err)
}

func (s *subvolumes) limit(id, bytes uint64) error {
	args := [6]uint64{group(id), maxReferenced, bytes}
	return os.NewSyscallError("BTRFS_IOC_QGROUP_LIMIT", ioctl(s.dir, btrfsIocQgroupLimit, unsafe.Pointer(&args)))
}

// commit makes qgroups durable: they are in no log, so fsync(2) of a file does not. A
// kernel thread commits, and if it is just about to sleep it misses for 30 seconds that
// it was asked to (transaction_kthread, fs/btrfs/disk-io.c). Then it is asked again, by
// another thread, for who asks waits until the commit has begun.
func (s *subvolumes) commit() error {
	begun := make(chan error, 1)
	var transaction uint64
	go func() {
		var err error
		transaction, err = s.beginCommit()
		begun <- err
	}()
	for patience := 50 * time.Millisecond; ; patience *= 2 {
		select {
		case err := <-begun:
			if err != nil {
				return err
			}
			return os.NewSyscallError("BTRFS_IOC_WAIT_SYNC", ioctl(s.dir, btrfsIocWaitSync, unsafe.Pointer(&transaction)))
		case <-time.After(patience):
			s.nudge()
		}
	}
}

// nudge asks for a commit without waiting for it, by a descriptor of its own: it may wait
// for longer than the filesystem's is open.
func (s *subvolumes) nudge() {
	dir, err := reopen(s.dir)
	if err != nil {
		return
	}
	go func() {
		defer dir.Close()
		_, _ = (&subvolumes{dir: dir}).beginCommit()
	}()
}

func (s *subvolumes) beginCommit() (transaction uint64, err error) {
	err = ioctl(s.dir, btrfsIocStartSync, unsafe.Pointer(&transaction))
	return transaction, os.NewSyscallError("BTRFS_IOC_START_SYNC", err)
}

// set puts back what somebody removed, as well: qgroups vanish when quotas are switched
// off and on again.
func (s *subvolumes) set(id uint64, l Limit) error {
	if err := s.createGroup(group(id)); err != nil && !errors.Is(err, unix.EEXIST) {
		return err
	}
	if err := s.assignAll(id, group(id)); err != nil {
		return err
	}
	if err := s.limit(id, uint64(l.Bytes)); err != nil {
		return err
	}
	return s.commit()
}

// assignAll puts a subvolume and those within it into a qgroup.
func (s *subvolumes) assignAll(id, to uint64) error {
	if err := s.assign(id, to); err != nil {
		return err
	}
	within, err := s.within(id)
	for _, ref := range within {
		err = errors.Join(err, s.assignAll(ref.Tree, to))
	}
	return err
}

// usage is read from sysfs, which has what the disk gets only with the next commit, and
// what is written and not yet on the disk.
func (s *subvolumes) usage(id uint64) (u Usage, err error) {
	var flags int64
	for _, f := range []struct {
		file string
		to   *int64
	}{{"referenced", &u.Bytes}, {"limit_flags", &flags}, {"max_referenced", &u.Limit.Bytes}} {
		if *f.to, err = s.number(id, f.file); err != nil {
			break
		}
	}
	if errors.Is(err, fs.ErrNotExist) { // there is no qgroup
		return Usage{}, nil
	}
	reserved, err := s.number(id, "rsv_data")
	if errors.Is(err, fs.ErrNotExist) { // it was removed meanwhile
		return Usage{}, nil
	}
	u.Bytes += reserved
	if flags&maxReferenced == 0 {
		u.Limit = Limit{}
	}
	return u, err
}

func (s *subvolumes) number(id uint64, file string) (int64, error) {
	text, err := s.read("qgroups/1_" + strconv.FormatUint(id, 10) + "/" + file)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseUint(text, 0, 63)
	return int64(n), err
}

// id leaves out a subvolume that was never put into the qgroup of its ID: that may be
// somebody else's.
func (s *subvolumes) id(dir *os.File) (uint64, error) {
	id, err := subvolume(dir)
	if err != nil || id == 0 {
		return 0, err
	}
	own, err := s.related(group(id), id, id)
	if errors.Is(err, unix.ENOENT) { // quotas are off
		return 0, nil
	}
	if err != nil || len(own) == 0 {
		return 0, err
	}
	return id, nil
}

func (s *subvolumes) release(id uint64) error {
	u, err := s.usage(id)
	if err != nil {
		return err
	}
	if u.Bytes != 0 {
		if err := s.commit(); err != nil { // with which the kernel begins to free what was removed
			return err
		}
		return ErrBusy
	}
	err = s.removeMembers(group(id))
	if err == nil {
		err = s.removeGroup(group(id))
	}
	switch {
	case errors.Is(err, unix.ENOTCONN), errors.Is(err, unix.ENOENT): // quotas are off
		return nil
	case errors.Is(err, unix.EBUSY):
		return ErrBusy
	}
	return err
}

// removeMembers removes the qgroups of subvolumes that are gone; kernels before 6.10 do
// not by themselves.
func (s *subvolumes) removeMembers(qgroup uint64) error {
	for {
		members, err := s.members(qgroup)
		if err != nil || len(members) == 0 {
			return err
		}
		for _, member := range members {
			if err := s.removeGroup(member); err != nil {
				return err
			}
		}
	}
}

// members are the first qgroups in one.
func (s *subvolumes) members(qgroup uint64) ([]uint64, error) {
	return s.related(qgroup, 0, group(0)-1)
}

// related are the first qgroups from one to another that are in a qgroup, or that it is in.
func (s *subvolumes) related(qgroup, from, to uint64) ([]uint64, error) {
	found, err := s.search(&searchArgs{
		tree: quotaTree, minObject: qgroup, maxObject: qgroup, minOffset: from, maxOffset: to,
		minType: qgroupRelation, maxType: qgroupRelation,
	})
	offsets := make([]uint64, 0, len(found))
	for _, item := range found {
		offsets = append(offsets, item.offset)
	}
	return offsets, err
}

// generation is what a handle of an inode has in it, which kernels before 6.2 compare.
func (s *subvolumes) generation(id, inode uint64) (uint32, error) {
	found, err := s.search(&searchArgs{tree: id, minObject: inode, maxObject: inode, minType: inodeItem, maxType: inodeItem})
	if err != nil {
		return 0, err
	}
	if len(found) != 1 || len(found[0].data) < 8 {
		return 0, fmt.Errorf("inode %d of subvolume %d: %w", inode, id, unix.ESTALE)
	}
	return uint32(binary.NativeEndian.Uint64(found[0].data)), nil // #nosec G115 -- i_generation has as many bits
}

// search finds the first items of a tree.
func (s *subvolumes) search(args *searchArgs) ([]item, error) {
	args.maxTrans, args.n = ^uint64(0), ^uint32(0)
	if err := ioctl(s.dir, btrfsIocTreeSearch, unsafe.Pointer(args)); err != nil {
		return nil, os.NewSyscallError("BTRFS_IOC_TREE_SEARCH", err)
	}
	return items(args.buf[:], args.n)
}

// item is one of a tree: the offset in its key, and what it has.
type item struct {
	offset uint64
	data   []byte
}

// items reads n items that a tree search has found: struct btrfs_ioctl_search_header, and
// what the item has.
func items(b []byte, n uint32) (found []item, err error) {
	const header = 32
	for range n {
		if len(b) < header {
			return nil, io.ErrUnexpectedEOF
		}
		size := uint64(binary.NativeEndian.Uint32(b[28:]))
		if size > uint64(len(b)-header) {
			return nil, io.ErrUnexpectedEOF
		}
		found = append(found, item{binary.NativeEndian.Uint64(b[16:]), b[header : header+size]})
		b = b[header+size:]
	}
	return found, nil
}
