package clone_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/internal/treetest"
	"github.com/trivet-csi/trivet/linux/clone"
)

// TestTreeManyLinks: memory does not grow with the number of hard links, even if the other names of the files
// are outside of the tree.
func TestTreeManyLinks(t *testing.T) {
	const files = 20_000
	dir := filesystem(t, "xfs", "1G")
	src, outside := mkdir(t, dir, "src"), mkdir(t, dir, "outside")
	first, second := mkdir(t, src, "first"), mkdir(t, src, "second")
	for i := range files {
		name := fmt.Sprint(i)
		path := filepath.Join(first, name)
		must(t, os.WriteFile(path, nil, 0o600))
		other := outside
		if i%2 == 0 {
			other = second
		}
		must(t, os.Link(path, filepath.Join(other, name)))
	}
	copied, before, maximum := 0, heapObjects(), uint64(0)
	o := clone.Options{Progress: func(int64) {
		if copied++; copied%(files/10) == 0 {
			maximum = max(maximum, heapObjects())
		}
	}}
	to, _, err := copyTree(t, src, o)
	must(t, err)
	if copied != files {
		t.Errorf("copied %d files, want %d", copied, files)
	}
	if maximum > before+files/10 {
		t.Errorf("got %d objects in memory during the copy of %d files, want about as many as before: %d", maximum, files, before)
	}
	for _, sub := range []string{"first", "second"} {
		a, b := inodes(t, filepath.Join(src, sub)), inodes(t, filepath.Join(to, sub))
		if len(a) != len(b) {
			t.Errorf("copy of %s: got %d names, want %d", sub, len(b), len(a))
		}
	}
	firstInodes := inodes(t, filepath.Join(to, "first"))
	for name, inode := range inodes(t, filepath.Join(to, "second")) {
		if firstInodes[name] != inode {
			t.Fatalf("the copies first/%s and second/%[1]s are different files, want one file", name)
		}
	}
	names, err := os.ReadDir(to)
	must(t, err)
	if len(names) != 2 {
		t.Errorf("root of the copy: got %v, want first and second", names)
	}
}

// heapObjects returns the number of objects on the heap that are in use.
func heapObjects() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapObjects
}

// inodes returns the inode of each name in a directory.
func inodes(tb testing.TB, dir string) map[string]uint64 {
	tb.Helper()
	entries, err := os.ReadDir(dir)
	must(tb, err)
	found := map[string]uint64{}
	for _, e := range entries {
		var st unix.Stat_t
		must(tb, unix.Lstat(filepath.Join(dir, e.Name()), &st))
		found[e.Name()] = st.Ino
	}
	return found
}

// TestTreeProtectedLinks: the attributes immutable and append-only of a file with two names are copied, even if
// one of the names is outside of the tree.
func TestTreeProtectedLinks(t *testing.T) {
	eachFilesystem(t, "512M", func(t *testing.T, _ testFS, dir string) {
		src, inside, outside := mkdir(t, dir, "src"), mkdir(t, dir, "src", "inside"), mkdir(t, dir, "outside")
		for _, flag := range []string{"i", "a", "ia"} {
			for _, second := range []string{inside, outside} {
				name := filepath.Join(src, flag+filepath.Base(second))
				must(t, os.WriteFile(name, []byte(flag), 0o600))
				must(t, os.Link(name, filepath.Join(second, flag)))
				testenv.Run(t, "chattr", "+"+flag, name)
				t.Cleanup(func() { testenv.Run(t, "chattr", "-ia", name) })
			}
		}
		to, _, err := copyTree(t, src, clone.Options{})
		must(t, err)
		t.Cleanup(func() { testenv.Run(t, "chattr", "-R", "-ia", to) })
		for _, flag := range []string{"i", "a", "ia"} {
			for name, links := range map[string]uint64{"inside": 2, "outside": 1} {
				var st unix.Stat_t
				path := filepath.Join(to, flag+name)
				must(t, unix.Lstat(path, &st))
				if st.Nlink != links {
					t.Errorf("%s: got %d names, want %d", path, st.Nlink, links)
				}
				got, err := unix.IoctlGetInt(int(open(t, path).Fd()), unix.FS_IOC_GETFLAGS)
				must(t, err)
				want, err := unix.IoctlGetInt(int(open(t, filepath.Join(src, flag+name)).Fd()), unix.FS_IOC_GETFLAGS)
				must(t, err)
				if got != want {
					t.Errorf("%s: got flags %x, want %x", path, got, want)
				}
			}
		}
	})
}

// TestTreeMaxLinks: a file with the maximum number of names that its filesystem supports is copied.
func TestTreeMaxLinks(t *testing.T) {
	dir := filesystem(t, "ext4", "512M")
	src := mkdir(t, dir, "src")
	name := filepath.Join(src, "0")
	must(t, os.WriteFile(name, []byte("content"), 0o600))
	for i := 1; ; i++ {
		err := os.Link(name, filepath.Join(src, fmt.Sprint(i)))
		if errors.Is(err, unix.EMLINK) {
			break
		}
		must(t, err)
	}
	to, _, err := copyTree(t, src, clone.Options{})
	must(t, err)
	treetest.Compare(t, src, to)
}
