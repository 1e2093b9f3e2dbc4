package localvolume

import (
	"testing"

	"github.com/trivet-csi/trivet/test/frozen"
)

// TestFrozenRecords: an interrupted mkfs of an earlier version is recognized by its record.
func TestFrozenRecords(t *testing.T) {
	frozen.JSON[record]("records").Test(t, map[string]record{
		"formatting": {Version: recordVersion, Boot: "0a1b2c3d-0123-4567-89ab-0123456789ab", Device: 0x700, Sequence: 12},
	})
}
