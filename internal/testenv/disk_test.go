package testenv_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// TestPulledDisk: the clean-up of a disk that was already removed does not remove another disk that now uses the
// same device.
func TestPulledDisk(t *testing.T) {
	testenv.RequireRoot(t)
	image := filepath.Join(t.TempDir(), "other")
	if err := os.WriteFile(image, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 20 {
		var pulled, other string
		t.Run("pulled", func(sub *testing.T) {
			device, _, pull := testenv.Disk(sub, 1<<20)
			pull()
			pulled, other = device, testenv.PlugIn(t, image) // the other disk remains until the outer test ends
		})
		if pulled != other { // another process uses the pulled device
			continue
		}
		if got := testenv.Run(t, "losetup", "-n", "-O", "BACK-FILE", other); strings.TrimSpace(got) != image {
			t.Errorf("%s: got image %q, want %q", other, got, image)
		}
		return
	}
	t.Error("in 20 attempts, no other disk got the device of a pulled disk")
}

// TestPlugInAfterThickVolume: a disk supports discards, although those of its loop device were disabled for an
// earlier image.
func TestPlugInAfterThickVolume(t *testing.T) {
	device, image, pull := testenv.Disk(t, 1<<20)
	limit := func(device string) string { return "/sys/block/" + filepath.Base(device) + "/queue/discard_max_bytes" }
	if err := os.WriteFile(limit(device), []byte("0"), 0); err != nil {
		t.Fatal(err)
	}
	pull()
	again := testenv.PlugIn(t, image)
	if b, err := os.ReadFile(limit(again)); err != nil || string(b) == "0\n" {
		t.Errorf("discard_max_bytes of %s, after %s without discards: got %q, %v, want more than 0", again, device, b, err)
	}
	testenv.Run(t, "blkdiscard", again)
}
