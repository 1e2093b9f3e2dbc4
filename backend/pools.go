package backend

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Pools implements the parts of a backend that use only the records in pools. A backend embeds it.
type Pools struct {
	Backend string
	Set     *pool.Set
	// Accepts reports whether the backend can use a pool.
	Accepts func(pool.Config) bool
	// Explain adds the remedy to an errno of a pool's filesystem, for example NoRoom.
	Explain func(*pool.Pool, error) error
}

// NoRoom converts the error of a full filesystem to ErrExhausted, and names the pool. It returns any
// other error unchanged.
func NoRoom(p *pool.Pool, err error) error {
	if errors.Is(err, volume.ErrExhausted) || !errors.Is(err, syscall.ENOSPC) && !errors.Is(err, syscall.EDQUOT) {
		return err
	}
	return volume.Errorf(volume.ErrExhausted, "pool %q: the filesystem of %s has no room: %w: free space on it, or enlarge it", p.Name(), p.Dir().Name(), err)
}

// Name implements Backend.
func (ps *Pools) Name() string { return ps.Backend }

// poolStates returns the states of the pools that the backend can use.
func (ps *Pools) poolStates() []pool.State {
	return slices.DeleteFunc(ps.Set.States(), func(s pool.State) bool {
		c, _ := ps.Set.Config(s.Name)
		return !ps.Accepts(c)
	})
}

// Named returns the pool with a name, or for an empty name the first pool that the backend can use.
// ErrInvalid if there is no such pool.
func (ps *Pools) Named(name string) (*pool.Pool, error) {
	var names []string
	for _, s := range ps.poolStates() {
		names = append(names, s.Name)
	}
	if name == "" && len(names) > 0 {
		name = names[0]
	}
	p, err := ps.Set.Named(name)
	if err == nil && !ps.Accepts(p.Config()) {
		return nil, volume.Errorf(volume.ErrInvalid, "parameter %s=%q: backend %s cannot use pool %q: name a pool that it can use (%s), or another %s",
			volume.ParamPool, name, ps.Backend, p.Name(), cmp.Or(strings.Join(names, ", "), "none"), volume.ParamBackend)
	}
	return p, err
}

// Usable returns the pool of a volume (ErrUnavailable if it cannot be used now).
func (ps *Pools) Usable(id volume.ID) (*pool.Pool, error) {
	p, err := ps.Set.ByID(id)
	if err == nil {
		err = p.Check()
	}
	return p, err
}

// Lock locks a volume against other processes until lock is closed, and reads its record.
func (ps *Pools) Lock(ctx context.Context, id volume.ID) (p *pool.Pool, v volume.Volume, lock io.Closer, err error) {
	return ps.lock(id, func(p *pool.Pool) (io.Closer, error) { return p.LockVolume(ctx, id.Name) })
}

// TryLock does the same as Lock without waiting: ErrPending if another call holds the lock.
func (ps *Pools) TryLock(id volume.ID) (p *pool.Pool, v volume.Volume, lock io.Closer, err error) {
	return ps.lock(id, func(p *pool.Pool) (io.Closer, error) { return p.TryLockVolume(id.Name) })
}

// lock locks a volume by a function, and reads its record.
func (ps *Pools) lock(id volume.ID, take func(*pool.Pool) (io.Closer, error)) (p *pool.Pool, v volume.Volume, lock io.Closer, err error) {
	if p, err = ps.Usable(id); err != nil {
		return nil, v, nil, err
	}
	if lock, err = take(p); err != nil {
		return nil, v, nil, ps.Explain(p, err)
	}
	if v, err = p.ByID(id); err != nil {
		return nil, v, nil, errors.Join(err, lock.Close())
	}
	return p, v, lock, nil
}

// Get implements Backend.
func (ps *Pools) Get(_ context.Context, id volume.ID) (volume.Volume, error) {
	p, err := ps.Set.ByID(id)
	if err != nil {
		return volume.Volume{}, err
	}
	return p.ByID(id)
}

