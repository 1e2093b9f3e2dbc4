package mount_test

import (
	"path/filepath"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/mount"
)

// TestProbe: Probe succeeds for root and leaves no mount.
func TestProbe(t *testing.T) {
	testenv.RequireRoot(t)
	count := func() int {
		all, err := mount.Table(func(e *mount.Entry) bool { return e.Mountpoint == "/" })
		must(t, err)
		return len(all)
	}
	before := count()
	must(t, mount.Probe())
	if after := count(); after != before {
		t.Errorf("root mounts after Probe: got %d, want %d", after, before)
	}
}

// TestAt: At finds the mount at a path or above it.
func TestAt(t *testing.T) {
	dir := testenv.Filesystem(t, "ext4", "64M")
	at, err := mount.At(dir)
	if err != nil || at.Mountpoint != dir || at.FSType != "ext4" {
		t.Errorf("At of a mount point: got %+v, %v, want ext4 at %s", at, err, dir)
	}
	above, err := mount.At(filepath.Dir(dir))
	if err != nil || above.ID == at.ID {
		t.Errorf("At of the parent of a mount point: got %+v, %v, want another mount", above, err)
	}
	if _, err := mount.At(filepath.Join(dir, "none")); err == nil {
		t.Error("At of a missing path: got no error, want one")
	}
}
