package router

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

// TestUnconfirmedExpires: calls that are not retried are removed after unconfirmedTime, and a call that is
// retried is kept.
func TestUnconfirmedExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &node{name: "a"}
		u := unconfirmed{calls: map[string]call{}}
		for range 48 { // every five minutes, the longest interval of orchestrators
			for i := range 100 {
				u.record(fmt.Sprint(time.Now(), i), a, context.DeadlineExceeded)
			}
			u.record("v", a, context.DeadlineExceeded)
			time.Sleep(5 * time.Minute)
		}
		// unconfirmedTime contains 12 rounds of 100 calls. The call v is retried.
		if n := len(u.calls); n > 12*100+1 {
			t.Errorf("after four hours: got %d recorded calls, want at most %d", n, 12*100+1)
		}
		if u.node([]*node{a}, "v") != a {
			t.Error("the retried call was removed")
		}
	})
}
