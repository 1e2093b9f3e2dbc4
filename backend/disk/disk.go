// Package disk is the backend of volumes that are whole disks of one node, one blank disk
// for each volume, with a filesystem or as a raw device.
//
// The records of its pools (disks in the configuration) are in the state directory. The mark of a
// disk is a GUID partition table with one partition of the driver's own type. The record contains
// the GUID of the partition. The partition contains the data, so that a pod with the raw device
// cannot overwrite the mark. The record is durable before the first sector of the mark is written,
// and wiping removes the mark last. After a crash, therefore, a disk is blank, or a record has its GUID.
package disk

import (
	"context"
	"errors"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Name is the backend's name.
const Name = "disk"

// Backend creates volumes that are whole disks.
type Backend struct{ backend.Devices }

var (
	_ backend.Backend           = (*Backend)(nil)
	_ backend.Publisher         = (*Backend)(nil)
	_ backend.Expander          = (*Backend)(nil)
	_ backend.HealthChecker     = (*Backend)(nil)
	_ backend.BlockProvider     = (*Backend)(nil)
	_ backend.OwnershipVerifier = (*Backend)(nil)
	_ backend.Cloner            = (*Backend)(nil)
	_ backend.Transferrer       = (*Backend)(nil)
)

// Kind describes volumes that are whole disks of a node.
var Kind = backend.Kind{
	Name: Name, Doc: "[a whole disk](../kinds/disks.md) of a node",
	Media: []pool.Kind{key}, PoolSection: func() pool.Section { return new(Disks) }, Section: newSection,
	Parameters: []backend.Parameter{
		backend.FSType,
		backend.MkfsOptions,
		backend.Encryption,
		{
			Key: paramWipe, Values: []string{string(wipeDiscard), string(wipeZero), string(wipeNone)}, Default: string(wipeDiscard),
			Doc: "What happens to the data of a [deleted volume](../kinds/disks.md#delete). `discard` overwrites it if the disk does not guarantee zeros after a discard, `zero` always. With `none` the next user of the disk can read it.",
		},
		backend.Copies,
	},
	New: New,
}

// New creates the backend. It uses only pools of disks.
func New(pools *pool.Set) backend.Backend {
	accepts := func(c pool.Config) bool {
		_, isDisks := c.Section.(*Disks)
		return isDisks
	}
	b := &Backend{}
	b.Devices = backend.Devices{
		Pools: backend.Pools{Backend: Name, Set: pools, Accepts: accepts, Explain: backend.NoRoom},
		Raw:   volume.Bounds{Min: volume.MiB, Granule: volume.MiB}, Formatter: blockdev.NewFormatter(),
		Loops: blockdev.NewLoopTags(blockdev.IsNodePath), ReadOnlyTag: readOnlyTag, OpenDevice: b.openDevice,
	}
	return b
}

// Create implements backend.Backend.
func (b *Backend) Create(ctx context.Context, spec volume.Spec) (volume.Volume, error) {
	return b.FindOrCreate(spec, func(p *pool.Pool) (volume.Volume, error) {
		if spec.Source != nil {
			return b.createFrom(ctx, p, spec)
		}
		// Each attempt claims another disk, because a disk that cannot be written is no longer free.
		for attempts := len(storageOf(p).states()); ; attempts-- {
			v, err := b.createEmpty(ctx, p, spec)
			if !errors.Is(err, blockdev.ErrDiskRefuses) || attempts <= 1 {
				return v, err
			}
			klog.FromContext(ctx).Error(err, "Marking a free disk failed; trying the next one", "pool", p.Name())
		}
	})
}

// createEmpty creates a volume without content on a free disk.
func (b *Backend) createEmpty(ctx context.Context, p *pool.Pool, spec volume.Spec) (volume.Volume, error) {
	c, err := claimDisk(ctx, p, room{Range: spec.Capacity, min: b.Bounds(spec.FSType(), spec.Block()).Min, header: backend.HeaderSize(spec.Parameters)})
	if err != nil {
		return volume.Volume{}, err
	}
	v := b.newVolume(p, spec, c, backend.NewEncryption(spec.Parameters, spec.Block(), c.Disk.SectorSize))
	v.Block, v.FSType, v.MkfsOptions = spec.Block(), spec.FSType(), spec.Parameters.MkfsOptions()
	if err := backend.CheckMkfsOptions(spec.Parameters, v.FSType, v.Capacity); err != nil {
		return volume.Volume{}, errors.Join(err, c.Close())
	}
	return v, create(ctx, p, v, c, nil)
}

// newVolume returns the record of a new volume on a claimed disk.
func (b *Backend) newVolume(p *pool.Pool, spec volume.Spec, c *claim, e *volume.Encryption) volume.Volume {
	v := b.NewVolume(p, spec)
	v.Encryption, v.SectorSize = e, c.Disk.SectorSize
	v.Capacity = c.Disk.Room() - v.Overhead()
	wipe := wipeMode(spec.Parameters.Get(paramWipe))
	v.Section = &section{GUID: c.GUID.String(), Identity: c.Disk.Identity, Wipe: wipe}
	return v
}

// Delete implements backend.Backend.
func (b *Backend) Delete(ctx context.Context, id volume.ID) error {
	return b.DeleteReleased(ctx, id, func(p *pool.Pool, v volume.Volume) error { return b.releaseDisk(ctx, p, v) })
}
