package pool

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/internal/reexec"
	"github.com/trivet-csi/trivet/linux/freeze"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

// retryInterval is how often a pool that could not be opened is tried again.
const retryInterval = 2 * time.Second

// Set is the pools of a configuration. They are opened in the background, and
// those that cannot be opened are tried again; until then their calls fail with
// the reason.
type Set struct {
	state  *os.Root
	shared *Shared // nil: the pools are node-local

	filesystems ledger.Filesystems

	// names are those of all pools of the configuration.
	names []string

	// creates: a StorageClass was seen; see Initialise.
	creates atomic.Bool
	retry   chan struct{}

	mu    sync.Mutex
	pools []*slot
	ready chan struct{} // closed when every pool was tried once, or one hangs
}

type slot struct {
	cfg Config
	// uuid is claimed, by the pool or by one that is being opened; of a shared pool
	// it is that which was seen last.
	uuid string
	// site is the pool's place, once no other pool is known to be around or inside it.
	// placed is closed then, or when the first attempt has failed.
	site   *site
	placed once
	// read ends what expect began. refused: the last attempt failed, and an administrator
	// has to act before another can succeed.
	read    func()
	refused bool
	// decided is closed when the pool has claimed its UUID, or the first attempt has failed.
	decided once
	// tried is closed when it was tried once, and pool and err say with what outcome.
	tried once
	pool  *Pool
	err   error
}

// NewSet prepares the node-local pools of a configuration; Run opens them. Of the
// shared ones, which have a set each, it knows the names.
func NewSet(configs []Config, state *os.Root) *Set {
	s := newSet(Arrange(slices.DeleteFunc(slices.Clone(configs), Config.Shared)), state)
	for _, c := range configs {
		s.names = append(s.names, c.Name)
	}
	return s
}

func newSet(configs []Config, state *os.Root) *Set {
	s := &Set{state: state, ready: make(chan struct{}), retry: make(chan struct{}, 1)}
	for _, c := range configs {
		tried := newOnce()
		s.pools = append(s.pools, &slot{cfg: c, err: &openingError{opening(c), tried.c}, placed: newOnce(), read: func() {}, decided: newOnce(), tried: tried})
	}
	return s
}

// Freezer freezes filesystems of this node's volumes; nil where no node is served.
func (s *Set) Freezer() *freeze.Freezer {
	if s.state == nil {
		return nil
	}
	mine := "local"
	if s.shared != nil {
		mine = "shared/" + url.PathEscape(s.pools[0].cfg.Name)
	}
	return freeze.New(reexec.Self, filepath.Join(s.state.Name(), "frozen", mine))
}

var errOpening = fmt.Errorf("%w: not tried yet", volume.ErrUnavailable)

func opening(c Config) error {
	return volume.Errorf(errOpening, "pool %q, at %s, is still being opened: retry; if this lasts, see whether one of its disks hangs (dmesg)", c.Name, c.place())
}

// openingError is the state of a pool before it was tried.
type openingError struct {
	error
	tried <-chan struct{}
}

func (e *openingError) Unwrap() error { return e.error }

// AwaitTried waits until the pool that a call failed for was tried, or ctx ends. It is false
// if err is not about a pool that was still to be tried, or still is.
func AwaitTried(ctx context.Context, err error) bool {
	var opening *openingError
	if !errors.As(err, &opening) {
		return false
	}
	select {
	case <-opening.tried:
		return true
	case <-ctx.Done():
		return false
	}
}

// Run opens the pools, each beside the others, and keeps trying those that fail,
// until ctx ends; then it closes them.
func (s *Set) Run(ctx context.Context) {
	var all sync.WaitGroup
	for _, slot := range s.pools {
		all.Go(func() { s.keepOpen(ctx, slot) })
	}
	tried := make(chan struct{})
	go func() {
		defer close(tried)
		for _, slot := range s.pools {
			<-slot.tried.c
		}
	}()
	go s.becomeReady(tried, readyPatience)
	all.Wait()
}

// readyPatience is how long a pool on a disk that hangs keeps the others' driver
// from being ready.
const readyPatience = 30 * time.Second