// FindOrCreate implements Create. create is called if no volume has the name of spec.
func (ps *Pools) FindOrCreate(spec volume.Spec, create func(*pool.Pool) (volume.Volume, error)) (volume.Volume, error) {
	p, err := ps.Named(spec.Parameters.Pool)
	if err != nil {
		return volume.Volume{}, err
	}
	if spec.Parameters.IOLimits() != nil && p.Config().Shared() {
		return volume.Volume{}, volume.Errorf(volume.ErrInvalid, "the parameters limit the I/O of the volume, but pool %q is an NFS export, whose volumes have no limits: remove the limits, or use a pool of a node", p.Name())
	}
	v, err := ps.existing(p, spec)
	if !errors.Is(err, volume.ErrNotFound) {
		return v, err
	}
	v, err = create(p)
	if errors.Is(err, pool.ErrExists) {
		return ps.existing(p, spec)
	}
	return v, ps.Explain(p, err)
}

// CopyAsJob calls create in a job that continues if the call ends, and returns the created volume. A
// retry of the call joins the job.
func (ps *Pools) CopyAsJob(ctx context.Context, p *pool.Pool, spec volume.Spec,
	create func(context.Context, *pool.Job) error,
) (volume.Volume, error) {
	if err := p.Jobs.Do(ctx, spec.Name(), create); err != nil {
		return volume.Volume{}, err
	}
	return ps.existing(p, spec)
}

// NewVolume returns a new volume's record with the fields that all kinds have.
func (ps *Pools) NewVolume(p *pool.Pool, spec volume.Spec) volume.Volume {
	v := volume.Volume{
		Version:   volume.RecordVersion,
		ID:        p.ID(ps.Backend, spec.Name()),
		CoName:    spec.CoName,
		Ephemeral: spec.Ephemeral,
		Namespace: spec.Parameters.Namespace,
		IOLimits:  spec.Parameters.IOLimits(),
		Created:   time.Now().UTC().Truncate(time.Second),
	}
	if spec.Source != nil {
		source := *spec.Source
		v.Source = &source
	}
	return v
}

// DeleteUnpublished implements Delete. It cancels a copy or a transfer that is creating the volume. It calls remove
// if the volume exists and is not published; remove must refuse a volume that is in use.
func (ps *Pools) DeleteUnpublished(id volume.ID, remove func(*pool.Pool, volume.Volume) error) error {
	p, err := ps.Set.ByID(id)
	if err != nil {
		return err
	}
	p.Jobs.Cancel(id.Name)
	if err := p.DiscardReceived(id.Name); err != nil {
		return ps.Explain(p, err)
	}
	v, err := p.ByID(id)
	if errors.Is(err, volume.ErrNotFound) {
		return p.SyncVolumes()
	}
	if err == nil {
		err = p.Attachments.CheckUnpublished(id)
	}
	if err == nil {
		err = remove(p, v)
	}
	return ps.Explain(p, err)
}

// existing returns the existing volume for spec. It returns ErrNotFound if no pool has a volume of that
// name, and ErrIncompatible if that volume does not satisfy spec or is not in pool p.
func (ps *Pools) existing(p *pool.Pool, spec volume.Spec) (volume.Volume, error) {
	v, err := p.Lookup(spec.Name())
	if errors.Is(err, volume.ErrNotFound) {
		if other := ps.Set.OtherWith(p, spec.Name()); other != nil {
			err = volume.Errorf(volume.ErrIncompatible, "volume %q exists in pool %q, the request names pool %q: use another name", spec.CoName, other.Name(), p.Name())
		}
	}
	if err != nil {
		return volume.Volume{}, err
	}
	if v.ID.Backend != ps.Backend {
		return volume.Volume{}, volume.Errorf(volume.ErrIncompatible, "volume %q exists as %s, the request names backend %s: use another name", spec.CoName, v.ID, ps.Backend)
	}
	if err := v.Satisfies(spec); err != nil {
		return volume.Volume{}, err
	}
	return v, p.SyncVolumes()
}

