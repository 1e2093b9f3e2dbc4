package fsprobe_test

import (
	"io/fs"
	"os"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/fsprobe"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// TestFilesystems checks the results for known filesystems, and that the probes remove their files.
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
				t.Errorf("%s: %s: got %t, %v, want %t", tc.fsType, name, got, err, probe.want)
			}
		}
		if after := names(t, dir); len(after) != len(before) {
			t.Errorf("%s: files after the probes: got %v, want %v", tc.fsType, after, before)
		}
	}
}

// TestOwner checks the owner of a new file, and that the call does not change the user of later calls.
func TestOwner(t *testing.T) {
	testenv.RequireRoot(t)
	path := t.TempDir()
	dir := openRoot(t, path)
	for _, d := range []string{path, path + "/.."} { // the other users need access to the directory and its parent
		if err := os.Chmod(d, 0o777); err != nil {
			t.Fatal(err)
		}
	}
	for _, uid := range []int{54321, 0} {
		if owner, err := fsprobe.OwnerOf(dir, uid); err != nil || int(owner) != uid {
			t.Errorf("owner of a file created by user %d: got %d, %v, want %[1]d", uid, owner, err)
		}
	}
	if left := names(t, dir); len(left) > 0 {
		t.Errorf("files after OwnerOf: got %v, want none", left)
	}
}

// TestLocksOfOtherDirectory: LocksReach is false if the directories contain different files of the same name.
func TestLocksOfOtherDirectory(t *testing.T) {
	a, b := openRoot(t, t.TempDir()), openRoot(t, t.TempDir())
	if err := b.WriteFile("probe", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if reach, err := fsprobe.LocksReach(a, b); reach || err != nil {
		t.Errorf("got %t, %v, want false", reach, err)
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
