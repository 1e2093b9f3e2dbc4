package testenv

import (
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Commands of BTRFS_IOC_QUOTA_CTL (uapi/linux/btrfs.h).
const (
	quotaDisable      = 2
	quotaEnableSimple = 4
)

// SimpleQuotas does the same as Filesystem for a btrfs with simple quotas. It does not enable them with btrfs(8),
// because btrfs(8) of Debian 12 cannot.
func SimpleQuotas(tb testing.TB, size string) string {
	tb.Helper()
	dir := Filesystem(tb, "btrfs", size)
	SwitchQuotas(tb, dir, true)
	return dir
}

// SwitchQuotas enables or disables the simple quotas of a btrfs.
func SwitchQuotas(tb testing.TB, dir string, on bool) {
	tb.Helper()
	command := uint64(quotaDisable)
	if on {
		command = quotaEnableSimple
	}
	quotaCtl(tb, dir, command)
}

// quotaCtl calls BTRFS_IOC_QUOTA_CTL on the filesystem at a path.
func quotaCtl(tb testing.TB, path string, command uint64) {
	tb.Helper()
	const btrfsIocQuotaCtl = 0xc0109428 // _IOWR(0x94, 40, struct btrfs_ioctl_quota_ctl_args)
	dir, err := os.Open(path)
	if err != nil {
		tb.Fatal(err)
	}
	defer dir.Close()
	args := [2]uint64{command}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, dir.Fd(), btrfsIocQuotaCtl, uintptr(unsafe.Pointer(&args))); errno != 0 {
		tb.Fatalf("BTRFS_IOC_QUOTA_CTL %d of %s: %v", command, path, errno)
	}
}

// ProjectQuotas does the same as Filesystem for an xfs or ext4 with project quotas.
func ProjectQuotas(tb testing.TB, fsType, size string) string {
	tb.Helper()
	var mkfs []string
	if fsType == "ext4" {
		mkfs = []string{"-O", "quota,project", "-E", "quotatype=prjquota"}
	}
	return filesystem(tb, fsType, size, mkfs, projectQuotas)
}

// projectQuotas is the mount option of xfs and ext4.
const projectQuotas = "prjquota"

// SwitchProjects unmounts a filesystem that ProjectQuotas mounted, and mounts it with or without project quotas.
// The filesystem must not be in use.
func SwitchProjects(tb testing.TB, dir string, on bool) {
	tb.Helper()
	unmount(tb, dir)
	if on {
		mount(tb, dir, projectQuotas)
	} else {
		mount(tb, dir)
	}
}
