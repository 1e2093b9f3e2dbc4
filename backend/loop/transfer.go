package loop

import (
	"context"
	"errors"
	"iter"
	"os"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/linux/sys"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// outgoing is the open image of a snapshot or a volume that is sent to another node.
type outgoing struct {
	*os.File
	manifest volume.Manifest
	pool     *pool.Pool
	// base is the open image of the earlier snapshot from which the differences are sent; nil for none.
	base *os.File
	// blank means that the image has no data to copy (source.blank).
	blank bool
	// release ends the protection of the image from changes.
	release func()
}

// Manifest implements backend.Outgoing.
func (o *outgoing) Manifest() volume.Manifest { return o.manifest }

// Since implements backend.Outgoing. The bases are the snapshots of the same volume.
func (o *outgoing) Since(identity string) bool {
	text, creation, _ := strings.Cut(strings.TrimPrefix(identity, snapshotIdentity), " ")
	id, err := volume.ParseSnapshotID(text)
	if err != nil || o.manifest.Lineage == (volume.ID{}) {
		return false
	}
	s, set, err := getSnapshot(o.pool, id)
	if err != nil || set.CreationID != creation || s.Source != o.manifest.Lineage {
		return false
	}
	o.base, err = o.pool.Snapshots.OpenImage(s)
	return err == nil
}

// Ranges implements backend.Outgoing.
func (o *outgoing) Ranges(ctx context.Context, from int64) iter.Seq2[clone.Range, error] {
	switch {
	case o.blank:
		return func(func(clone.Range, error) bool) {}
	case o.base != nil:
		return clone.Delta(ctx, o.base, o.File, from)
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
	s, set, err := getSnapshot(p, source.ID)
	if err != nil {
		return nil, err
	}
	image, err := p.Snapshots.OpenImage(s)
	if err != nil {
		return nil, err
	}
	return &outgoing{File: image, pool: p, release: func() {}, manifest: volume.Manifest{
		Identity: snapshotIdentity + s.ID.String() + " " + set.CreationID, Lineage: s.Source, Created: set.Created, Size: s.Size, Bytes: s.Bytes,
		Formatted: s.Formatted, Block: s.Block, FSType: s.FSType, SectorSize: s.SectorSize, Encryption: s.Encryption,
	}}, nil
}

// snapshotIdentity begins the identity of a snapshot's content.
const snapshotIdentity = "snapshot "

// getSnapshot reads a snapshot and its set.
func getSnapshot(p *pool.Pool, id volume.ID) (s volume.Snapshot, set volume.SnapshotSet, err error) {
	if s, err = p.Snapshots.Get(id); err != nil {
		return s, set, err
	}
	id.Name = volume.SetOf(id.Name)
	set, err = p.Snapshots.Set(id)
	return s, set, err
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
	o := &outgoing{blank: s.blank(), manifest: volume.Manifest{
		Identity: "volume " + s.v.ID.String() + " " + uuid.NewString(), Size: s.v.Capacity, Formatted: s.formatted(),
		Block: s.v.Block, FSType: s.v.FSType, SectorSize: s.v.SectorSize, Encryption: s.v.Encryption,
	}}
	o.File, o.release = s.image, all.close
	if s.staged && !o.blank {
		o.File, err = copyUnnamed(ctx, p, all)
		all.close()
		o.release = func() {}
	}
	if err != nil {
		return nil, err
	}
	if o.manifest.Bytes, err = allocatedBytes(o.File); err != nil {
		return nil, errors.Join(err, o.Close())
	}
	return o, nil
}

// copyUnnamed copies the image of a staged source to a file without a name, by sharing its blocks.
func copyUnnamed(ctx context.Context, p *pool.Pool, all sources) (*os.File, error) {
	to, err := p.UnnamedFile()
	if err != nil {
		return nil, err
	}
	if err = all.flush(); err == nil {
		_, err = clone.File(ctx, to, all[0].image, clone.Options{OnlyShared: true})
	}
	if errors.Is(err, clone.ErrNotShared) {
		err = volume.Errorf(volume.ErrPrecondition, "volume %s is in use, and its pool %q cannot share blocks: unstage the volume first, or create the new volume from a snapshot", all[0].v.ID, p.Name())
	}
	if err != nil {
		return nil, errors.Join(err, to.Close())
	}
	return to, nil
}

// unattendedTime is the time after which a transfer ends for whose end no call waits.
const unattendedTime = 15 * time.Minute

// Receive implements backend.Transferrer.
func (b *Backend) Receive(ctx context.Context, spec volume.Spec, from backend.Incoming) (volume.Volume, error) {
	return b.FindOrCreate(spec, func(p *pool.Pool) (volume.Volume, error) {
		if p.Shared() {
			return volume.Volume{}, volume.Errorf(volume.ErrInvalid, "volume_content_source: %v is on another node, the requested volume is in pool %q, which is on an export: use a pool of the nodes", spec.Source, p.Name())
		}
		return b.CopyAsJob(ctx, p, spec, func(ctx context.Context, j *pool.Job) error {
			stream, err := from.Connect(ctx)
			if err != nil {
				return err
			}
			defer stream.Close()
			return b.receive(ctx, p, spec, stream, j)
		})
	})
}

// receive creates a volume with the content of a stream.
func (b *Backend) receive(ctx context.Context, p *pool.Pool, spec volume.Spec, stream backend.Stream, j *pool.Job) error {
	m := stream.Manifest()
	if err := m.Check(*spec.Source); err != nil {
		return err
	}
	v, err := b.newCopy(p, spec, &backend.Origin{Volume: m.Volume()})
	if err != nil {
		return err
	}
	partial, err := p.Receive(v, m)
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
	t := &target{partial: partial, job: j, before: partial.Bytes, expected: m.Bytes}
	err = stream.Copy(ctx, partial.Verified, bases, t)
	if err = errors.Join(err, t.await()); err != nil {
		return err
	}
	_ = stream.Close() // ends the use of the source; everything was verified
	return partial.Commit(ctx, func(dir *os.Root, image *os.File) error {
		err := finishCopy(dir, image, v, m.Formatted)
		if err == nil && allocationOf(v) == thin {
			err = pool.MarkReceived(dir, image, m)
		}
		return err
	})
}

// target writes the content of a stream to the image of a new volume. It implements backend.Target.
type target struct {
	partial *pool.Partial
	job     *pool.Job
	// expected is the size of the whole content without holes, in bytes.
	expected int64
	// before and written are the bytes that were received before the stream began, and since.
	before, written int64
	// syncing receives the result of SetVerified, which runs while the next part is received; nil if it was received.
	syncing chan error
}

// Begin implements backend.Target. How many bytes differ from a base is not known before.
func (t *target) Begin(ctx context.Context, base string) error {
	if base == "" {
		t.job.Expect(max(0, t.expected-t.before))
	}
	return t.partial.Begin(ctx, base)
}

// WriteZeros implements backend.Target.
func (t *target) WriteZeros(r clone.Range) error { return t.partial.PunchHole(r) }

// WriteAt implements io.WriterAt.
func (t *target) WriteAt(content []byte, at int64) (int, error) {
	n, err := t.partial.Image.WriteAt(content, at)
	t.written += int64(n)
	t.job.Progress(t.written)
	return n, err
}

// Verified implements backend.Target.
func (t *target) Verified(upTo int64) error {
	if idle := t.job.Unattended(); idle > unattendedTime {
		return volume.Errorf(volume.ErrUnavailable, "no call has waited for the transfer for %v: it has ended, and a retry continues it", idle.Round(time.Second))
	}
	if err := t.await(); err != nil {
		return err
	}
	syncing, bytes := make(chan error, 1), t.before+t.written
	t.syncing = syncing
	go func() {
		sys.IdleIO()
		syncing <- t.partial.SetVerified(upTo, bytes)
	}()
	return nil
}

// await waits until the last verified part is durable and recorded.
func (t *target) await() error {
	if t.syncing == nil {
		return nil
	}
	err := <-t.syncing
	t.syncing = nil
	return err
}
