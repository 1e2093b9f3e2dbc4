package tree_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/sys"
	"github.com/trivet-csi/trivet/linux/tree"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// open opens a directory until the test ends.
func open(t *testing.T, dir string) *os.File {
	t.Helper()
	f, err := os.Open(dir)
	must(t, err)
	t.Cleanup(func() { f.Close() })
	return f
}

// TestStackPath: a path that is too long for system calls is empty.
func TestStackPath(t *testing.T) {
	var s tree.Stack
	defer s.Close()
	push := func(parent *os.File, name string) *os.File {
		t.Helper()
		dir, err := tree.OpenDir(parent, name)
		must(t, err)
		must(t, s.Push(dir))
		return dir
	}
	dir, name := push(open(t, t.TempDir()), "."), strings.Repeat("d", unix.NAME_MAX)
	for range unix.PathMax/(unix.NAME_MAX+1) - 1 {
		must(t, unix.Mkdirat(int(dir.Fd()), name, 0o700))
		dir = push(dir, name)
	}
	long := name[:unix.PathMax-1-len(s.Path(""))]
	if got, want := s.Path(long), strings.Repeat(name+"/", unix.PathMax/(unix.NAME_MAX+1)-1)+long; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if got := s.Path(long + "d"); got != "" {
		t.Errorf("got %q, want no path", got)
	}
}

