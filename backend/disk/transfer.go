package disk

import (
	"context"
	"errors"
	"io"
	"iter"
	"os"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/background"
	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// outgoing is the open partition of a volume that is sent to another node. The volume is locked.
type outgoing struct {
	*os.File
	manifest    volume.Manifest
	mayHaveData bool
	lock        io.Closer
}

// Manifest implements backend.Outgoing.
func (o *outgoing) Manifest() volume.Manifest { return o.manifest }

// Budget implements backend.Outgoing: no other volume is on the disk.
func (o *outgoing) Budget() *background.Budget { return nil }

// Since implements backend.Outgoing: the whole content is sent.
func (o *outgoing) Since(string) bool { return false }

// Ranges implements backend.Outgoing. A disk does not report which of its blocks were written, so all are read.
func (o *outgoing) Ranges(ctx context.Context, from int64) iter.Seq2[clone.Range, error] {
	if !o.mayHaveData {
		return func(func(clone.Range, error) bool) {}
	}
	return clone.Allocated(ctx, o.File, from, o.manifest.StorageSize())
}

// Close implements io.Closer.
func (o *outgoing) Close() error { return errors.Join(o.File.Close(), o.lock.Close()) }

// Send implements backend.Transferrer, for a volume that is not staged.
func (b *Backend) Send(ctx context.Context, source volume.Source) (backend.Outgoing, error) {
	if err := b.CheckSource(source); err != nil {
		return nil, err
	}
	p, v, lock, err := b.Lock(ctx, source.ID) // prevents staging
	if err != nil {
		return nil, err
	}
	o, err := open(ctx, p, v)
	if err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	o.lock = lock
	return o, nil
}

// open opens a locked volume to send it.
func open(ctx context.Context, p *pool.Pool, v volume.Volume) (o *outgoing, err error) {
	o = new(outgoing)
	if o.File, o.mayHaveData, err = openUnstaged(ctx, &backend.Origin{Pool: p, Volume: v}); err != nil {
		return nil, err
	}
	var bytes int64
	if o.mayHaveData {
		bytes = v.StorageSize()
	}
	if o.manifest, err = backend.IdleManifest(p, v, bytes, o.mayHaveData && !v.Block); err != nil {
		return nil, errors.Join(err, o.File.Close())
	}
	return o, nil
}

// Receive implements backend.Transferrer.
func (b *Backend) Receive(ctx context.Context, spec volume.Spec, from backend.Incoming) (volume.Volume, error) {
	return b.FindOrCreate(spec, func(p *pool.Pool) (volume.Volume, error) {
		return b.ReceiveAsJob(ctx, p, spec, from, func(ctx context.Context, stream backend.Stream, j *pool.Job) error {
			return b.receive(ctx, p, spec, stream, j)
		})
	})
}

// receive creates a volume with the content of a stream.
func (b *Backend) receive(ctx context.Context, p *pool.Pool, spec volume.Spec, stream backend.Stream, j *pool.Job) error {
	m := stream.Manifest()
	o := &backend.Origin{Volume: m.Volume()}
	if err := errors.Join(o.CheckDevice(spec), o.CheckLimit(spec)); err != nil {
		return err
	}
	r := &reception{Backend: b, pool: p, spec: spec, content: m, room: roomFor(spec, o.Volume)}
	defer r.release()
	if backend.HasNoData(m) {
		if err := backend.ReceiveNothing(ctx, stream, p, spec.Name()); err != nil {
			return err
		}
		v, err := r.Begin(ctx)
		if err != nil {
			return err
		}
		c := r.claimed
		r.claimed = nil // createBlank closes it
		return createBlank(ctx, p, spec, v, c)
	}
	partial, err := p.ReceiveOnStorage(ctx, spec.Name(), m, r)
	if err != nil {
		return err
	}
	defer partial.Close()
	if err := backend.ReceiveContent(ctx, stream, partial, nil, j); err != nil {
		return err
	}
	v := partial.Volume()
	if v.Encryption == nil { // a container does not show old data
		if err := partial.ZeroUpTo(ctx, v.StorageSize()); err != nil {
			return err
		}
	}
	return partial.Commit(ctx, func(dir *os.Root, device *os.File) error {
		if err := backend.ReceivedOnDevice(dir, device, v, m); err != nil {
			return err
		}
		d, err := storageOf(p).locateForChange(v)
		if err != nil {
			return err
		}
		return explainDisk(v, d.SetUsed(ctx, sectionOf(v).GUID))
	})
}

// reception is the disk of a volume that is being received. It implements pool.ReceivedData.
type reception struct {
	*Backend
	pool    *pool.Pool
	spec    volume.Spec
	content volume.Manifest
	room    room
	// claimed is the disk of a new volume, until the mark reserves it.
	claimed *claim
}

// release ends the claim, if there is one.
func (r *reception) release() {
	if r.claimed != nil {
		storageOf(r.pool).release(r.claimed)
		r.claimed = nil
	}
}

// Continue implements pool.ReceivedData. The disk of an earlier call is overwritten with other content, so that the call need not
// wait until it is wiped. The parts of the disk that are not received are zeroed, as for a free disk. A disk that is missing or cannot be read
// is given up.
func (r *reception) Continue(before volume.Volume, _ bool) (v volume.Volume, ok bool) {
	v = r.NewVolume(r.pool, r.spec)
	v.Block, v.FSType, v.Encryption = r.content.Block, r.content.FSType, r.content.Encryption
	v.Capacity, v.SectorSize, v.Section = before.Capacity, before.SectorSize, before.Section
	if _, err := storageOf(r.pool).locateForChange(v); errors.Is(err, volume.ErrUnavailable) {
		return v, false
	}
	return v, before.Overhead() == v.Overhead() && r.room.fits(before.StorageSize(), before.SectorSize) && sectionOf(before).Wipe == r.wipe()
}

// wipe is the parameter of the class.
func (r *reception) wipe() wipeMode { return wipeMode(r.spec.Parameters.Get(paramWipe)) }

// Begin implements pool.ReceivedData: it claims a disk.
func (r *reception) Begin(ctx context.Context) (v volume.Volume, err error) {
	if r.claimed, err = claimDisk(ctx, r.pool, r.room); err != nil {
		return v, err
	}
	v = r.newVolume(r.pool, r.spec, r.claimed, r.content.Encryption)
	v.Block, v.FSType = r.content.Block, r.content.FSType
	return v, nil
}

// Open implements pool.ReceivedData. It marks a claimed disk. Its data is wiped if the volume is not created.
func (r *reception) Open(ctx context.Context, folder *os.Root, v volume.Volume, verified int64) (device *os.File, kept int64, err error) {
	s := storageOf(r.pool)
	if c := r.claimed; c != nil {
		verified = 0
		err := c.Mark(v.CoName)
		crashpoint.Here(crashpoint.CreateImage)
		r.release() // the mark reserves the disk
		s.noteRefusal(c, err)
		if err == nil {
			err = backend.CreateFlag(folder, copyingFile)
		}
		if err != nil {
			return nil, 0, err
		}
	}
	d, err := s.locateForChange(v)
	if err != nil {
		return nil, 0, err
	}
	device, err = d.OpenData(ctx, sectionOf(v).GUID)
	return device, verified, explainDisk(v, err)
}

// SharesDisk implements pool.ReceivedData.
func (r *reception) SharesDisk() bool { return false }

// Zero implements pool.ReceivedData. Only the places of signatures of the claimed disk were zeros.
func (r *reception) Zero(ctx context.Context, to *background.Writer, gap clone.Range, alive func()) error {
	return backend.ZeroGap(ctx, to, gap, r.wipe() != wipeZero, alive)
}

// Close implements pool.ReceivedData.
func (r *reception) Close(_ volume.Volume, device *os.File) error { return device.Close() }
