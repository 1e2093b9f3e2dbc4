package local

import (
	"context"
	"errors"
	"io"
	"os"
	"time"

	"github.com/google/uuid"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/background"
	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/volume"
)

// outgoing is the directory of a snapshot or a volume that is sent to another node, as a packed tree.
type outgoing struct {
	*clone.Packed
	manifest volume.Manifest
	pools    *backend.Pools
	pool     *pool.Pool
	// release ends the protection of the directory from changes.
	release func() error
}

// Manifest implements backend.Outgoing.
func (o *outgoing) Manifest() volume.Manifest { return o.manifest }

// Budget implements backend.Outgoing.
func (o *outgoing) Budget() *background.Budget { return o.Packed.Budget }

// Since implements backend.Outgoing. The bases are the snapshots of the same volume.
func (o *outgoing) Since(identity string) bool {
	s, ok := o.pools.SnapshotWith(o.pool, o.manifest.Lineage, identity)
	if !ok {
		return false
	}
	dir, err := o.pool.Snapshots.OpenDirectory(s)
	if err != nil {
		return false
	}
	exists := func() error {
		if _, ok := o.pools.SnapshotWith(o.pool, o.manifest.Lineage, identity); !ok {
			return volume.Errorf(volume.ErrUnavailable, "snapshot %s was deleted or replaced meanwhile", s.ID)
		}
		return nil
	}
	if err := o.Packed.Since(dir, exists); err != nil {
		klog.ErrorS(err, "Comparing a directory with an earlier snapshot failed", "source", o.manifest.Identity, "base", identity)
		_ = dir.Close()
		return false
	}
	return true
}

// Close implements io.Closer.
func (o *outgoing) Close() error {
	err := errors.Join(o.Packed.Close(), o.release())
	if err != nil {
		klog.ErrorS(err, "Ending the transfer of a directory failed", "source", o.manifest.Identity)
	}
	return err
}

// open packs a directory, and closes it. exists returns an error if the source was deleted: its entries may then be missing in the
// index, because the trash is emptied meanwhile. After an error, open calls release.
func (b *Backend) open(ctx context.Context, p *pool.Pool, dir *os.File, m volume.Manifest, exists, release func() error) (backend.Outgoing, error) {
	packed, err := clone.Pack(ctx, dir, p.UnnamedFile)
	if existsErr := exists(); err == nil && existsErr != nil {
		err = errors.Join(existsErr, packed.Close())
	}
	if err != nil {
		return nil, errors.Join(pool.CopyError(err), release())
	}
	packed.Budget = p.Background(dir)
	m.Bytes = packed.Bytes
	m.Tree = &volume.PackedTree{IndexSize: packed.IndexSize, Size: packed.Size, Layout: packed.Layout}
	return &outgoing{packed, m, &b.Pools, p, release}, nil
}

// Send implements backend.Transferrer. If the source is deleted meanwhile, the transfer fails.
func (b *Backend) Send(ctx context.Context, source volume.Source) (backend.Outgoing, error) {
	p, err := b.Set.ByID(source.ID)
	if err != nil {
		return nil, err
	}
	if !source.Snapshot {
		return b.sendVolume(ctx, p, source.ID)
	}
	s, m, err := b.SnapshotManifest(p, source.ID)
	if err != nil {
		return nil, err
	}
	dir, err := p.Snapshots.OpenDirectory(s)
	if err != nil {
		return nil, err
	}
	exists := func() error {
		_, now, err := b.SnapshotManifest(p, source.ID)
		if err == nil && now.Identity != m.Identity {
			err = volume.Errorf(volume.ErrUnavailable, "snapshot %s was replaced meanwhile: retry", s.ID)
		}
		return err
	}
	return b.open(ctx, p, dir, m, exists, func() error { return nil })
}