// deep creates the nested directories "directory/…/directory/bottom" in dir. levels is the number of those named
// "directory". The path of the last one may be longer than PATH_MAX.
func deep(t *testing.T, dir string, levels int) {
	t.Helper()
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	must(t, err)
	for range levels {
		must(t, unix.Mkdirat(fd, "directory", 0o700))
		below, err := unix.Openat(fd, "directory", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
		must(t, err)
		unix.Close(fd)
		fd = below
	}
	must(t, unix.Mkdirat(fd, "bottom", 0o700))
	unix.Close(fd)
}

// TestWalk: Walk visits every entry, does not follow a symbolic link, and adds the path to an error of the visitor.
func TestWalk(t *testing.T) {
	dir := t.TempDir()
	must(t, os.MkdirAll(dir+"/a/b", 0o755))
	must(t, os.WriteFile(dir+"/a/b/file", nil, 0o644))
	must(t, os.Symlink("/etc", dir+"/a/link"))
	must(t, unix.Mkfifo(dir+"/pipe", 0o600))
	var names []string
	must(t, tree.Walk(t.Context(), open(t, dir), func(e *tree.Entry) error {
		names = append(names, e.Name)
		return nil
	}))
	if slices.Sort(names); strings.Join(names, " ") != "a b file link pipe" {
		t.Errorf("visited %q, want a, b, file, link and pipe", names)
	}
	if err := tree.Walk(t.Context(), open(t, dir), func(e *tree.Entry) error {
		if e.Name == "file" {
			return errors.New("no more")
		}
		return nil
	}); err == nil || !strings.Contains(err.Error(), dir+`: "a/b/file": no more`) {
		t.Errorf("got error %v, want the path %s/a/b/file and the error of the visitor", err, dir)
	}
}

// TestWalkManyFiles: Walk visits every name once, even if reading a directory needs several system calls and the
// directory is closed between them.
func TestWalkManyFiles(t *testing.T) {
	dir := t.TempDir()
	const files = 3000
	for i := range files {
		must(t, os.WriteFile(filepath.Join(dir, strings.Repeat("long", 20)+strconv.Itoa(i)), nil, 0o600))
		if i%1000 == 0 {
			must(t, os.Mkdir(filepath.Join(dir, "dir"+strconv.Itoa(i)), 0o700))
			deep(t, filepath.Join(dir, "dir"+strconv.Itoa(i)), 200)
		}
	}
	seen := map[string]int{}
	must(t, tree.Walk(t.Context(), open(t, dir), func(e *tree.Entry) error {
		seen[e.Name]++
		return nil
	}))
	if seen["directory"] != 600 || seen["bottom"] != 3 {
		t.Errorf("visited \"directory\" %d times and \"bottom\" %d times, want 3·200 and 3", seen["directory"], seen["bottom"])
	}
	delete(seen, "directory")
	delete(seen, "bottom")
	for name, n := range seen {
		if n != 1 {
			t.Errorf("visited %s %d times, want once", name, n)
		}
	}
	if len(seen) != files+3 {
		t.Errorf("visited %d names, want %d", len(seen), files+3)
	}
	must(t, tree.Empty(t.Context(), open(t, dir)))
}

// TestWalkRemoved: if a directory is removed while it is read, Walk continues with its parent.
func TestWalkRemoved(t *testing.T) {
	dir := t.TempDir()
	must(t, os.MkdirAll(dir+"/a", 0o755))
	must(t, os.WriteFile(dir+"/a/file", nil, 0o644))
	must(t, os.WriteFile(dir+"/b", nil, 0o644))
	var names []string
	must(t, tree.Walk(t.Context(), open(t, dir), func(e *tree.Entry) error {
		names = append(names, e.Name)
		if e.Name == "file" {
			return os.RemoveAll(dir + "/a")
		}
		return nil
	}))
	if slices.Sort(names); strings.Join(names, " ") != "a b file" {
		t.Errorf("visited %q, want a, b and file", names)
	}
}

// TestWalkCanceled: Walk visits no entry after its context has ended.
func TestWalkCanceled(t *testing.T) {
	dir := t.TempDir()
	deep(t, dir, 10)
	ctx, cancel := context.WithCancel(t.Context())
	visited := 0
	err := tree.Walk(ctx, open(t, dir), func(*tree.Entry) error {
		visited++
		cancel()
		return nil
	})
	if !errors.Is(err, context.Canceled) || visited != 1 {
		t.Errorf("got %v after %d visits, want %v after 1", err, visited, context.Canceled)
	}
}

// TestRemoveHostile: Remove removes all entries that a tenant can create, and nothing outside of the tree.
func TestRemoveHostile(t *testing.T) {
	testenv.RequireRoot(t)
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			base := testenv.Filesystem(t, fsType, "320M")
			dir, outside := base+"/volume", base+"/outside"
			must(t, os.Mkdir(dir, 0o700))
			must(t, os.Mkdir(outside, 0o700))
			must(t, os.WriteFile(outside+"/kept", []byte("kept"), 0o600))
			must(t, os.Symlink(outside, dir+"/link"))
			must(t, os.Symlink("nowhere", dir+"/dangling"))
			must(t, unix.Mkfifo(dir+"/pipe", 0o600))
			must(t, unix.Mknod(dir+"/null", unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))))
			must(t, os.MkdirAll(dir+"/locked/within", 0))
			must(t, os.WriteFile(dir+"/locked/immutable", nil, 0))
			must(t, os.WriteFile(dir+"/locked/append", nil, 0))
			testenv.Run(t, "chattr", "+i", dir+"/locked/immutable")
			testenv.Run(t, "chattr", "+a", dir+"/locked/append")
			testenv.Run(t, "chattr", "+i", dir+"/locked")
			deep(t, dir, 5000)
			must(t, tree.Remove(t.Context(), open(t, base), "volume"))
			if _, err := os.Lstat(dir); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("lstat of the removed tree: got %v, want %v", err, fs.ErrNotExist)
			}
			if b, err := os.ReadFile(outside + "/kept"); err != nil || string(b) != "kept" {
				t.Errorf("the file outside of the tree: got %q, %v, want it unchanged", b, err)
			}
			must(t, tree.Remove(t.Context(), open(t, base), "volume")) // a missing name is no error
		})
	}
}

