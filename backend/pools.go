package backend

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Pools are a backend's volumes as far as they are records in pools; what else they
// are is the backend's own, which embeds this.
type Pools struct {
	Backend string
	Set     *pool.Set
	// Own tells which pools of the set the backend can use.
	Own func(pool.Config) bool
	// Explain says what to do about an errno that a pool's filesystem answers with.
	Explain func(*pool.Pool, error) error
}

// Name implements Backend.
func (ps *Pools) Name() string { return ps.Backend }

// own are the pools that the backend can use.
func (ps *Pools) own() []pool.State {
	return slices.DeleteFunc(ps.Set.States(), func(s pool.State) bool {
		c, _ := ps.Set.Config(s.Name)
		return !ps.Own(c)
	})
}

// Named finds the pool that a StorageClass names; for an empty name the first that the
// backend can use. ErrInvalid if there is no such pool.
func (ps *Pools) Named(name string) (*pool.Pool, error) {
	var names []string
	for _, s := range ps.own() {
		names = append(names, s.Name)
	}
	if name == "" && len(names) > 0 {
		name = names[0]
	}
	p, err := ps.Set.Named(name)
	if err == nil && !ps.Own(p.Config()) {
		return nil, volume.Errorf(volume.ErrInvalid, "parameter %s=%q: backend %s cannot use pool %q: name one that it can (here: %s), or another %s",
			volume.ParamPool, name, ps.Backend, p.Name(), cmp.Or(strings.Join(names, ", "), "none"), volume.ParamBackend)
	}
	return p, err
}

// Lookup finds a volume and its pool, which it also returns if there is no such volume
// (ErrNotFound).
func (ps *Pools) Lookup(id volume.ID) (*pool.Pool, volume.Volume, error) {
	p, err := ps.Set.ByID(id)
	if err != nil {
		return nil, volume.Volume{}, err
	}
	v, err := p.ByID(id)
	return p, v, err
}

// LookupToDelete is Lookup for a volume that is to be deleted: what is being copied into
// one of that name is given up.
func (ps *Pools) LookupToDelete(id volume.ID) (*pool.Pool, volume.Volume, error) {
	p, err := ps.Set.ByID(id)
	if err != nil {
		return nil, volume.Volume{}, err
	}
	p.Jobs.Cancel(id.Name)
	return ps.Lookup(id)
}

// Get implements Backend.
func (ps *Pools) Get(_ context.Context, id volume.ID) (volume.Volume, error) {
	_, v, err := ps.Lookup(id)
	return v, err
}

// Existing returns the volume that spec requests. It returns ErrNotFound if no pool has a volume
// of that name, ErrIncompatible if that volume differs or is in another pool than p.
func (ps *Pools) Existing(p *pool.Pool, spec volume.Spec) (volume.Volume, error) {
	v, err := p.Lookup(spec.Name())
	if errors.Is(err, volume.ErrNotFound) {
		if other := ps.Set.OtherWith(p, spec.Name()); other != nil {
			err = volume.Errorf(volume.ErrIncompatible, "volume %q exists in pool %q, asked for is pool %q: use another name", spec.CoName, other.Name(), p.Name())
		}
	}
	if err != nil {
		return volume.Volume{}, err
	}
	if v.ID.Backend != ps.Backend {
		return volume.Volume{}, volume.Errorf(volume.ErrIncompatible, "volume %q exists as %s, asked for is backend %s: use another name", spec.CoName, v.ID, ps.Backend)
	}
	if err := v.Satisfies(spec); err != nil {
		return volume.Volume{}, err
	}
	return v, p.SyncVolumes()
}

// List implements Backend: pools in the order of the configuration, the volumes of each
// by name.
func (ps *Pools) List(_ context.Context, after volume.ID, limit int) ([]volume.Volume, bool, error) {
	return listed(ps, after, limit, (*pool.Pool).List)
}

