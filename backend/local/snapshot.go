package local

import (
	"context"
	"errors"
	"io"
	"os"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Snapshot implements backend.Snapshotter for directories. Only a single btrfs subvolume can be in use:
// the snapshot of any other directory, or of several subvolumes, would not show one point in time.
func (b *Backend) Snapshot(ctx context.Context, volumes []volume.Volume, spec volume.SnapshotSpec) (volume.SnapshotSet, error) {
	set, err := b.Take(ctx, volumes, spec, expect, b.cut)
	if err != nil {
		return set, err
	}
	p, err := b.Set.ByID(set.ID)
	if err != nil {
		return set, err
	}
	for _, s := range set.Snapshots {
		if err := p.Quotas.Relimit(s.Writers()...); err != nil {
			return set, err
		}
	}
	return set, nil
}

// expect returns the expected record of a snapshot. The size of a directory without a limit is known
// only after the copy.
func expect(p *pool.Pool, v volume.Volume) (volume.Snapshot, error) {
	u, _, err := p.Quotas.Usage(v)
	s := volume.Snapshot{Directory: true, Bytes: u.Bytes}
	if v.Source != nil && len(v.Source.Owners) > 0 { // the volume's usage does not include the data that it shares
		s.Bytes, s.Owners = s.Bytes+v.Source.Shared, v.Source.Owners
	}
	return s, err
}

func (b *Backend) cut(ctx context.Context, c *backend.Cut) error {
	for _, v := range c.Of {
		const samePool = true
		err := awaitSlot(ctx, c.Job, samePool, func() (*os.File, error) { return c.Pool.OpenData(v) })
		if err != nil {
			return err
		}
	}
	return c.CutDirectories(
		func(v volume.Volume) (io.Closer, error) { return c.Pool.LockVolume(ctx, v.ID.Name) }, // against staging
		func(i int, from *os.File) error { return b.cutOne(ctx, c, i, from) })
}

// awaitSlot waits for a slot to copy a directory. It does not wait for a subvolume in the destination's
// pool, because btrfs creates a snapshot of that immediately.
func awaitSlot(ctx context.Context, j *pool.Job, samePool bool, open func() (*os.File, error)) error {
	if !samePool {
		return j.AwaitSlot(ctx)
	}
	dir, err := open()
	if err != nil {
		return err
	}
	defer dir.Close()
	subvolume, err := clone.IsSubvolume(dir)
	if err != nil || subvolume {
		return err
	}
	return j.AwaitSlot(ctx)
}

func (b *Backend) cutOne(ctx context.Context, c *backend.Cut, i int, from *os.File) error {
	v, s := c.Of[i], &c.Set.Snapshots[i]
	subvolume, err := clone.IsSubvolume(from)
	if err != nil {
		return err
	}
	if !subvolume || len(c.Of) > 1 {
		if err := b.quiet(v); err != nil {
			return err
		}
	}
	if !subvolume {
		return c.CutDirectory(ctx, i, from)
	}
	folder, err := c.Folders[i].Open(".")
	if err != nil {
		return err
	}
	defer folder.Close()
	if v.Directory.Quota == nil { // the usage of the volume is unknown
		s.Bytes = v.Capacity
	}
	s.Shared = true
	const readOnly = true
	return pool.CopyError(clone.Subvolume(folder, pool.DataDir, from, readOnly))
}

// quiet refuses a volume that is in use: its copy would not show one point in time.
func (b *Backend) quiet(v volume.Volume) error {
	err := b.CheckUnused(v)
	if errors.Is(err, volume.ErrInUse) {
		return volume.Errorf(volume.ErrPrecondition, "%w: a directory is copied file by file, so the copy of one in use would not show one point in time; only a single volume on btrfs can be in use", err)
	}
	return err
}

// copyFrom copies a snapshot or another volume to the directory of a new volume. The source volume
// is locked during the copy, so that it cannot be staged.
func (b *Backend) copyFrom(ctx context.Context, c *backend.DirectoryCopy) error {
	o := c.Origin
	if err := awaitSlot(ctx, c.Job, o.Pool == c.Pool, o.Directory); err != nil {
		return err
	}
	if o.Snapshot == nil {
		lock, err := o.Pool.LockVolume(ctx, o.Volume.ID.Name)
		if err != nil {
			return err
		}
		defer lock.Close()
	}
	from, err := o.Directory()
	if err != nil {
		return err
	}
	defer from.Close()
	if err := recordShared(c.Pool, c.Volume.Source, o, from); err != nil {
		return err
	}
	return c.Create(ctx, &pool.Content{Dir: from, Copy: func(to *os.File) error {
		if o.Snapshot == nil {
			if err := b.quiet(o.Volume); err != nil {
				return err
			}
		}
		result, err := clone.Tree(ctx, to, from, clone.Options{Progress: c.Job.Progress})
		if result.Shared {
			c.Volume.Source.Shared = result.Bytes
		}
		return err
	}})
}

// recordShared records in source the size of the data that a copy shares, and the volumes that have
// written this data: the copy of a subvolume is a snapshot, and btrfs counts each block as usage of
// the subvolume that wrote it. The volumes are recorded only if they are in the same pool.
func recordShared(p *pool.Pool, source *volume.Source, o *backend.Origin, from *os.File) error {
	subvolume, err := clone.IsSubvolume(from)
	if err != nil || !subvolume {
		return err
	}
	if limited, err := p.Quotas.Limits(); err != nil || !limited {
		return err
	}
	s := o.Snapshot
	if s == nil {
		expected, err := expect(o.Pool, o.Volume)
		if err != nil {
			return err
		}
		expected.Source = o.Volume.ID
		s = &expected
	}
	if source.Shared = s.Bytes; o.Pool == p {
		source.Owners = s.Writers()
	}
	return nil
}
