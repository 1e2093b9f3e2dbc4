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

// TestClaimBehindHungPools: a pool claims its UUID even if the disks of pools before it hang. A copy of a
// pool that has claimed its UUID is refused.
func TestClaimBehindHungPools(t *testing.T) {
	s := NewSet(Forms, []Config{{Name: "hung"}, {Name: "hung-too"}, {Name: "good"}, {Name: "copy"}}, nil)
	good, copied := s.pools[2], s.pools[3]
	if err := s.claim(good, "uuid"); err != nil {
		t.Errorf("claim behind hung pools: %v", err)
	}
	if err := s.claim(copied, "uuid"); !errors.Is(err, volume.ErrPrecondition) {
		t.Errorf("claim of a copy: got %v, want ErrPrecondition", err)
	}
}

// TestReadyBesideHangingPool: a set becomes ready after the first attempt to open each pool, or after
// the patience if a disk hangs.
func TestReadyBesideHangingPool(t *testing.T) {
	s := NewSet(Forms, []Config{{Name: "hangs"}}, nil)
	go s.becomeReady(10 * time.Millisecond)
	if err := s.AwaitReady(t.Context()); err != nil || !s.Ready() {
		t.Errorf("beside a hanging pool: got ready %t, %v; want true", s.Ready(), err)
	}

	s = NewSet(Forms, []Config{{Name: "slow"}}, nil)
	go s.becomeReady(time.Hour)
	if s.Ready() {
		t.Error("ready before the first attempt to open the pool has ended")
	}
	s.pools[0].attempted.close()
	if err := s.AwaitReady(t.Context()); err != nil {
		t.Error(err)
	}
}

// somewhere is a section whose data is at the place "somewhere".
type somewhere struct{ Section }

func (somewhere) String() string { return "somewhere" }

// TestStillOpening: while a pool is being opened, calls for it fail with the name of the pool, and
// AwaitAttempt waits until the attempt has ended.
func TestStillOpening(t *testing.T) {
	s := NewSet(Forms, []Config{{Name: "slow", Section: somewhere{}}}, nil)
	_, err := s.Named("slow")
	if want := `pool "slow", at somewhere, is still being opened`; !errors.Is(err, volume.ErrUnavailable) || !strings.Contains(err.Error(), want) {
		t.Errorf("got %v, want ErrUnavailable with %q", err, want)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if AwaitAttempt(ended, err) {
		t.Error("with an ended context: AwaitAttempt returned true before the attempt has ended")
	}
	waited := make(chan bool)
	go func() { waited <- AwaitAttempt(t.Context(), fmt.Errorf("list: %w", err)) }()
	s.pools[0].attempted.close()
	if !<-waited {
		t.Error("after the attempt: AwaitAttempt returned false")
	}
	if AwaitAttempt(t.Context(), volume.ErrUnavailable) || AwaitAttempt(t.Context(), nil) {
		t.Error("AwaitAttempt returned true for an error with another cause")
	}
}