// listed goes through the pools, and what list has of each.
func listed[T any](ps *Pools, after volume.ID, limit int, list func(p *pool.Pool, backend, after string, limit int) ([]T, bool, error)) ([]T, bool, error) {
	if c, there := ps.Set.Config(after.Pool); there && !ps.Own(c) {
		return nil, false, nil // the controller's driver asks of each pool for each backend
	}
	found := after == volume.ID{}
	var out []T
	for _, s := range ps.own() {
		if s.Err != nil {
			return nil, false, volume.Errorf(volume.ErrUnavailable, "the list would be incomplete: %s", s.Err.Error()) // not wrapped: a list waits for no pool
		}
		name := ""
		if !found {
			if s.Pool.ID(ps.Backend, after.Name) != after {
				continue
			}
			found, name = true, after.Name
		}
		some, more, err := list(s.Pool, ps.Backend, name, limit-len(out))
		if err != nil {
			return nil, false, err
		}
		if out = append(out, some...); more {
			return out, true, nil
		}
	}
	if !found {
		return nil, false, volume.Errorf(volume.ErrStaleToken, "starting_token: its pool is not here any more: list from the beginning")
	}
	return out, false, nil
}

// Room is what Capacity answers for volumes within bounds in the pool that parameters
// name: nothing if it is none of these, for another driver may have it.
func (ps *Pools) Room(parameters volume.Parameters, b volume.Bounds) (Capacity, error) {
	p, err := ps.Named(parameters.Pool)
	if errors.Is(err, volume.ErrInvalid) {
		return Capacity{}, nil
	}
	if err == nil {
		err = p.Check()
	}
	if err != nil {
		return Capacity{}, err
	}
	u, err := p.Usage()
	if err != nil {
		return Capacity{}, ps.Explain(p, err)
	}
	if u.Full {
		return Capacity{Min: b.Min}, nil
	}
	return Capacity{Available: u.Room / b.Granule * b.Granule, Max: u.Largest / b.Granule * b.Granule, Min: b.Min}, nil
}

// Grow implements Expand. grow is called for a volume that is too small, while its
// folder is locked, and returns its new size.
func (ps *Pools) Grow(ctx context.Context, v volume.Volume, r volume.Range, grow func(*pool.Pool, volume.Volume) (int64, error)) (volume.Volume, error) {
	if err := r.Validate(); err != nil {
		return v, err
	}
	p, err := ps.Set.ByID(v.ID)
	if err != nil {
		return v, err
	}
	lock, err := p.LockVolume(ctx, v.ID.Name)
	if err != nil {
		return v, ps.Explain(p, err)
	}
	defer lock.Close()
	if v, err = p.ByID(v.ID); err != nil {
		return v, err
	}
	if v.Capacity >= r.Required {
		return v, errors.Join(WithinLimit(v.Capacity, r), p.SyncVolume(v.ID.Name), p.CompleteGrowth(ctx, v.ID.Name))
	}
	size, err := grow(p, v)
	if err = ps.Explain(p, err); errors.Is(err, volume.ErrExhausted) { // RESOURCE_EXHAUSTED would be tried again for ever
		err = volume.Errorf(volume.ErrOutOfRange, "capacity_range.required_bytes %d: %w", r.Required, err)
	}
	if err == nil {
		v.Capacity = size
	}
	return v, err
}

// SetNamespace implements NamespaceSetter.
func (ps *Pools) SetNamespace(ctx context.Context, id volume.ID, change volume.NamespaceChange) error {
	p, err := ps.Set.ByID(id)
	if err != nil {
		return err
	}
	lock, err := p.LockVolume(ctx, id.Name)
	if err != nil {
		return ps.Explain(p, err)
	}
	defer lock.Close()
	v, err := p.ByID(id)
	if err != nil {
		return err
	}
	if v, err = change.Apply(v); err != nil {
		return err
	}
	return p.SetNamespace(v, v.Namespace)
}

// WithinLimit refuses a volume that has more bytes than may be (ErrOutOfRange).
func WithinLimit(size int64, r volume.Range) error {
	if r.Limit > 0 && size > r.Limit {
		return volume.Errorf(volume.ErrOutOfRange, "capacity_range.limit_bytes %d is below the volume's %d bytes: volumes do not shrink", r.Limit, size)
	}
	return nil
}

// Publish implements Publisher.
func (ps *Pools) Publish(_ context.Context, v volume.Volume, at Publication) error {
	p, err := ps.Set.ByID(v.ID)
	if err != nil {
		return err
	}
	return ps.Explain(p, p.Attachments.Attach(v.ID.Name, pool.Attachment{Node: at.Node, ReadOnly: at.ReadOnly, MultiNode: at.MultiNode}))
}

