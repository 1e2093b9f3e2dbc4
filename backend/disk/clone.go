package disk

import (
	"context"
	"errors"
	"os"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// CheckSource implements backend.Cloner.
func (b *Backend) CheckSource(s volume.Source) error {
	if s.Snapshot {
		return volume.Errorf(volume.ErrInvalid, "volume_content_source: %v: snapshots of whole disks are not supported: use a volume as the source", &s)
	}
	return nil
}

// createFrom creates a volume on a free disk and copies another volume to it. The source must not
// be staged during the copy.
func (b *Backend) createFrom(ctx context.Context, p *pool.Pool, spec volume.Spec) (volume.Volume, error) {
	o, err := b.Origin(p, spec)
	if err != nil {
		return volume.Volume{}, err
	}
	if err := o.CheckDevice(spec); err != nil {
		return volume.Volume{}, err
	}
	if err := o.CheckLimit(spec); err != nil { // the other limits are checked when a disk is claimed
		return volume.Volume{}, err
	}
	return b.CopyAsJob(ctx, p, spec, func(ctx context.Context, j *pool.Job) error {
		return b.copyTo(ctx, p, spec, o, j.Progress)
	})
}

// copyTo claims a disk for the new volume, and copies the origin to the disk unless the origin was
// never written.
func (b *Backend) copyTo(ctx context.Context, p *pool.Pool, spec volume.Spec, o *backend.Origin, progress func(int64)) error {
	lock, err := o.Pool.LockVolume(ctx, o.Volume.ID.Name) // prevents staging
	if err != nil {
		return err
	}
	defer lock.Close()
	from, mayHaveData, err := openUnstaged(ctx, o)
	if err != nil {
		return err
	}
	defer from.Close()
	free, err := claimDisk(ctx, p, roomFor(spec, o.Volume))
	if err != nil {
		return err
	}
	v := b.newVolume(p, spec, free, o.Volume.Encryption)
	v.Block, v.FSType = o.Volume.Block, o.Volume.FSType
	if !mayHaveData {
		return createBlank(ctx, p, spec, v, free)
	}
	disk := free.Disk
	return create(ctx, p, v, free, func(dir *os.Root) error {
		return fill(ctx, dir, v, disk, from, progress)
	})
}

// roomFor returns the size of a disk for a volume with the content of another one. A filesystem has blocks of at least 4096
// bytes, so it allows all sectors.
func roomFor(spec volume.Spec, of volume.Volume) room {
	r := room{Range: spec.Capacity, min: of.Capacity, header: of.Overhead()}
	r.Required = max(r.Required, of.Capacity)
	switch {
	case of.Encryption != nil:
		r.sector = of.Encryption.SectorSize
	case of.Block:
		r.sector = of.SectorSize
	}
	return r
}

// createBlank creates a volume whose source has no data on a claimed disk, and closes the claim.
func createBlank(ctx context.Context, p *pool.Pool, spec volume.Spec, v volume.Volume, c *claim) error {
	if err := backend.SetMkfsOptions(&v, spec.Parameters); err != nil {
		return errors.Join(err, c.Close())
	}
	return create(ctx, p, v, c, nil)
}

// openUnstaged opens the partition of a volume that is not staged. mayHaveData reports whether the partition may
// contain data. If so, its container and filesystem are complete: the mark says that it was used only after that.
func openUnstaged(ctx context.Context, o *backend.Origin) (from *os.File, mayHaveData bool, err error) {
	v := o.Volume
	staged, _, err := blockdev.Present(sectionOf(v).GUID, deviceName(v.ID))
	if err == nil && staged {
		err = volume.Errorf(volume.ErrPrecondition, "volume %s is staged on this node: a disk can be copied or sent only while it is not in use: unpublish and unstage it first", v.ID)
	}
	if err != nil {
		return nil, false, err
	}
	d, m, err := storageOf(o.Pool).locate(v)
	if err != nil {
		return nil, false, err
	}
	from, err = d.OpenData(ctx, sectionOf(v).GUID)
	return from, m.Used, explainDisk(v, err)
}

// fill copies the source to the disk of the new volume.
func fill(ctx context.Context, dir *os.Root, v volume.Volume, disk blockdev.Disk, from *os.File, progress func(int64)) error {
	to, err := disk.OpenData(ctx, sectionOf(v).GUID)
	if err != nil {
		return explainDisk(v, err)
	}
	defer to.Close()
	copied, err := clone.File(ctx, to, from, clone.Options{Progress: progress})
	if err != nil {
		return pool.CopyError(err)
	}
	if v.Encryption != nil { // the container does not show old data, and the source has a container because it has data
		err = pool.MarkContainerCopied(dir)
	} else {
		err = zeroRest(ctx, to, copied.Bytes, v, progress)
	}
	if err != nil {
		return err
	}
	if !v.Block {
		if err := pool.MarkCloned(dir); err != nil {
			return err
		}
	}
	return explainDisk(v, disk.SetUsed(ctx, sectionOf(v).GUID))
}

// zeroRest makes the part of a disk after the copied bytes read as zeros, because it may contain old
// data.
func zeroRest(ctx context.Context, to *os.File, copied int64, v volume.Volume, progress func(int64)) error {
	release := sectionOf(v).Wipe != wipeZero // zero by discarding, where that guarantees zeros
	return blockdev.ZeroRange(ctx, to, copied, v.Capacity, blockdev.ZeroOptions{Release: release, Progress: func(upTo int64) error {
		progress(upTo)
		return nil
	}})
}
