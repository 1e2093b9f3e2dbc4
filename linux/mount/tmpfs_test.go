package mount_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/mount"
)

// mountMemory mounts a new tmpfs, which is unmounted at the end of the test.
func mountMemory(t *testing.T, limit mount.MemoryLimit, o mount.Options) string {
	t.Helper()
	testenv.RequireRoot(t)
	at := t.TempDir()
	fs, err := mount.Memory("trivet:test", limit, o)
	must(t, err)
	must(t, fs.MoveTo(at))
	must(t, fs.Close())
	t.Cleanup(func() { must(t, mount.Unmount(at)) })
	return at
}

// fill writes to a file until ENOSPC, and returns the number of written bytes.
func fill(t *testing.T, path string) (n int64) {
	t.Helper()
	f, err := os.Create(path)
	must(t, err)
	defer f.Close()
	b := make([]byte, 64<<10)
	for {
		written, err := f.Write(b)
		n += int64(written)
		if errors.Is(err, unix.ENOSPC) {
			return n
		}
		must(t, err)
	}
}

// hasSizeAndAttributes reports whether a tmpfs has the size and the attributes.
func hasSizeAndAttributes(t *testing.T, at string, size int64, o mount.Options) bool {
	t.Helper()
	source := &mount.MemorySource{Name: "trivet:test", Size: size}
	shows, err := source.Shows(at)
	must(t, err)
	same, err := mount.HasAttributes(source, at, o)
	must(t, err)
	return shows && same
}

// TestMemory: a tmpfs has the limit, rounded up to pages, and the attributes of every tmpfs, and is recognized by its
// name, size and attributes.
func TestMemory(t *testing.T) {
	const size = 2<<20 - 1
	at := mountMemory(t, mount.MemoryFor(size), mount.Options{})
	if n := fill(t, filepath.Join(at, "file")); n != 2<<20 {
		t.Errorf("wrote %d bytes, want %d", n, 2<<20)
	}
	e, err := mount.OnPath(at)
	must(t, err)
	if !mount.IsMemory(e, "trivet:test") || mount.IsMemory(e, "trivet:other") || mount.IsMemory(nil, "trivet:test") {
		t.Errorf("IsMemory of %+v: want true only for the name trivet:test, and false for nil", e)
	}
	for _, word := range []string{"nosuid", "nodev"} {
		if !strings.Contains(e.Options, word) {
			t.Errorf("got options %q, want %s among them", e.Options, word)
		}
	}
	for _, tc := range []struct {
		name string
		size int64
		o    mount.Options
		want bool
	}{
		{"same size", size, mount.Options{}, true},
		{"same number of pages", size + 1, mount.Options{}, true},
		{"another size", size + 2, mount.Options{}, false},
		{"read-only", size, mount.Options{}.ReadOnly(), false},
	} {
		if same := hasSizeAndAttributes(t, at, tc.size, tc.o); same != tc.want {
			t.Errorf("%s: got %t, want %t", tc.name, same, tc.want)
		}
	}
}

// TestMemoryInodes: MemoryFor limits the number of files, because empty files need memory, too.
func TestMemoryInodes(t *testing.T) {
	for size, want := range map[int64]uint64{1: 1024, 64 << 20: 16384} {
		at := mountMemory(t, mount.MemoryFor(size), mount.Options{})
		st, err := mount.Statfs(at)
		must(t, err)
		if st.Files != want {
			t.Errorf("%d bytes: got %d inodes, want %d", size, st.Files, want)
		}
	}
}

// TestMemoryKernelInodes: without Inodes the default limit of the kernel applies, and a resize does not change it.
func TestMemoryKernelInodes(t *testing.T) {
	at := mountMemory(t, mount.MemoryLimit{Bytes: 1 << 20}, mount.Options{})
	before, err := mount.Statfs(at)
	must(t, err)
	must(t, mount.ResizeMemory(at, mount.MemoryLimit{Bytes: 2 << 20}))
	after, err := mount.Statfs(at)
	if err != nil || before.Files < 1<<16 || after.Files != before.Files || after.Blocks != 2*before.Blocks {
		t.Errorf("after the resize: got %d inodes and %d blocks, %v, want %d inodes and %d blocks", after.Files, after.Blocks, err, before.Files, 2*before.Blocks)
	}
}

