package local

import (
	"context"
	"errors"
	"strings"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/blockdev"
	"github.com/trivet-csi/trivet/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Name is the backend's name.
const Name = volume.BackendLocal

// bounds: quotas are kept in blocks, and the smallest directory takes some.
var bounds = volume.Bounds{Min: volume.MiB, Granule: 4096}

// Backend makes directory volumes in directory pools, and volumes of whole disks in
// pools of disks.
type Backend struct {
	backend.Pools
	formatter *blockdev.Formatter
}

var (
	_ backend.Backend       = (*Backend)(nil)
	_ backend.Publisher     = (*Backend)(nil)
	_ backend.Expander      = (*Backend)(nil)
	_ backend.HealthChecker = (*Backend)(nil)
	_ backend.Limiter       = (*Backend)(nil)
	_ backend.Meter         = (*Backend)(nil)
	_ backend.BlockProvider = (*Backend)(nil)
	_ backend.Keeper        = (*Backend)(nil)
	_ backend.Snapshotter   = (*Backend)(nil)
)

// New makes the backend for the given pools. Those on servers are not its own.
func New(pools *pool.Set) backend.Backend {
	local := func(c pool.Config) bool { return !c.Shared() }
	return &Backend{
		Pools:     backend.Pools{Backend: Name, Set: pools, Own: local, Explain: noRoom},
		formatter: blockdev.NewFormatter(),
	}
}

// Enforced implements backend.Limiter. What holds a directory does not hold everybody:
// see docs/local.md.
func (b *Backend) Enforced(v volume.Volume) string {
	if b.onDisk(v.ID) {
		return backend.EnforcedHard
	}
	limited := v.Directory != nil && v.Directory.Quota != nil
	if v.Version == 0 { // known by its ID alone
		p, err := b.Set.ByID(v.ID)
		limited = err == nil && p.HasQuota(v.ID.Name)
	}
	if limited {
		return backend.EnforcedCooperative
	}
	return backend.EnforcedNot
}

// Supports implements backend.Backend: access from one node. What only whole disks can
// have is refused where there are none, and else by Create, which knows the pool.
func (b *Backend) Supports(c volume.Capability) error {
	if c.Mode.MultiNode() {
		return volume.Errorf(volume.ErrInvalid, "access mode %s: a volume of backend %s is on one node: use ReadWriteOnce or ReadWriteOncePod, or backend %s", c.Mode, Name, volume.BackendNFS)
	}
	if b.haveDisks() {
		return supportsDisk(c)
	}
	return supportsDirectory(c)
}

// supportsDirectory is Supports for directories: no raw devices.
func supportsDirectory(c volume.Capability) error {
	switch {
	case c.Block:
		return volume.Errorf(volume.ErrInvalid, "volume_capability asks for a raw device, volumes of backend %s are directories: use volumeMode Filesystem, or backend %s", Name, volume.BackendLoop)
	case c.FSType != "":
		return volume.Errorf(volume.ErrInvalid, "volume_capability.mount.fs_type %q: volumes of backend %s are directories and have no filesystem of their own: leave it empty, or use backend %s", c.FSType, Name, volume.BackendLoop)
	}
	if err := volume.CheckMountFlags(c.MountFlags, volume.FSTypes...); err != nil {
		return err
	}
	if flags, err := mount.ParseFlags(c.MountFlags); err == nil && len(flags.Data) > 0 {
		return volume.Errorf(volume.ErrInvalid, "volume_capability.mount.mount_flags %q: volumes of backend %s are directories and have no filesystem of their own that could have %s: remove that from mountOptions", c.MountFlags, Name, strings.Join(flags.Data, ","))
	}
	return nil
}

// Create implements backend.Backend.
func (b *Backend) Create(ctx context.Context, spec volume.Spec) (volume.Volume, error) {
	subDir, err := spec.Parameters.Directory.ExpandSubDir()
	if err != nil {
		return volume.Volume{}, err
	}
	p, err := b.Named(spec.Parameters.Pool)
	if err != nil {
		return volume.Volume{}, err
	}
	if err := suits(p, spec); err != nil {
		return volume.Volume{}, err
	}
	have, err := b.existing(p, spec)
	if !errors.Is(err, volume.ErrNotFound) {
		return have, err
	}
	if other := b.Set.Elsewhere(p, spec.Name()); other != nil {
		return volume.Volume{}, volume.Errorf(volume.ErrIncompatible, "volume %q exists in pool %q, asked for is pool %q: use another name", spec.CoName, other.Name(), p.Name())
	}
	switch {
	case p.OfDisks() && spec.Source != nil:
		return b.cloneDisk(ctx, p, spec)
	case p.OfDisks():
		return createDisk(ctx, p, spec)
	case spec.Source != nil:
		return b.createOf(ctx, p, spec, subDir)
	}
	return create(ctx, p, spec, subDir)
}

// Delete implements backend.Backend. What becomes of the directory is in the record.
func (b *Backend) Delete(ctx context.Context, id volume.ID) error {
	p, v, err := b.LookupToDelete(id)
	if errors.Is(err, volume.ErrNotFound) {
		return p.Settle()
	}
	if err != nil {
		return err
	}
	if err := p.Unpublished(id); err != nil {
		return err
	}
	if p.OfDisks() {
		err = unusedDisk(ctx, p, v)
	} else {
		err = b.unused(v)
	}
	if err != nil {
		return err
	}
	return noRoom(p, p.Remove(ctx, v))
}

// Capacity implements backend.Backend: a pool that makes no volume, for want of limits,
// has none.
func (b *Backend) Capacity(_ context.Context, q backend.CapacityQuery) (backend.Capacity, error) {
	room, err := b.Room(q.Parameters, bounds)
	if err != nil || room.Min == 0 { // another node's pool
		return room, err
	}
	p, err := b.Named(q.Parameters.Pool)
	if err != nil {
		return backend.Capacity{}, err
	}
	if p.OfDisks() {
		return diskRoom(p, q)
	}
	_, err = p.Limits()
	if errors.Is(err, volume.ErrPrecondition) {
		return backend.Capacity{Min: bounds.Min}, nil
	}
	return room, err
}

// Expand implements backend.Expander: more is promised, and the limit is raised.
func (b *Backend) Expand(ctx context.Context, v volume.Volume, r volume.Range) (volume.Volume, error) {
	return b.Grow(ctx, v, r, func(p *pool.Pool, v volume.Volume) (int64, error) {
		if p.OfDisks() {
			return growDisk(ctx, p, v, r)
		}
		size, err := r.Choose(bounds)
		if err != nil {
			return 0, err
		}
		return size, p.GrowDirectory(ctx, v, size)
	})
}

// Follow implements backend.Expander.
func (b *Backend) Follow(ctx context.Context, v volume.Volume) error {
	if !b.onDisk(v.ID) {
		return nil
	}
	return b.followDisk(ctx, v)
}

// Measure implements backend.Meter.
func (b *Backend) Measure(_ context.Context, v volume.Volume) (backend.Measure, bool, error) {
	p, err := b.Set.ByID(v.ID)
	if err != nil {
		return backend.Measure{}, false, err
	}
	u, ok, err := p.QuotaUsage(v)
	return backend.Measure{Bytes: u.Limit.Bytes, UsedBytes: u.Bytes, Inodes: u.Limit.Inodes, UsedInodes: u.Inodes}, ok, err
}
