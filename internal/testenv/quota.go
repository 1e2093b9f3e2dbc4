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
	dir := filepath.Join(tb.TempDir(), "mnt")
	image := ImageOf(dir)
	var mkfs []string
	if fsType == "ext4" {
		mkfs = append(mkfs, "-O", "quota,project", "-E", "quotatype=prjquota")
	}
	Run(tb, "truncate", "-s", size, image)
	Mkfs(tb, fsType, append(mkfs, image)...)
	if err := os.Mkdir(dir, 0o755); err != nil {
		tb.Fatal(err)
	}
	MountProjects(tb, dir, true)
	tb.Cleanup(func() { unmount(tb, dir) })
	return dir
}

// ImageOf is what ProjectQuotas has mounted at dir.
func ImageOf(dir string) string { return filepath.Join(filepath.Dir(dir), "disk") }

// MountProjects mounts the image of ProjectQuotas, with project quotas or without.
func MountProjects(tb testing.TB, dir string, quotas bool) {
	tb.Helper()
	options := "loop"
	if quotas {
		options += ",prjquota"
	}
	Run(tb, "mount", "-o", options, ImageOf(dir), dir)
}

// SwitchProjects mounts a filesystem of ProjectQuotas anew, with them or without. Nobody
// may have it.
func SwitchProjects(tb testing.TB, dir string, on bool) {
	tb.Helper()
	unmount(tb, dir)
	MountProjects(tb, dir, on)
}
