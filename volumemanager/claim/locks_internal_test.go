package claim

import (
	"sync"
	"testing"
)

// TestLocks: one name is one holder's at a time, and waits for no other name.
func TestLocks(t *testing.T) {
	l := newLocks()
	other := l.lock("other")
	const holders = 100
	count := 0
	var all sync.WaitGroup
	for range holders {
		all.Go(func() {
			defer l.lock("name")()
			count++
		})
	}
	all.Wait()
	other()
	if count != holders {
		t.Errorf("%d of %d have counted", count, holders)
	}
	if len(l.held) > 0 {
		t.Errorf("still held: %v", l.held)
	}
}
