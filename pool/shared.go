package pool

import (
	"context"
	"errors"
	"os"
	"time"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/volume"
)

// Shared is what a shared pool is opened with, in the worker process that serves
// it.
type Shared struct {
	// Mount mounts the export out of sight and returns its root directory, and the
	// version of the protocol ("4.2").
	Mount func(ctx context.Context, c Config) (root *os.File, version string, err error)
	// NodeID is this driver's node; empty for a controller's.
	NodeID string
	// Cleans: this process also serves the Controller service. It empties the trash
	// and clears what others left.
	Cleans bool
	// SilentSince is when the server stopped answering; zero: it answers. While it
	// is set the pool is not opened at all.
	SilentSince time.Time
	// MountsDir is where private mounts of images stand.
	MountsDir string
}

// NewSharedSet prepares one shared pool; Run opens it. state may be nil.
func NewSharedSet(c Config, state *os.Root, shared Shared) *Set {
	s := newSet([]Config{c}, state)
	s.shared, s.names = &shared, []string{c.Name}
	if !shared.SilentSince.IsZero() {
		s.pools[0].err = s.silent(c)
	}
	return s
}

// Initialise lets an export that no configuration names become a pool, and waits for
// that until ctx ends. It is for calls with the parameters of a StorageClass: an ID that
// somebody made up names any server's export.
func (s *Set) Initialise(ctx context.Context) {
	s.creates.Store(true)
	_ = retry.For(ctx, time.Minute, func() (bool, error) { // the pool's own error says more
		if s.makes() {
			notify(s.retry)
		}
		err := s.States()[0].Err
		return errors.Is(err, errOpening), err
	})
}

// makes tells whether the pool has to be opened again to be made: it was refused
// before a StorageClass was seen.
func (s *Set) makes() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	slot := s.pools[0]
	if !errors.Is(slot.err, errNotMade) {
		return false
	}
	slot.err = opening(slot.cfg)
	return true
}

func (s *Set) silent(c Config) error {
	since := s.shared.SilentSince
	return volume.Errorf(volume.ErrUnavailable, "pool %q: server %s has not answered since %s", c.Name, c.NFS.Server, since.Format(time.TimeOnly))
}

// Teardown tells how what is mounted from a pool is taken down: (false, nil) as
// usual; (true, nil) by force, the server having been silent for longer than the
// outage that the configuration sets; an error (ErrUnavailable), which says when
// force comes, while the outage lasts.
func (s *Set) Teardown(poolName string) (force bool, err error) {
	if s.shared == nil || s.shared.SilentSince.IsZero() {
		return false, nil
	}
	c := s.pools[0].cfg
	end := s.shared.SilentSince.Add(c.NFS.OutageTime())
	if left := time.Until(end); left > 0 {
		return false, volume.Errorf(volume.ErrUnavailable, "pool %q: server %s has not answered since %s: what it has not received is kept for it until %s (%v more, nfs.outage), then it is given up",
			poolName, c.NFS.Server, s.shared.SilentSince.Format(time.TimeOnly), end.Format(time.TimeOnly), left.Round(time.Second))
	}
	return true, nil
}

// MountsDir is where private mounts of images stand; empty for node-local pools.
func (s *Set) MountsDir() string {
	if s.shared == nil {
		return ""
	}
	return s.shared.MountsDir
}

// NodeID is the node that this process serves; empty for node-local pools and a
// controller's.
func (s *Set) NodeID() string {
	if s.shared == nil {
		return ""
	}
	return s.shared.NodeID
}
