package clone_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/internal/treetest"
	"github.com/trivet-csi/trivet/linux/clone"
)

// copyTree copies a directory into a new directory with the same parent.
func copyTree(tb testing.TB, src string, o clone.Options) (string, clone.Result, error) {
	tb.Helper()
	to, err := os.MkdirTemp(filepath.Dir(src), "copy-")
	must(tb, err)
	r, err := clone.Tree(tb.Context(), open(tb, to), open(tb, src), o)
	return to, r, err
}

// TestTree: a copy of a tree with all kinds of files equals the tree.
func TestTree(t *testing.T) {
	eachFilesystem(t, "1G", func(t *testing.T, fsys testFS, dir string) {
		for seed := range uint64(3) {
			src := mkdir(t, dir, fmt.Sprint(seed))
			treetest.Make(t, src, seed)
			for name, o := range map[string]clone.Options{"shared": {}, "unshared": {Unshared: true}} {
				var reported int64
				o.Progress = increasing(t, &reported)
				to, got, err := copyTree(t, src, o)
				must(t, err)
				treetest.Compare(t, src, to)
				used := allocated(t, to)
				// The filesystem may have allocated a few blocks for metadata after the copy.
				if got.Shared != (fsys.reflink && !o.Unshared) || got.Bytes > used || got.Bytes < used-64*kib ||
					reported == 0 || reported > used {
					t.Errorf("%s: got %+v, last progress %d, want shared %t and about %d bytes", name, got, reported, fsys.reflink && !o.Unshared, used)
				}
			}
		}
	})
}

// allocated returns the result of du(1), which counts a file with several names once.
func allocated(tb testing.TB, dir string) (bytes int64) {
	tb.Helper()
	_, err := fmt.Sscan(testenv.Run(tb, "du", "-s", "-B1", dir), &bytes)
	must(tb, err)
	return bytes
}

// TestTreeInherits: the copied files do not inherit the ACL, mode and flags of dst.
func TestTreeInherits(t *testing.T) {
	dir := filesystem(t, "btrfs", "512M")
	src, dst := mkdir(t, dir, "src"), mkdir(t, dir, "dst")
	treetest.Make(t, src, 7)
	plain := mkdir(t, src, "plain")
	acl := make([]byte, 100)
	n, err := unix.Getxattr(src, "system.posix_acl_default", acl)
	must(t, err)
	must(t, unix.Removexattr(src, "system.posix_acl_default"))
	must(t, unix.Setxattr(dst, "system.posix_acl_default", acl[:n], 0))
	must(t, os.Chmod(dst, 0o2777|os.ModeSetgid))
	testenv.Run(t, "chattr", "+c", dst)
	must(t, os.WriteFile(filepath.Join(plain, "file"), []byte("content"), 0o644))
	_, err = clone.Tree(t.Context(), open(t, dst), open(t, src), clone.Options{})
	must(t, err)
	treetest.Compare(t, src, dst)
}

// TestTreeAcross: a copy on another filesystem equals the tree.
func TestTreeAcross(t *testing.T) {
	for _, types := range [][2]string{{"ext4", "xfs"}, {"xfs", "ext4"}} {
		src, dst := filesystem(t, types[0], "512M"), filesystem(t, types[1], "512M")
		src, dst = mkdir(t, src, "tree"), mkdir(t, dst, "tree")
		treetest.Make(t, src, 1)
		got, err := clone.Tree(t.Context(), open(t, dst), open(t, src), clone.Options{})
		must(t, err)
		if got.Shared {
			t.Errorf("%v: got %+v, want no shared blocks", types, got)
		}
		treetest.Compare(t, src, dst)
	}
}

// TestTreeUnchanged: Tree does not change the source, including its access times.
func TestTreeUnchanged(t *testing.T) {
	dir := filesystem(t, "ext4", "512M", "strictatime")
	src := mkdir(t, dir, "src")
	for i := range 5 {
		f := filepath.Join(mkdir(t, src, fmt.Sprint(i)), "file")
		must(t, os.WriteFile(f, random(10000), 0o600))
	}
	list := func() string {
		return testenv.Run(t, "find", src, "-printf", "%p %A@ %T@ %C@ %s\n")
	}
	_ = list() // the first list changes the access times of the directories
	testenv.Run(t, "mount", "-o", "remount,noatime", dir)
	before := list()
	testenv.Run(t, "mount", "-o", "remount,strictatime", dir)
	_, _, err := copyTree(t, src, clone.Options{})
	must(t, err)
	testenv.Run(t, "mount", "-o", "remount,noatime", dir)
	if after := list(); after != before {
		t.Errorf("the source after the copy: got\n%s\nwant\n%s", after, before)
	}
}

