package pool

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/volume"
)

// TestClaimBehindHungPools: the wait for all pools whose disks hang is limited. A copy of a pool
// that has claimed its UUID is refused.
func TestClaimBehindHungPools(t *testing.T) {
	s := NewSet(Forms, []Config{{Name: "hung"}, {Name: "hung-too"}, {Name: "good"}, {Name: "copy"}}, nil)
	good, copied := s.pools[2], s.pools[3]
	if err := s.claim(good, "uuid"); err != nil {
		t.Errorf("behind hung pools: %v", err)
	}
	if err := s.claim(copied, "uuid"); !errors.Is(err, volume.ErrPrecondition) {
		t.Errorf("a copy: %v", err)
	}
}

// TestReadyBesideHangingPool: the wait for a pool whose disk hangs is limited.
func TestReadyBesideHangingPool(t *testing.T) {
	s := NewSet(Forms, []Config{{Name: "hangs"}}, nil)
	go s.becomeReady(10 * time.Millisecond)
	if err := s.AwaitReady(t.Context()); err != nil || !s.Ready() {
		t.Errorf("ready %t: %v", s.Ready(), err)
	}

	s = NewSet(Forms, []Config{{Name: "was tried"}}, nil)
	go s.becomeReady(time.Hour)
	if s.Ready() {
		t.Error("ready before the pool was tried")
	}
	s.pools[0].attempted.close()
	if err := s.AwaitReady(t.Context()); err != nil {
		t.Error(err)
	}
}

// somewhere is a section that describes the place of its pool's data.
type somewhere struct{ Section }

func (somewhere) String() string { return "somewhere" }

// TestStillOpening: a call for a pool that is being opened can wait for that, and its error names
// the pool.
func TestStillOpening(t *testing.T) {
	s := NewSet(Forms, []Config{{Name: "slow", Section: somewhere{}}}, nil)
	_, err := s.Named("slow")
	if want := `pool "slow", at somewhere, is still being opened`; !errors.Is(err, volume.ErrUnavailable) || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if AwaitAttempt(ended, err) {
		t.Error("tried before it was")
	}
	waited := make(chan bool)
	go func() { waited <- AwaitAttempt(t.Context(), fmt.Errorf("list: %w", err)) }()
	s.pools[0].attempted.close()
	if !<-waited {
		t.Error("not told that it was tried")
	}
	if AwaitAttempt(t.Context(), volume.ErrUnavailable) || AwaitAttempt(t.Context(), nil) {
		t.Error("waited for no pool")
	}
}