// List implements Backend: pools in the order of the configuration, and the volumes of each pool
// by name.
func (ps *Pools) List(_ context.Context, after volume.ID, limit int) ([]volume.Volume, bool, error) {
	return listPools(ps, after, limit, (*pool.Pool).List)
}

// listPools concatenates the results of list for each pool.
func listPools[T any](ps *Pools, after volume.ID, limit int, list func(p *pool.Pool, backend, after string, limit int) ([]T, bool, error)) ([]T, bool, error) {
	if c, ok := ps.Set.Config(after.Pool); ok && !ps.Accepts(c) {
		return nil, false, nil // the controller requests the list of each pool from every backend
	}
	found := after == volume.ID{} // from the pool of after on
	var out []T
	for _, s := range ps.poolStates() {
		if s.Err != nil {
			return nil, false, volume.Errorf(volume.ErrUnavailable, "the list would be incomplete: %s", s.Err.Error()) // not wrapped, so that pool.AwaitAttempt does not delay the call
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
		return nil, false, volume.Errorf(volume.ErrStaleToken, "starting_token is of a pool that this driver does not have: list from the beginning")
	}
	return out, false, nil
}

// Room implements Capacity for volumes within bounds. The capacity in a pool that this driver does not
// have is zero, without an error, because another driver may have that pool.
func (ps *Pools) Room(parameters volume.Parameters, bounds volume.Bounds) (Capacity, error) {
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
		return Capacity{Min: bounds.Min}, nil
	}
	return Capacity{Available: u.Room / bounds.Granule * bounds.Granule, Max: u.Largest / bounds.Granule * bounds.Granule, Min: bounds.Min}, nil
}

// Grow implements Expand. If the volume is too small, Grow calls grow while the volume is locked. grow
// returns the new size of the volume.
func (ps *Pools) Grow(ctx context.Context, v volume.Volume, r volume.Range, grow func(*pool.Pool, volume.Volume) (int64, error)) (volume.Volume, error) {
	if err := r.Validate(); err != nil {
		return v, err
	}
	p, v, lock, err := ps.Lock(ctx, v.ID)
	if err != nil {
		return v, err
	}
	defer lock.Close()
	if v.Capacity >= r.Required {
		return v, errors.Join(WithinLimit(v.Capacity, r), p.SyncVolume(v.ID.Name), p.CompleteGrowth(ctx, v.ID.Name))
	}
	size, err := grow(p, v)
	if err != nil {
		return v, ps.Unexpandable(p, r, err)
	}
	v.Capacity = size
	return v, nil
}

// Unexpandable is Explain for an error of an expansion. A lack of space is ErrOutOfRange, because callers retry
// RESOURCE_EXHAUSTED forever.
func (ps *Pools) Unexpandable(p *pool.Pool, r volume.Range, err error) error {
	if err = ps.Explain(p, err); errors.Is(err, volume.ErrExhausted) {
		err = volume.Errorf(volume.ErrOutOfRange, "capacity_range.required_bytes %d: %w", r.Required, err)
	}
	return err
}

// SetNamespace implements NamespaceSetter.
func (ps *Pools) SetNamespace(ctx context.Context, id volume.ID, namespace string) error {
	p, v, lock, err := ps.Lock(ctx, id)
	if err != nil {
		return err
	}
	defer lock.Close()
	return p.SetNamespace(v, namespace)
}

// WithinLimit refuses a volume that is larger than the limit (ErrOutOfRange).
func WithinLimit(size int64, r volume.Range) error {
	if r.Limit > 0 && size > r.Limit {
		return volume.Errorf(volume.ErrOutOfRange, "capacity_range.limit_bytes %d is below the volume's size of %s: volumes do not shrink", r.Limit, volume.ExactSize(size))
	}
	return nil
}

