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
type Backend struct{ backend.Devices }

var (
	_ backend.Backend       = (*Backend)(nil)
	_ backend.Publisher     = (*Backend)(nil)
	_ backend.Expander      = (*Backend)(nil)
	_ backend.HealthChecker = (*Backend)(nil)
	_ backend.BlockProvider = (*Backend)(nil)
)

// Kind describes volumes that are logical volumes of a node.
var Kind = backend.Kind{
	Name: Name, Doc: "[a logical volume](../kinds/lvm.md) of a volume group of a node",
	Media: []pool.Kind{key}, PoolSection: func() pool.Section { return new(Group) }, Section: newSection,
	Parameters: []backend.Parameter{
		backend.FSType,
		backend.MkfsOptions,
		{
			Key: paramWipe, Values: []string{string(wipeDiscard), string(wipeZero)}, Default: string(wipeDiscard),
			Doc: "How the data of a [deleted volume](../kinds/lvm.md#delete) is erased. `discard`: its extents are discarded if the physical volume guarantees zeros afterwards, otherwise they are overwritten. `zero`: they are overwritten.",
		},
	},
	Examine: examine,
	New:     New,
}

// New creates the backend. It uses only pools of volume groups.
func New(pools *pool.Set) backend.Backend {
	accepts := func(c pool.Config) bool {
		_, isGroup := c.Section.(*Group)
		return isGroup
	}
	return &Backend{backend.Devices{
		Pools: backend.Pools{Backend: Name, Set: pools, Accepts: accepts, Explain: explainPool}, Formatter: blockdev.NewFormatter(),
		Loops: blockdev.NewLoopTags(blockdev.IsNodePath), ReadOnlyTag: readOnlyTag, OpenDevice: openDevice,
	}}
}

// explainPool names the remedy for a group without room.
func explainPool(p *pool.Pool, err error) error {
	if errors.Is(err, dm.ErrNoRoom) && !errors.Is(err, volume.ErrExhausted) {
		return volume.Errorf(volume.ErrExhausted, "pool %q has no room: %w: delete volumes, or extend the volume group (vgextend)", p.Name(), err)
	}
	return backend.NoRoom(p, err)
}

// Create implements backend.Backend.
func (b *Backend) Create(ctx context.Context, spec volume.Spec) (volume.Volume, error) {
	return b.FindOrCreate(spec, func(p *pool.Pool) (volume.Volume, error) {
		s := storageOf(p)
		v := b.NewVolume(p, spec)
		v.Block, v.FSType, v.MkfsOptions = spec.Block(), spec.FSType(), spec.Parameters.MkfsOptions()
		var err error
		if v.Capacity, err = spec.Capacity.Choose(s.bounds(v.FSType, v.Block)); err != nil {
			return v, err
		}
		if err := backend.CheckMkfsOptions(spec.Parameters, v.FSType, v.Capacity); err != nil {
			return v, err
		}
		if err := s.awaitRoom(ctx, p, v.Capacity); err != nil {
			return v, err
		}
		v.SectorSize = s.sectorSize()
		sec := &section{GUID: uuid.NewString(), Group: s.groupUUID(), Wipe: wipeMode(spec.Parameters.Get(paramWipe))}
		v.Section = sec
		return v, p.Create(ctx, v, func(*os.Root) error {
			id, err := s.create(ctx, v)
			sec.Volume = id.Volume
			crashpoint.Here(crashpoint.CreateImage)
			return err
		})
	})
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
	bounds := storageOf(p).bounds(q.FSType, q.Block)
	bounds.Min = (bounds.Min + bounds.Granule - 1) / bounds.Granule * bounds.Granule // the smallest logical volume
	return b.Room(q.Parameters, bounds)
}

// Delete implements backend.Backend.
func (b *Backend) Delete(ctx context.Context, id volume.ID) error {
	return b.DeleteUnpublished(id, func(p *pool.Pool, v volume.Volume) error {
		if err := b.release(ctx, v); err != nil {
			return err
		}
		return p.Remove(ctx, v)
	})
}
