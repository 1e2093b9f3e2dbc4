package testenv_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// TestPulledDisk: a disk that was pulled is not taken away again when its test ends, for
// its device may be another's by then.
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
		if pulled != another { // somebody else on this machine has it
			continue
		}
		if have := testenv.Run(t, "losetup", "-n", "-O", "BACK-FILE", another); strings.TrimSpace(have) != image {
			t.Errorf("%s has %q", another, have)
		}
		return
	}
	t.Error("no device was given out twice")
}
