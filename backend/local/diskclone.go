package local

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"time"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/blockdev"
	"github.com/trivet-csi/trivet/clone"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// cloneDisk makes a volume of a free disk and copies another volume's to it, which is
// not staged meanwhile.
func (b *Backend) cloneDisk(ctx context.Context, p *pool.Pool, spec volume.Spec) (volume.Volume, error) {
	o, err := b.Origin(p, spec)
	if err != nil {
		return volume.Volume{}, err
	}
	switch from := o.Volume; {
	case from.Disk == nil:
		return volume.Volume{}, volume.Errorf(volume.ErrInvalid, "volume_content_source: %v is no whole disk, the volume is to be one: use a class of the source's pool", spec.Source)
	case spec.Block() != from.Block:
		return volume.Volume{}, volume.Errorf(volume.ErrInvalid, "volume_capabilities ask for block %t, %v has block %t: ask for the same", spec.Block(), spec.Source, from.Block)
	case spec.AsksFSType() && spec.FSType() != from.FSType:
		return volume.Volume{}, volume.Errorf(volume.ErrInvalid, "volume_capabilities or parameter %s ask for filesystem %s, %v has %s: ask for that, or for none", volume.ParamFSType, spec.FSType(), spec.Source, from.FSType)
	}
	if err := o.Fits(spec); err != nil { // all of a disk is a volume, however little was asked for
		return volume.Volume{}, err
	}
	err = p.Do(ctx, spec.Name(), func(ctx context.Context, j *pool.Job) error {
		return b.copyDisk(ctx, p, spec, o, j.Progress)
	})
	if err != nil {
		return volume.Volume{}, noRoom(p, err)
	}
	return b.Existing(p, spec)
}

func (b *Backend) copyDisk(ctx context.Context, p *pool.Pool, spec volume.Spec, o *backend.Origin, progress func(int64)) error {
	lock, err := o.Pool.LockVolume(ctx, o.Volume.ID.Name) // against staging
	if err != nil {
		return err
	}
	defer lock.Close()
	from, used, err := openDisk(ctx, o)
	if err != nil {
		return err
	}
	defer from.Close()
	needs := spec.Capacity
	needs.Required = max(needs.Required, o.Volume.Capacity)
	claim, err := p.ClaimDisk(ctx, needs, o.Volume.Capacity)
	if err != nil {
		return err
	}
	v := volume.Volume{
		Version: volume.RecordVersion, ID: p.ID(Name, spec.Name()), CoName: spec.CoName, Capacity: claim.Disk.Room(),
		Block: o.Volume.Block, FSType: o.Volume.FSType, SectorSize: claim.Disk.SectorSize,
		Disk:   &volume.Disk{GUID: claim.GUID.String(), Identity: claim.Disk.Identity, Wipe: cmp.Or(spec.Parameters.Wipe, volume.WipeDiscard)},
		Source: spec.Source, Created: time.Now().UTC().Truncate(time.Second),
	}
	if !used {
		return p.CreateDisk(ctx, v, claim, nil)
	}
	disk := claim.Disk
	return p.CreateDisk(ctx, v, claim, func(dir *os.Root) error {
		return fillDisk(ctx, dir, v, disk, from, progress)
	})
}

// openDisk opens the data of a disk that nobody has, and tells whether there is any.
func openDisk(ctx context.Context, o *backend.Origin) (from *os.File, used bool, err error) {
	v := o.Volume
	staged, _, err := blockdev.Present(guid(v), node(v.ID))
	if err == nil && staged {
		err = volume.Errorf(volume.ErrPrecondition, "volume %s is staged on this node: a disk is copied while nobody has it, unpublish and unstage it first", v.ID)
	}
	if err != nil {
		return nil, false, err
	}
	d, m, err := o.Pool.FindDisk(v)
	if err != nil {
		return nil, false, err
	}
	from, err = d.OpenData(ctx, v.Disk.GUID)
	return from, m.Used, diskFailed(v, err)
}

// fillDisk copies to the disk of a volume that is being made.
func fillDisk(ctx context.Context, dir *os.Root, v volume.Volume, disk blockdev.Disk, from *os.File, progress func(int64)) error {
	to, err := disk.OpenData(ctx, v.Disk.GUID)
	if err != nil {
		return diskFailed(v, err)
	}
	defer to.Close()
	copied, err := clone.File(ctx, to, from, clone.Options{Progress: progress})
	if err != nil {
		return err
	}
	if err := zeroBehind(ctx, to, copied.Bytes, v, progress); err != nil {
		return err
	}
	if !v.Block {
		if err := pool.MarkCloned(dir); err != nil {
			return err
		}
	}
	return diskFailed(v, disk.SetUsed(ctx, v.Disk.GUID))
}

// zeroBehind makes everything behind the copied content read as zeros: the disk may have
// anything there.
func zeroBehind(ctx context.Context, to *os.File, copied int64, v volume.Volume, progress func(int64)) error {
	release := v.Disk.Wipe != volume.WipeZero
	return blockdev.ZeroRange(ctx, to, copied, v.Capacity, release, func(upTo int64) error {
		progress(upTo)
		return nil
	})
}

// identifyDisk makes the copy of another volume's filesystem one of its own.
func (b *Backend) identifyDisk(ctx context.Context, a *attaching) (settle func() error, err error) {
	if err := checkDisk(ctx, a.v, a.device); err != nil {
		return nil, err
	}
	if err := blockdev.Reidentify(context.WithoutCancel(ctx), a.device, a.v.FSType); err != nil {
		return nil, fmt.Errorf("volume %s, a copy of %v: %w", a.v.ID, a.v.Source, err)
	}
	crashpoint.Here(crashpoint.StageIdentified)
	return func() error {
		if err := a.device.Sync(); err != nil {
			return err
		}
		return a.p.EndClone(a.v.ID.Name)
	}, nil
}