// TestRemoveMounted: Remove does not remove the content of mounts in a tree, including bind mounts of the same
// filesystem.
func TestRemoveMounted(t *testing.T) {
	base := testenv.Filesystem(t, "ext4", "32M")
	dir, other := base+"/volume", base+"/other"
	for _, d := range []string{dir + "/bound", dir + "/memory", other} {
		must(t, os.MkdirAll(d, 0o700))
	}
	must(t, os.WriteFile(dir+"/file", nil, 0o600))
	must(t, os.WriteFile(other+"/kept", nil, 0o600))
	must(t, unix.Mount(other, dir+"/bound", "", unix.MS_BIND, ""))
	t.Cleanup(func() { must(t, unix.Unmount(dir+"/bound", 0)) })
	must(t, unix.Mount("none", dir+"/memory", "tmpfs", 0, ""))
	t.Cleanup(func() { must(t, unix.Unmount(dir+"/memory", 0)) })
	must(t, os.WriteFile(dir+"/memory/kept", nil, 0o600))
	if err := tree.Remove(t.Context(), open(t, base), "volume"); !errors.Is(err, tree.ErrMounted) {
		t.Errorf("removing a tree with mounts: got %v, want %v", err, tree.ErrMounted)
	}
	for _, kept := range []string{other + "/kept", dir + "/memory/kept"} {
		if _, err := os.Stat(kept); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Stat(dir + "/file"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("stat of the file beside the mount points: got %v, want %v", err, fs.ErrNotExist)
	}
	if err := tree.Remove(t.Context(), open(t, dir), "bound"); !errors.Is(err, tree.ErrMounted) {
		t.Errorf("removing a mount point: got %v, want %v", err, tree.ErrMounted)
	}
}

// TestRemoveWhileSwapped: Remove removes nothing outside of the tree while a tenant swaps a directory and a
// symbolic link.
func TestRemoveWhileSwapped(t *testing.T) {
	base := t.TempDir()
	dir, outside := base+"/volume", base+"/outside"
	must(t, os.MkdirAll(outside, 0o700))
	kept := outside + "/kept"
	must(t, os.WriteFile(kept, nil, 0o600))
	for range 200 {
		must(t, os.MkdirAll(dir+"/victim", 0o700))
		must(t, os.WriteFile(dir+"/victim/kept", nil, 0o600))
		must(t, os.Symlink(outside, dir+"/link"))
		done := make(chan struct{})
		go func() {
			defer close(done)
			for unix.Renameat2(unix.AT_FDCWD, dir+"/victim", unix.AT_FDCWD, dir+"/link", unix.RENAME_EXCHANGE) == nil {
				continue
			}
		}()
		err := tree.Remove(t.Context(), open(t, base), "volume")
		for err != nil { // a name changed from a directory to a link between two system calls
			err = tree.Remove(t.Context(), open(t, base), "volume")
		}
		<-done
		if _, err := os.Stat(kept); err != nil {
			t.Fatal(err)
		}
	}
}

// TestEmptyLocked: Empty does not change the mode of the directory that it empties, even if this mode prevents the
// removal of the content.
func TestEmptyLocked(t *testing.T) {
	testenv.RequireRoot(t)
	dir := t.TempDir()
	const user = 64321 // any user other than root
	must(t, os.WriteFile(dir+"/file", nil, 0o600))
	must(t, os.Chown(dir, user, user))
	must(t, os.Chmod(dir, 0o500))
	f := open(t, dir)
	err := sys.OnOwnThread(func() error {
		return errors.Join(syscall.Setfsuid(user), tree.Empty(t.Context(), f))
	})
	if !errors.Is(err, fs.ErrPermission) {
		t.Errorf("emptying a directory with mode 0500: got %v, want %v", err, fs.ErrPermission)
	}
	if st, err := f.Stat(); err != nil || st.Mode().Perm() != 0o500 {
		t.Errorf("got mode %v, %v, want 0500", st.Mode(), err)
	}
}
