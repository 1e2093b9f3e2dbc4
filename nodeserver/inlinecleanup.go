package nodeserver

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// discard removes an inline volume. ErrPrecondition while it is mounted anywhere.
func discard(ctx context.Context, b backend.Backend, v volume.Volume) error {
	if err := detachUnmounted(ctx, b, v); err != nil {
		return err
	}
	return b.Delete(ctx, v.ID)
}

// detachUnmounted detaches a volume. ErrPrecondition while it is mounted anywhere.
func detachUnmounted(ctx context.Context, b backend.Backend, v volume.Volume) error {
	at, err := mountpoints(ctx, b, v)
	if err != nil {
		return err
	}
	if len(at) > 0 {
		return volume.Errorf(volume.ErrPrecondition, "volume %s is still mounted at %s: unpublish it there first", v.ID, at[0])
	}
	if err := b.Detach(ctx, v); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.UnstageGone)
	return nil
}

// mountpoints returns where a volume is mounted.
func mountpoints(ctx context.Context, b backend.Backend, v volume.Volume) ([]string, error) {
	source, ok, err := b.Present(ctx, v)
	if err != nil || !ok {
		return nil, err
	}
	mounts, err := mount.Of(source)
	var at []string
	for _, m := range mounts {
		at = append(at, m.Mountpoint)
	}
	return at, err
}

// cleanups records which inline volumes this process has cleaned up. Others may be left by
// an earlier process.
type cleanups struct {
	mu      sync.Mutex
	ids     map[string]*cleanup
	running sync.WaitGroup
}

// cleanup is the state of one inline volume.
type cleanup struct {
	lock chan struct{} // has room for one holder, which may change done
	done bool
}

// acquire locks the state of one volume. The caller releases it. Each volume has its own lock,
// because a holder may wait for a disk that does not answer.
func (c *cleanups) acquire(ctx context.Context, id string) (*cleanup, error) {
	c.mu.Lock()
	v := c.ids[id]
	if v == nil {
		v = &cleanup{lock: make(chan struct{}, 1)}
		c.ids[id] = v
	}
	c.mu.Unlock()
	select {
	case v.lock <- struct{}{}: // free: also for a call whose deadline is over
		return v, nil
	default:
	}
	select {
	case v.lock <- struct{}{}:
		return v, nil
	case <-ctx.Done():
		return nil, volume.Errorf(volume.ErrPending, "inline volume %.80q: removing what an earlier driver process left of it is still under way: %w", id, ctx.Err())
	}
}

func (v *cleanup) release() { <-v.lock }

func (c *cleanups) forget(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.ids, id)
}

// cleanUp removes what an earlier process left of an inline volume, once. A mounted volume
// belongs to a pod and stays. One that is not mounted is left by a call that was
// interrupted, or by a restart of the node.
func (s *Server) cleanUp(ctx context.Context, id string) error {
	state, err := s.cleaned.acquire(ctx, id)
	if err != nil {
		return err
	}
	return s.cleanUpAcquired(ctx, id, state)
}

func (s *Server) cleanUpAcquired(ctx context.Context, id string, state *cleanup) error {
	defer state.release()
	if state.done {
		return nil
	}
	b, v, err := s.inline(id)
	switch {
	case err == nil:
		err = discardUnmounted(ctx, b, v)
	case isMissing(err), errors.Is(err, volume.ErrDamaged): // a call for the volume reports it
		err = nil
	}
	state.done = err == nil
	return err
}

func discardUnmounted(ctx context.Context, b backend.Backend, v volume.Volume) error {
	at, err := mountpoints(ctx, b, v)
	if err != nil || len(at) > 0 {
		return err
	}
	return discard(ctx, b, v)
}

// CleanUpInline removes the inline volumes that earlier processes left, each in a goroutine
// of its own: one whose disk does not answer delays no other. It returns when all are
// removed, or after wait. After an error, the caller must call it again: a volume is still in use
// or being removed, or a pool that may contain inline volumes is not open.
func (s *Server) CleanUpInline(ctx context.Context, wait time.Duration) error {
	waiting, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	var errs []error
	var results []<-chan error
	for _, provider := range backend.As[backend.InlineProvider](s.backends) {
		ids, err := provider.Inlines()
		errs = append(errs, err)
		for _, id := range ids {
			results = append(results, s.startCleanUp(ctx, waiting, id))
		}
	}
	for _, result := range results {
		select {
		case err := <-result:
			errs = append(errs, err)
		case <-waiting.Done():
			return errors.Join(append(errs, waiting.Err())...)
		}
	}
	return errors.Join(errs...)
}

// startCleanUp cleans up a volume in a goroutine. The result is an error if the goroutine cannot
// lock the state of the volume before waiting ends.
func (s *Server) startCleanUp(ctx, waiting context.Context, id string) <-chan error {
	result := make(chan error, 1)
	s.cleaned.running.Go(func() {
		state, err := s.cleaned.acquire(waiting, id)
		if err == nil {
			err = s.cleanUpAcquired(ctx, id, state)
		}
		result <- err
	})
	return result
}

// Wait waits for the goroutines that CleanUpInline started. They use the pools.
func (s *Server) Wait() { s.cleaned.running.Wait() }