// sendVolume is Send for a volume. Of a btrfs subvolume it sends a snapshot that exists only for the transfer, so that the volume
// can be used meanwhile. Any other volume must not be in use, and is locked until it is sent.
func (b *Backend) sendVolume(ctx context.Context, p *pool.Pool, id volume.ID) (backend.Outgoing, error) {
	v, err := p.ByID(id)
	if err != nil {
		return nil, err
	}
	dir, err := p.OpenData(v)
	if err != nil {
		return nil, err
	}
	subvolume, err := clone.IsSubvolume(dir)
	if err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	m := backend.VolumeManifest(v, 0, false)
	if subvolume {
		_ = dir.Close()
		return b.sendTemporary(ctx, p, v, m)
	}
	lock, err := p.LockVolume(ctx, id.Name)
	if err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	if err := b.checkIdle(v); err != nil {
		return nil, errors.Join(err, dir.Close(), lock.Close())
	}
	exists := func() error {
		now, err := p.ByID(id)
		if err == nil && now.CreationID != v.CreationID {
			err = volume.Errorf(volume.ErrUnavailable, "volume %s was replaced meanwhile: retry", id)
		}
		return err
	}
	return b.open(ctx, p, dir, m, exists, lock.Close)
}

// sendTemporary sends a subvolume with a snapshot that exists only for the transfer.
func (b *Backend) sendTemporary(ctx context.Context, p *pool.Pool, v volume.Volume, m volume.Manifest) (backend.Outgoing, error) {
	one, err := expect(p, v)
	if err != nil {
		return nil, err
	}
	name := "transfer-" + uuid.NewString()
	one.ID, one.Source, one.Size = p.ID(Name, name), v.ID, v.Capacity
	set := volume.SnapshotSet{Version: volume.RecordVersion, ID: one.ID, CoName: name, Created: time.Now().UTC(), Snapshots: []volume.Snapshot{one}}
	var dir *os.File
	remove, err := p.Snapshots.Temporary(ctx, &set, func(folders []*os.Root) error {
		c := &backend.SnapshotCopy{Pool: p, Volumes: []volume.Volume{v}, Record: &set, Folders: folders}
		lock := func(v volume.Volume) (io.Closer, error) { return p.LockVolume(ctx, v.ID.Name) }
		err := c.CopyDirectories(lock, func(i int, from *os.File) error { return b.copyToSnapshot(ctx, c, i, from) })
		if err == nil {
			dir, err = openData(folders[0])
		}
		return err
	})
	if errors.Is(err, volume.ErrExhausted) { // not in the pool of the new volume
		err = volume.Errorf(volume.ErrPrecondition, "volume %s: its transfer needs a snapshot, for which pool %q of its node has no room: %w", v.ID, p.Name(), err)
	}
	if err != nil {
		if dir != nil {
			_ = dir.Close()
		}
		return nil, err
	}
	writers := set.Snapshots[0].Writers()
	if err := p.Quotas.Relimit(writers...); err != nil {
		return nil, errors.Join(err, dir.Close(), remove())
	}
	return b.open(ctx, p, dir, m, func() error { return nil }, remove) // the trash sets the limits again
}

// openData opens the directory in the folder of a snapshot.
func openData(folder *os.Root) (*os.File, error) {
	at, err := folder.Open(".")
	if err != nil {
		return nil, err
	}
	defer at.Close()
	return beneath.OpenDir(at, pool.DataDir)
}

// Receive implements backend.Transferrer.
func (b *Backend) Receive(ctx context.Context, spec volume.Spec, from backend.Incoming) (volume.Volume, error) {
	requested, err := backend.RequestedDirectory(spec)
	if err != nil {
		return volume.Volume{}, err
	}
	v, err := b.FindOrCreate(spec, func(p *pool.Pool) (volume.Volume, error) {
		return b.ReceiveAsJob(ctx, p, spec, from, func(ctx context.Context, stream backend.Stream, j *pool.Job) error {
			return b.receive(ctx, p, spec, requested, stream, j)
		})
	})
	if err != nil {
		return v, err
	}
	return v, b.limitOwners(v)
}

// receive creates a volume with the content of a stream.
func (b *Backend) receive(ctx context.Context, p *pool.Pool, spec volume.Spec, requested volume.DirectoryParameters, stream backend.Stream, j *pool.Job) error {
	m := stream.Manifest()
	v := b.NewDirectory(p, spec, requested)
	var err error
	if v.Capacity, err = (&backend.Origin{Volume: m.Volume()}).Choose(spec, bounds); err != nil {
		return err
	}
	partial, err := p.Receive(ctx, v, m)
	if err != nil {
		return err
	}
	defer partial.Close()
	bases, err := partial.Bases()
	if err != nil {
		return err
	}
	if err := backend.ReceiveContent(ctx, stream, partial, bases, j); err != nil {
		return err
	}
	return partial.CommitDirectory(ctx, func(dir *os.File, empty bool) error {
		return b.Prepare(dir, empty, requested, v.Directory)
	})
}