// Unpublish implements Publisher.
func (ps *Pools) Unpublish(_ context.Context, id volume.ID, node string) error {
	p, err := ps.Set.ByID(id)
	if err != nil {
		return err
	}
	if have, err := p.Lookup(id.Name); err == nil && have.ID != id { // what is published is another backend's
		return nil
	}
	return ps.Explain(p, p.Attachments.Detach(id.Name, node))
}

// PublishedNodes implements Publisher.
func (ps *Pools) PublishedNodes(_ context.Context, v volume.Volume) ([]string, error) {
	p, err := ps.Set.ByID(v.ID)
	if err != nil {
		return nil, err
	}
	at, err := p.Attachments.List(v.ID.Name)
	var nodes []string
	for _, a := range at {
		nodes = append(nodes, a.Node)
	}
	return nodes, err
}

// PublishedCount implements Publisher.
func (ps *Pools) PublishedCount() int {
	n := 0
	for _, s := range ps.own() {
		if s.Pool != nil {
			n += s.Pool.AttachedCount(ps.Backend)
		}
	}
	return n
}

// Outage implements OutageReporter. A pool of this node is unavailable only while it is
// being opened, or until an administrator mounts its disk: then the call fails.
func (ps *Pools) Outage(id volume.ID, err error) []Condition {
	if !id.Shared() || !errors.Is(err, volume.ErrUnavailable) {
		return nil
	}
	return []Condition{PoolUnavailable(err)}
}

// Reach finds the pool of a volume whose health is asked for; broken says why there is
// nothing to be looked at.
func (ps *Pools) Reach(v volume.Volume) (p *pool.Pool, broken *Condition) {
	p, err := ps.Set.ByID(v.ID)
	if err == nil {
		err = p.Check()
	}
	if err != nil {
		c := PoolUnavailable(err)
		return nil, &c
	}
	if v.Version == 0 { // listed by its ID alone
		_, err := p.Lookup(v.ID.Name)
		return nil, &Condition{Severity: DataLoss, Reason: ReasonRecordDamaged, Message: fmt.Sprint(err)}
	}
	return p, nil
}

// Found are those of the conditions that are not nil.
func Found(conditions ...*Condition) []Condition {
	var found []Condition
	for _, c := range conditions {
		if c != nil {
			found = append(found, *c)
		}
	}
	return found
}

// AlmostFull warns before writes fail for want of the space that was promised: a thin
// image would notice only at fsync.
func AlmostFull(p *pool.Pool) *Condition {
	u, err := p.Usage()
	if err != nil || !u.Low() {
		return nil
	}
	return &Condition{
		Severity: Degraded, Reason: ReasonPoolAlmostFull, Pool: p.Name(),
		Message: fmt.Sprintf("pool %q has %s free, below its reserve of %s: writes to its volumes will soon fail, but to thick ones; free space on its filesystem, or grow that",
			p.Name(), volume.FormatSize(u.Free), volume.FormatSize(u.Reserve)),
	}
}

// trashStuck tells of what was deleted and cannot be removed. For a pool on storage of its
// own the backend tells it.
func trashStuck(p *pool.Pool) *Condition {
	errs := p.Trash.Errors()
	if len(errs) == 0 || p.Storage() != nil {
		return nil
	}
	more := ""
	if len(errs) > 1 {
		more = fmt.Sprintf(" (and %d more)", len(errs)-1)
	}
	return &Condition{
		Severity: Degraded, Reason: ReasonTrashStuck, Pool: p.Name(),
		Message: fmt.Sprintf("pool %q: deleted volumes or snapshots cannot be removed, and their space is not free: %v%s: remove the cause; the driver tries again within a minute", p.Name(), errs[0], more),
	}
}

// Open are the pools that the backend can use and that are open now.
func (ps *Pools) Open() []*pool.Pool {
	var open []*pool.Pool
	for _, s := range ps.own() {
		if s.Pool != nil && s.Pool.Check() == nil {
			open = append(open, s.Pool)
		}
	}
	return open
}

// StorageHealth implements HealthChecker.
func (ps *Pools) StorageHealth(context.Context) []Condition {
	var found []Condition
	for _, s := range ps.own() {
		err := s.Err
		if err == nil {
			err = s.Pool.Check()
		}
		if err == nil {
			found = append(found, Found(AlmostFull(s.Pool), trashStuck(s.Pool))...)
			continue
		}
		c := PoolUnavailable(err)
		c.Pool = s.Name
		found = append(found, c)
	}
	return found
}
