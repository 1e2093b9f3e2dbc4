package disk

import (
	"context"
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
		return volume.Errorf(volume.ErrInvalid, "volume_content_source: %v: there are no snapshots of whole disks", &s)
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
	if err := o.CheckLimit(spec); err != nil { // a volume has the size of its disk, whatever the request
		return volume.Volume{}, err
	}
	return b.CopyAsJob(ctx, p, spec, func(ctx context.Context, j *pool.Job) error {
		return b.copyTo(ctx, p, spec, o, j.Progress)
	})
}

func (b *Backend) copyTo(ctx context.Context, p *pool.Pool, spec volume.Spec, o *backend.Origin, progress func(int64)) error {
	lock, err := o.Pool.LockVolume(ctx, o.Volume.ID.Name) // against staging
	if err != nil {
		return err
	}
	defer lock.Close()
	from, used, err := openUnused(ctx, o)
	if err != nil {
		return err
	}
	defer from.Close()
	needs := spec.Capacity
	needs.Required = max(needs.Required, o.Volume.Capacity)
	free, err := claimDisk(ctx, p, needs, o.Volume.Capacity)
	if err != nil {
		return err
	}
	v := b.volumeOn(p, spec, free)
	v.Block, v.FSType = o.Volume.Block, o.Volume.FSType
	if !used {
		return create(ctx, p, v, free, nil)
	}
	disk := free.Disk
	return create(ctx, p, v, free, func(dir *os.Root) error {
		return fill(ctx, dir, v, disk, from, progress)
	})
}

// openUnused opens the data of a disk that is not in use, and reports whether it contains any.
func openUnused(ctx context.Context, o *backend.Origin) (from *os.File, used bool, err error) {
	v := o.Volume
	staged, _, err := blockdev.Present(sectionOf(v).GUID, node(v.ID))
	if err == nil && staged {
		err = volume.Errorf(volume.ErrPrecondition, "volume %s is staged on this node: a disk can be copied only while it is not in use: unpublish and unstage it first", v.ID)
	}
	if err != nil {
		return nil, false, err
	}
	d, m, err := of(o.Pool).locate(v)
	if err != nil {
		return nil, false, err
	}
	from, err = d.OpenData(ctx, sectionOf(v).GUID)
	return from, m.Used, explain(v, err)
}

// fill copies the source to the disk of the new volume.
func fill(ctx context.Context, dir *os.Root, v volume.Volume, disk blockdev.Disk, from *os.File, progress func(int64)) error {
	to, err := disk.OpenData(ctx, sectionOf(v).GUID)
	if err != nil {
		return explain(v, err)
	}
	defer to.Close()
	copied, err := clone.File(ctx, to, from, clone.Options{Progress: progress})
	if err != nil {
		return pool.CopyError(err)
	}
	if err := zeroBehind(ctx, to, copied.Bytes, v, progress); err != nil {
		return err
	}
	if !v.Block {
		if err := pool.MarkCloned(dir); err != nil {
			return err
		}
	}
	return explain(v, disk.SetUsed(ctx, sectionOf(v).GUID))
}

// zeroBehind makes everything behind the copied content read as zeros: the disk may contain
// old data there.
func zeroBehind(ctx context.Context, to *os.File, copied int64, v volume.Volume, progress func(int64)) error {
	release := sectionOf(v).Wipe != wipeZero
	return blockdev.ZeroRange(ctx, to, copied, v.Capacity, release, func(upTo int64) error {
		progress(upTo)
		return nil
	})
}
