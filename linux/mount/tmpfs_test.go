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

// mountedMemory mounts a new filesystem in memory until the test ends.
func mountedMemory(t *testing.T, limit mount.MemoryLimit, o mount.Options) string {
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

// fill writes to a file until ENOSPC and returns the number of bytes.
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

// isMemoryAs reports whether a filesystem in memory has a size and attributes.
func isMemoryAs(t *testing.T, at string, size int64, o mount.Options) bool {
	t.Helper()
	source := &mount.MemorySource{Name: "trivet:test", Size: size}
	shows, err := source.Shows(at)
	must(t, err)
	same, err := mount.HasAttributes(source, at, o)
	must(t, err)
	return shows && same
}

func TestMemory(t *testing.T) {
	const size = 2<<20 - 1
	at := mountedMemory(t, mount.MemoryFor(size), mount.Options{})
	if n := fill(t, filepath.Join(at, "file")); n != 2<<20 {
		t.Errorf("%d bytes were written", n)
	}
	e, err := mount.OnPath(at)
	must(t, err)
	if !mount.IsMemory(e, "trivet:test") || mount.IsMemory(e, "trivet:other") || mount.IsMemory(nil, "trivet:test") {
		t.Errorf("%+v", e)
	}
	for _, word := range []string{"nosuid", "nodev"} {
		if !strings.Contains(e.Options, word) {
			t.Errorf("options %q lack %s", e.Options, word)
		}
	}
	for _, tc := range []struct {
		name string
		size int64
		o    mount.Options
		want bool
	}{
		{"the same", size, mount.Options{}, true},
		{"the same pages", size + 1, mount.Options{}, true},
		{"another size", size + 2, mount.Options{}, false},
		{"read-only", size, mount.Options{}.ReadOnly(), false},
	} {
		if same := isMemoryAs(t, at, tc.size, tc.o); same != tc.want {
			t.Errorf("%s: %t", tc.name, same)
		}
	}
}

// TestMemoryInodes: the number of files is limited, because empty files need memory too.
func TestMemoryInodes(t *testing.T) {
	for size, want := range map[int64]uint64{1: 1024, 64 << 20: 16384} {
		at := mountedMemory(t, mount.MemoryFor(size), mount.Options{})
		st, err := mount.Statfs(at)
		must(t, err)
		if st.Files != want {
			t.Errorf("%d bytes have %d inodes, want %d", size, st.Files, want)
		}
	}
}

// TestMemoryKernelInodes: without Inodes the limit of the kernel applies, also after a resize.
func TestMemoryKernelInodes(t *testing.T) {
	at := mountedMemory(t, mount.MemoryLimit{Bytes: 1 << 20}, mount.Options{})
	before, err := mount.Statfs(at)
	must(t, err)
	must(t, mount.ResizeMemory(at, mount.MemoryLimit{Bytes: 2 << 20}))
	after, err := mount.Statfs(at)
	if err != nil || before.Files < 1<<16 || after.Files != before.Files || after.Blocks != 2*before.Blocks {
		t.Errorf("%d inodes and %d blocks, then %d and %d, %v", before.Files, before.Blocks, after.Files, after.Blocks, err)
	}
}

func TestMemoryReadOnly(t *testing.T) {
	at := mountedMemory(t, mount.MemoryFor(1<<20), mount.Options{}.ReadOnly())
	if err := os.WriteFile(filepath.Join(at, "file"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("writing: %v", err)
	}
	if !isMemoryAs(t, at, 1<<20, mount.Options{}.ReadOnly()) {
		t.Error("the mount does not have the requested options")
	}
}

// TestMemoryLeavesNothing: closing a filesystem that was not moved removes it.
func TestMemoryLeavesNothing(t *testing.T) {
	testenv.RequireRoot(t)
	fs, err := mount.Memory("trivet:unseen", mount.MemoryFor(1<<20), mount.Options{})
	must(t, err)
	must(t, fs.Close())
	left, err := mount.Table(func(e *mount.Entry) bool { return mount.IsMemory(e, "trivet:unseen") })
	if err != nil || len(left) > 0 {
		t.Errorf("%v, %v", left, err)
	}
}

// TestResizeMemory: a resize keeps the content, and fails if the content is larger.
func TestResizeMemory(t *testing.T) {
	at := mountedMemory(t, mount.MemoryFor(1<<20), mount.Options{})
	file := filepath.Join(at, "file")
	fill(t, file)
	must(t, mount.ResizeMemory(at, mount.MemoryFor(64<<20)))
	if !isMemoryAs(t, at, 64<<20, mount.Options{}) {
		t.Error("the filesystem does not have its new size")
	}
	if st, err := mount.Statfs(at); err != nil || st.Files != 16384 {
		t.Errorf("%d inodes, %v", st.Files, err)
	}
	if n := fill(t, filepath.Join(at, "more")); n != 63<<20 {
		t.Errorf("%d more bytes were written", n)
	}
	if err := mount.ResizeMemory(at, mount.MemoryFor(1<<20)); !errors.Is(err, unix.EINVAL) {
		t.Errorf("smaller than the content: %v", err)
	}
	if info, err := os.Stat(file); err != nil || info.Size() != 1<<20 {
		t.Errorf("%v, %v", info, err)
	}
	if err := mount.ResizeMemory(t.TempDir(), mount.MemoryFor(1<<20)); err == nil {
		t.Error("a directory that is not a mount point was resized")
	}
}

// TestBelow: Below returns the mounts at and below a path, also for a path with a link.
func TestBelow(t *testing.T) {
	at := mountedMemory(t, mount.MemoryFor(1<<20), mount.Options{})
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
			t.Errorf("%s: %d mounts, %v", path, len(found), err)
		}
	}
}
