package lvm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"slices"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/background"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/linux/dm"
	"github.com/trivet-csi/trivet/linux/sys"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// sentCopy is the open device of a snapshot, or of a thick volume that is not staged, that is sent to other nodes.
type sentCopy struct {
	*os.File
	users int
}

// openCopy opens a logical volume, which closeCopy closes.
func (s *storage) openCopy(ctx context.Context, id dm.VolumeID, access dm.Access) (c *sentCopy, err error) {
	return c, s.changeCurrent(ctx, func(g dm.Group, r *dm.Report) error {
		if c = s.sent[id]; c != nil {
			c.users++
			return nil
		}
		lv, ok := r.Volume(id)
		if !ok {
			return volume.Errorf(volume.ErrUnavailable, "volume group %s has no logical volume with the UUID %s: if it was not deleted meanwhile, restore the group's metadata (vgcfgrestore)", s.name, id.Volume)
		}
		device, err := openIdle(ctx, g, lv, access)
		if err != nil {
			return err
		}
		c = &sentCopy{device, 1}
		s.sent[id] = c
		return nil
	})
}

// openIdle opens a logical volume that nothing uses. After an error, the logical volume is inactive unless it was active before.
func openIdle(ctx context.Context, g dm.Group, lv dm.LogicalVolume, access dm.Access) (*os.File, error) {
	_, active, err := lv.ID.Device()
	if err != nil {
		return nil, err
	}
	device, err := open(ctx, g, lv, access)
	if err == nil {
		return device, nil
	}
	kind, remedy := volume.ErrUnavailable, "retry"
	if errors.Is(err, dm.ErrInUse) {
		kind, remedy = volume.ErrPrecondition, "stop the program that has it open (find it with fuser or lsblk)"
	}
	err = volume.Errorf(kind, "opening %s/%s to send it: %w: %s", g.Name, lv.Name, err, remedy)
	if !active {
		err = errors.Join(err, g.Deactivate(ctx, lv.Name, lv.ID))
	}
	return nil, err
}

// closeCopy closes a logical volume that was sent, and deactivates it unless another transfer reads it. If that fails, a later
// scan deactivates it.
func (s *storage) closeCopy(id dm.VolumeID) {
	ctx := context.Background()
	err := s.change(ctx, func(g dm.Group, r *dm.Report) error {
		c := s.sent[id]
		if c.users--; c.users > 0 {
			return nil
		}
		delete(s.sent, id)
		err := c.Close()
		if lv, ok := r.Volume(id); ok {
			err = errors.Join(err, g.Deactivate(ctx, lv.Name, id))
		}
		return err
	})
	if err != nil {
		klog.ErrorS(err, "Deactivating a logical volume that was sent failed", "pool", s.cfg.Name, "uuid", id.Volume)
	}
}

// deactivateCopies deactivates the logical volumes that are active only during a transfer, and that no program has open. A killed
// driver has left them active, or closing them has failed.
func (s *storage) deactivateCopies(ctx context.Context, g dm.Group, r dm.Report, known inventory) {
	for _, lv := range r.Volumes {
		if !lv.HasTag(poolTag+s.cfg.Name) || !known.activeInTransfer(lv) {
			continue
		}
		d, ok, err := lv.ID.Device()
		if err == nil && ok && d.Opens == 0 {
			err = g.Deactivate(ctx, lv.Name, lv.ID)
		}
		if err != nil {
			klog.FromContext(ctx).Error(err, "Deactivating a logical volume failed", "pool", s.cfg.Name, "volume", lv.Name)
		}
	}
}

// activeInTransfer reports whether a logical volume is active only during a transfer: that of a snapshot, of a thin volume that
// was never staged, or of a thick one that was sent and not used since, and the volume is not staged.
func (i inventory) activeInTransfer(lv dm.LogicalVolume) bool {
	thick, unused := lv.Pool == "", lv.HasTag(unusedTag)
	switch {
	case thick && unused: // it may be active because it is being zeroed
		return false
	case !thick && !unused:
		return i.hasSnapshot(lv)
	}
	tag := slices.IndexFunc(lv.Tags, func(tag string) bool { return i.volumes[guidOf(tag)].Folder != "" })
	if tag < 0 {
		return false
	}
	record := i.volumes[guidOf(lv.Tags[tag])]
	staged, err := showsVolume(record.Volume)
	return err == nil && !staged && (!thick || record.WasSent() && !record.Trashed)
}

