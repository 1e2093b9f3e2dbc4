package pool

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/trivet-csi/trivet/linux/quota"
	"github.com/trivet-csi/trivet/volume"
)

const (
	// reapDelay is the time before removals begin. Each delete waits for the journal, and a
	// burst of deletes should not also wait for the removal of the first volumes.
	reapDelay = 200 * time.Millisecond
	// reapAtOnce is the number of entries that are removed concurrently, so that up to three huge
	// entries do not delay the others.
	reapAtOnce = 4
	// firstRetry and lastRetry bound the back-off of an entry that could not be removed.
	// firstRetry is short, because data that the filesystem removes in the background is often gone
	// after that time.
	firstRetry = 100 * time.Millisecond
	lastRetry  = time.Minute
	// stuckTries is the number of failed attempts after which no call waits for an entry.
	stuckTries = 5
	// loggedTries is the number of failed attempts to remove an entry of which one is logged.
	loggedTries = 60
)

// trashEntry is an entry of the trash.
type trashEntry struct {
	name  string // of its folder in the trash
	tries int    // failed attempts
	err   error  // of the last attempt
	// relimit are the volumes whose limits must be set after the removal. Only the goroutine
	// that removes the entry changes it.
	relimit []volume.ID
}

// reaper contains the entries of the trash, and the order in which they are removed.
type reaper struct {
	mu      sync.Mutex
	entries map[string]*trashEntry
	queue   []*trashEntry
	// awaited counts the entries with fewer than stuckTries failed attempts. drained is nil before
	// the first entry, and closed when awaited falls to zero.
	awaited int
	drained chan struct{}
	// wake has a notification after an entry was queued, hurry after a call began to wait for the
	// trash.
	wake, hurry chan struct{}
}

func newReaper() *reaper {
	return &reaper{entries: map[string]*trashEntry{}, wake: make(chan struct{}, 1), hurry: make(chan struct{}, 1)}
}

// add queues entries. It does not change entries that were added before.
func (r *reaper) add(names ...string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, name := range names {
		if r.entries[name] != nil {
			continue
		}
		e := &trashEntry{name: name}
		r.entries[name] = e
		r.queue = append(r.queue, e)
		if r.awaited++; r.awaited == 1 {
			r.drained = make(chan struct{})
		}
		notify(r.wake)
	}
}

// notify wakes the goroutine that waits on c, now or later.
func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default: // a notification is pending
	}
}

// next takes the first entry off the queue. After the attempt to remove it, the caller calls finish or
// retry.
func (r *reaper) next() (*trashEntry, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.queue) == 0 {
		return nil, false
	}
	e := r.queue[0]
	r.queue = r.queue[1:]
	return e, true
}

// finish forgets an entry that was removed.
func (r *reaper) finish(e *trashEntry) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.forget(e)
}

// forget is finish for a caller that holds r.mu.
func (r *reaper) forget(e *trashEntry) {
	delete(r.entries, e.name)
	if e.tries < stuckTries {
		r.decrementAwaited()
	}
}

// queued returns the queued entries by name. It omits those whose folder is already removed and
// whose limits must still be set.
func (r *reaper) queued() map[string]*trashEntry {
	r.mu.Lock()
	defer r.mu.Unlock()
	queued := map[string]*trashEntry{}
	for _, e := range r.queue {
		if len(e.relimit) == 0 {
			queued[e.name] = e
		}
	}
	return queued
}

// drop forgets those of the given entries that are still queued.
func (r *reaper) drop(removed map[string]*trashEntry) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.queue = slices.DeleteFunc(r.queue, func(e *trashEntry) bool {
		if removed[e.name] != e {
			return false
		}
		r.forget(e)
		return true
	})
}

// retry queues an entry again after a back-off.
func (r *reaper) retry(e *trashEntry, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e.err = err
	if e.tries++; e.tries == stuckTries {
		r.decrementAwaited()
	}
	time.AfterFunc(backOff(e.tries), func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.queue = append(r.queue, e)
		notify(r.wake)
	})
}

func (r *reaper) decrementAwaited() {
	if r.awaited--; r.awaited == 0 {
		close(r.drained)
	}
}

// backOff doubles with each attempt, up to lastRetry. A random part of up to a half is subtracted,
// so that entries that failed at the same time are tried again at different times.
func backOff(tries int) time.Duration {
	d := min(firstRetry<<min(tries-1, 16), lastRetry)
	return d - rand.N(d/2)
}

// drain waits until no entry is awaited, or atMost has passed.
func (r *reaper) drain(atMost time.Duration) {
	r.mu.Lock()
	awaited, drained := r.awaited, r.drained
	r.mu.Unlock()
	if awaited == 0 {
		return
	}
	notify(r.hurry)
	select {
	case <-drained:
	case <-time.After(atMost):
	}
}

// stuck returns the names and errors of the entries whose removal failed, sorted by name. An entry whose
// data the filesystem is still removing counts only after stuckTries attempts.
func (r *reaper) stuck() []trashEntry {
	r.mu.Lock()
	defer r.mu.Unlock()
	var stuck []trashEntry
	for _, e := range r.entries {
		if e.err != nil && (e.tries >= stuckTries || !errors.Is(e.err, quota.ErrBusy)) {
			stuck = append(stuck, trashEntry{name: e.name, err: e.err})
		}
	}
	slices.SortFunc(stuck, func(a, b trashEntry) int { return cmp.Compare(a.name, b.name) })
	return stuck
}

// waitsFor tells whether any of the named entries is awaited. unknown is the result for entries that
// were not added.
func (r *reaper) waitsFor(names []string, unknown bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.ContainsFunc(names, func(name string) bool {
		e := r.entries[name]
		if e == nil {
			return unknown
		}
		return e.tries < stuckTries
	})
}

// pause waits for reapDelay, or until a call waits for the trash. It returns false when ctx ends.
func (r *reaper) pause(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return false
	case <-r.hurry:
	case <-time.After(reapDelay):
	}
	return true
}

func (r *reaper) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.entries)
}
