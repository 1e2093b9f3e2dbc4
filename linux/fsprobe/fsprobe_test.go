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
		path := testenv.Filesystem(t, tc.fsType, "320M")
		dir, err := os.OpenRoot(path)
		if err != nil {
			t.Fatal(err)
		}
		defer dir.Close()
		before := names(t, dir)
		for name, look := range map[string]struct {
			at   func(*os.Root) (bool, error)
			want bool
		}{
			"clones":    {fsprobe.Clones, tc.clones},
			"holes":     {fsprobe.ShowsHoles, true},
			"allocates": {fsprobe.Allocates, true},
			"locks":     {func(dir *os.Root) (bool, error) { return fsprobe.LocksReach(dir, dir) }, true},
		} {
			if got, err := look.at(dir); err != nil || got != look.want {
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
	dir, err := os.OpenRoot(path)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	for _, up := range []string{path, path + "/.."} {
		if err := os.Chmod(up, 0o777); err != nil {
			t.Fatal(err)
		}
	}
	for _, uid := range []int{54321, 0} {
		if owner, err := fsprobe.OwnerOf(dir, uid); err != nil || int(owner) != uid {
			t.Errorf("made by %d: %d, %v", uid, owner, err)
		}
	}
	if left := names(t, dir); len(left) > 0 {
		t.Errorf("%v", left)
	}
}

// TestOtherDirectory: a lock that is not seen does not reach.
func TestOtherDirectory(t *testing.T) {
	one, two := t.TempDir(), t.TempDir()
	a, err := os.OpenRoot(one)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	b, err := os.OpenRoot(two)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if err := b.WriteFile("probe", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if reach, err := fsprobe.LocksReach(a, b); reach || err != nil {
		t.Errorf("%t, %v", reach, err)
	}
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
