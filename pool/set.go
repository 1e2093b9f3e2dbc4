package pool

import (
	"context"
	"errors"
	"os"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/volume"
)

// retryInterval is how often a pool that could not be opened is tried again.
const retryInterval = 2 * time.Second

// Set is the pools of a configuration. They are opened in the background, and
// those that cannot be opened are tried again; until then their calls fail with
// the reason.
type Set struct {
	state  *os.Root
	writer bool

	mu    sync.Mutex
	pools []*slot
	ready chan struct{} // closed when every pool was tried once
}

type slot struct {
	cfg  Config
	pool *Pool
	err  error
}

// NewSet prepares the pools; Run opens them.
func NewSet(configs []Config, state *os.Root, writer bool) *Set {
	s := &Set{state: state, writer: writer, ready: make(chan struct{})}
	opening := volume.Errorf(volume.ErrUnavailable, "pools are still being opened: try again")
	for _, c := range configs {
		s.pools = append(s.pools, &slot{cfg: c, err: opening})
	}
	return s
}

// Run opens the pools and keeps trying those that fail, until ctx ends; then it
// closes them.
func (s *Set) Run(ctx context.Context) {
	tick := time.NewTicker(retryInterval)
	defer tick.Stop()
	s.openAll(ctx)
	close(s.ready)
	for {
		select {
		case <-tick.C:
			s.openAll(ctx)
		case <-ctx.Done():
			s.close()
			return
		}
	}
}

// Ready tells whether every pool was tried.
func (s *Set) Ready() bool {
	select {
	case <-s.ready:
		return true
	default:
		return false
	}
}

// Await returns when every pool was tried, or ctx ended.
func (s *Set) Await(ctx context.Context) error {
	select {
	case <-s.ready:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *Set) openAll(ctx context.Context) {
	for _, slot := range s.pools {
		s.mu.Lock()
		open := slot.pool != nil
		s.mu.Unlock()
		if open || ctx.Err() != nil {
			continue
		}
		p, err := Open(ctx, slot.cfg, s.state, s.writer)
		if err == nil {
			if other := s.withUUID(p.uuid); other != nil {
				p.Close()
				p, err = nil, volume.Errorf(volume.ErrPrecondition, "pool %q at %s has the same uuid as pool %q: one is a copy; give it a directory of its own", slot.cfg.Name, slot.cfg.Directory.Path, other.Name())
			}
		}
		s.store(ctx, slot, p, err)
	}
}

func (s *Set) store(ctx context.Context, slot *slot, p *Pool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil && (slot.err == nil || slot.err.Error() != err.Error()) {
		klog.FromContext(ctx).Error(err, "Opening a pool failed; it is tried again", "pool", slot.cfg.Name)
	}
	slot.pool, slot.err = p, err
}

func (s *Set) withUUID(uuid string) *Pool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, slot := range s.pools {
		if slot.pool != nil && slot.pool.uuid == uuid {
			return slot.pool
		}
	}
	return nil
}

func (s *Set) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, slot := range s.pools {
		if slot.pool != nil {
			slot.pool.Close()
			slot.pool, slot.err = nil, volume.Errorf(volume.ErrUnavailable, "the driver is stopping")
		}
	}
}

// Named finds a pool by the name that a StorageClass gives, the first one for
// an empty name. ErrInvalid if the configuration has none of that name; the
// pool's own error if it is not open.
func (s *Set) Named(name string) (*Pool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, slot := range s.pools {
		if name == "" || slot.cfg.Name == name {
			return slot.pool, unavailable(slot.err)
		}
	}
	return nil, volume.Errorf(volume.ErrInvalid, "parameter %s=%q: the configuration of this node has no such pool", volume.ParamPool, name)
}

// ByID finds the pool of a volume. A pool that is not known here is
// ErrUnavailable: its volume may well exist elsewhere, or again later.
func (s *Set) ByID(id volume.ID) (*Pool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, slot := range s.pools {
		if slot.cfg.Name != id.Pool {
			continue
		}
		if slot.err != nil {
			return nil, unavailable(slot.err)
		}
		if slot.pool.ShortUUID() == id.PoolUUID {
			return slot.pool, nil
		}
	}
	return nil, volume.Errorf(volume.ErrUnavailable, "volume %s: pool %q with uuid %s… is not on this node: is it in the configuration, and its disk mounted?", id, id.Pool, id.PoolUUID)
}

// unavailable makes of the reason why a pool is not open what a call for it
// answers.
func unavailable(err error) error {
	if err == nil || errors.Is(err, volume.ErrUnavailable) {
		return err
	}
	return volume.Errorf(volume.ErrUnavailable, "%w", err)
}

// State is a pool and how it is.
type State struct {
	Name string
	Pool *Pool // nil if it is not open
	Err  error // why it is not
}

// States lists all pools, in the order of the configuration.
func (s *Set) States() []State {
	s.mu.Lock()
	defer s.mu.Unlock()
	states := make([]State, 0, len(s.pools))
	for _, slot := range s.pools {
		states = append(states, State{Name: slot.cfg.Name, Pool: slot.pool, Err: slot.err})
	}
	return states
}