// outgoing is a logical volume that is sent to another node.
type outgoing struct {
	*sentCopy
	manifest volume.Manifest
	pool     *pool.Pool
	budget   *background.Budget
	id       dm.VolumeID
	// blank means that there is no data to copy (origin.blank).
	blank bool
	// release removes a snapshot that was created for the transfer, or unlocks a thick volume.
	release func() error
}

// Manifest implements backend.Outgoing.
func (o *outgoing) Manifest() volume.Manifest { return o.manifest }

// Budget implements backend.Outgoing.
func (o *outgoing) Budget() *background.Budget { return o.budget }

// Since implements backend.Outgoing: the whole content is sent.
func (o *outgoing) Since(string) bool { return false }

// Ranges implements backend.Outgoing. Which blocks of a thin volume were written is only in the metadata of the thin pool, so
// all blocks are read.
func (o *outgoing) Ranges(ctx context.Context, from int64) iter.Seq2[clone.Range, error] {
	if o.blank {
		return func(func(clone.Range, error) bool) {}
	}
	return clone.Allocated(ctx, o.File, from, o.manifest.StorageSize())
}

// Close implements io.Closer.
func (o *outgoing) Close() error {
	storageOf(o.pool).closeCopy(o.id)
	err := o.release()
	if err != nil {
		klog.ErrorS(err, "Removing the snapshot or the lock of a transfer failed", "pool", o.pool.Name())
	}
	return err
}

// Send implements backend.Transferrer. A snapshot that is deleted meanwhile keeps its logical volume until it is closed.
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
	from, err := b.openOrigin(ctx, &backend.Origin{Pool: p, Snapshot: &s, Volume: m.Volume()})
	if err != nil {
		return nil, err
	}
	return openOutgoing(ctx, p, from, m, func() error { return nil })
}

// openOutgoing opens the logical volume of an origin to send it. If that fails, it calls release. In the description, the size of the
// data is 0 only if there is none: the recorded size may be older than the data.
func openOutgoing(ctx context.Context, p *pool.Pool, from *origin, m volume.Manifest, release func() error) (backend.Outgoing, error) {
	c, err := storageOf(p).openCopy(ctx, from.id, dm.ReadOnly)
	if err != nil {
		return nil, errors.Join(err, release())
	}
	switch {
	case from.blank():
		m.Bytes = 0
	case m.Bytes == 0:
		m.Bytes = m.StorageSize()
	}
	budget := p.Background(c.File)
	budget.NoReadAhead(c.File)
	return &outgoing{sentCopy: c, manifest: m, pool: p, budget: budget, id: from.id, blank: from.blank(), release: release}, nil
}

// sendVolume is Send for a volume. It sends a snapshot of a thin volume that exists only for the transfer, so that the volume
// can be used and changed meanwhile.
func (b *Backend) sendVolume(ctx context.Context, p *pool.Pool, id volume.ID) (backend.Outgoing, error) {
	v, err := p.ByID(id)
	if err != nil {
		return nil, err
	}
	if storageOf(p).thin == "" {
		return b.sendThick(ctx, p, v)
	}
	t, err := b.takeTemporary(ctx, p, v, "transfer", false)
	if errors.Is(err, volume.ErrExhausted) || errors.Is(err, dm.ErrNoRoom) { // not in the pool of the new volume
		err = volume.Errorf(volume.ErrPrecondition, "volume %s: its transfer needs a snapshot, for which pool %q of its node has no room: %w", v.ID, p.Name(), err)
	}
	if err != nil {
		return nil, err
	}
	return openOutgoing(ctx, p, t.origin, backend.VolumeManifest(t.volume, t.bytes, t.formatted), t.release)
}

// temporary is a snapshot of a volume that exists until release is called.
type temporary struct {
	*origin
	bytes   int64
	release func() error
}

