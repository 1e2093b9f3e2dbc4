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
		t.Errorf("%d root mounts became %d", before, after)
	}
}

func TestAt(t *testing.T) {
	dir := testenv.Filesystem(t, "ext4", "64M")
	at, err := mount.At(dir)
	if err != nil || at.Mountpoint != dir || at.FSType != "ext4" {
		t.Errorf("%+v, %v", at, err)
	}
	above, err := mount.At(filepath.Dir(dir))
	if err != nil || above.ID == at.ID {
		t.Errorf("its parent: %+v, %v", above, err)
	}
	if _, err := mount.At(filepath.Join(dir, "none")); err == nil {
		t.Error("a missing path has a mount")
	}
}
