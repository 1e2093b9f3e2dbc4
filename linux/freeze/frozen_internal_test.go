package freeze

import (
	"encoding/json"
	"testing"

	"github.com/trivet-csi/trivet/test/frozen"
)

// TestFrozenNotes: the next driver reads the notes of a killed driver and its guardian.
func TestFrozenNotes(t *testing.T) {
	frozen.Format[note]{Dir: "notes", Read: parseNote, Write: func(n note) ([]byte, error) { return json.Marshal(n) }}.Test(t, map[string]note{
		"note": {Version: noteVersion, Filesystems: []string{"loop:ssd.0a1b2c3d:pvc-1", "loop:ssd.0a1b2c3d:pvc-2"}},
	})
	frozen.List(t, "files", []string{notePrefix})
}
