package loop

import (
	"context"
	"errors"
	"iter"
	"os"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/background"
	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// outgoing is the open image of a snapshot or a volume that is sent to another node.
type outgoing struct {
	*os.File
	manifest volume.Manifest
	pools    *backend.Pools
	pool     *pool.Pool
	budget   *background.Budget
	// base is the open image of the earlier snapshot from which the differences are sent; nil for none.
	base *os.File
	// blank means that the image has no data to copy (source.blank).
	blank bool
	// release ends the protection of the image from changes.
	release func()
}

// Manifest implements backend.Outgoing.
func (o *outgoing) Manifest() volume.Manifest { return o.manifest }

// Budget implements backend.Outgoing.
func (o *outgoing) Budget() *background.Budget { return o.budget }

// Since implements backend.Outgoing. The bases are the snapshots of the same volume.
func (o *outgoing) Since(identity string) bool {
	s, ok := o.pools.SnapshotWith(o.pool, o.manifest.Lineage, identity)
	if !ok {
		return false
	}
	var err error
	o.base, err = o.pool.Snapshots.OpenImage(s)
	return err == nil
}

// Ranges implements backend.Outgoing.
func (o *outgoing) Ranges(ctx context.Context, from int64) iter.Seq2[clone.Range, error] {
	switch {
	case o.blank:
		return func(func(clone.Range, error) bool) {}
	case o.base != nil:
		return clone.Delta(ctx, o.base, o.File, from, o.budget)
	}
	return clone.Allocated(ctx, o.File, from, o.manifest.StorageSize())
}

// Close implements io.Closer.
func (o *outgoing) Close() error {
	defer o.release()
	if o.base != nil {
		_ = o.base.Close()
	}
	return o.File.Close()
}

// Send implements backend.Transferrer. A snapshot can be deleted meanwhile: the open file keeps its data, which never changes.
func (b *Backend) Send(ctx context.Context, source volume.Source) (backend.Outgoing, error) {
	p, err := b.Set.ByID(source.ID)
	if err != nil {
		return nil, err
	}
	if p.Shared() {
		return nil, volume.Errorf(volume.ErrInvalid, "%v is on an export, which all nodes mount: create the volume there", &source)
	}
	if !source.Snapshot {
		return b.sendVolume(ctx, p, source.ID)
	}
	s, m, err := b.SnapshotManifest(p, source.ID)
	if err != nil {
		return nil, err
	}
	image, err := p.Snapshots.OpenImage(s)
	if err != nil {
		return nil, err
	}
	o := &outgoing{File: image, pools: &b.Pools, pool: p, budget: p.Background(image), manifest: m, release: func() {}}
	o.budget.NoReadAhead(image)
	return o, nil
}

// sendVolume is Send for a volume. A volume that is not staged is locked until its image is closed, as during a copy. Of a staged
// volume it sends a copy that shares the blocks, and that has no name, so that it vanishes when it is closed.
func (b *Backend) sendVolume(ctx context.Context, p *pool.Pool, id volume.ID) (backend.Outgoing, error) {
	v, err := p.ByID(id)
	if err != nil {
		return nil, err
	}
	all, err := b.openSources(ctx, p, []volume.Volume{v})
	if err != nil {
		return nil, err
	}
	s := all[0]
	o := &outgoing{blank: s.blank()}
	o.File, o.release = s.image, all.close
	if s.staged && !o.blank {
		o.File, err = copyUnnamed(ctx, p, all)
		all.close()
		o.release = func() {}
	}
	if err != nil {
		return nil, err
	}
	o.budget = p.Background(o.File)
	o.budget.NoReadAhead(o.File)
	bytes, err := allocatedBytes(o.File)
	if err != nil {
		return nil, errors.Join(err, o.Close())
	}
	o.manifest = backend.VolumeManifest(s.v, bytes, s.formatted())
	return o, nil
}

// copyUnnamed copies the image of a staged source to a file without a name, by sharing its blocks.
func copyUnnamed(ctx context.Context, p *pool.Pool, all sources) (*os.File, error) {
	to, err := p.UnnamedFile()
	if err != nil {
		return nil, err
	}
	err = copyShared(ctx, to, all)
	if errors.Is(err, clone.ErrNotShared) {
		err = volume.Errorf(volume.ErrPrecondition, "volume %s is in use, and its pool %q cannot share blocks: unstage the volume first, or create the new volume from a snapshot", all[0].v.ID, p.Name())
	}
	if err != nil {
		return nil, errors.Join(err, to.Close())
	}
	return to, nil
}

// copyShared copies the image of a source to a file, by sharing its blocks. The error is clone.ErrNotShared if the pool cannot share
// blocks.
func copyShared(ctx context.Context, to *os.File, all sources) error {
	if err := all.flush(); err != nil {
		return err
	}
	_, err := clone.File(ctx, to, all[0].image, clone.Options{OnlyShared: true})
	return err
}

// Receive implements backend.Transferrer.
func (b *Backend) Receive(ctx context.Context, spec volume.Spec, from backend.Incoming) (volume.Volume, error) {
	return b.FindOrCreate(spec, func(p *pool.Pool) (volume.Volume, error) {
		if p.Shared() {
			return volume.Volume{}, volume.Errorf(volume.ErrInvalid, "volume_content_source: %v is on another node, the requested volume is in pool %q, which is on an export: use a pool of the nodes", spec.Source, p.Name())
		}
		return b.ReceiveAsJob(ctx, p, spec, from, func(ctx context.Context, stream backend.Stream, j *pool.Job) error {
			return b.receive(ctx, p, spec, stream, j)
		})
	})
}

// receive creates a volume with the content of a stream.
func (b *Backend) receive(ctx context.Context, p *pool.Pool, spec volume.Spec, stream backend.Stream, j *pool.Job) error {
	m := stream.Manifest()
	v, err := b.newCopy(p, spec, &backend.Origin{Volume: m.Volume()})
	if err != nil {
		return err
	}
	partial, err := p.Receive(ctx, v, m)
	if err != nil {
		return err
	}
	defer partial.Close()
	var bases []string
	if allocationOf(v) == thin { // the blocks of a thick volume are its own
		if bases, err = partial.Bases(); err != nil {
			return err
		}
	}
	if err := backend.ReceiveContent(ctx, stream, partial, bases, j); err != nil {
		return err
	}
	return partial.Commit(ctx, func(dir *os.Root, image *os.File) error {
		err := finishCopy(dir, image, v, m.Volume(), m.Formatted)
		if err == nil && allocationOf(v) == thin {
			err = pool.MarkReceived(dir, image, m)
		}
		return err
	})
}
