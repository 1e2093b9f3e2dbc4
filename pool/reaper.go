package pool

import (
	"cmp"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/trivet-csi/trivet/linux/quota"
	"github.com/trivet-csi/trivet/volume"
)

const (
	// reapDelay lets a burst of deletes be answered before the journal, which each
	// of them waits for, is filled with the removal of the first ones.
	reapDelay = 200 * time.Millisecond
	// reapAtOnce is how many entries are removed at once: up to three huge ones do not
	// delay the others.
	reapAtOnce = 4
	// firstRetry and lastRetry bound the back-off of an entry that could not be removed.
	// Some data is removed in the background, and is gone after the first.
	firstRetry = 100 * time.Millisecond
	lastRetry  = time.Minute
	// stuckTries is the number of failed attempts after which no call waits for an entry.
	stuckTries = 5
	// loggedTries is how many vain tries pass until another one is logged.
	loggedTries = 60
)

// trashEntry is what was deleted and is not yet removed.
type trashEntry struct {
	name  string // of its folder in the trash
	tries int    // failed attempts
	err   error
	// relimit are the volumes whose limits are still to be set after the removal. Only the
	// goroutine that removes the entry changes it.
	relimit []volume.ID
}

// background tells whether data is still being removed by the filesystem.
func (e *trashEntry) background() bool { return errors.Is(e.err, quota.ErrBusy) }

// reaper knows what is in the trash, and what is to be removed next.
type reaper struct {
	mu      sync.Mutex
	entries map[string]*trashEntry
	queue   []*trashEntry
	// awaited counts the entries with fewer than stuckTries failed attempts. drained is
	// closed when there is none, and nil at first.
	awaited int
	drained chan struct{}
	wake    chan struct{}
	hurry   chan struct{}
}

func newReaper() *reaper {
	return &reaper{entries: map[string]*trashEntry{}, wake: make(chan struct{}, 1), hurry: make(chan struct{}, 1)}
}

// add queues entries. Those that are known already stay as they are.
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

// take takes the first entry off the queue; finish or retry follows.
func (r *reaper) take() (*trashEntry, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.queue) == 0 {
		return nil, false
	}
	e := r.queue[0]
	r.queue = r.queue[1:]
	return e, true
}

// finish says that an entry is removed.
func (r *reaper) finish(e *trashEntry) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.forget(e)
}

func (r *reaper) forget(e *trashEntry) {
	delete(r.entries, e.name)
	if e.tries < stuckTries {
		r.awaitOneLess()
	}
}

// queued are the entries that nobody is removing at the moment, by name, without those whose
// folder is gone already.
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

// drop forgets those of some entries that are queued still.
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
		r.awaitOneLess()
	}
	time.AfterFunc(backOff(e.tries), func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.queue = append(r.queue, e)
		notify(r.wake)
	})
}

func (r *reaper) awaitOneLess() {
	if r.awaited--; r.awaited == 0 {
		close(r.drained)
	}
}

// backOff doubles with each try, up to lastRetry, less a random part of up to a half:
// entries that failed together are not tried again together.
func backOff(tries int) time.Duration {
	d := min(firstRetry<<min(tries-1, 16), lastRetry)
	return d - rand.N(d/2)
}

// drain waits until the trash is empty but for what is stuck, at most for a time.
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

// stuck are the names and errors of the entries that could not be removed, by name. What
// its filesystem is still removing is not among them at first.
func (r *reaper) stuck() []trashEntry {
	r.mu.Lock()
	defer r.mu.Unlock()
	var stuck []trashEntry
	for _, e := range r.entries {
		if e.err != nil && (e.tries >= stuckTries || !e.background()) {
			stuck = append(stuck, trashEntry{name: e.name, err: e.err})
		}
	}
	slices.SortFunc(stuck, func(a, b trashEntry) int { return cmp.Compare(a.name, b.name) })
	return stuck
}

// waitsFor tells whether drain would wait for one of some entries. unknown is the answer
// for entries that were not added.
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

func (r *reaper) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.entries)
}