// TestTreeMounted: Tree fails if the tree contains a mount, and the error contains the path of the mount point.
func TestTreeMounted(t *testing.T) {
	dir := filesystem(t, "ext4", "256M")
	for name, mount := range map[string]func(at, file string) error{
		"tmpfs":                  func(at, _ string) error { return unix.Mount("tmpfs", at, "tmpfs", 0, "") },
		"bind mount of the root": func(at, _ string) error { return unix.Mount(dir, at, "", unix.MS_BIND, "") },
		"directory on itself":    func(at, _ string) error { return unix.Mount(at, at, "", unix.MS_BIND, "") },
		"file on itself":         func(_, file string) error { return unix.Mount(file, file, "", unix.MS_BIND, "") },
		"device on a file":       func(_, file string) error { return unix.Mount("/dev/null", file, "", unix.MS_BIND, "") },
	} {
		t.Run(name, func(t *testing.T) {
			src := mkdir(t, dir, name)
			at := mkdir(t, mkdir(t, src, "deep"), "mnt")
			file := filepath.Join(src, "deep", "file")
			must(t, os.WriteFile(file, nil, 0o600))
			must(t, mount(at, file))
			t.Cleanup(func() {
				_ = unix.Unmount(at, 0)
				_ = unix.Unmount(file, 0)
			})
			want := "deep/mnt"
			if strings.Contains(name, "file") {
				want = "deep/file"
			}
			if _, _, err := copyTree(t, src, clone.Options{}); !errors.Is(err, clone.ErrUncopyable) || !strings.Contains(err.Error(), want) {
				t.Errorf("got %v, want %v with the path %s", err, clone.ErrUncopyable, want)
			}
		})
	}
}

// TestTreeDeep: the number of open files does not grow with the depth of the tree, and the depth is limited.
func TestTreeDeep(t *testing.T) {
	for _, fsType := range []string{"xfs", "btrfs", "ext4"} {
		t.Run(fsType, func(t *testing.T) {
			const depth = 2000
			dir := filesystem(t, fsType, "1G")
			src := mkdir(t, dir, "src")
			makeDeep(t, src, depth, "a", "file", "z")
			files, maximum := 0, 0
			o := clone.Options{Progress: func(int64) {
				if files++; files%50 == 0 {
					fds, err := os.ReadDir("/proc/self/fd")
					must(t, err)
					maximum = max(maximum, len(fds))
				}
			}}
			to, _, err := copyTree(t, src, o)
			must(t, err)
			if maximum > 200 || maximum < 100 { // up to 64 directories of the source and 64 of the copy are open
				t.Errorf("got up to %d open files, want 100 to 200", maximum)
			}
			if a, b := countDeep(t, src), countDeep(t, to); a != b || a.depth != depth {
				t.Errorf("copy: got %+v, source: got %+v, want equal ones of depth %d", b, a, depth)
			}
		})
	}
	src := mkdir(t, filesystem(t, "xfs", "1G"), "src")
	makeDeep(t, src, 10_001)
	if _, _, err := copyTree(t, src, clone.Options{}); !errors.Is(err, clone.ErrUncopyable) || len(err.Error()) > 1000 {
		t.Errorf("a tree that is too deep: got %.2000v, want a short error with %v", err, clone.ErrUncopyable)
	}
}

// makeDeep creates nested directories, some with long names. Each of them except the last one contains files with the
// given names. The content of a file is the number of the directories above its own.
func makeDeep(t *testing.T, dir string, depth int, files ...string) {
	t.Helper()
	at, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	must(t, err)
	defer func() { unix.Close(at) }()
	for i := range depth {
		for _, name := range files {
			fd, err := unix.Openat(at, name, unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o600)
			must(t, err)
			_, err = unix.Write(fd, fmt.Append(nil, i))
			must(t, errors.Join(err, unix.Close(fd)))
		}
		name := "d"
		if i%50 == 0 {
			name = strings.Repeat("D", unix.NAME_MAX)
		}
		must(t, unix.Mkdirat(at, name, 0o700))
		below, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		must(t, errors.Join(err, unix.Close(at)))
		at = below
	}
}

// deep is the result of countDeep. bytes is the size of all files.
type deep struct{ depth, names, bytes int }