// Publish implements Publisher.
func (ps *Pools) Publish(_ context.Context, v volume.Volume, publication Publication) error {
	p, err := ps.Set.ByID(v.ID)
	if err != nil {
		return err
	}
	return ps.Explain(p, p.Attachments.Attach(v.ID.Name, pool.Attachment{
		Node: publication.Node, ReadOnly: publication.ReadOnly, MultiNode: publication.MultiNode,
	}))
}

// Unpublish implements Publisher.
func (ps *Pools) Unpublish(_ context.Context, id volume.ID, node string) error {
	p, err := ps.Set.ByID(id)
	if err != nil {
		return err
	}
	if have, err := p.Lookup(id.Name); err == nil && have.ID != id { // the published volume is of another backend
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
	attachments, err := p.Attachments.List(v.ID.Name)
	var nodes []string
	for _, a := range attachments {
		nodes = append(nodes, a.Node)
	}
	return nodes, err
}

// PublishedCount implements Publisher.
func (ps *Pools) PublishedCount() int {
	n := 0
	for _, s := range ps.poolStates() {
		if s.Pool != nil {
			n += s.Pool.AttachedCount(ps.Backend)
		}
	}
	return n
}

// Outage implements OutageReporter. It returns no condition for a pool of this node, because such a pool
// is unavailable only while it is being opened, or until an administrator mounts its disk.
func (ps *Pools) Outage(id volume.ID, err error) []Condition {
	if !id.Shared() || !errors.Is(err, volume.ErrUnavailable) {
		return nil
	}
	return []Condition{PoolUnavailable(err)}
}

// A Check examines a volume in its pool, and returns nil if it finds no problem.
type Check func(*pool.Pool, volume.Volume) *Condition

// Examine implements HealthChecker.Health. It calls the checks only if the pool is usable and the
// volume's record is readable.
func (ps *Pools) Examine(v volume.Volume, checks ...Check) []Condition {
	p, err := ps.Usable(v.ID)
	if err != nil {
		return []Condition{PoolUnavailable(err)}
	}
	if v.Version == 0 { // the record cannot be read
		_, err := p.Lookup(v.ID.Name)
		return []Condition{{Severity: DataLoss, Reason: ReasonRecordDamaged, Message: fmt.Sprint(err)}}
	}
	var found []Condition
	for _, check := range checks {
		if c := check(p, v); c != nil {
			found = append(found, *c)
		}
	}
	return found
}

// AlmostFull is a Check that warns before writes to thin volumes fail, because a process that writes to
// a thin image gets the error only from fsync(2).
func AlmostFull(p *pool.Pool, _ volume.Volume) *Condition {
	u, err := p.Usage()
	if err != nil || !u.Low() {
		return nil
	}
	return &Condition{
		Severity: Degraded, Reason: ReasonPoolAlmostFull, Pool: p.Name(),
		Message: fmt.Sprintf("pool %q has %s free, below its reserve of %s: writes to volumes that are not thick will soon fail: free space on its filesystem, or enlarge it",
			p.Name(), volume.FormatSize(u.Free), volume.FormatSize(u.Reserve)),
	}
}

// trashStuck reports deleted volumes that cannot be removed. For a pool with a pool.Storage the backend
// reports them itself.
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

// OpenPools returns the open pools that the backend can use.
func (ps *Pools) OpenPools() []*pool.Pool {
	var open []*pool.Pool
	for _, s := range ps.poolStates() {
		if s.Pool != nil && s.Pool.Check() == nil {
			open = append(open, s.Pool)
		}
	}
	return open
}

// StorageHealth implements HealthChecker.
func (ps *Pools) StorageHealth(context.Context) []Condition {
	var found []Condition
	for _, s := range ps.poolStates() {
		err := s.Err
		if err == nil {
			err = s.Pool.Check()
		}
		if err != nil {
			c := PoolUnavailable(err)
			c.Pool = s.Name
			found = append(found, c)
			continue
		}
		for _, c := range []*Condition{AlmostFull(s.Pool, volume.Volume{}), trashStuck(s.Pool)} {
			if c != nil {
				found = append(found, *c)
			}
		}
	}
	return found
}
