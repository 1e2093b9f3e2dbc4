package fsprobe_test

import (
	"io/fs"
	"os"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/fsprobe"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// TestFilesystems checks the results for known filesystems, and that no file is left.
func TestFilesystems(t *testing.T) {
	for _, tc := range []struct {
		fsType string
		clones bool
	}{{"xfs", true}, {"ext4", false}} {
		dir := openRoot(t, testenv.Filesystem(t, tc.fsType, "320M"))
		before := names(t, dir)
		for name, probe := range map[string]struct {
			run  func(*os.Root) (bool, error)
			want bool
		}{
			"clones":    {fsprobe.Clones, tc.clones},
			"holes":     {fsprobe.ShowsHoles, true},
			"allocates": {fsprobe.Allocates, true},
			"locks":     {func(dir *os.Root) (bool, error) { return fsprobe.LocksReach(dir, dir) }, true},
		} {
			if got, err := probe.run(dir); err != nil || got != probe.want {
				t.Errorf("%s %s: %t, %v", tc.fsType, name, got, err)
			}
		}
		if after := names(t, dir); len(after) != len(before) {
			t.Errorf("%s: %v became %v", tc.fsType, before, after)
		}
	}
}

// TestOwner checks the owner of a new file, and that the caller keeps its own user.
func TestOwner(t *testing.T) {
	testenv.RequireRoot(t)
	path := t.TempDir()
	dir := openRoot(t, path)
	for _, up := range []string{path, path + "/.."} {
		if err := os.Chmod(up, 0o777); err != nil {
			t.Fatal(err)
		}
	}
	for _, uid := range []int{54321, 0} {
		if owner, err := fsprobe.OwnerOf(dir, uid); err != nil || int(owner) != uid {
			t.Errorf("created by %d: owner %d, %v", uid, owner, err)
		}
	}
	if left := names(t, dir); len(left) > 0 {
		t.Errorf("%v are left", left)
	}
}

// TestLocksOfOtherDirectory: a lock on another file is not effective.
func TestLocksOfOtherDirectory(t *testing.T) {
	a, b := openRoot(t, t.TempDir()), openRoot(t, t.TempDir())
	if err := b.WriteFile("probe", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if reach, err := fsprobe.LocksReach(a, b); reach || err != nil {
		t.Errorf("%t, %v", reach, err)
	}
}

func openRoot(t *testing.T, path string) *os.Root {
	t.Helper()
	dir, err := os.OpenRoot(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dir.Close() })
	return dir
}

func names(t *testing.T, dir *os.Root) []string {
	t.Helper()
	entries, err := fs.ReadDir(dir.FS(), ".")
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, e := range entries {
		all = append(all, e.Name())
	}
	return all
}
