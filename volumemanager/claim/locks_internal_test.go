package claim

import (
	"sync"
	"testing"
)

// TestLocks: a name has one holder at a time, and does not block other names.
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
		t.Errorf("%d of %d holders", count, holders)
	}
	if len(l.held) > 0 {
		t.Errorf("still held: %v", l.held)
	}
}
