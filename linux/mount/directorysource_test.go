package mount_test

import (
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/mount"
)

// directoryAt returns the source for the directory at a path below a base.
func directoryAt(t *testing.T, base *os.File, path string) *mount.DirectorySource {
	t.Helper()
	dir, err := os.OpenFile(filepath.Join(base.Name(), path), os.O_RDONLY|syscall.O_DIRECTORY, 0)
	must(t, err)
	t.Cleanup(func() { dir.Close() })
	var st syscall.Stat_t
	must(t, syscall.Fstat(int(dir.Fd()), &st))
	return &mount.DirectorySource{Base: base, Path: path, Dir: dir, Dev: st.Dev, Ino: st.Ino}
}

// TestDirectory: a source recognizes its bind mount, even on btrfs, whose st_dev is not in the mount table,
// and even after the directory was moved or removed. It does not recognize the mount of another directory. A source
// without a base recognizes its mount by the path.
func TestDirectory(t *testing.T) {
	for _, fsType := range []string{"ext4", "btrfs"} {
		t.Run(fsType, func(t *testing.T) { testDirectory(t, testenv.Filesystem(t, fsType, "128M")) })
	}
}

// testDirectory tests sources on the filesystem that is mounted at a path.
func testDirectory(t *testing.T, at string) {
	t.Helper()
	below := filepath.Join(at, "some where", "pool")
	must(t, os.MkdirAll(filepath.Join(below, "v/data"), 0o755))
	must(t, os.MkdirAll(filepath.Join(below, "v2/data"), 0o755))
	// As in a container, the base is a bind mount of a part of its filesystem.
	baseMount := t.TempDir()
	testenv.Run(t, "mount", "--bind", below, baseMount)
	base, err := os.Open(baseMount)
	must(t, err)
	t.Cleanup(func() { base.Close(); testenv.Run(t, "umount", baseMount) })
	d, other := directoryAt(t, base, "v/data"), directoryAt(t, base, "v2/data")
	d.Path, other.Path = "v", "v2" // the folder of each volume, of which only the directory data is mounted

	target := t.TempDir()
	o, err := mount.ParseFlags([]string{"ro", "noexec"})
	must(t, err)
	must(t, d.Mount(t.Context(), target, o))
	t.Cleanup(func() { testenv.Run(t, "umount", target) })
	if err := os.WriteFile(filepath.Join(target, "x"), nil, 0o600); err == nil {
		t.Error("creating a file in a read-only bind mount: got no error, want EROFS")
	}
	check := func(what string, d *mount.DirectorySource, wantMounts int) {
		t.Helper()
		shows, err := d.Shows(target)
		must(t, err)
		owns, err := d.Owns(target)
		must(t, err)
		mounts, err := mount.Of(d)
		must(t, err)
		if len(mounts) != wantMounts || owns != (wantMounts == 1) || shows != (wantMounts == 1 && d.Dir != nil) {
			t.Errorf("%s: got %d mounts, Shows %t, Owns %t, want %d mounts", what, len(mounts), shows, owns, wantMounts)
		}
	}
	check("the directory", d, 1)
	check("another directory", other, 0)
	withoutBase := &mount.DirectorySource{Path: "v"}
	check("without a base", withoutBase, 1)
	check("another directory without a base", &mount.DirectorySource{Path: "v2"}, 0)
	anyPath := &mount.DirectorySource{Base: base, Path: "volumes/x", AnyPath: true}
	for path, want := range map[string]bool{target: true, baseMount: false} { // the base itself does not belong to the source
		if ok, err := anyPath.Owns(path); ok != want || err != nil {
			t.Errorf("AnyPath: Owns of %s: got %t, %v, want %t", path, ok, err, want)
		}
	}
	if all, err := mount.Of(anyPath); err != nil || len(all) > 0 {
		t.Errorf("AnyPath: got mounts %v, %v, want none, because Matcher ignores it", all, err)
	}
	testElsewhere(t, d, target)
	must(t, os.Rename(filepath.Join(below, "v/data"), filepath.Join(below, "v/away")))
	check("moved within its volume", d, 1)
	must(t, os.Remove(filepath.Join(below, "v/away")))
	check("removed", d, 1)
	check("removed, without a base", withoutBase, 1)
}

// testElsewhere tests that a second mount of a directory is found, on each kernel.
func testElsewhere(t *testing.T, d *mount.DirectorySource, staged string) {
	t.Helper()
	at, err := mount.Inspect(staged)
	must(t, err)
	elsewhere := func(want ...string) {
		t.Helper()
		find := func() {
			if got, err := mount.Elsewhere(d, at.MountID); err != nil || !slices.Equal(got, want) {
				t.Errorf("Elsewhere: got %q, %v, want %q", got, err, want)
			}
		}
		find()
		testenv.Forbid(t, syscall.ENOSYS, []uint32{unix.SYS_LISTMOUNT, unix.SYS_STATMOUNT}, find)
	}
	elsewhere()
	pod := t.TempDir()
	must(t, mount.Bind(staged, pod, mount.Options{}))
	elsewhere(pod)
	must(t, mount.Unmount(pod))
	elsewhere()
}
