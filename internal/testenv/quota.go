package testenv

import (
	"os"
	"path/filepath"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Commands of BTRFS_IOC_QUOTA_CTL (uapi/linux/btrfs.h).
const (
	quotaDisable      = 2
	quotaEnableSimple = 4
)

// SimpleQuotas is Filesystem for a btrfs with simple quotas. The program of Debian 12
// knows none.
func SimpleQuotas(tb testing.TB, size string) string {
	tb.Helper()
	dir := Filesystem(tb, "btrfs", size)
	quotaCtl(tb, dir, quotaEnableSimple)
	return dir
}

// SwitchQuotas switches the simple quotas of a btrfs on or off.
func SwitchQuotas(tb testing.TB, dir string, on bool) {
	tb.Helper()
	if on {
		quotaCtl(tb, dir, quotaEnableSimple)
	} else {
		quotaCtl(tb, dir, quotaDisable)
	}
}

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

// ProjectQuotas is Filesystem for an xfs or ext4 with project quotas.
func ProjectQuotas(tb testing.TB, fsType, size string) string {
	tb.Helper()
	RequireRoot(tb)
	base := tb.TempDir()
	image, dir := filepath.Join(base, "disk"), filepath.Join(base, "mnt")
	var mkfs []string
	if fsType == "ext4" {
		mkfs = append(mkfs, "-O", "quota,project", "-E", "quotatype=prjquota")
	}
	Run(tb, "truncate", "-s", size, image)
	Mkfs(tb, fsType, append(mkfs, image)...)
	if err := os.Mkdir(dir, 0o755); err != nil {
		tb.Fatal(err)
	}
	Run(tb, "mount", "-t", fsType, "-o", "loop,prjquota", image, dir)
	tb.Cleanup(func() { Run(tb, "umount", dir) })
	return dir
}
