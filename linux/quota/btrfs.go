package quota

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
)

// Constants of uapi/linux/btrfs_tree.h. fidRoot is a type of file handle (open_by_handle_at(2)).
const (
	quotaTree      = 8    // BTRFS_QUOTA_TREE_OBJECTID
	inodeItem      = 1    // BTRFS_INODE_ITEM_KEY
	qgroupRelation = 246  // BTRFS_QGROUP_RELATION_KEY
	levelShift     = 48   // BTRFS_QGROUP_LEVEL_SHIFT
	referenced     = 1    // BTRFS_QGROUP_LIMIT_MAX_RFER
	fidRoot        = 0x4d // FILEID_BTRFS_WITHOUT_PARENT
)

// subvolumes limits directories that are subvolumes, by simple quotas. The qgroup 1/N holds the limit of
// subvolume N. Its members are 0/N, the qgroup of the subvolume itself, and the qgroups of subvolumes
// that a tenant creates in it, which the kernel adds.
type subvolumes struct {
	dir   *os.File
	sysfs string // the directory of the filesystem in sysfs
}

// newSubvolumes finds the sysfs directory of the btrfs that contains dir.
func newSubvolumes(dir *os.File) (*subvolumes, error) {
	id, err := sys.BtrfsUUID(dir)
	if err != nil {
		return nil, err
	}
	uuid := fmt.Sprintf("%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
	return &subvolumes{dir: dir, sysfs: "/sys/fs/btrfs/" + uuid}, nil
}

// group returns the qgroup 1/N of subvolume N.
func group(id uint64) uint64 { return 1<<levelShift | id }

// groupDir returns the directory of the qgroup 1/N in the sysfs directory of the filesystem.
func groupDir(id uint64) string { return "qgroups/1_" + strconv.FormatUint(id, 10) }

func (s *subvolumes) check() error {
	if _, err := os.Stat(s.sysfs); err != nil {
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
		return fmt.Errorf("this btrfs has quotas of mode %q, which are too slow to limit volumes: run btrfs quota disable on it, then btrfs quota enable --simple (btrfs-progs 6.7 or newer)", mode)
	}
	override, err := s.read("quota_override")
	if err == nil && override != "0" {
		err = fmt.Errorf("%s/quota_override is %s, which exempts root from limits: write 0 to it", s.sysfs, override)
	}
	return err
}

// read returns the content of a file in the sysfs directory of the filesystem.
func (s *subvolumes) read(file string) (string, error) {
	b, err := os.ReadFile(s.sysfs + "/" + file)
	if errors.Is(err, unix.ENODEV) { // quotas were switched off between open(2) and read(2)
		err = fs.ErrNotExist
	}
	return strings.TrimSpace(string(b)), err
}

// makeDir creates a subvolume and sets its mode. The kernel creates it with mode 0777 & ^umask.
func (s *subvolumes) makeDir(parent *os.File, name string) error {
	dir, err := reopen(parent)
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := sys.CreateSubvolume(dir, name); err != nil {
		return err
	}
	made, err := openDir(parent, name)
	if err != nil {
		return err
	}
	defer made.Close()
	return made.Chmod(dirMode)
}

// subvolume returns the ID of the subvolume whose root is dir, or 0 if dir is not the root of a subvolume.
func subvolume(dir *os.File) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &st); err != nil {
		return 0, &os.PathError{Op: "fstat", Path: dir.Name(), Err: err}
	}
	if st.Ino != sys.BtrfsRootInode {
		return 0, nil
	}
	return sys.SubvolumeID(dir)
}

// allocate returns the ID of the subvolume. After a mount, btrfs reuses the IDs of removed subvolumes, so the
// ID may still have a qgroup, or be the recorded ID of another directory. allocate refuses such an ID.
func (s *subvolumes) allocate(dir *os.File, l Limit, taken func(id uint64) bool) (uint64, error) {
	id, err := subvolume(dir)
	if err == nil && id == 0 {
		err = fmt.Errorf("%s is not a subvolume: create the directory again", dir.Name())
	}
	if err != nil {
		return 0, err
	}
	if taken(id) {
		return 0, fmt.Errorf("the ID %d of the subvolume %s is recorded for another directory: create the directory again", id, dir.Name())
	}
	if err := sys.CreateQgroup(s.dir, group(id)); err != nil {
		return 0, fmt.Errorf("qgroup 1/%d: %w: create the directory again", id, err)
	}
	if err := errors.Join(s.assign(id, group(id)), sys.LimitQgroup(s.dir, group(id), uint64(l.Bytes)), s.commit()); err != nil {
		return 0, errors.Join(err, s.unassign(id, group(id)), s.removeGroup(group(id)))
	}
	return id, nil
}

// removeGroup deletes a qgroup and its assignments to other qgroups. It is no error if the qgroup does not exist. The
// error is EBUSY if the qgroup has members or belongs to a subvolume.
func (s *subvolumes) removeGroup(qgroup uint64) error {
	return ignore(sys.RemoveQgroup(s.dir, qgroup), unix.ENOENT)
}

// unassign removes the qgroup member from another qgroup. It is no error if member is not in that qgroup.
func (s *subvolumes) unassign(member, from uint64) error {
	return ignore(sys.UnassignQgroup(s.dir, member, from), unix.ENOENT)
}

// assign adds the qgroup member to another qgroup. It is no error if member is already in that qgroup.
func (s *subvolumes) assign(member, to uint64) error {
	return ignore(sys.AssignQgroup(s.dir, member, to), unix.EEXIST)
}