// countDeep counts nested directories, the names in them, and the bytes of their files.
func countDeep(t *testing.T, dir string) (d deep) {
	t.Helper()
	at, err := os.Open(dir)
	must(t, err)
	for {
		entries, err := at.Readdirnames(-1)
		must(t, err)
		d.names += len(entries)
		below := ""
		for _, e := range entries {
			var st unix.Stat_t
			must(t, unix.Fstatat(int(at.Fd()), e, &st, unix.AT_SYMLINK_NOFOLLOW))
			if st.Mode&unix.S_IFMT == unix.S_IFDIR {
				below = e
			} else {
				d.bytes += int(st.Size)
			}
		}
		if below == "" {
			at.Close()
			return d
		}
		next, err := unix.Openat(int(at.Fd()), below, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		must(t, err)
		at.Close()
		at, d.depth = os.NewFile(uintptr(next), below), d.depth+1
	}
}

// TestTreeWide: memory does not grow with the number of files in a directory.
func TestTreeWide(t *testing.T) {
	files := 40_000
	if testing.Short() {
		files /= 10
	}
	dir := filesystem(t, "xfs", "1G")
	src := mkdir(t, dir, "src")
	at := open(t, src)
	for i := range files {
		must(t, unix.Mknodat(int(at.Fd()), fmt.Sprintf("%0250d", i), unix.S_IFREG|0o600, 0))
	}
	heapSize := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before, maximum, reports := heapSize(), uint64(0), 0
	to, _, err := copyTree(t, src, clone.Options{Progress: func(int64) {
		if reports++; reports%5000 == 0 {
			maximum = max(maximum, heapSize())
		}
	}})
	must(t, err)
	if grown := int64(maximum) - int64(before); grown > 8*mib {
		t.Errorf("the heap grew by %d bytes, want at most %d", grown, 8*mib)
	}
	names, err := open(t, to).Readdirnames(-1)
	must(t, err)
	if len(names) != files || reports != files {
		t.Errorf("got %d names and %d calls of Progress, want %d", len(names), reports, files)
	}
}

// TestTreeLeases: a copy that waits because a tenant has a lease on a file ends with its context.
func TestTreeLeases(t *testing.T) {
	src := mkdir(t, filesystem(t, "ext4", "256M"), "src")
	path := filepath.Join(src, "leased")
	must(t, os.WriteFile(path, []byte("x"), 0o600))
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	must(t, err)
	defer f.Close()
	_, err = unix.FcntlInt(f.Fd(), unix.F_SETLEASE, unix.F_WRLCK)
	must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		for lease := unix.F_WRLCK; lease == unix.F_WRLCK; { // until the copy waits for the lease
			lease, _ = unix.FcntlInt(f.Fd(), unix.F_GETLEASE, 0)
		}
		cancel()
	}()
	_, err = clone.Tree(ctx, open(t, mkdir(t, filepath.Dir(src), "dst")), open(t, src), clone.Options{})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want %v", err, context.Canceled)
	}
}

// TestTreeCancel: Tree copies no further file after its context has ended.
func TestTreeCancel(t *testing.T) {
	src := mkdir(t, filesystem(t, "ext4", "256M"), "src")
	treetest.Make(t, src, 1)
	ctx, cancel := context.WithCancel(t.Context())
	n := 0
	_, err := clone.Tree(ctx, open(t, mkdir(t, filepath.Dir(src), "dst")), open(t, src), clone.Options{Progress: func(int64) {
		n++
		cancel()
	}})
	if !errors.Is(err, context.Canceled) || n != 1 {
		t.Errorf("got %v after %d files, want %v after 1", err, n, context.Canceled)
	}
}

// subvolume creates a btrfs subvolume, and returns its path.
func subvolume(t *testing.T, path ...string) string {
	t.Helper()
	at := filepath.Join(path...)
	testenv.Run(t, "btrfs", "-q", "subvolume", "create", at)
	return at
}

