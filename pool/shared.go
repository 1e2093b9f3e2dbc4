package pool

import (
	"context"
	"errors"
	"os"
	"time"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/volume"
)

// Shared is what the worker process of an export needs to open its pool.
type Shared struct {
	// Mount mounts the export at a private path and returns its root directory, and the
	// version of the protocol ("4.2").
	Mount func(ctx context.Context, c Config) (root *os.File, version string, err error)
	// NodeID is this driver's node; empty for a controller's.
	NodeID string
	// Cleans: this process also serves the Controller service. It creates the pool, empties
	// the trash, and clears what ended processes left.
	Cleans bool
	// SilentSince is when the server stopped answering; zero: it answers. While it is set the
	// pool is not opened.
	SilentSince time.Time
	// MountsDir contains the private mounts of images.
	MountsDir string
}

// NewSharedSet prepares the pool of one export; Run opens it. Without state (nil) the pool's
// UUID is not recorded, and nothing is frozen.
func NewSharedSet(forms volume.Forms, c Config, state *os.Root, shared Shared) *Set {
	s := newSet(forms, []Config{c}, state)
	s.shared, s.names = shared, []string{c.Name}
	s.openPool = func(ctx context.Context, slot *slot) (*Pool, error) {
		return openShared(ctx, forms, slot.cfg, state, shared, s.mayCreate.Load())
	}
	if since := shared.SilentSince; !since.IsZero() {
		s.pools[0].err = volume.Errorf(volume.ErrUnavailable, "pool %q: server %s has not answered since %s", c.Name, c.NFS.Server, since.Format(time.TimeOnly))
	}
	return s
}

// Initialise makes an export that no configuration names a pool, and waits for that until ctx
// ends. Only calls with the parameters of a StorageClass may do this: a forged volume ID could
// name the export of any server.
func (s *Set) Initialise(ctx context.Context) {
	s.mayCreate.Store(true)
	_ = retry.For(ctx, time.Minute, func() (bool, error) { // States has the error
		if s.wasNotMade() {
			notify(s.retry)
		}
		err := s.States()[0].Err
		return errors.Is(err, errOpening), err
	})
}

// wasNotMade tells whether the last attempt failed because mayCreate was not set. The pool
// counts as being opened then.
func (s *Set) wasNotMade() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	slot := s.pools[0]
	if !errors.Is(slot.err, errNotMade) {
		return false
	}
	slot.err = opening(slot.cfg)
	return true
}

// Teardown tells whether the mounts of a pool are to be unmounted by force: true if the server
// has not answered for longer than nfs.outage. ErrUnavailable while it has not answered for
// less; the error says when the mounts will be unmounted by force.
func (s *Set) Teardown(poolName string) (force bool, err error) {
	if s.shared.SilentSince.IsZero() {
		return false, nil
	}
	c := s.pools[0].cfg
	end := s.shared.SilentSince.Add(c.NFS.OutageTime())
	if left := time.Until(end); left > 0 {
		return false, volume.Errorf(volume.ErrUnavailable, "pool %q: server %s has not answered since %s: unsent data is kept for it until %s (%v more, nfs.outage), then it is discarded",
			poolName, c.NFS.Server, s.shared.SilentSince.Format(time.TimeOnly), end.Format(time.TimeOnly), left.Round(time.Second))
	}
	return true, nil
}

// MountsDir contains the private mounts of images; empty for node-local pools.
func (s *Set) MountsDir() string { return s.shared.MountsDir }

// NodeID is the node that this process serves; empty for node-local pools and in the process
// of a controller.
func (s *Set) NodeID() string { return s.shared.NodeID }
