package nfs

import (
	"cmp"
	"context"
	"errors"
	"io"
	"os"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Snapshot implements backend.Snapshotter. A directory is copied file by file, by the server itself if it
// supports that. The volume must not be published.
func (b *Backend) Snapshot(ctx context.Context, volumes []volume.Volume, spec volume.SnapshotSpec) (volume.SnapshotSet, error) {
	expect := func(*pool.Pool, volume.Volume) (volume.Snapshot, error) { return volume.Snapshot{Directory: true}, nil }
	return b.Take(ctx, volumes, spec, expect, b.copyToSnapshots)
}

// copyToSnapshots copies volumes to snapshots.
func (b *Backend) copyToSnapshots(ctx context.Context, c *backend.SnapshotCopy) error {
	if err := c.Job.AwaitSlot(ctx); err != nil {
		return err
	}
	return c.CopyDirectories(
		func(v volume.Volume) (io.Closer, error) { return b.lockIdle(ctx, c.Pool, v) },
		func(i int, from *os.File) error { return c.CopyDirectory(ctx, i, from) })
}

// lockIdle refuses a volume that is published or mounted on this node, and prevents publication until the
// lock is closed.
func (b *Backend) lockIdle(ctx context.Context, p *pool.Pool, v volume.Volume) (lock io.Closer, err error) {
	if lock, err = p.LockVolume(ctx, v.ID.Name); err != nil {
		return nil, err
	}
	source, err := b.source(v)
	if err == nil {
		err = cmp.Or(p.Attachments.CheckUnpublished(v.ID), backend.CheckUnmounted(v, source))
	}
	if errors.Is(err, volume.ErrPrecondition) {
		err = volume.Errorf(volume.ErrPrecondition, "%w: a directory is copied file by file, so its copy would not show one point in time while it is in use", err)
	}
	if err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return lock, nil
}

// Publish implements backend.Publisher. A volume cannot be published while it is being copied.
func (b *Backend) Publish(ctx context.Context, v volume.Volume, publication backend.Publication) error {
	p, err := b.Set.ByID(v.ID)
	if err != nil {
		return err
	}
	lock, err := p.LockVolume(ctx, v.ID.Name)
	if err != nil {
		return explain(p, err)
	}
	return errors.Join(b.Pools.Publish(ctx, v, publication), lock.Close())
}

// copyFrom copies a snapshot or another volume to the directory of a new volume.
func (b *Backend) copyFrom(ctx context.Context, c *backend.DirectoryCopy) error {
	if err := c.Job.AwaitSlot(ctx); err != nil {
		return err
	}
	if o := c.Origin; o.Snapshot == nil {
		lock, err := b.lockIdle(ctx, o.Pool, o.Volume)
		if err != nil {
			return err
		}
		defer lock.Close()
	}
	from, err := c.Origin.Directory()
	if err != nil {
		return err
	}
	defer from.Close()
	return c.Create(ctx, &pool.Content{Dir: from, Copy: func(to *os.File) error {
		_, err := clone.Tree(ctx, to, from, clone.Options{Progress: c.Job.Progress})
		return err
	}})
}
