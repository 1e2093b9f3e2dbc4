package router

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

// TestUnansweredForgets: volumes that nobody asks for again are not remembered for ever,
// and one that is asked for is.
func TestUnansweredForgets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &node{name: "a"}
		u := unanswered{calls: map[string]call{}}
		for range 48 { // every five minutes, as an orchestrator that waits longest
			for i := range 100 {
				u.note(fmt.Sprint(time.Now(), i), a, context.DeadlineExceeded)
			}
			u.note("v", a, context.DeadlineExceeded)
			time.Sleep(5 * time.Minute)
		}
		if n := len(u.calls); n > 12*100+1 {
			t.Errorf("after four hours %d volumes are remembered", n)
		}
		if u.where([]*node{a}, "v") != a {
			t.Error("the one that is asked for was forgotten")
		}
	})
}
