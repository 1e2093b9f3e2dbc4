package mount

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// TestFlushKeepsFlags: flush keeps the flags of the mount and of its filesystem.
func TestFlushKeepsFlags(t *testing.T) {
	testenv.RequireRoot(t)
	t.Run("writable filesystem", func(t *testing.T) { testFlushKeepsFlags(t, 0) })
	t.Run("read-only filesystem", func(t *testing.T) { testFlushKeepsFlags(t, unix.MS_RDONLY) })
}

// testFlushKeepsFlags flushes a read-only bind mount, whose flags differ from those of its filesystem.
func testFlushKeepsFlags(t *testing.T, filesystemFlags uintptr) {
	filesystem, bound := t.TempDir(), t.TempDir()
	unmountAtEnd := func(err error, at string) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(at, 0) })
	}
	unmountAtEnd(unix.Mount("none", filesystem, "tmpfs", filesystemFlags, "size=1m"), filesystem)
	unmountAtEnd(unix.Mount(filesystem, bound, "", unix.MS_BIND, ""), bound)
	const flags = unix.MOUNT_ATTR_RDONLY | unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV | unix.MOUNT_ATTR_NOATIME | unix.MOUNT_ATTR_NOSYMFOLLOW
	if err := unix.MountSetattr(unix.AT_FDCWD, bound, 0, &unix.MountAttr{Attr_set: flags, Attr_clr: unix.MOUNT_ATTR__ATIME}); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Open(bound, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	before, err := OnPath(bound)
	if err != nil {
		t.Fatal(err)
	}
	(&held{fd: fd, path: bound, at: before}).flush()
	after, err := OnPath(bound)
	if err != nil || after.Options != before.Options || after.VFSOptions != before.VFSOptions {
		t.Errorf("after flush: got %+v, %v, want flags %s and %s", after, err, before.Options, before.VFSOptions)
	}
}
