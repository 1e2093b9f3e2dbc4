package freeze

import (
	"testing"

	"github.com/trivet-csi/trivet/test/frozen"
)

// TestFrozenNotes: the next driver reads the notes of a killed driver and its guardian.
func TestFrozenNotes(t *testing.T) {
	frozen.JSON[[]string]("notes").Test(t, map[string][]string{"note": {"loop:ssd.0a1b2c3d:pvc-1", "loop:ssd.0a1b2c3d:pvc-2"}})
	frozen.List(t, "files", []string{notePrefix})
}
