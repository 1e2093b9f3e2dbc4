package backend

import (
	"context"
	"errors"
	"os"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/trivet-csi/trivet/linux/background"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/linux/luks"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// SnapshotManifest reads a snapshot, and describes its content for another node.
func (ps *Pools) SnapshotManifest(p *pool.Pool, id volume.ID) (s volume.Snapshot, m volume.Manifest, err error) {
	if s, err = p.Snapshots.Get(id); err != nil {
		return s, m, err
	}
	id.Name = volume.SetOf(id.Name)
	set, err := p.Snapshots.Set(id)
	return s, volume.Manifest{
		Identity: snapshotIdentity + s.ID.String() + " " + set.CreationID, Lineage: s.Source, Created: set.Created, Size: s.Size, Bytes: s.Bytes,
		Formatted: s.Formatted, Block: s.Block, FSType: s.FSType, SectorSize: s.SectorSize, Encryption: s.Encryption,
	}, err
}

// snapshotIdentity begins the identity of a snapshot's content.
const snapshotIdentity = "snapshot "

// SnapshotWith reads the snapshot of a volume whose content has an identity. ok is false if there is none.
func (ps *Pools) SnapshotWith(p *pool.Pool, lineage volume.ID, identity string) (s volume.Snapshot, ok bool) {
	text, _, _ := strings.Cut(strings.TrimPrefix(identity, snapshotIdentity), " ")
	id, err := volume.ParseSnapshotID(text)
	if err != nil {
		return s, false
	}
	s, m, err := ps.SnapshotManifest(p, id)
	return s, err == nil && m.Identity == identity && m.Lineage == lineage
}

// VolumeManifest describes the content of a volume for another node. Each description has its own identity, because the
// volume can change.
func VolumeManifest(v volume.Volume, bytes int64, formatted bool) volume.Manifest {
	return volume.Manifest{
		Identity: "volume " + v.ID.String() + " " + uuid.NewString(), Size: v.Capacity, Bytes: bytes, Formatted: formatted,
		Block: v.Block, FSType: v.FSType, SectorSize: v.SectorSize, Encryption: v.Encryption,
	}
}

// IdleManifest is VolumeManifest for a volume that is locked and not staged. The identity stays until the volume is staged or
// expanded, so that an interrupted transfer continues.
func IdleManifest(p *pool.Pool, v volume.Volume, bytes int64, formatted bool) (volume.Manifest, error) {
	m := VolumeManifest(v, bytes, formatted)
	id, err := p.Images.ContentID(v.ID.Name)
	m.Identity = "volume " + v.ID.String() + " " + id
	return m, err
}

// ReceiveAsJob is CopyAsJob for a source on another node.
func (ps *Pools) ReceiveAsJob(ctx context.Context, p *pool.Pool, spec volume.Spec, from Incoming,
	receive func(context.Context, Stream, *pool.Job) error,
) (volume.Volume, error) {
	return ps.CopyAsJob(ctx, p, spec, func(ctx context.Context, j *pool.Job) error {
		stream, err := from.Connect(ctx)
		if err != nil {
			return err
		}
		defer stream.Close()
		if err := stream.Manifest().Check(*spec.Source); err != nil {
			return err
		}
		return receive(ctx, stream, j)
	})
}

// ReceiveContent receives the content of a stream, or the differences from one of the bases, and closes the stream.
func ReceiveContent(ctx context.Context, stream Stream, partial *pool.Partial, bases []string, j *pool.Job) error {
	t := &target{
		partial: partial, job: j, alive: stream.Alive, unattended: j.Unattended, setVerified: partial.SetVerified, before: partial.Bytes, expected: stream.Manifest().Bytes,
	}
	t.write = func(content []byte, at int64) (int, error) { return partial.WriteAt(ctx, content, at) }
	t.zeroUpTo = func(offset int64) error {
		if !partial.HasGap(offset) {
			return nil
		}
		// The kernel reports an error of writing back to only one sync of an open file (fsync(2)), and ZeroUpTo syncs too.
		if err := t.await(); err != nil {
			return err
		}
		err := partial.ZeroUpTo(ctx, offset)
		t.unsynced = t.unsynced && err == nil
		return err
	}
	err := stream.Copy(ctx, partial.Verified, bases, t)
	if err = errors.Join(err, t.end()); err != nil {
		return err
	}
	_ = stream.Close() // ends the use of the source; everything was verified
	return nil
}

// HasNoData reports whether a source has no data, so that a volume that is created from it is a new one.
func HasNoData(m volume.Manifest) bool { return m.Bytes == 0 || !m.Block && !m.Formatted }

// ReceiveNothing verifies that the source of a stream has no data, and closes the stream. p discards what was received for the
// volume with a name before.
func ReceiveNothing(ctx context.Context, stream Stream, p *pool.Pool, name string) error {
	if err := stream.Copy(ctx, 0, nil, noTarget{}); err != nil {
		return err
	}
	_ = stream.Close() // ends the use of the source
	return p.DiscardReceived(name)
}

// noTarget implements Target, and accepts no data.
type noTarget struct{}

// Begin implements Target.
func (noTarget) Begin(context.Context, string) error { return nil }

// WriteAt implements io.WriterAt.
func (noTarget) WriteAt([]byte, int64) (int, error) {
	return 0, volume.Errorf(volume.ErrDamaged, "the other node sends data of a source that it describes as never used: check which driver runs there")
}

// WriteZeros implements Target.
func (noTarget) WriteZeros(clone.Range) error { return nil }

// Verified implements Target.
func (noTarget) Verified(int64) error { return nil }

// ReceivedOnDevice makes the received data on the device of a volume durable, and records its description in the volume's folder.
func ReceivedOnDevice(dir *os.Root, device *os.File, v volume.Volume, m volume.Manifest) error {
	if err := MarkCopied(dir, v, m.Volume(), m.Formatted); err != nil {
		return err
	}
	if m.Encryption != nil {
		encrypted, err := luks.HasHeader(device)
		if err == nil && encrypted {
			err = pool.MarkContainerCopied(dir)
		}
		if err != nil {
			return err
		}
	}
	if err := device.Sync(); err != nil {
		return err
	}
	return pool.MarkReceived(dir, device, m)
}

// smallGap is the size in bytes below which zeros are written, because ZeroRange waits for the device several times.
const smallGap = 8 << 20

// ZeroGap makes a range of a device read as zeros, between data that is received. If release is set, the device may release its
// storage (blockdev.ZeroRange). alive is called often.
func ZeroGap(ctx context.Context, to *background.Writer, r clone.Range, release bool, alive func()) error {
	const aligned = 4096 // to sectors, as ZeroRange requires
	if r.Length >= smallGap && r.Offset%aligned == 0 && r.Length%aligned == 0 {
		if err := to.File.Sync(); err != nil { // ZeroRange syncs too, and would not return an error of the data before the gap
			return err
		}
		return blockdev.ZeroRange(ctx, to.File, r.Offset, r.Offset+r.Length, blockdev.ZeroOptions{
			Release: release, Budget: to.Budget, Each: alive, Progress: func(int64) error { return nil },
		})
	}
	zeros := make([]byte, min(r.Length, 1<<20))
	for end := r.Offset + r.Length; r.Offset < end; {
		alive()
		n, err := to.Budget.WriteAt(ctx, to, zeros[:min(int64(len(zeros)), end-r.Offset)], r.Offset)
		if err != nil {
			return err
		}
		r.Offset += int64(n)
	}
	return nil
}

// unattendedTime is the time after which a transfer ends for whose end no call waits.
const unattendedTime = 15 * time.Minute

// target writes the content of a stream to a new volume. It implements Target.
type target struct {
	partial *pool.Partial
	job     *pool.Job
	// alive is Stream.Alive, and unattended pool.Job.Unattended.
	alive      func()
	unattended func() time.Duration
	// write is pool.Partial.WriteAt, setVerified its SetVerified, and zeroUpTo its ZeroUpTo, after await.
	write       func(content []byte, at int64) (int, error)
	setVerified func(upTo, bytes int64) error
	zeroUpTo    func(offset int64) error
	// expected is the size of the whole content without holes, in bytes.
	expected int64
	// before and written are the bytes that were received before the stream began, and since.
	before, written int64
	// verified and verifiedBytes are the arguments of the next setVerified, if unsynced is set. It is not set after a failed sync: the
	// kernel may report no error to the next one, although data was lost.
	verified, verifiedBytes int64
	unsynced                bool
	// syncing receives the result of setVerified, which runs while the next part is received; nil if it was received. syncBegan is when
	// it began, and syncBytes how many bytes were received then.
	syncing   chan error
	syncBegan time.Time
	syncBytes int64
}

// A part is made durable when syncInterval has passed, or syncSize bytes were received, since the last one. A sync also makes the disk write
// out its cache, for which the requests of others wait. An interrupted transfer continues with the last verified part. A transfer whose
// process is killed, or that is interrupted while a gap is zeroed, continues with the one that was recorded.
const (
	syncInterval = time.Second
	syncSize     = 256 << 20
)

// Begin implements Target. How many bytes differ from a base is not known before.
func (t *target) Begin(ctx context.Context, base string) error {
	if base == "" {
		t.job.Expect(max(0, t.expected-t.before))
	}
	return t.partial.Begin(ctx, base, t.alive)
}

// WriteZeros implements Target.
func (t *target) WriteZeros(r clone.Range) error { return t.partial.PunchHole(r) }

// WriteAt implements io.WriterAt.
func (t *target) WriteAt(content []byte, at int64) (int, error) {
	if err := t.zeroUpTo(at); err != nil {
		return 0, err
	}
	n, err := t.write(content, at)
	t.written += int64(n)
	t.job.Progress(t.written)
	return n, err
}

// Verified implements Target.
func (t *target) Verified(upTo int64) error {
	if idle := t.unattended(); idle > unattendedTime {
		return volume.Errorf(volume.ErrUnavailable, "no call has waited for the transfer for %v: it has ended, and a retry continues it", idle.Round(time.Second))
	}
	bytes := t.before + t.written
	if t.partial.Completes(upTo) {
		if err := t.await(); err != nil {
			return err
		}
		t.unsynced = false // Complete records more, or that the transfer begins again
		if err := t.partial.Complete(bytes); err != nil {
			return err
		}
	}
	if err := t.zeroUpTo(upTo); err != nil {
		return err
	}
	t.verified, t.verifiedBytes, t.unsynced = upTo, bytes, true
	if time.Since(t.syncBegan) < syncInterval && bytes-t.syncBytes < syncSize {
		return nil
	}
	return t.sync()
}

// sync begins to make the verified parts durable, after the last sync.
func (t *target) sync() error {
	if err := t.await(); err != nil || !t.unsynced {
		return err
	}
	syncing, upTo, bytes := make(chan error, 1), t.verified, t.verifiedBytes
	t.syncing, t.syncBegan, t.syncBytes, t.unsynced = syncing, time.Now(), bytes, false
	go func() { syncing <- t.setVerified(upTo, bytes) }()
	return nil
}

// end makes the verified parts durable. It is called when the content was received, and after an error.
func (t *target) end() error { return errors.Join(t.sync(), t.await()) }

// await waits until the last verified part is durable and recorded.
func (t *target) await() error {
	if t.syncing == nil {
		return nil
	}
	err := <-t.syncing
	t.syncing, t.unsynced = nil, t.unsynced && err == nil
	return err
}
