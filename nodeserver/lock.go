package nodeserver

import (
	"context"
	"sync"

	"github.com/trivet-csi/trivet/internal/trace"
	"github.com/trivet-csi/trivet/volume"
)

// lock is a mutex. A caller waits for it until its context ends, because a call that holds it may wait for a disk that does not
// answer.
type lock chan struct{}

func newLock() lock { return make(lock, 1) }

// acquire acquires the lock. A free lock is acquired even after the deadline of the call.
func (l lock) acquire(ctx context.Context) error {
	if l.tryAcquire() {
		return nil
	}
	ctx, span := trace.Start(ctx, "wait for lock")
	defer span.End(nil)
	select {
	case l <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// tryAcquire acquires the lock if it is free.
func (l lock) tryAcquire() bool {
	select {
	case l <- struct{}{}:
		return true
	default:
		return false
	}
}

func (l lock) release() { <-l }

// volumeLocks has a lock for each volume.
type volumeLocks struct {
	mu    sync.Mutex
	locks map[volume.ID]*volumeLock
}

// volumeLock is the lock of a volume, and the number of calls that hold it or wait for it.
type volumeLock struct {
	lock
	users int
}

// acquire acquires the lock of a volume until release is called.
func (l *volumeLocks) acquire(ctx context.Context, id volume.ID) (release func(), err error) {
	v := l.use(id)
	if err := v.acquire(ctx); err != nil {
		l.leave(id, v)
		return nil, err
	}
	return func() { v.release(); l.leave(id, v) }, nil
}

// tryAcquire does the same as acquire if the lock is free.
func (l *volumeLocks) tryAcquire(id volume.ID) (release func(), ok bool) {
	v := l.use(id)
	if !v.tryAcquire() {
		l.leave(id, v)
		return nil, false
	}
	return func() { v.release(); l.leave(id, v) }, true
}

// use returns the lock of a volume. The caller must call leave.
func (l *volumeLocks) use(id volume.ID) *volumeLock {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.locks == nil {
		l.locks = map[volume.ID]*volumeLock{}
	}
	v := l.locks[id]
	if v == nil {
		v = &volumeLock{lock: newLock()}
		l.locks[id] = v
	}
	v.users++
	return v
}

// leave removes the lock of a volume if no other call uses it.
func (l *volumeLocks) leave(id volume.ID, v *volumeLock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if v.users--; v.users == 0 {
		delete(l.locks, id)
	}
}