// TestMemoryReadOnly: a tmpfs can be mounted read-only.
func TestMemoryReadOnly(t *testing.T) {
	at := mountMemory(t, mount.MemoryFor(1<<20), mount.Options{}.ReadOnly())
	if err := os.WriteFile(filepath.Join(at, "file"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("writing to a read-only tmpfs: got %v, want EROFS", err)
	}
	if !hasSizeAndAttributes(t, at, 1<<20, mount.Options{}.ReadOnly()) {
		t.Error("the tmpfs does not have the requested size and attributes")
	}
}

// TestMemoryClosed: closing a tmpfs that has no path removes it.
func TestMemoryClosed(t *testing.T) {
	testenv.RequireRoot(t)
	fs, err := mount.Memory("trivet:unseen", mount.MemoryFor(1<<20), mount.Options{})
	must(t, err)
	must(t, fs.Close())
	left, err := mount.Table(func(e *mount.Entry) bool { return mount.IsMemory(e, "trivet:unseen") })
	if err != nil || len(left) > 0 {
		t.Errorf("mounts after Close: got %v, %v, want none", left, err)
	}
}

// TestResizeMemory: a resize keeps the content, and fails if the content is larger.
func TestResizeMemory(t *testing.T) {
	at := mountMemory(t, mount.MemoryFor(1<<20), mount.Options{})
	file := filepath.Join(at, "file")
	fill(t, file)
	must(t, mount.ResizeMemory(at, mount.MemoryFor(64<<20)))
	if !hasSizeAndAttributes(t, at, 64<<20, mount.Options{}) {
		t.Error("the tmpfs does not have its new size")
	}
	if st, err := mount.Statfs(at); err != nil || st.Files != 16384 {
		t.Errorf("got %d inodes, %v, want 16384", st.Files, err)
	}
	if n := fill(t, filepath.Join(at, "more")); n != 63<<20 {
		t.Errorf("wrote %d more bytes, want %d", n, 63<<20)
	}
	if err := mount.ResizeMemory(at, mount.MemoryFor(1<<20)); !errors.Is(err, unix.EINVAL) {
		t.Errorf("resizing to less than the content: got %v, want EINVAL", err)
	}
	if info, err := os.Stat(file); err != nil || info.Size() != 1<<20 {
		t.Errorf("the file after the resizes: got %v, %v, want 1 MiB", info, err)
	}
	if err := mount.ResizeMemory(t.TempDir(), mount.MemoryFor(1<<20)); err == nil {
		t.Error("resizing a directory that is not a mount point: got no error, want one")
	}
}

// TestBelow: Below returns the mounts at and below a path, even if the path contains a symbolic link.
func TestBelow(t *testing.T) {
	at := mountMemory(t, mount.MemoryFor(1<<20), mount.Options{})
	inner := filepath.Join(at, "dir", "inner")
	must(t, os.MkdirAll(inner, 0o755))
	must(t, mount.Bind(filepath.Join(at, "dir"), inner, mount.Options{}))
	t.Cleanup(func() { must(t, mount.Unmount(inner)) })
	link := filepath.Join(t.TempDir(), "link")
	must(t, os.Symlink(filepath.Dir(at), link))
	for path, want := range map[string]int{
		at:                                     2,
		filepath.Join(link, filepath.Base(at)): 2,
		filepath.Join(at, "dir"):               1,
		inner:                                  1,
		filepath.Join(at, "di"):                0,
		filepath.Join(at, "missing", "path"):   0,
	} {
		if found, err := mount.Below(path); err != nil || len(found) != want {
			t.Errorf("%s: got %d mounts, %v, want %d", path, len(found), err, want)
		}
	}
}
