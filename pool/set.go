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
	"github.com/trivet-csi/trivet/internal/trace"
	"github.com/trivet-csi/trivet/linux/freeze"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

// retryInterval is the time between two attempts to open a pool. For an export, each attempt mounts it, so the time doubles
// up to exportRetryInterval.
const (
	retryInterval       = 2 * time.Second
	exportRetryInterval = 10 * time.Second
)

// Set contains the pools of a configuration. It opens them in the background, and retries those
// that fail to open. Until a pool is open, calls for it fail with the reason.
type Set struct {
	forms  volume.Forms
	state  *os.Root
	shared Shared // zero if the pools are node-local
	// openPool opens the pool of a slot.
	openPool func(ctx context.Context, slot *slot) (*Pool, error)

	filesystems ledger.Filesystems

	// names are the names of all pools in the configuration, for errors.
	names []string

	// mayCreate allows an attempt to create the pool on an export; see Initialise.
	mayCreate atomic.Bool
	// retry starts the next attempt to open a pool at once.
	retry chan struct{}

	mu    sync.Mutex
	pools []*slot
	// ready is closed when an attempt to open each pool has ended, or after readyPatience.
	ready chan struct{}
}

// slot is one pool of a Set, open or not.
type slot struct {
	cfg Config
	// uuid is the UUID that the pool has claimed; empty for exports.
	uuid string
	// site is the location of the pool's directory; nil until it was compared with those of the
	// other pools. placed happens when site is set, or at the end of the first attempt.
	site   *site
	placed once
	// endExpect allows the pools of the filesystem to reserve bytes again; see expect.
	endExpect func()
	// refused means that the last attempt failed, and an administrator must act before another attempt
	// can succeed.
	refused bool
	// claimed happens when the pool has claimed its UUID, or at the end of the first attempt.
	claimed once
	// attempted happens at the end of the first attempt. pool and err are the outcome of the
	// last attempt.
	attempted once
	pool      *Pool
	err       error
}

// NewSet prepares the node-local pools of a configuration; Run opens them. Each export has a
// set of its own (NewSharedSet). This set contains only the names of exports, for errors.
func NewSet(forms volume.Forms, configs []Config, state *os.Root) *Set {
	s := newSet(forms, Arrange(slices.DeleteFunc(slices.Clone(configs), Config.Shared)), state)
	s.openPool = s.openLocal
	for _, c := range configs {
		s.names = append(s.names, c.Name)
	}
	return s
}

// newSet returns a set of pools that are being opened. The caller sets openPool.
func newSet(forms volume.Forms, configs []Config, state *os.Root) *Set {
	s := &Set{forms: forms, state: state, ready: make(chan struct{}), retry: make(chan struct{}, 1)}
	for _, c := range configs {
		attempted := newOnce()
		s.pools = append(s.pools, &slot{cfg: c, err: &openingError{opening(c), attempted.c}, placed: newOnce(), endExpect: func() {}, claimed: newOnce(), attempted: attempted})
	}
	return s
}

// Config finds the configuration of a pool by its name, whether the pool is open or not.
func (s *Set) Config(name string) (c Config, ok bool) {
	i := slices.IndexFunc(s.pools, func(slot *slot) bool { return slot.cfg.Name == name })
	if i < 0 {
		return Config{}, false
	}
	return s.pools[i].cfg, true
}

// Freezer returns the freezer for the filesystems of this node's volumes; nil without a state directory.
func (s *Set) Freezer() *freeze.Freezer {
	if s.state == nil {
		return nil
	}
	dir := "local"
	if s.shared.Mount != nil {
		dir = "shared/" + url.PathEscape(s.pools[0].cfg.Name)
	}
	return freeze.New(reexec.Self, filepath.Join(s.state.Name(), "frozen", dir))
}

var errOpening = fmt.Errorf("%w: being opened", volume.ErrUnavailable)

func opening(c Config) error {
	return volume.Errorf(errOpening, "pool %q, at %s, is still being opened: retry; if this lasts, check whether one of its disks hangs (dmesg)", c.Name, c.place())
}

// openingError is the error of a pool before the end of the first attempt to open it.
type openingError struct {
	error
	attempted <-chan struct{}
}

func (e *openingError) Unwrap() error { return e.error }

// AwaitAttempt waits until the first attempt to open a pool has ended. err is the error of a call
// for that pool. AwaitAttempt returns false if the call failed for another reason, or if ctx ends first.
func AwaitAttempt(ctx context.Context, err error) bool {
	var opening *openingError
	if !errors.As(err, &opening) {
		return false
	}
	ctx, span := trace.Start(ctx, "wait for pool")
	defer span.End(nil)
	select {
	case <-opening.attempted:
		return true
	case <-ctx.Done():
		return false
	}
}

