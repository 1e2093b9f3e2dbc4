package driver

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// TestCheckHangs: a check counts as failed if it has not returned some time after its end. Then another volume has its turn.
func TestCheckHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newChecks(t.Context(), nil, nil, []pool.Config{{Name: "p"}})
		failed := func() float64 {
			c.mu.Lock()
			defer c.mu.Unlock()
			return c.counts[countedCheck{"p", CheckFailed}]
		}
		ctx, cancel := context.WithCancel(t.Context())
		passed := 0
		pass := func() { passed++ }
		hangs := c.watch(ctx, CheckResult{Pool: "p", Result: CheckFailed}, pass)
		ends := c.watch(ctx, CheckResult{Pool: "p", Result: CheckFailed}, pass)
		<-time.After(2 * hangTime)
		cancel()
		<-time.After(hangTime - time.Second)
		ends()
		if got := failed(); got != 0 {
			t.Errorf("got %v failed checks before the time is over, want none", got)
		}
		<-time.After(2 * time.Second)
		synctest.Wait()
		if got := failed(); got != 1 || passed != 1 {
			t.Errorf("got %v failed checks and %d turns that were passed, want one", got, passed)
		}
		hangs()
	})
}

// TestCheckTurn: the checks of volumes wait for each other, but not for ever for one that does not return.
func TestCheckTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newChecks(t.Context(), nil, nil, nil)
		began := time.Now()
		hangs, err := c.takeTurn(t.Context(), volume.ID{Name: "hangs"})
		must(t, err)
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Hour, errCheckEnds)
		defer cancel()
		if _, err := c.takeTurn(ctx, volume.ID{Name: "in a window"}); !errors.Is(err, errNotBegun) || !errors.Is(err, errCheckEnds) {
			t.Errorf("got error %v at the end of a window, want that the check has not begun", err)
		}
		ends, err := c.takeTurn(t.Context(), volume.ID{Name: "ends"})
		must(t, err)
		if waited := time.Since(began); waited != turnTime {
			t.Errorf("got the turn after %v, want %v", waited, turnTime)
		}
		hangs() // it returns, and does not end the turn of the other check
		next := make(chan struct{})
		go func() {
			defer close(next)
			pass, err := c.takeTurn(t.Context(), volume.ID{Name: "next"})
			if err != nil {
				t.Error(err)
				return
			}
			pass()
		}()
		synctest.Wait()
		select {
		case <-next:
			t.Error("got two turns at the same time, want one")
		default:
		}
		ends()
		<-next
	})
}

// TestCheckOnce: a volume is not checked again while a check of it has not returned, so that an old result does not replace a new one.
func TestCheckOnce(t *testing.T) {
	c := newChecks(t.Context(), nil, nil, nil)
	t.Cleanup(c.Close)
	v, other := volume.ID{Name: "v"}, volume.ID{Name: "other"}
	end, err := c.begin(v)
	must(t, err)
	if _, err := c.begin(v); !errors.Is(err, volume.ErrPending) {
		t.Errorf("a second check: got error %v, want %v", err, volume.ErrPending)
	}
	endOther, err := c.begin(other)
	must(t, err)
	endOther()
	end()
	end, err = c.begin(v)
	must(t, err)
	end()
}
