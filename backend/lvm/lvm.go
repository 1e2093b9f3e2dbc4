// Package lvm is the backend of volumes that are logical volumes of an existing LVM volume group, with a filesystem or
// as raw devices.
//
// The records of a pool are in a small logical volume of the same group, so that they move with the data. A logical
// volume has the tag of a random GUID, and the durable record of its volume contains this GUID before the logical
// volume is created, and later also its UUID. The driver changes or removes a logical volume only if a record proves
// in this way that it belongs to a volume. The tag unusedTag is removed before the volume can contain data.
package lvm

import (
	"context"
	"errors"
	"math"
	"os"

	"github.com/google/uuid"
	"golang.org/x/sync/semaphore"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/dm"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Name is the backend's name.
const Name = "lvm"

// Backend creates volumes that are logical volumes.
type Backend struct {
	backend.Devices
	backend.InlinePools
	// takingOver is held by a call that takes over a logical volume, so that no two calls take over the same one.
	takingOver *semaphore.Weighted
}

var (
	_ backend.Backend           = (*Backend)(nil)
	_ backend.Publisher         = (*Backend)(nil)
	_ backend.Expander          = (*Backend)(nil)
	_ backend.HealthChecker     = (*Backend)(nil)
	_ backend.BlockProvider     = (*Backend)(nil)
	_ backend.Snapshotter       = (*Backend)(nil)
	_ backend.FilesystemChecker = (*Backend)(nil)
	_ backend.Transferrer       = (*Backend)(nil)
)

// Kind describes volumes that are logical volumes of a node.
var Kind = backend.Kind{
	Name: Name, Doc: "[a logical volume](../kinds/lvm.md) of a volume group of a node, thick or in a thin pool",
	Media: []pool.Kind{key}, PoolSection: func() pool.Section { return new(Group) }, Section: newSection,
	Parameters: []backend.Parameter{
		backend.FSType,
		backend.MkfsOptions,
		backend.Encryption,
		{
			Key: paramWipe, Values: []string{string(wipeDiscard), string(wipeZero)}, Default: string(wipeDiscard),
			Doc: "How the data of a [deleted volume](../kinds/lvm.md#delete) is erased. `discard`: its extents are discarded if the physical volume guarantees zeros afterwards, otherwise they are overwritten. `zero`: they are overwritten. Not for thin pools, which zero their blocks.",
		},
		{
			Key: paramLogicalVolume, Valid: validName, Want: "the name of a logical volume (lvs)",
			Doc: "The name of a logical volume that exists in the volume group. The volume [takes it over](../kinds/lvm.md#take-over-a-logical-volume) with its data. Default: a new logical volume.",
		},
		backend.Copies,
		backend.Protect,
	},
	Check:   checkParameters,
	Examine: examine,
	New:     New,
}

// New creates the backend. It uses only pools of volume groups.
func New(pools *pool.Set) backend.Backend {
	accepts := func(c pool.Config) bool {
		_, isGroup := c.Section.(*Group)
		return isGroup
	}
	b := &Backend{takingOver: semaphore.NewWeighted(1)}
	b.Devices = backend.Devices{
		Pools: backend.Pools{Backend: Name, Set: pools, Accepts: accepts, Explain: explainPool}, Formatter: blockdev.NewFormatter(),
		Loops: blockdev.NewLoopTags(blockdev.IsNodePath), ReadOnlyTag: readOnlyTag, OpenDevice: b.openDevice,
	}
	b.InlinePools = backend.InlinePools{Of: &b.Pools}
	return b
}

// explainPool names the remedy for a group without room, and refuses calls for which the kernel lacks a module.
func explainPool(p *pool.Pool, err error) error {
	if errors.Is(err, dm.ErrNoModule) {
		return volume.Errorf(volume.ErrPrecondition, "pool %q: %w", p.Name(), err)
	}
	if errors.Is(err, dm.ErrNoRoom) && !errors.Is(err, volume.ErrExhausted) {
		return volume.Errorf(volume.ErrExhausted, "pool %q has no room: %w: delete volumes, or extend the volume group (vgextend)", p.Name(), err)
	}
	return backend.NoRoom(p, err)
}

// Create implements backend.Backend.
func (b *Backend) Create(ctx context.Context, spec volume.Spec) (volume.Volume, error) {
	return b.FindOrCreate(spec, func(p *pool.Pool) (volume.Volume, error) {
		s := storageOf(p)
		if err := s.checkPool(spec.Parameters); err != nil {
			return volume.Volume{}, err
		}
		if spec.Parameters.Get(paramLogicalVolume) != "" {
			return b.takeOver(ctx, p, spec)
		}
		if spec.Source != nil {
			return b.createFrom(ctx, p, spec)
		}
		v := b.NewVolume(p, spec)
		v.Block, v.FSType, v.MkfsOptions = spec.Block(), spec.FSType(), spec.Parameters.MkfsOptions()
		v.SectorSize = s.sectorSize()
		v.Encryption = backend.NewEncryption(spec.Parameters, v.Block, v.SectorSize)
		var err error
		if v.Capacity, err = spec.Capacity.Choose(s.bounds(v)); err != nil {
			return v, err
		}
		if err := backend.CheckMkfsOptions(spec.Parameters, v.FSType, v.Capacity); err != nil {
			return v, err
		}
		v.Section = s.newSection(spec)
		if !s.showsExtents(v) {
			return v, s.createNew(ctx, p, v, nil)
		}
		return b.CopyAsJob(ctx, p, spec, func(ctx context.Context, j *pool.Job) error { return s.createNew(ctx, p, v, j.Progress) })
	})
}

// checkPool refuses parameters that a thick or a thin pool does not support.
func (s *storage) checkPool(p volume.Parameters) error {
	switch {
	case s.thin != "" && p.Get(paramWipe) == string(wipeZero):
		return volume.Errorf(volume.ErrInvalid, "parameter %s=%s: the blocks of a deleted volume in a thin pool cannot be overwritten; the pool zeroes them before another volume sees them: remove the parameter", paramWipe, wipeZero)
	case s.thin == "" && p.Get(volume.ParamProtect) != "":
		return volume.Errorf(volume.ErrInvalid, "parameter %s=%q: pool %q has no thin pool, and copies on another node need snapshots, which only volumes in thin pools have: remove the parameter, or use a pool with lvm.thinPool", volume.ParamProtect, p.Get(volume.ParamProtect), s.cfg.Name)
	}
	return nil
}

// createNew creates a volume without content, when there is room.
func (s *storage) createNew(ctx context.Context, p *pool.Pool, v volume.Volume, progress func(int64)) error {
	if err := s.awaitRoom(ctx, p, v.StorageSize()); err != nil {
		return err
	}
	return p.Create(ctx, v, func(*os.Root) error { return s.build(ctx, v, progress) })
}

// build creates the logical volume of a new volume, and records its UUID in the volume's section. Extents that the volume
// shows are zeroed.
func (s *storage) build(ctx context.Context, v volume.Volume, progress func(int64)) error {
	id, err := s.create(ctx, v)
	sectionOf(v).Volume = id.Volume
	crashpoint.Here(crashpoint.CreateImage)
	if err != nil || !s.showsExtents(v) {
		return err
	}
	err = s.zero(ctx, v, id, v.Capacity, progress)
	crashpoint.Here(crashpoint.CreateZeroed)
	if err != nil {
		return err
	}
	return s.deactivateNew(ctx, v)
}

// newSection returns the section of the record of a new volume.
func (s *storage) newSection(spec volume.Spec) *section {
	return &section{
		identity: identity{GUID: uuid.NewString(), Group: s.groupUUID()},
		Wipe:     wipeMode(spec.Parameters.Get(paramWipe)), LogicalVolume: spec.Parameters.Get(paramLogicalVolume),
	}
}

// Capacity implements backend.Backend.
func (b *Backend) Capacity(_ context.Context, q backend.CapacityQuery) (backend.Capacity, error) {
	if err := backend.CheckMkfsOptions(q.Parameters, q.FSType, math.MaxInt64); err != nil {
		return backend.Capacity{}, err
	}
	p, err := b.Named(q.Parameters.Pool)
	if errors.Is(err, volume.ErrInvalid) {
		return backend.Capacity{}, nil
	}
	if err != nil {
		return backend.Capacity{}, err
	}
	s := storageOf(p)
	if name := q.Parameters.Get(paramLogicalVolume); name != "" {
		return s.capacityOf(name), nil
	}
	bounds := s.bounds(volume.Volume{FSType: q.FSType, Block: q.Block, Encryption: backend.NewEncryption(q.Parameters, q.Block, s.sectorSize())})
	if bounds.Min, err = (volume.Range{Required: bounds.Min}).Choose(bounds); err != nil {
		return backend.Capacity{}, err
	}
	room, err := b.Room(q.Parameters, bounds)
	return backend.WithoutHeader(room, q.Parameters), err
}

// Delete implements backend.Backend.
func (b *Backend) Delete(ctx context.Context, id volume.ID) error {
	return b.DeleteReleased(ctx, id, func(_ *pool.Pool, v volume.Volume) error { return b.release(ctx, v) })
}