// Run opens all pools concurrently, and retries those that fail, until ctx ends. Then it closes
// all pools.
func (s *Set) Run(ctx context.Context) {
	var all sync.WaitGroup
	for _, slot := range s.pools {
		all.Go(func() { s.keepOpen(ctx, slot) })
	}
	go s.becomeReady(readyPatience)
	all.Wait()
}

// readyPatience is the longest time for which a pool with a hanging disk delays the readiness of
// the driver.
const readyPatience = 30 * time.Second

func (s *Set) becomeReady(patience time.Duration) {
	awaitAll(s.pools, func(slot *slot) once { return slot.attempted }, patience)
	close(s.ready)
}

// keepOpen opens one pool and closes it at the end of ctx. It opens the pool again after its
// export was replaced.
func (s *Set) keepOpen(ctx context.Context, slot *slot) {
	defer slot.attempted.close()
	if !s.shared.SilentSince.IsZero() { // mounting would wait for the server
		return
	}
	for s.openWithRetries(ctx, slot) {
		select {
		case <-ctx.Done():
			s.removePool(slot, volume.Errorf(volume.ErrUnavailable, "the driver is stopping")).Close()
			return
		case <-slot.pool.replaced.c:
			s.removePool(slot, volume.Errorf(volume.ErrUnavailable, "pool %q: %s is being mounted again: retry", slot.cfg.Name, slot.cfg.place())).retire()
		}
	}
}