// TestSubvolume: a snapshot equals its source, and is writable unless readOnly is true. IsSubvolume is true only for
// the root of a subvolume. Subvolume refuses any other directory, a name that exists, and a name that is too long.
func TestSubvolume(t *testing.T) {
	dir := filesystem(t, "btrfs", "512M")
	src, parent := subvolume(t, dir, "src"), open(t, dir)
	treetest.Make(t, src, 5)
	for name, readOnly := range map[string]bool{"read-only": true, "writable": false} {
		must(t, clone.Subvolume(parent, name, open(t, src), readOnly))
		at := filepath.Join(dir, name)
		if ok, err := clone.IsSubvolume(open(t, at)); !ok || err != nil {
			t.Errorf("IsSubvolume of the %s snapshot: got %t, %v, want true", name, ok, err)
		}
		err := os.WriteFile(filepath.Join(at, "new"), nil, 0o600)
		if errors.Is(err, unix.EROFS) != readOnly {
			t.Errorf("writing to the %s snapshot: got %v, want EROFS only if it is read-only", name, err)
		}
		if err := clone.Subvolume(parent, name, open(t, src), readOnly); !errors.Is(err, os.ErrExist) {
			t.Errorf("a snapshot with an existing name: got %v, want %v", err, os.ErrExist)
		}
	}
	must(t, os.Remove(filepath.Join(dir, "writable", "new")))
	treetest.Compare(t, src, filepath.Join(dir, "read-only"))
	testenv.Run(t, "chattr", "+ia", src)
	must(t, clone.Subvolume(parent, "unprotected", open(t, src), false))
	must(t, os.Rename(filepath.Join(dir, "unprotected"), filepath.Join(dir, "moved")))
	if err := clone.Subvolume(parent, strings.Repeat("n", 5000), open(t, src), true); !errors.Is(err, unix.ENAMETOOLONG) {
		t.Errorf("a long name: got %v, want ENAMETOOLONG", err)
	}
	for _, path := range []string{mkdir(t, dir, "plain"), "/proc", filesystem(t, "ext4", "64M")} {
		if ok, err := clone.IsSubvolume(open(t, path)); ok || err != nil {
			t.Errorf("IsSubvolume of %s: got %t, %v, want false", path, ok, err)
		}
		if err := clone.Subvolume(parent, "none", open(t, path), true); !errors.Is(err, clone.ErrNotSubvolume) {
			t.Errorf("Subvolume of %s: got %v, want %v", path, err, clone.ErrNotSubvolume)
		}
	}
}

// TestNested: Subvolume and Tree fail if a subvolume contains another one, at any depth. The error contains the name
// of the inner one unless its path is too long.
func TestNested(t *testing.T) {
	dir := filesystem(t, "btrfs", "512M")
	parent := open(t, dir)
	for name, depth := range map[string]int{"in the root": 0, "in a directory": 3, "deeper than PATH_MAX": 2500} {
		src, wantName := subvolume(t, dir, name), "inner"
		at := src
		for range min(depth, 3) {
			at = mkdir(t, at, "d")
		}
		subvolume(t, at, "inner")
		if depth > 3 {
			makeDeep(t, at, depth) // a subvolume whose path is longer than PATH_MAX
			deepest(t, at, func(fd int) {
				testenv.Run(t, "btrfs", "-q", "subvolume", "create", fmt.Sprintf("/proc/%d/fd/%d/other", os.Getpid(), fd))
			})
			testenv.Run(t, "btrfs", "-q", "subvolume", "delete", filepath.Join(at, "inner"))
			wantName = ""
		}
		if err := clone.Subvolume(parent, name+"-snapshot", open(t, src), true); !errors.Is(err, clone.ErrUncopyable) || !strings.Contains(err.Error(), wantName) {
			t.Errorf("%s: Subvolume: got %v, want %v with the name %q", name, err, clone.ErrUncopyable, wantName)
		}
		if _, err := os.Stat(filepath.Join(dir, name+"-snapshot")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: the snapshot: got %v, want %v", name, err, os.ErrNotExist)
		}
		if _, _, err := copyTree(t, src, clone.Options{}); !errors.Is(err, clone.ErrUncopyable) || !strings.Contains(err.Error(), wantName) {
			t.Errorf("%s: Tree: got %v, want %v with the name %q", name, err, clone.ErrUncopyable, wantName)
		}
	}
}

// deepest calls use with the deepest directory of makeDeep.
func deepest(t *testing.T, dir string, use func(fd int)) {
	t.Helper()
	at, err := unix.Open(dir, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	must(t, err)
	for {
		next := -1
		for _, name := range []string{"d", strings.Repeat("D", unix.NAME_MAX)} {
			if fd, err := unix.Openat(at, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err == nil {
				next = fd
			}
		}
		if next < 0 {
			use(at)
			unix.Close(at)
			return
		}
		unix.Close(at)
		at = next
	}
}
