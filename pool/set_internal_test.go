package pool

import (
	"errors"
	"testing"

	"github.com/trivet-csi/trivet/volume"
)

// TestClaimBehindHungPools: pools whose disks hang are waited for once, all of
// them together, and not for ever; a copy of one that has claimed is refused.
func TestClaimBehindHungPools(t *testing.T) {
	s := NewSet([]Config{{Name: "hung"}, {Name: "hung-too"}, {Name: "good"}, {Name: "copy"}}, nil, true)
	good, copied := s.pools[2], s.pools[3]
	if err := s.claim(good, "uuid"); err != nil {
		t.Errorf("behind hung pools: %v", err)
	}
	if err := s.claim(copied, "uuid"); !errors.Is(err, volume.ErrPrecondition) {
		t.Errorf("a copy: %v", err)
	}
}
