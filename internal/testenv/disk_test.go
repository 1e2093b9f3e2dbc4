package testenv_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// TestPulledDisk: a disk that was pulled is not removed again when its test ends, because another disk may
// have its device.
func TestPulledDisk(t *testing.T) {
	testenv.RequireRoot(t)
	image := filepath.Join(t.TempDir(), "another")
	if err := os.WriteFile(image, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	for range 20 {
		var pulled, another string
		t.Run("pulled", func(sub *testing.T) {
			device, _, pull := testenv.Disk(sub, 1<<20)
			pull()
			pulled, another = device, testenv.PlugIn(t, image)
		})
		if pulled != another { // another process of this machine has it
			continue
		}
		if have := testenv.Run(t, "losetup", "-n", "-O", "BACK-FILE", another); strings.TrimSpace(have) != image {
			t.Errorf("%s has %q", another, have)
		}
		return
	}
	t.Error("no device was used twice")
}