// openWithRetries tries to open a pool until it is open, or ctx ends.
func (s *Set) openWithRetries(ctx context.Context, slot *slot) (open bool) {
	longest := retryInterval
	if slot.cfg.NFS != nil {
		longest = exportRetryInterval
	}
	for wait := retryInterval; !s.tryOpen(ctx, slot); wait = min(2*wait, longest) {
		select {
		case <-time.After(wait):
		case <-s.retry:
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// removePool takes the pool out of its slot. Then calls for the pool fail with err.
func (s *Set) removePool(slot *slot, err error) *Pool {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := slot.pool
	slot.pool, slot.err = nil, err
	return p
}

// tryOpen makes one attempt to open a pool, and tells whether it succeeded.
func (s *Set) tryOpen(ctx context.Context, slot *slot) bool {
	p, err := s.openPool(ctx, slot)
	defer slot.attempted.close()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil && slot.err.Error() != err.Error() && ctx.Err() == nil {
		klog.FromContext(ctx).Error(err, "Opening a pool failed; it is tried again", "pool", slot.cfg.Name)
	}
	slot.pool, slot.err = p, err
	return err == nil
}

// openLocal opens a pool of this node. Until the pool is open or refused, no pool on its filesystem
// reserves bytes, because another driver that is stopping may still reserve bytes in this pool.
func (s *Set) openLocal(ctx context.Context, own *slot) (p *Pool, err error) {
	defer own.placed.close()
	defer own.claimed.close()
	c := own.cfg.Within(s.state.Name())
	unmount, err := c.mountRecords(ctx)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			unmount()
			return
		}
		p.unmount = unmount
	}()
	at, err := siteOf(c.Directory.Path)
	if err != nil {
		return nil, fmt.Errorf("pool %q: directory.path: %w", c.Name, err)
	}
	l := joinLedger(&s.filesystems, at, c)
	if !own.refused { // a refused pool delays the others only after its UUID is accepted
		own.expect(l)
	}
	if err = s.claimSite(own, c, at); err == nil {
		awaitAll(s.pools, func(slot *slot) once { return slot.placed }, claimPatience)
		p, err = openOn(ctx, s.forms, c, s.state, l, func(uuid string) error {
			err := s.claim(own, uuid)
			if err == nil && own.refused {
				own.expect(l)
			}
			return err
		})
	}
	if err != nil {
		l.Leave()
		s.mu.Lock()
		own.site, own.uuid = nil, ""
		s.mu.Unlock()
	}
	own.refused = refuses(err)
	if err == nil || own.refused {
		own.endExpect()
	}
	return p, err
}

// refuses tells whether an administrator must act before a pool can be opened. A pool that is
// locked (EWOULDBLOCK) is only retried: the other driver may be stopping.
func refuses(err error) bool {
	return (errors.Is(err, volume.ErrPrecondition) || errors.Is(err, volume.ErrDamaged)) && !errors.Is(err, unix.EWOULDBLOCK)
}

// expect prevents the pools on the filesystem of l from reserving bytes until endExpect is called.
func (own *slot) expect(l *ledger.Ledger) {
	endPrevious := own.endExpect
	own.endExpect = l.Expect(own.cfg.Name)
	endPrevious()
}

// claimSite refuses a pool whose directory is inside that of another pool, or contains it. The
// first of the two pools in the configuration is opened.
func (s *Set) claimSite(own *slot, c Config, at site) error {
	defer own.placed.close()
	awaitAll(s.before(own), func(slot *slot) once { return slot.placed }, claimPatience)
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

// once is an event that happens once. Its channel is closed when it happens.
type once struct {
	c     chan struct{}
	close func()
}

func newOnce() once {
	c := make(chan struct{})
	return once{c, sync.OnceFunc(func() { close(c) })}
}

// claimPatience is the longest time for which a pool waits for an event of the other pools,
// whose disks may hang.
const claimPatience = 2 * time.Second

// claim refuses a pool with the UUID of another slot: one of them is a copy. If both are being
// opened, the first in the configuration wins.
func (s *Set) claim(own *slot, uuid string) error {
	defer own.claimed.close()
	awaitAll(s.before(own), func(slot *slot) once { return slot.claimed }, claimPatience)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, other := range s.pools {
		if other != own && other.uuid == uuid {
			return volume.Errorf(volume.ErrPrecondition, "pool %q at %s has the same uuid as pool %q, so one is a copy of the other: give the pool of the copy an empty directory, or remove it from the configuration", own.cfg.Name, own.cfg.Directory.Path, other.cfg.Name)
		}
	}
	own.uuid = uuid
	return nil
}

// before returns the pools that precede own in the configuration.
func (s *Set) before(own *slot) []*slot { return s.pools[:slices.Index(s.pools, own)] }

// awaitAll waits until an event has happened for all given pools, or patience has passed.
func awaitAll(pools []*slot, event func(*slot) once, patience time.Duration) {
	timeout := time.After(patience)
	for _, slot := range pools {
		select {
		case <-event(slot).c:
		case <-timeout:
			return
		}
	}
}

// AwaitReady waits until Ready returns true. It returns the error of ctx if ctx ends first.
func (s *Set) AwaitReady(ctx context.Context) error {
	select {
	case <-s.ready:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Ready tells whether the first attempt to open each pool has ended, or readyPatience has
// passed.
func (s *Set) Ready() bool {
	select {
	case <-s.ready:
		return true
	default:
		return false
	}
}

// Named returns the pool with the name that a StorageClass gives, or the first pool for an
// empty name. ErrInvalid if the configuration has no such pool, ErrUnavailable if it is not open.
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
		return nil, volume.Errorf(volume.ErrInvalid, "parameter %s is missing, and the configuration of this node has no node-local pool, which would be the default: set %[1]s to one of its pools (%s), or add a node-local pool", volume.ParamPool, pools)
	}
	return nil, volume.Errorf(volume.ErrInvalid, "parameter %s=%q: the configuration of this node has no such pool (it has %s): use one of these, or add that pool", volume.ParamPool, name, pools)
}

// ByID returns the pool of a volume. ErrUnavailable, not ErrNotFound, for a pool that this node does
// not have, because the volume may be on another node, or on a disk that is not mounted.
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

// OtherWith returns an open pool other than own that contains a volume with the name; nil if
// there is none.
func (s *Set) OtherWith(own *Pool, name string) *Pool {
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

// unavailable makes the error of a call from the reason why the pool is not open.
func unavailable(err error) error {
	if err == nil || errors.Is(err, volume.ErrUnavailable) {
		return err
	}
	return volume.Errorf(volume.ErrUnavailable, "%w", err)
}

// UUIDs returns the short UUIDs of all pools, by name; empty for a pool that is not open or fails
// Check.
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

// ExpectedUUIDs returns the short UUIDs of the pools that UUIDs returns without one, by name: the UUID in
// the configuration, or that of the pool that was open on this node before. Pools without such a UUID are
// omitted.
func (s *Set) ExpectedUUIDs() map[string]string {
	expected := map[string]string{}
	for name, open := range s.UUIDs() {
		if open != "" {
			continue
		}
		c, _ := s.Config(name)
		known, err := recall(s.state.Name(), name)
		if uuid := cmp.Or(c.UUID, known.uuid); err == nil && validUUID(uuid) {
			expected[name] = shortUUID(uuid)
		}
	}
	return expected
}

// Kinds returns the kinds of all pools by name.
func (s *Set) Kinds() map[string]string {
	kinds := map[string]string{}
	for _, slot := range s.pools {
		kinds[slot.cfg.Name] = string(slot.cfg.Kind())
	}
	return kinds
}

// State is a pool, or the reason why it is not open.
type State struct {
	Name string
	Pool *Pool // nil if it is not open
	Err  error // nil if it is open
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
