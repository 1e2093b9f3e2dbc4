package sys

import (
	"errors"
	"io/fs"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Commands of quotactl(2) and uapi/linux/dqblk_xfs.h, which ext4 supports too.
const (
	prjQuota    = 2           // PRJQUOTA
	qXGetQuota  = 'X'<<8 + 3  // Q_XGETQUOTA
	qXSetQLim   = 'X'<<8 + 4  // Q_XSETQLIM
	qXGetQStatV = 'X'<<8 + 8  // Q_XGETQSTATV
	statVersion = 1           // FS_QSTATV_VERSION1
	dqVersion   = 1           // FS_DQUOT_VERSION
	projQuota   = 2           // FS_PROJ_QUOTA
	limitMask   = 1<<4 - 1    // FS_DQ_LIMIT_MASK without the realtime limits
	noFile      = ^uintptr(0) // descriptor -1
)

// Flags of the state of project quota (FS_QUOTA_PDQ_*).
const (
	ProjectQuotaCounted  = 1 << 4
	ProjectQuotaEnforced = 1 << 5
)

// QuotaBlock is the unit of the block counts of ProjectQuota in bytes.
const QuotaBlock = 512

// quotaState is struct fs_quota_statv.
type quotaState struct {
	version int8
	_       uint8
	flags   uint16
	_       [156]byte
}

// ProjectQuota is struct fs_disk_quota. A limit of 0 means no limit.
type ProjectQuota struct {
	version              int8
	flags                int8
	fields               uint16
	id                   uint32
	BlockHard, BlockSoft uint64
	InodeHard, InodeSoft uint64
	Blocks, Inodes       uint64
	_                    [56]byte
}

// ProjectQuotaState reads the flags of project quota on the filesystem of a directory (Q_XGETQSTATV). The error is
// ENOSYS if all quotas are off, or if the kernel has no quotactl_fd(2) (HasQuotactl).
func ProjectQuotaState(dir *os.File) (flags uint16, err error) {
	s := quotaState{version: statVersion}
	err = quotactl(dir, "Q_XGETQSTATV", qXGetQStatV, 0, unsafe.Pointer(&s))
	return s.flags, err
}

// GetProjectQuota reads the usage and the limits of a project (Q_XGETQUOTA). The error is ENOENT if the
// filesystem has no record of the project.
func GetProjectQuota(dir *os.File, id uint32) (q ProjectQuota, err error) {
	err = quotactl(dir, "Q_XGETQUOTA", qXGetQuota, id, unsafe.Pointer(&q))
	return q, err
}

// SetProjectLimits sets the hard limits of a project and clears its soft limits
// (Q_XSETQLIM).
func SetProjectLimits(dir *os.File, id uint32, blocks, inodes uint64) error {
	q := ProjectQuota{version: dqVersion, flags: projQuota, fields: limitMask, id: id, BlockHard: blocks, InodeHard: inodes}
	return quotactl(dir, "Q_XSETQLIM", qXSetQLim, id, unsafe.Pointer(&q))
}

// HasQuotactl reports whether the kernel has quotactl_fd(2) (Linux 5.14, CONFIG_QUOTA).
func HasQuotactl() bool {
	_, _, errno := unix.Syscall6(unix.SYS_QUOTACTL_FD, noFile, qXGetQStatV<<8|prjQuota, 0, 0, 0, 0)
	return !errors.Is(errno, unix.ENOSYS)
}

// quotactl is quotactl_fd(2) for project quota.
func quotactl(dir *os.File, op string, cmd, id uint32, arg unsafe.Pointer) error {
	_, _, errno := unix.Syscall6(unix.SYS_QUOTACTL_FD, dir.Fd(), uintptr(cmd<<8|prjQuota), uintptr(id), uintptr(arg), 0, 0)
	runtime.KeepAlive(dir)
	if errno != 0 {
		return &fs.PathError{Op: "quotactl_fd " + op, Path: dir.Name(), Err: errno}
	}
	return nil
}
