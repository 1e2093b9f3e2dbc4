package loop

import (
	"errors"
	"testing"

	"github.com/trivet-csi/trivet/volume"
)

// TestSection: a record with an unknown allocation is damaged.
func TestSection(t *testing.T) {
	for allocation, want := range map[allocation]error{thin: nil, thick: nil, "": volume.ErrDamaged, "Thin": volume.ErrDamaged} {
		if err := (&section{allocation}).Check(); !errors.Is(err, want) {
			t.Errorf("allocation %q: got %v, want %v", allocation, err, want)
		}
	}
}
