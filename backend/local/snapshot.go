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

// Snapshot implements backend.Snapshotter for directories. It refuses a volume in use, unless it is a
// btrfs subvolume and the only volume, because the snapshots of other directories, or of several
// subvolumes, would not show one point in time.
func (b *Backend) Snapshot(ctx context.Context, volumes []volume.Volume, spec volume.SnapshotSpec) (volume.SnapshotSet, error) {
	set, err := b.Take(ctx, volumes, spec, expect, b.copyToSnapshots)
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

var _ backend.LiveSnapshotter = (*Backend)(nil)

// LiveSnapshots implements backend.LiveSnapshotter.
func (b *Backend) LiveSnapshots(v volume.Volume) bool {
	p, err := b.Set.ByID(v.ID)
	if err != nil {
		return true
	}
	dir, err := p.OpenData(v)
	if err != nil {
		return true
	}
	defer dir.Close()
	subvolume, err := clone.IsSubvolume(dir)
	return err != nil || subvolume
}

// expect returns the expected record of a snapshot. The size of a directory without a limit is known
// only after the copy.
func expect(p *pool.Pool, v volume.Volume) (volume.Snapshot, error) {
	u, _, err := p.Quotas.Usage(v)
	s := volume.Snapshot{Directory: true, Bytes: u.Bytes}
	if v.Source != nil && len(v.Source.Owners) > 0 { // btrfs does not count shared data as usage of this volume
		s.Bytes, s.Owners = s.Bytes+v.Source.Shared, v.Source.Owners
	}
	return s, err
}

// copyToSnapshots copies volumes to snapshots.
func (b *Backend) copyToSnapshots(ctx context.Context, c *backend.SnapshotCopy) error {
	for _, v := range c.Volumes {
		const samePool = true
		err := awaitSlot(ctx, c.Job, samePool, func() (*os.File, error) { return c.Pool.OpenData(v) })
		if err != nil {
			return err
		}
	}
	return c.CopyDirectories(
		func(v volume.Volume) (io.Closer, error) { return c.Pool.LockVolume(ctx, v.ID.Name) }, // prevents staging
		func(i int, from *os.File) error { return b.copyToSnapshot(ctx, c, i, from) })
}

// awaitSlot waits for a slot to copy the directory that open opens. It does not wait if the directory is a
// subvolume and stays in its pool, because btrfs copies it immediately.
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

// copyToSnapshot copies a volume to the snapshot with index i.
func (b *Backend) copyToSnapshot(ctx context.Context, c *backend.SnapshotCopy, i int, from *os.File) error {
	v, s := c.Volumes[i], &c.Record.Snapshots[i]
	subvolume, err := clone.IsSubvolume(from)
	if err != nil {
		return err
	}
	if !subvolume || len(c.Volumes) > 1 {
		if err := b.checkIdle(v); err != nil {
			return err
		}
	}
	if !subvolume {
		return c.CopyDirectory(ctx, i, from)
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

// checkIdle refuses (ErrPrecondition) a volume that is mounted, because its copy would not show one point in time.
// Unlike CheckUnused it also checks a directory that is retained.
func (b *Backend) checkIdle(v volume.Volume) error {
	source, err := b.Source(v)
	if err == nil {
		err = backend.CheckUnmounted(v, source)
	}
	if errors.Is(err, volume.ErrInUse) {
		return volume.Errorf(volume.ErrPrecondition, "%w: a directory is copied file by file, so its copy would not show one point in time while it is in use; only a single volume on btrfs can be in use", err)
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
			if err := b.checkIdle(o.Volume); err != nil {
				return err
			}
		}
		result, err := clone.Tree(ctx, to, from, clone.Options{Progress: c.Job.Progress, Budget: c.Pool.Background(to, from)})
		if result.Shared {
			c.Volume.Source.Shared = result.Bytes
		}
		return err
	}})
}

// recordShared records in source the size of the data that a copy of a subvolume shares with it, and the
// volumes that have written this data, because btrfs counts a block as usage of the subvolume that wrote
// it. The volumes are recorded only if the copy is in the same pool.
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
