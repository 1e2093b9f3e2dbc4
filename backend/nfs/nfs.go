package nfs

import (
	"cmp"
	"context"
	"errors"
	"os"
	"syscall"
	"time"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Name is the backend's name.
const Name = volume.BackendNFS

// defaultMode lets every pod write, whatever user it runs as: nothing else tells
// them apart where no fsGroup is set.
const defaultMode = 0o777

// bounds: a promise of any size can be kept in books.
var bounds = volume.Bounds{Min: 1, Granule: 1}

// Backend makes directory volumes in nfs pools.
type Backend struct {
	pools *pool.Set
}

var (
	_ backend.Backend        = (*Backend)(nil)
	_ backend.Publisher      = (*Backend)(nil)
	_ backend.Expander       = (*Backend)(nil)
	_ backend.HealthChecker  = (*Backend)(nil)
	_ backend.Limiter        = (*Backend)(nil)
	_ backend.StaticProvider = (*Backend)(nil)
)

// New makes the backend for the given pools. Those that are directories of this node
// are not its own.
func New(pools *pool.Set) backend.Backend { return &Backend{pools} }

// Name implements backend.Backend.
func (b *Backend) Name() string { return Name }

// Enforced implements backend.Limiter. Where the export's filesystem has a project
// quota on the directory, that is between its owner and the server.
func (b *Backend) Enforced() string { return backend.EnforcedNot }

// Supports implements backend.Backend: all access modes, no raw devices.
func (b *Backend) Supports(c volume.Capability) error {
	switch {
	case c.Block:
		return volume.Errorf(volume.ErrInvalid, "volume_capability asks for a raw device, volumes of backend %s are directories: use volumeMode Filesystem, or backend %s", Name, volume.BackendLoop)
	case !volume.DirectoryFSType(c.FSType):
		return volume.Errorf(volume.ErrInvalid, "volume_capability.mount.fs_type %q: volumes of backend %s are directories and have no filesystem of their own: leave it empty", c.FSType, Name)
	}
	flags, err := mount.ParseFlags(c.MountFlags)
	if err == nil {
		err = mount.CheckNFSOptions(flags.Data)
	}
	if err != nil {
		return volume.Errorf(volume.ErrInvalid, "volume_capability.mount.mount_flags %q: %w: remove it from mountOptions", c.MountFlags, err)
	}
	return nil
}

// named finds the pool that parameters name.
func (b *Backend) named(parameters volume.Parameters) (*pool.Pool, error) {
	p, err := b.pools.Named(parameters.Pool)
	if err == nil && !p.Shared() {
		return nil, volume.Errorf(volume.ErrInvalid, "parameter %s=%q: pool %q is a directory of one node: name an nfs pool in %s, or give %s and %s",
			volume.ParamBackend, Name, p.Name(), volume.ParamPool, volume.ParamServer, volume.ParamShare)
	}
	return p, err
}

// Create implements backend.Backend.
func (b *Backend) Create(_ context.Context, spec volume.Spec) (volume.Volume, error) {
	subDir, err := spec.Parameters.Directory.ExpandSubDir()
	if err != nil {
		return volume.Volume{}, err
	}
	p, err := b.named(spec.Parameters)
	if err != nil {
		return volume.Volume{}, err
	}
	have, err := p.Lookup(volume.NameFor(spec.CoName))
	if errors.Is(err, volume.ErrNotFound) {
		have, err = create(p, spec, subDir) //nolint:contextcheck // what changes a pool runs to its end, whatever becomes of the call
		if !errors.Is(err, pool.ErrExists) {
			return have, err
		}
		have, err = p.Lookup(volume.NameFor(spec.CoName))
	}
	if err != nil {
		return volume.Volume{}, err
	}
	return have, existing(p, have, spec)
}

// existing tells whether a volume that is there is what is asked for.
func existing(p *pool.Pool, have volume.Volume, spec volume.Spec) error {
	if have.ID.Backend != Name {
		return volume.Errorf(volume.ErrIncompatible, "volume %q exists as %s, asked for is backend %s: use another name", spec.CoName, have.ID, Name)
	}
	if err := have.Satisfies(spec); err != nil {
		return err
	}
	return p.Settle()
}

func create(p *pool.Pool, spec volume.Spec, subDir string) (volume.Volume, error) {
	size, err := spec.Capacity.Choose(bounds)
	if err != nil {
		return volume.Volume{}, err
	}
	asked := spec.Parameters.Directory
	v := volume.Volume{
		Version:  volume.RecordVersion,
		ID:       p.ID(Name, volume.NameFor(spec.CoName)),
		CoName:   spec.CoName,
		Capacity: size,
		Directory: &volume.Directory{
			SubDir:   subDir,
			OnDelete: cmp.Or(asked.OnDelete, volume.OnDeleteDelete),
			Mode:     defaultMode,
		},
		Created: time.Now().UTC().Truncate(time.Second),
	}
	err = p.CreateDirectory(v, func(dir *os.File, made bool) error { return prepare(dir, made, asked, v.Directory) })
	return v, explain(p, err)
}

// explain says what to do about an errno that an export answers with.
func explain(p *pool.Pool, err error) error {
	for kind, reason := range reasons {
		if errors.Is(err, kind) && !decided(err) {
			return volume.Errorf(reason.kind, "pool %q: %w: %s", p.Name(), err, reason.remedy)
		}
	}
	return err
}

const squashed = "the server does not let this node's root be root: export with no_root_squash"

var reasons = map[error]struct {
	kind   error
	remedy string
}{
	syscall.EACCES: {volume.ErrPrecondition, squashed},
	syscall.EPERM:  {volume.ErrPrecondition, squashed},
	syscall.EROFS:  {volume.ErrPrecondition, "the export is read-only: export it rw"},
	syscall.ENOSPC: {volume.ErrExhausted, "free space on the server, or grow its filesystem"},
	syscall.EDQUOT: {volume.ErrExhausted, "raise the quota on the server"},
	syscall.ESTALE: {volume.ErrUnavailable, "the export was replaced, or exported anew: try again"},
}

// decided tells whether an error says already what kind it is of.
func decided(err error) bool {
	for _, kind := range []error{
		volume.ErrInvalid, volume.ErrNotFound, volume.ErrIncompatible, volume.ErrOutOfRange, volume.ErrExhausted,
		volume.ErrPrecondition, volume.ErrPending, volume.ErrUnavailable, volume.ErrDamaged,
	} {
		if errors.Is(err, kind) {
			return true
		}
	}
	return false
}

// lookup finds a volume and its pool. ErrNotFound for an ID of which there is no
// volume, though there may be one of that name of another backend.
func (b *Backend) lookup(id volume.ID) (*pool.Pool, volume.Volume, error) {
	p, err := b.pools.ByID(id)
	if err != nil {
		return nil, volume.Volume{}, err
	}
	v, err := p.Lookup(id.Name)
	if err == nil && v.ID != id {
		err = volume.Errorf(volume.ErrNotFound, "volume %s does not exist: what has its name is %s", id, v.ID)
	}
	if err != nil {
		return p, volume.Volume{}, err
	}
	return p, v, nil
}

// Get implements backend.Backend.
func (b *Backend) Get(_ context.Context, id volume.ID) (volume.Volume, error) {
	_, v, err := b.lookup(id)
	return v, err
}

// Delete implements backend.Backend. What becomes of the directory is in the record.
func (b *Backend) Delete(_ context.Context, id volume.ID) error {
	p, v, err := b.lookup(id)
	if errors.Is(err, volume.ErrNotFound) {
		return p.Settle()
	}
	if err != nil {
		return err
	}
	at, err := p.Attachments(id.Name)
	if err != nil {
		return err
	}
	if len(at) > 0 {
		return volume.Errorf(volume.ErrPrecondition, "volume %s is published to node %q: unpublish it first", id, at[0].Node)
	}
	// What stays where it is, another volume may have too, and nobody misses.
	if stays := v.Directory.SubDir != "" && v.Directory.OnDelete == volume.OnDeleteRetain; !stays {
		if err := b.unused(v); err != nil {
			return err
		}
	}
	return explain(p, p.Remove(v)) //nolint:contextcheck // what changes a pool runs to its end, whatever becomes of the call
}

// unused refuses a volume that is mounted on this node. Of other nodes nobody knows
// but by where it is published.
func (b *Backend) unused(v volume.Volume) error {
	source, err := b.source(v)
	if err != nil {
		return err
	}
	mounts, err := mount.Of(source)
	if err != nil || len(mounts) == 0 {
		return err
	}
	return volume.Errorf(volume.ErrInUse, "volume %s is in use on this node: it is mounted at %s: unpublish and unstage it first", v.ID, mounts[0].Mountpoint)
}

// List implements backend.Backend: the volumes of each pool by name.
func (b *Backend) List(_ context.Context, after volume.ID, limit int) ([]volume.Volume, bool, error) {
	found := after == volume.ID{}
	var out []volume.Volume
	for _, s := range b.pools.States() {
		if s.Err != nil {
			return nil, false, volume.Errorf(volume.ErrUnavailable, "listing volumes: %w", s.Err)
		}
		name := ""
		if !found && s.Pool.ID(Name, after.Name) == after {
			found, name = true, after.Name
		}
		if !found || !s.Pool.Shared() {
			continue
		}
		volumes, more, err := s.Pool.List(Name, name, limit-len(out))
		if err != nil {
			return nil, false, err
		}
		if out = append(out, volumes...); more {
			return out, true, nil
		}
	}
	if !found {
		return nil, false, volume.Errorf(volume.ErrStaleToken, "starting_token: its pool is not here any more: list from the beginning")
	}
	return out, false, nil
}

// Capacity implements backend.Backend.
func (b *Backend) Capacity(_ context.Context, q backend.CapacityQuery) (backend.Capacity, error) {
	p, err := b.named(q.Parameters)
	if errors.Is(err, volume.ErrInvalid) { // another driver may have that pool
		return backend.Capacity{}, nil
	}
	if err != nil {
		return backend.Capacity{}, err
	}
	if err := p.Check(); err != nil {
		return backend.Capacity{}, err
	}
	u, err := p.Usage()
	if err != nil {
		return backend.Capacity{}, explain(p, err)
	}
	if u.Full {
		u.Room = 0
	}
	return backend.Capacity{Available: u.Room, Max: u.Room, Min: bounds.Min}, nil
}

// Expand implements backend.Expander: more is promised, and nothing else changes.
func (b *Backend) Expand(ctx context.Context, v volume.Volume, r volume.Range) (volume.Volume, error) {
	size, err := r.Choose(bounds)
	if err != nil {
		return v, err
	}
	p, err := b.pools.ByID(v.ID)
	if err != nil {
		return v, err
	}
	lock, err := p.LockVolume(ctx, v.ID.Name)
	if err != nil {
		return v, explain(p, err)
	}
	defer lock.Close()
	if _, v, err = b.lookup(v.ID); err != nil {
		return v, err
	}
	if v.Capacity >= r.Required {
		if r.Limit > 0 && v.Capacity > r.Limit {
			return v, volume.Errorf(volume.ErrOutOfRange, "capacity_range.limit_bytes %d is below the volume's %d bytes: volumes do not shrink", r.Limit, v.Capacity)
		}
		return v, p.SettleVolume(v.ID.Name)
	}
	err = explain(p, p.Grow(v, size, func() error { return nil })) //nolint:contextcheck // what changes a pool runs to its end, whatever becomes of the call
	if errors.Is(err, volume.ErrExhausted) {                       // RESOURCE_EXHAUSTED would be tried again for ever
		return v, volume.Errorf(volume.ErrOutOfRange, "capacity_range.required_bytes %d: %w", r.Required, err)
	}
	if err == nil {
		v.Capacity = size
	}
	return v, err
}

// Follow implements backend.Expander.
func (b *Backend) Follow(context.Context, volume.Volume) error { return nil }

// Publish implements backend.Publisher.
func (b *Backend) Publish(_ context.Context, v volume.Volume, at backend.Publication) error {
	p, err := b.pools.ByID(v.ID)
	if err != nil {
		return err
	}
	return explain(p, p.Attach(v.ID.Name, pool.Attachment{Node: at.Node, ReadOnly: at.ReadOnly, MultiNode: at.MultiNode}))
}

// Unpublish implements backend.Publisher.
func (b *Backend) Unpublish(_ context.Context, id volume.ID, node string) error {
	p, err := b.pools.ByID(id)
	if err != nil {
		return err
	}
	if have, err := p.Lookup(id.Name); err == nil && have.ID != id { // what is published is another backend's
		return nil
	}
	return explain(p, p.Detach(id.Name, node))
}

// PublishedNodes implements backend.Publisher.
func (b *Backend) PublishedNodes(_ context.Context, v volume.Volume) ([]string, error) {
	p, err := b.pools.ByID(v.ID)
	if err != nil {
		return nil, err
	}
	at, err := p.Attachments(v.ID.Name)
	var nodes []string
	for _, a := range at {
		nodes = append(nodes, a.Node)
	}
	return nodes, err
}

// PublishedCount implements backend.Publisher: none of these pools is one node's.
func (b *Backend) PublishedCount() int { return 0 }
