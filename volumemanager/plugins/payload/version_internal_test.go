package payload

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/mount"
	dirtree "github.com/trivet-csi/trivet/linux/tree"
	"github.com/trivet-csi/trivet/volumemanager/plugins/plugintest"
)

var must = plugintest.Must

// TestRemoveMounted: removeAll does not remove a mount that appears in a version after removeAll has read
// the mount table. The test simulates this by renaming the directory, so that the mount table has no
// mount below the name that removeAll knows.
func TestRemoveMounted(t *testing.T) {
	testenv.RequireRoot(t)
	dir, other := t.TempDir(), t.TempDir()
	precious := filepath.Join(other, "precious")
	must(t, os.WriteFile(precious, nil, 0o600))
	before, after := filepath.Join(dir, "before"), filepath.Join(dir, "after")
	below := filepath.Join(after, "..old", "below")
	must(t, os.MkdirAll(filepath.Join(before, "..old", "below"), 0o755))
	root := plugintest.Value(os.OpenRoot(before))(t)
	defer root.Close()
	must(t, os.Rename(before, after))
	must(t, mount.Bind(other, below, mount.Options{}))
	if err := removeAll(t.Context(), root, "..old"); !errors.Is(err, dirtree.ErrMounted) {
		t.Errorf("removing a version with a mount: got %v, want ErrMounted", err)
	}
	plugintest.WantText(t, precious, "")
	must(t, mount.Unmount(below))
	must(t, removeAll(t.Context(), root, "..old"))
	plugintest.WantEntries(t, after, 0)
}
