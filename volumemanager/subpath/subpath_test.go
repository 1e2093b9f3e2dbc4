package subpath_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/subpath"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Dir(path), 0o755))
	must(t, os.WriteFile(path, []byte(text), 0o644))
}

func wantText(t *testing.T, path, want string) {
	t.Helper()
	if b, err := os.ReadFile(path); err != nil || string(b) != want {
		t.Errorf("content of %s: got %q, error %v; want %q", path, b, err, want)
	}
}

// newVolume returns the directory of a volume, and a target for Bind that is unmounted when the test
// ends.
func newVolume(t *testing.T) (volume, target string) {
	t.Helper()
	testenv.RequireRoot(t)
	base := t.TempDir()
	volume, target = base+"/volume", base+"/volume-subpaths/data/main/0"
	must(t, os.Mkdir(volume, 0o755))
	t.Cleanup(func() {
		must(t, subpath.Unbind(target))
		if _, err := os.Lstat(target); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("Unbind did not remove the target: Lstat returned %v", err)
		}
	})
	return volume, target
}

// TestBindDirectory: Bind mounts a directory, Unbind unmounts it, and both can be repeated.
func TestBindDirectory(t *testing.T) {
	volume, target := newVolume(t)
	write(t, volume+"/a/b/file", "text")
	for range 2 {
		must(t, subpath.Bind(t.Context(), volume, "a/b", target, false))
		wantText(t, target+"/file", "text")
	}
	write(t, target+"/other", "written")
	wantText(t, volume+"/a/b/other", "written")
	must(t, subpath.Unbind(target))
	must(t, subpath.Unbind(target))
	wantText(t, volume+"/a/b/file", "text")
}

// TestBindFile: Bind mounts a file read-only, and replaces a target that is a directory.
func TestBindFile(t *testing.T) {
	volume, target := newVolume(t)
	write(t, volume+"/a/file", "text")
	must(t, os.MkdirAll(target, 0o750)) // the subPath was a directory before
	must(t, subpath.Bind(t.Context(), volume, "a/file", target, true))
	wantText(t, target, "text")
	if err := os.WriteFile(target, nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("write to a read-only subPath: got error %v, want EROFS", err)
	}
}

// TestBindMissing: Bind creates missing directories with the mode of the volume's root.
func TestBindMissing(t *testing.T) {
	volume, target := newVolume(t)
	must(t, os.Chown(volume, 0, 4711))
	must(t, os.Chmod(volume, 0o770|fs.ModeSetgid))
	must(t, os.Mkdir(volume+"/real", 0o700))
	must(t, os.Symlink("real", volume+"/link"))
	must(t, subpath.Bind(t.Context(), volume, "link/new/./newer/", target, false))
	for _, path := range []string{"real/new", "real/new/newer"} {
		if info, err := os.Stat(volume + "/" + path); err != nil || info.Mode() != 0o770|fs.ModeSetgid|fs.ModeDir {
			t.Errorf("%s: got %v, error %v; want a directory with the mode of the volume's root", path, info, err)
		}
	}
	write(t, target+"/file", "text")
	wantText(t, volume+"/real/new/newer/file", "text")
}

// TestBindOutside: Bind refuses a subPath that leads out of the volume or passes through a file or a
// dangling link, and creates nothing outside the volume.
func TestBindOutside(t *testing.T) {
	volume, target := newVolume(t)
	outside := t.TempDir()
	must(t, os.Symlink(outside, volume+"/absolute"))
	must(t, os.Symlink("../"+filepath.Base(filepath.Dir(volume)), volume+"/relative"))
	must(t, os.Symlink("nowhere", volume+"/dangling"))
	write(t, volume+"/file", "text")
	for _, tc := range []struct{ subPath, want string }{
		{"absolute", "leads out"},
		{"absolute/new", "leads out"},
		{"relative", "leads out"},
		{"dangling", "remove the file or link"},
		{"dangling/new", "remove the file or link"},
		{"file/new", "remove the file or link"},
	} {
		err := subpath.Bind(t.Context(), volume, tc.subPath, target, false)
		if err == nil || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), tc.subPath) {
			t.Errorf("subPath %q: got error %v, want one with the subPath and %q", tc.subPath, err, tc.want)
		}
	}
	for _, invalidPath := range []string{"/etc", "../x", "a/../../x", "new/../new", "new/..", "", "a\x00b"} {
		var invalid *plugins.InvalidError
		if err := subpath.Bind(t.Context(), volume, invalidPath, target, false); !errors.As(err, &invalid) {
			t.Errorf("subPath %q: got error %v, want an InvalidError", invalidPath, err)
		}
	}
	if entries, err := os.ReadDir(outside); err != nil || len(entries) > 0 {
		t.Errorf("directory outside the volume: got entries %v, error %v; want none", entries, err)
	}
}

// TestBindWhileSwapped: while a pod repeatedly swaps a directory with a symbolic link that leads out of
// the volume, nothing outside the volume is bound or created.
func TestBindWhileSwapped(t *testing.T) {
	volume, target := newVolume(t)
	outside := filepath.Dir(volume) + "/outside"
	write(t, outside+"/sub/secret", "secret")
	write(t, volume+"/dir/sub/own", "own")
	must(t, os.Symlink("../outside", volume+"/link"))
	ctx, cancel := context.WithCancel(t.Context())
	swapped := make(chan int)
	go func() {
		n := 0
		for ; ctx.Err() == nil; n++ {
			_ = unix.Renameat2(unix.AT_FDCWD, volume+"/dir", unix.AT_FDCWD, volume+"/link", unix.RENAME_EXCHANGE)
		}
		swapped <- n
	}()
	bound, refused := 0, 0
	for i := 0; i < 2000 || bound == 0 || refused == 0; i++ {
		subPath := "dir/sub"
		if i%2 == 1 {
			subPath = "dir/sub/new"
		}
		if err := subpath.Bind(t.Context(), volume, subPath, target, false); err != nil {
			refused++
			continue
		}
		bound++
		if _, err := os.Stat(target + "/secret"); err == nil {
			t.Fatal("a directory outside the volume was bound")
		}
		must(t, subpath.Unbind(target))
	}
	cancel()
	t.Logf("%d bound, %d refused, %d swaps", bound, refused, <-swapped)
	if _, err := os.Stat(outside + "/sub/new"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a directory was created outside the volume: %v", err)
	}
}

// TestBindAgain: an existing mount stays, even if subPath does not exist any more.
func TestBindAgain(t *testing.T) {
	volume, target := newVolume(t)
	write(t, volume+"/a/file", "text")
	must(t, subpath.Bind(t.Context(), volume, "a", target, false))
	before, err := mount.OnPath(target)
	must(t, err)
	must(t, os.Rename(volume+"/a", volume+"/b"))
	must(t, subpath.Bind(t.Context(), volume, "a", target, false))
	after, err := mount.OnPath(target)
	must(t, err)
	if before.ID != after.ID {
		t.Error("the subPath was mounted again")
	}
	wantText(t, target+"/file", "text")
}
