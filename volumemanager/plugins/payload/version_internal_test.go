package payload

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/mount"
	dirtree "github.com/trivet-csi/trivet/linux/tree"
)

// TestRemoveMounted: what is mounted in a version after the mount table was looked at is
// left alone. Here the path by which it is looked for leads elsewhere by then.
func TestRemoveMounted(t *testing.T) {
	testenv.RequireRoot(t)
	dir, other := t.TempDir(), t.TempDir()
	precious := filepath.Join(other, "precious")
	must(t, os.WriteFile(precious, nil, 0o600))
	was, is := filepath.Join(dir, "was"), filepath.Join(dir, "is")
	below := filepath.Join(is, "..old", "below")
	must(t, os.MkdirAll(filepath.Join(was, "..old", "below"), 0o755))
	root, err := os.OpenRoot(was)
	must(t, err)
	defer root.Close()
	must(t, os.Rename(was, is))
	must(t, mount.Bind(other, below, mount.Options{}))
	if err := removeAll(t.Context(), root, "..old"); !errors.Is(err, dirtree.ErrMounted) {
		t.Errorf("with a mount: %v", err)
	}
	if _, err := os.Stat(precious); err != nil {
		t.Error(err)
	}
	must(t, mount.Unmount(below))
	must(t, removeAll(t.Context(), root, "..old"))
	if left, err := os.ReadDir(is); err != nil || len(left) > 0 {
		t.Errorf("there still is %v, %v", left, err)
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