// ignore returns nil if err wraps expected, and err otherwise.
func ignore(err, expected error) error {
	if errors.Is(err, expected) {
		return nil
	}
	return err
}

// commit makes changes of qgroups durable. fsync(2) of a file is not enough, because the log of btrfs does not
// contain qgroups. If the kernel thread that commits is about to sleep, it misses the request, and the commit
// begins up to 30 seconds later (transaction_kthread, fs/btrfs/disk-io.c). Therefore commit repeats the
// request from other goroutines while the first request blocks.
func (s *subvolumes) commit() error {
	begun := make(chan error, 1)
	var transaction uint64
	go func() {
		var err error
		transaction, err = sys.StartBtrfsCommit(s.dir)
		begun <- err
	}()
	for wait := 50 * time.Millisecond; ; wait *= 2 {
		select {
		case err := <-begun:
			if err != nil {
				return err
			}
			return sys.WaitBtrfsCommit(s.dir, transaction)
		case <-time.After(wait):
			s.requestCommit()
		}
	}
}

// requestCommit requests a commit without waiting for it. The request has its own descriptor, because the request
// may outlive the FS.
func (s *subvolumes) requestCommit() {
	dir, err := reopen(s.dir)
	if err != nil {
		return
	}
	go func() {
		defer dir.Close()
		_, _ = sys.StartBtrfsCommit(dir)
	}()
}

// set also creates the qgroup if it is missing, because switching quotas off removes all qgroups.
func (s *subvolumes) set(id uint64, l Limit) error {
	if err := ignore(sys.CreateQgroup(s.dir, group(id)), unix.EEXIST); err != nil {
		return err
	}
	if err := s.assignAll(id, group(id)); err != nil {
		return err
	}
	if err := sys.LimitQgroup(s.dir, group(id), uint64(l.Bytes)); err != nil {
		return err
	}
	return s.commit()
}

// assignAll adds a subvolume and the subvolumes in it to a qgroup.
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

// usage reads sysfs, which also counts uncommitted changes and dirty pages.
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
	if errors.Is(err, fs.ErrNotExist) { // no such qgroup
		return Usage{}, nil
	}
	reserved, err := s.number(id, "rsv_data")
	if errors.Is(err, fs.ErrNotExist) { // the qgroup was removed after the first read
		return Usage{}, nil
	}
	u.Bytes += reserved
	if flags&referenced == 0 {
		u.Limit = Limit{}
	}
	return u, err
}

// number reads a number in the directory of the qgroup 1/N.
func (s *subvolumes) number(id uint64, file string) (int64, error) {
	text, err := s.read(groupDir(id) + "/" + file)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseUint(text, 0, 63)
	return int64(n), err
}

// id returns 0 for a subvolume N that allocate did not limit: the qgroup 1/N does not exist, or it has other
// members. id returns N for a qgroup 1/N without members, which allocate leaves if it is killed before it assigns
// the subvolume.
func (s *subvolumes) id(dir *os.File) (uint64, error) {
	id, err := subvolume(dir)
	if err != nil || id == 0 {
		return 0, err
	}
	if _, err := os.Stat(s.sysfs + "/" + groupDir(id)); errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	members, err := s.related(group(id), id, id)
	if err == nil && len(members) == 1 {
		return id, nil
	}
	if err == nil {
		members, err = s.members(group(id))
	}
	if errors.Is(err, unix.ENOENT) { // quotas were switched off
		return 0, nil
	}
	if err != nil || len(members) != 0 {
		return 0, err
	}
	return id, nil
}

// release deletes the qgroup 1/N and its remaining members.
func (s *subvolumes) release(id uint64) error {
	u, err := s.usage(id)
	if err != nil {
		return err
	}
	if u.Bytes != 0 {
		if err := s.commit(); err != nil { // the kernel frees removed data after the commit
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

// removeMembers deletes the member qgroups of a qgroup. They are the qgroups of removed subvolumes, which
// kernels before 6.10 keep.
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

// members lists the first members of a qgroup.
func (s *subvolumes) members(qgroup uint64) ([]uint64, error) {
	return s.related(qgroup, 0, group(0)-1) // up to the last ID of level 0
}

// related lists the qgroups between the IDs from and to that are members of a qgroup or contain it. If they do
// not fit in one buffer of the kernel, it returns the first ones.
func (s *subvolumes) related(qgroup, from, to uint64) ([]uint64, error) {
	found, err := sys.SearchBtrfs(s.dir, sys.BtrfsKeys{
		Tree: quotaTree, MinObject: qgroup, MaxObject: qgroup, MinOffset: from, MaxOffset: to,
		MaxTrans: math.MaxUint64, MinType: qgroupRelation, MaxType: qgroupRelation,
	})
	offsets := make([]uint64, 0, len(found))
	for _, item := range found {
		offsets = append(offsets, item.Offset)
	}
	return offsets, err
}

// generation reads the generation of an inode. A file handle contains it, and kernels before 6.2 check
// it.
func (s *subvolumes) generation(id, inode uint64) (uint32, error) {
	found, err := sys.SearchBtrfs(s.dir, sys.BtrfsKeys{
		Tree: id, MinObject: inode, MaxObject: inode, MaxTrans: math.MaxUint64, MinType: inodeItem, MaxType: inodeItem,
	})
	if err != nil {
		return 0, err
	}
	if len(found) != 1 || len(found[0].Data) < 8 {
		return 0, fmt.Errorf("inode %d of subvolume %d: %w", inode, id, unix.ESTALE)
	}
	return uint32(binary.NativeEndian.Uint64(found[0].Data)), nil // #nosec G115 -- i_generation has 32 bits
}
