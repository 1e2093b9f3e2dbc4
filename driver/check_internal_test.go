package driver

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/trivet-csi/trivet/pool"
)

// TestCheckHangs: a check counts as failed if it has not returned some time after its end.
func TestCheckHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newChecks(t.Context(), nil, nil, []pool.Config{{Name: "p"}})
		failed := func() float64 {
			c.mu.Lock()
			defer c.mu.Unlock()
			return c.counts[countedCheck{"p", CheckFailed}]
		}
		ctx, cancel := context.WithCancel(t.Context())
		hangs := c.watch(ctx, CheckResult{Pool: "p", Result: CheckFailed})
		ends := c.watch(ctx, CheckResult{Pool: "p", Result: CheckFailed})
		<-time.After(2 * hangTime)
		cancel()
		<-time.After(hangTime - time.Second)
		ends()
		if got := failed(); got != 0 {
			t.Errorf("got %v failed checks before the time is over, want none", got)
		}
		<-time.After(2 * time.Second)
		synctest.Wait()
		if got := failed(); got != 1 {
			t.Errorf("got %v failed checks, want one", got)
		}
		hangs()
	})
}
