package local

import (
	"context"
	"errors"
	"strings"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Name is the backend's name.
const Name = "local"

// bounds allows for quotas in blocks, and for the blocks of an empty directory.
var bounds = volume.Bounds{Min: volume.MiB, Granule: 4096}

// Backend creates volumes that are directories of a filesystem of this node.
type Backend struct{ backend.Pools }

var (
	_ backend.Backend       = (*Backend)(nil)
	_ backend.Publisher     = (*Backend)(nil)
	_ backend.Expander      = (*Backend)(nil)
	_ backend.HealthChecker = (*Backend)(nil)
	_ backend.Limiter       = (*Backend)(nil)
	_ backend.Meter         = (*Backend)(nil)
	_ backend.Snapshotter   = (*Backend)(nil)
)

// Kind describes volumes that are directories of a filesystem of a node.
var Kind = backend.Kind{
	Name: Name, Doc: "[a directory](local.md) of a node",
	Media: []pool.Kind{pool.KindDirectory}, Directories: true,
	MountFlags: volume.FSTypes,
	Parameters: backend.DirectoryParameters,
	Check:      backend.CheckDirectory,
	New:        New,
}

// New creates the backend on the pools. It ignores pools that are not directories of this node.
func New(pools *pool.Set) backend.Backend {
	local := func(c pool.Config) bool { return !c.Shared() && c.Section == nil }
	return &Backend{backend.Pools{Backend: Name, Set: pools, Own: local, Explain: noRoom}}
}

// Enforced implements backend.Limiter. Some users can exceed the limit of a directory: see
// docs/local.md.
func (b *Backend) Enforced(v volume.Volume) string {
	limited := v.Directory != nil && v.Directory.Quota != nil
	if v.Version == 0 { // only the ID is known
		p, err := b.Set.ByID(v.ID)
		limited = err == nil && p.Quotas.Has(v.ID.Name)
	}
	if limited {
		return backend.EnforcedCooperative
	}
	return backend.EnforcedNot
}

// Supports implements backend.Backend: access from one node, and no raw devices.
func (b *Backend) Supports(c volume.Capability) error {
	switch {
	case c.Mode.MultiNode():
		return volume.Errorf(volume.ErrInvalid, "access mode %s: a volume of backend %s is on one node: use ReadWriteOnce or ReadWriteOncePod, or a backend that shares", c.Mode, Name)
	case c.Block:
		return volume.Errorf(volume.ErrInvalid, "volume_capability asks for a raw device, volumes of backend %s are directories: use volumeMode Filesystem, or a backend with devices", Name)
	case c.FSType != "":
		return volume.Errorf(volume.ErrInvalid, "volume_capability.mount.fs_type %q: volumes of backend %s are directories and have no filesystem of their own: leave it empty, or use a backend with devices", c.FSType, Name)
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
	asked, err := backend.Asked(spec)
	if err != nil {
		return volume.Volume{}, err
	}
	p, err := b.Named(spec.Parameters.Pool)
	if err != nil {
		return volume.Volume{}, err
	}
	have, err := b.existing(p, spec)
	if !errors.Is(err, volume.ErrNotFound) {
		return have, err
	}
	if spec.Source != nil {
		return b.createOf(ctx, p, spec, asked)
	}
	return create(ctx, p, spec, asked)
}

// Delete implements backend.Backend. The record says whether the directory is retained.
func (b *Backend) Delete(ctx context.Context, id volume.ID) error {
	p, v, err := b.LookupToDelete(id)
	if errors.Is(err, volume.ErrNotFound) {
		return p.SyncVolumes()
	}
	if err != nil {
		return err
	}
	if err := p.Attachments.Unpublished(id); err != nil {
		return err
	}
	if err := b.unused(v); err != nil {
		return err
	}
	return noRoom(p, p.Remove(ctx, v))
}

// Capacity implements backend.Backend. A pool that needs limits and cannot enforce them has no
// capacity.
func (b *Backend) Capacity(_ context.Context, q backend.CapacityQuery) (backend.Capacity, error) {
	room, err := b.Room(q.Parameters, bounds)
	if err != nil || room.Min == 0 { // another node's pool
		return room, err
	}
	p, err := b.Named(q.Parameters.Pool)
	if err != nil {
		return backend.Capacity{}, err
	}
	_, err = p.Quotas.Limits()
	if errors.Is(err, volume.ErrPrecondition) {
		return backend.Capacity{Min: bounds.Min}, nil
	}
	return room, err
}

// Expand implements backend.Expander. It reserves more space and raises the limit.
func (b *Backend) Expand(ctx context.Context, v volume.Volume, r volume.Range) (volume.Volume, error) {
	return b.Grow(ctx, v, r, func(p *pool.Pool, v volume.Volume) (int64, error) {
		size, err := r.Choose(bounds)
		if err != nil {
			return 0, err
		}
		return size, p.GrowDirectory(ctx, v, size)
	})
}

// ResizeDevice implements backend.Expander: a directory has no device.
func (b *Backend) ResizeDevice(context.Context, volume.Volume) error { return nil }

// Measure implements backend.Meter.
func (b *Backend) Measure(_ context.Context, v volume.Volume) (backend.Measure, bool, error) {
	p, err := b.Set.ByID(v.ID)
	if err != nil {
		return backend.Measure{}, false, err
	}
	u, ok, err := p.Quotas.Usage(v)
	return backend.Measure{Bytes: u.Limit.Bytes, UsedBytes: u.Bytes, Inodes: u.Limit.Inodes, UsedInodes: u.Inodes}, ok, err
}