func (s *Set) becomeReady(tried <-chan struct{}, patience time.Duration) {
	select {
	case <-tried:
	case <-time.After(patience):
	}
	close(s.ready)
}

// keepOpen opens one pool and closes it in the end. A pool that is gone from its export is
// opened again.
func (s *Set) keepOpen(ctx context.Context, slot *slot) {
	defer slot.tried.close()
	if s.shared != nil && !s.shared.SilentSince.IsZero() {
		return
	}
	for s.untilOpen(ctx, slot) {
		select {
		case <-ctx.Done():
			s.shut(slot, volume.Errorf(volume.ErrUnavailable, "the driver is stopping")).Close()
			return
		case <-slot.pool.gone.c:
			s.shut(slot, volume.Errorf(volume.ErrUnavailable, "pool %q: %s is being mounted again: try again", slot.cfg.Name, slot.cfg.place())).retire()
		}
	}
}

// untilOpen tries to open a pool until it is open, or ctx ends.
func (s *Set) untilOpen(ctx context.Context, slot *slot) (open bool) {
	tick := time.NewTicker(retryInterval)
	defer tick.Stop()
	for !s.open(ctx, slot) {
		select {
		case <-tick.C:
		case <-s.retry:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// shut takes a slot's pool out of use; err says why.
func (s *Set) shut(slot *slot, err error) *Pool {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := slot.pool
	slot.pool, slot.err = nil, err
	return p
}

func (s *Set) open(ctx context.Context, slot *slot) bool {
	p, err := s.openOne(ctx, slot)
	slot.placed.close()
	slot.decided.close()
	defer slot.tried.close()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		slot.site = nil
		if s.shared == nil {
			slot.uuid = ""
		}
		if slot.err.Error() != err.Error() && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Opening a pool failed; it is tried again", "pool", slot.cfg.Name)
		}
	}
	slot.pool, slot.err = p, err
	return err == nil
}

func (s *Set) openOne(ctx context.Context, slot *slot) (*Pool, error) {
	if s.shared == nil {
		return s.openLocal(ctx, slot)
	}
	p, err := openShared(ctx, slot.cfg, s.state, *s.shared, slot.uuid, s.creates.Load())
	if err == nil {
		slot.uuid = p.uuid
	}
	return p, err
}

// openLocal opens a pool of this node. Until it is open or refused, no pool on its
// filesystem promises anything: another driver, which is ending, may have promised in it.
func (s *Set) openLocal(ctx context.Context, own *slot) (*Pool, error) {
	c := own.cfg.Within(s.state.Name())
	at, err := siteOf(c.Directory.Path)
	if err != nil {
		return nil, fmt.Errorf("pool %q: directory.path: %w", c.Name, err)
	}
	l := joinLedger(&s.filesystems, at, c)
	if !own.refused {
		own.expect(l)
	}
	p, err := s.openAt(ctx, own, c, at, l)
	if err != nil {
		l.Leave()
	}
	own.refused = refuses(err)
	if err == nil || own.refused {
		own.read()
	}
	return p, err
}

// refuses tells whether an administrator has to act before a pool can be opened. Another
// driver that has the pool open may be ending.
func refuses(err error) bool {
	return (errors.Is(err, volume.ErrPrecondition) || errors.Is(err, volume.ErrDamaged)) && !errors.Is(err, unix.EWOULDBLOCK)
}

// expect keeps the pools of a filesystem from promising anything until read is called.
func (own *slot) expect(l *ledger.Ledger) {
	before := own.read
	own.read = l.Expect(own.cfg.Name)
	before()
}

func (s *Set) openAt(ctx context.Context, own *slot, c Config, at site, l *ledger.Ledger) (*Pool, error) {
	if err := s.place(own, c, at); err != nil {
		return nil, err
	}
	await(s.pools, func(slot *slot) once { return slot.placed })
	return openOn(ctx, c, s.state, l, func(uuid string) error {
		err := s.claim(own, uuid)
		if err == nil && own.refused {
			own.expect(l)
		}
		return err
	})
}

// place refuses a pool that is inside another one, or that has another one inside. The
// first of the two in the configuration is served.
func (s *Set) place(own *slot, c Config, at site) error {
	defer own.placed.close()
	await(s.before(own), func(slot *slot) once { return slot.placed })
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, other := range s.pools {
		if other == own || other.site == nil {
			continue
		}
		if err := checkNesting(c, at, other.cfg.Within(s.state.Name()), *other.site); err != nil {
			return err
		}
	}
	own.site = &at
	return nil
}

// once is an event that happens once: its channel is closed then.
type once struct {
	c    chan struct{}
	done *sync.Once
}

func newOnce() once { return once{make(chan struct{}), new(sync.Once)} }

func (o once) close() { o.done.Do(func() { close(o.c) }) }

// claimPatience is how long a pool waits for those before it in the
// configuration; one on a disk that hangs is not waited for.
const claimPatience = 2 * time.Second

// claim refuses a pool that another slot has: one of them is a copy. Of two that
// are opened at once the first in the configuration is served.
func (s *Set) claim(own *slot, uuid string) error {
	defer own.decided.close()
	await(s.before(own), func(slot *slot) once { return slot.decided })
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, other := range s.pools {
		if other != own && other.uuid == uuid {
			return volume.Errorf(volume.ErrPrecondition, "pool %q at %s has the same uuid as pool %q: one is a copy; give it a directory of its own", own.cfg.Name, own.cfg.Directory.Path, other.cfg.Name)
		}
	}
	own.uuid = uuid
	return nil
}

// before are the pools before own in the configuration.
func (s *Set) before(own *slot) []*slot { return s.pools[:slices.Index(s.pools, own)] }

// await returns when pools have come to some point, or patience with all of them together
// is over.
func await(pools []*slot, point func(*slot) once) {
	patience := time.After(claimPatience)
	for _, slot := range pools {
		select {
		case <-point(slot).c:
		case <-patience:
			return
		}
	}
}

// AwaitReady waits until Ready; its error is that of ctx, if ctx ends before.
func (s *Set) AwaitReady(ctx context.Context) error {
	select {
	case <-s.ready:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Ready tells whether every pool was tried, or has had half a minute for it.
func (s *Set) Ready() bool {
	select {
	case <-s.ready:
		return true
	default:
		return false
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
	pools := cmp.Or(strings.Join(s.names, ", "), "none")
	if name == "" {
		return nil, volume.Errorf(volume.ErrInvalid, "parameter %s is missing, which means a pool of the node itself, and the configuration of this one has none: name one that it has (%s) in %[1]s, or add one", volume.ParamPool, pools)
	}
	return nil, volume.Errorf(volume.ErrInvalid, "parameter %s=%q: the configuration of this node has no such pool (it has %s): name one that there is, or add it", volume.ParamPool, name, pools)
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
		if slot.pool.ID(id.Backend, id.Name) == id {
			return slot.pool, nil
		}
	}
	return nil, volume.Errorf(volume.ErrUnavailable, "volume %s: pool %q with uuid %s… is not on this node: is it in the configuration, and its disk mounted?", id, id.Pool, id.PoolUUID)
}

// Elsewhere finds a volume of that name in another pool than own; nil if there is
// none in those that are open.
func (s *Set) Elsewhere(own *Pool, name string) *Pool {
	for _, state := range s.States() {
		if state.Pool == nil || state.Pool == own {
			continue
		}
		if _, err := state.Pool.Lookup(name); err == nil {
			return state.Pool
		}
	}
	return nil
}

// unavailable makes of the reason why a pool is not open what a call for it
// answers.
func unavailable(err error) error {
	if err == nil || errors.Is(err, volume.ErrUnavailable) {
		return err
	}
	return volume.Errorf(volume.ErrUnavailable, "%w", err)
}

// UUIDs are those of all pools by name, as volume IDs have them; empty for one that
// is not open.
func (s *Set) UUIDs() map[string]string {
	uuids := map[string]string{}
	for _, state := range s.States() {
		uuids[state.Name] = ""
		if state.Pool != nil && state.Pool.Check() == nil {
			uuids[state.Name] = state.Pool.ShortUUID()
		}
	}
	return uuids
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
