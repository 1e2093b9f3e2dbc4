package claim

import (
	"testing"

	"github.com/trivet-csi/trivet/test/frozen"
)

// TestFrozenAnnotations: the annotations of the records in the store keep their names and values.
func TestFrozenAnnotations(t *testing.T) {
	frozen.List(t, "annotations", []string{provisionedBy, storageProvisioner, fromManifest, reclaim + "=" + reclaimBegun, reclaim + "=" + reclaimDone})
}
