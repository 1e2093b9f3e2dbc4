package loop

import (
	"errors"
	"testing"

	"github.com/trivet-csi/trivet/volume"
)

func TestSection(t *testing.T) {
	for allocation, ok := range map[allocation]bool{thin: true, thick: true, "": false, "Thin": false} {
		if err := (&section{allocation}).Check(); (err == nil) != ok || err != nil && !errors.Is(err, volume.ErrDamaged) {
			t.Errorf("%q: %v", allocation, err)
		}
	}
}
