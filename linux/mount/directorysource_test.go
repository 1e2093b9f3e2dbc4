package mount_test

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/mount"
)

// directoryAt is the directory at a path below a base, open.
func directoryAt(t *testing.T, base *os.File, path string) *mount.DirectorySource {
	t.Helper()
	dir, err := os.OpenFile(filepath.Join(base.Name(), path), os.O_RDONLY|syscall.O_DIRECTORY, 0)
	must(t, err)
	t.Cleanup(func() { dir.Close() })
	var st syscall.Stat_t
	must(t, syscall.Fstat(int(dir.Fd()), &st))
	return &mount.DirectorySource{Base: base, Path: path, Dir: dir, Dev: st.Dev, Ino: st.Ino}
}

// TestDirectory: a bound directory is known by what is shown and by the mount table, on
// filesystems whose devices are the same in both and on btrfs, and after it was moved or
// removed; its neighbour is not taken for it.
func TestDirectory(t *testing.T) {
	for name, filesystem := range map[string]func(testing.TB, string) string{
		"ext4":  func(tb testing.TB, size string) string { return testenv.Filesystem(tb, "ext4", size) },
		"btrfs": func(tb testing.TB, size string) string { return testenv.Filesystem(tb, "btrfs", size) },
	} {
		t.Run(name, func(t *testing.T) { testDirectory(t, filesystem(t, "128M")) })
	}
}

func testDirectory(t *testing.T, at string) {
	t.Helper()
	below := filepath.Join(at, "some where", "pool")
	must(t, os.MkdirAll(filepath.Join(below, "v/data"), 0o755))
	must(t, os.MkdirAll(filepath.Join(below, "v2/data"), 0o755))
	// As in a container: the pool is a bind mount of a part of its filesystem.
	seen := t.TempDir()
	testenv.Run(t, "mount", "--bind", below, seen)
	base, err := os.Open(seen)
	must(t, err)
	t.Cleanup(func() { base.Close(); testenv.Run(t, "umount", seen) })
	d, other := directoryAt(t, base, "v/data"), directoryAt(t, base, "v2/data")
	d.Path, other.Path = "v", "v2"

	target := t.TempDir()
	o, err := mount.ParseFlags([]string{"ro", "noexec"})
	must(t, err)
	must(t, d.Mount(t.Context(), target, o))
	t.Cleanup(func() { testenv.Run(t, "umount", target) })
	if err := os.WriteFile(filepath.Join(target, "x"), nil, 0o600); err == nil {
		t.Error("a directory that was bound read-only took a file")
	}
	check := func(what string, d *mount.DirectorySource, shown int) {
		t.Helper()
		shows, err := d.Shows(target)
		must(t, err)
		owns, err := d.Owns(target)
		must(t, err)
		mounts, err := mount.Of(d)
		must(t, err)
		if len(mounts) != shown || owns != (shown == 1) || shows != (shown == 1 && d.Dir != nil) {
			t.Errorf("%s: %d mounts, the target shows it: %t, is of it: %t, want %d", what, len(mounts), shows, owns, shown)
		}
	}
	check("its own", d, 1)
	check("another's", other, 0)
	unknown := &mount.DirectorySource{Path: "v"}
	check("without a base", unknown, 1)
	check("another's without a base", &mount.DirectorySource{Path: "v2"}, 0)
	anywhere := &mount.DirectorySource{Base: base, Path: "volumes/x", AnyPath: true}
	for path, want := range map[string]bool{target: true, seen: false} { // the base itself is no volume's
		if ok, err := anywhere.Owns(path); ok != want || err != nil {
			t.Errorf("anywhere below the base, at %s: %t, %v", path, ok, err)
		}
	}
	if all, err := mount.Of(anywhere); err != nil || len(all) > 0 {
		t.Errorf("others' mounts below the base: %v, %v", all, err)
	}
	must(t, os.Rename(filepath.Join(below, "v/data"), filepath.Join(below, "v/away")))
	check("moved in its folder", d, 1)
	must(t, os.Remove(filepath.Join(below, "v/away")))
	check("removed", d, 1)
	check("removed, without a base", unknown, 1)
}
