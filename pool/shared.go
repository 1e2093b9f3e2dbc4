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
	// NodeID is this driver's node; empty in the process of a controller.
	NodeID string
	// Maintains means that this process also serves the Controller service. It creates the pool,
	// empties the trash, and removes the entries of ended processes.
	Maintains bool
	// SilentSince is when the server stopped answering; zero if it answers. With a silent server the
	// pool is not opened.
	SilentSince time.Time
	// MountsDir is the directory of the private mounts of images.
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

// Initialise creates the pool on an export that no configuration names, and waits for it until ctx
// ends. Only calls with the parameters of a StorageClass may do this, because a forged volume ID
// could name the export of any server.
func (s *Set) Initialise(ctx context.Context) {
	s.mayCreate.Store(true)
	_ = retry.For(ctx, time.Minute, func() (bool, error) { // States has the error
		s.retryCreation()
		err := s.States()[0].Err
		return errors.Is(err, errOpening), err
	})
}

// retryCreation starts another attempt if the last one failed because mayCreate was not set. Until
// its end the pool counts as being opened.
func (s *Set) retryCreation() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if slot := s.pools[0]; errors.Is(slot.err, errNotMade) {
		slot.err = opening(slot.cfg)
		notify(s.retry)
	}
}

// Teardown tells whether the mounts of a pool may be unmounted by force: true if the server has not
// answered for longer than nfs.outage, false if the server answers. ErrUnavailable while it has not
// answered for less than nfs.outage; the error says how long data is still kept.
func (s *Set) Teardown(poolName string) (force bool, err error) {
	if s.shared.SilentSince.IsZero() {
		return false, nil
	}
	c := s.pools[0].cfg
	end := s.shared.SilentSince.Add(c.NFS.OutageTime())
	if left := time.Until(end); left > 0 {
		return false, volume.Errorf(volume.ErrUnavailable, "pool %q: server %s has not answered since %s: data that was not sent is kept until %s (for %v more, nfs.outage), and discarded after that",
			poolName, c.NFS.Server, s.shared.SilentSince.Format(time.TimeOnly), end.Format(time.TimeOnly), left.Round(time.Second))
	}
	return true, nil
}

// MountsDir is the directory of the private mounts of images; empty for node-local pools.
func (s *Set) MountsDir() string { return s.shared.MountsDir }

// NodeID is the node that this process serves; empty for node-local pools and in the process
// of a controller.
func (s *Set) NodeID() string { return s.shared.NodeID }