// takeTemporary takes a temporary snapshot of a volume. purpose begins its name.
func (b *Backend) takeTemporary(ctx context.Context, p *pool.Pool, v volume.Volume, purpose string, writable bool) (*temporary, error) {
	var made snapshotCopy
	expected := func(p *pool.Pool, v volume.Volume) (volume.Snapshot, error) { return storageOf(p).expected(ctx, v) }
	one, release, err := b.TakeTemporary(ctx, p, v, purpose, expected, func(ctx context.Context, c *backend.SnapshotCopy) error {
		c.Writable = writable
		err := b.takeThin(ctx, c)
		if err == nil {
			made, _, err = readCopy(c.Folders[0].FS(), ".")
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	v.Capacity = one.Size
	return &temporary{&origin{volume: v, id: made.id(), formatted: one.Formatted, encrypted: made.Encrypted}, one.Bytes, release}, nil
}

// sendThick is Send for a volume without a thin pool, which is locked meanwhile.
func (b *Backend) sendThick(ctx context.Context, p *pool.Pool, v volume.Volume) (backend.Outgoing, error) {
	o, err := b.lockOrigin(ctx, p, v)
	if err != nil {
		return nil, err
	}
	staged, err := showsVolume(o.volume)
	if err == nil && staged {
		err = volume.Errorf(volume.ErrPrecondition, "volume %s is staged on this node: a thick logical volume can be sent only while it is not in use: unpublish and unstage it first", v.ID)
	}
	if err != nil {
		return nil, errors.Join(err, o.lock.Close())
	}
	m, err := backend.IdleManifest(p, o.volume, o.volume.StorageSize(), o.formatted)
	if err != nil {
		return nil, errors.Join(err, o.lock.Close())
	}
	return openOutgoing(ctx, p, o, m, o.lock.Close)
}

// Receive implements backend.Transferrer.
func (b *Backend) Receive(ctx context.Context, spec volume.Spec, from backend.Incoming) (volume.Volume, error) {
	return b.FindOrCreate(spec, func(p *pool.Pool) (volume.Volume, error) {
		if err := storageOf(p).checkPool(spec.Parameters); err != nil {
			return volume.Volume{}, err
		}
		if spec.Parameters.Get(paramLogicalVolume) != "" {
			return b.takeOver(ctx, p, spec)
		}
		return b.ReceiveAsJob(ctx, p, spec, from, func(ctx context.Context, stream backend.Stream, j *pool.Job) error {
			return b.receive(ctx, p, spec, stream, j)
		})
	})
}

// receive creates a volume with the content of a stream.
func (b *Backend) receive(ctx context.Context, p *pool.Pool, spec volume.Spec, stream backend.Stream, j *pool.Job) error {
	m, s := stream.Manifest(), storageOf(p)
	if size := s.sectorSize(); m.SectorSize < size {
		return volume.Errorf(volume.ErrInvalid, "volume_content_source: %v has sectors of %d bytes, and the volume group of pool %q has sectors of %d: use a pool on disks with sectors of %[2]d bytes", spec.Source, m.SectorSize, p.Name(), size)
	}
	v, err := b.newCopy(p, spec, &backend.Origin{Volume: m.Volume()})
	if err != nil {
		return err
	}
	if backend.HasNoData(m) {
		if err := backend.SetMkfsOptions(&v, spec.Parameters); err != nil {
			return err
		}
		if s.thin == "" {
			if err := backend.ReceiveNothing(ctx, stream, p, v.ID.Name); err != nil {
				return err
			}
			return s.createNew(ctx, p, v, j.Progress)
		}
	}
	partial, err := p.ReceiveOnStorage(ctx, v.ID.Name, m, &reception{storage: s, pool: p, v: v})
	if err != nil {
		return err
	}
	defer partial.Close()
	if err := backend.ReceiveContent(ctx, stream, partial, nil, j); err != nil {
		return err
	}
	if v.Encryption == nil { // the device in a container does not show what it never encrypted
		if err := partial.ZeroUpTo(ctx, v.StorageSize()); err != nil {
			return err
		}
	}
	return partial.Commit(ctx, func(dir *os.Root, device *os.File) error { return backend.ReceivedOnDevice(dir, device, v, m) })
}

// reception is the logical volume of a volume that is being received. It implements pool.ReceivedData.
type reception struct {
	*storage
	pool *pool.Pool
	v    volume.Volume
}

// Continue implements pool.ReceivedData. A thick logical volume is overwritten with other content, so that the call need not wait
// until it is wiped. The parts that are not received are zeroed, as for a new one.
func (r *reception) Continue(before volume.Volume, same bool) (v volume.Volume, ok bool) {
	v = r.v
	wipe := sectionOf(v).Wipe
	v.Section = before.Section
	return v, (same || r.thin == "") && before.StorageSize() == v.StorageSize() && sectionOf(before).Wipe == wipe
}

// Begin implements pool.ReceivedData.
func (r *reception) Begin(ctx context.Context) (volume.Volume, error) {
	return r.v, r.awaitRoom(ctx, r.pool, r.v.StorageSize())
}

// Open implements pool.ReceivedData. The logical volume of a volume in a thin pool has unusedTag, as that of a clone. Of a thick
// one, the data is wiped if the volume is not created.
func (r *reception) Open(ctx context.Context, folder *os.Root, v volume.Volume, verified int64) (device *os.File, kept int64, err error) {
	_, lv, exists, err := r.find(ctx, sectionOf(v).identity)
	if err == nil && !exists {
		lv.ID, err = r.create(ctx, v)
		crashpoint.Here(crashpoint.CreateImage)
	}
	if err != nil {
		return nil, 0, err
	}
	sectionOf(v).Volume = lv.ID.Volume
	if r.thin == "" {
		if err := backend.CreateFlag(folder, copyingFile); err != nil {
			return nil, 0, err
		}
		if err := r.setUsed(ctx, v); err != nil {
			return nil, 0, err
		}
	}
	if device, err = r.openNew(ctx, v); err != nil || !exists {
		return device, 0, err
	}
	if r.thin == "" {
		return device, verified, nil
	}
	if err = eraseFrom(ctx, device, verified); err != nil {
		err = volume.Errorf(volume.ErrUnavailable, "volume %s: %w: retry", v.ID, err)
		return nil, 0, errors.Join(err, r.Close(v, device)) //nolint:contextcheck // the device is closed even if the call has ended
	}
	return device, verified, nil
}

// Zero implements pool.ReceivedData. The blocks of a new thin volume, and those after eraseFrom, are zeros.
func (r *reception) Zero(ctx context.Context, to *background.Writer, gap clone.Range, alive func()) error {
	if r.thin != "" {
		return nil
	}
	return backend.ZeroGap(ctx, to, gap, sectionOf(r.v).Wipe == wipeDiscard, alive)
}

// SharesDisk implements pool.ReceivedData.
func (r *reception) SharesDisk() bool { return true }

// Close implements pool.ReceivedData.
func (r *reception) Close(v volume.Volume, device *os.File) error {
	return errors.Join(device.Close(), r.deactivateNew(context.Background(), v))
}

// openNew opens the device of a volume that is being received.
func (s *storage) openNew(ctx context.Context, v volume.Volume) (device *os.File, err error) {
	return device, s.onVolume(ctx, v, func(g dm.Group, lv *dm.LogicalVolume) error {
		device, err = open(ctx, g, *lv, dm.Exclusive)
		return err
	})
}

// eraseFrom makes the bytes of a thin volume from an offset on read as zeros. A discard releases only whole blocks, and none if
// the thin pool ignores discards, so the result is read, and the remaining data overwritten. pool.ErrNotErased if that fails. It has no
// budget and no idle I/O priority, because the other node waits for it for a limited time.
func eraseFrom(ctx context.Context, device *os.File, from int64) error {
	size, err := blockdev.Size(device)
	if err != nil || from >= size {
		return err
	}
	if err := sys.Discard(device, from, size-from); err != nil {
		klog.FromContext(ctx).V(2).Info("Discarding failed; the data is overwritten", "device", device.Name(), "err", err)
	}
	zeros, data := make([]byte, 1<<20), make([]byte, 1<<20)
	for at := from; at < size && err == nil; at += int64(len(zeros)) {
		if err := ctx.Err(); err != nil {
			return err
		}
		n := min(int64(len(zeros)), size-at)
		if _, err = device.ReadAt(data[:n], at); err == nil && !bytes.Equal(data[:n], zeros[:n]) {
			_, err = device.WriteAt(zeros[:n], at)
		}
	}
	if err = errors.Join(err, device.Sync()); err != nil {
		err = fmt.Errorf("%w: %w", pool.ErrNotErased, err)
	}
	return err
}
