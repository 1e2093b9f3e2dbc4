package lvm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/dm"
	"github.com/trivet-csi/trivet/linux/luks"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// snapshotTag is a tag of the logical volume of a snapshot, with the name in the ID of the snapshot, for administrators.
const snapshotTag = "trivet.snapshot."

// origin is a volume or snapshot that is copied. Its volume is locked.
type origin struct {
	volume    volume.Volume
	id        dm.VolumeID
	formatted bool // the volume has a complete filesystem
	encrypted bool // the volume has a complete container
	// container is the name of the device in the container; empty if that is not open.
	container dm.DeviceName
	lock      io.Closer
}

// blank reports whether there is no data to copy, because the filesystem or the container is not complete.
func (o *origin) blank() bool {
	return !o.volume.Block && !o.formatted || o.volume.Encryption != nil && !o.encrypted
}

// origins are volumes that are copied at the same moment.
type origins []*origin

func (all origins) close() {
	for _, o := range all {
		o.lock.Close()
	}
}

// lockOrigins locks volumes until close, and reads their records.
func (b *Backend) lockOrigins(ctx context.Context, p *pool.Pool, volumes []volume.Volume) (all origins, err error) {
	for _, v := range volumes {
		o, err := b.lockOrigin(ctx, p, v)
		if err != nil {
			all.close()
			return nil, err
		}
		all = append(all, o)
	}
	return all, nil
}

func (b *Backend) lockOrigin(ctx context.Context, p *pool.Pool, v volume.Volume) (o *origin, err error) {
	o = new(origin)
	if o.lock, err = p.LockVolume(ctx, v.ID.Name); err != nil {
		return nil, err
	}
	o.volume, err = p.ByID(v.ID)
	var state pool.FormatState
	if err == nil && !o.volume.Block {
		state, err = p.Images.State(v.ID.Name)
	}
	if err == nil && o.volume.Encryption != nil {
		err = b.findContainer(o)
	}
	if err != nil {
		return nil, errors.Join(err, o.lock.Close())
	}
	o.id, o.formatted = sectionOf(o.volume).id(), state == pool.Formatted || state == pool.Cloned
	return o, nil
}

// findContainer sets the state of the container of an encrypted volume.
func (b *Backend) findContainer(o *origin) (err error) {
	if o.encrypted, err = b.ContainerComplete(o.volume); err != nil {
		return err
	}
	_, open, err := b.Mapped(o.volume)
	if open {
		o.container = dm.DeviceName(backend.MappedName(o.volume.ID))
	}
	return err
}

// inUse reports whether the device of the volume exists.
func (o *origin) inUse() (bool, error) {
	_, ok, err := o.id.Device()
	return ok, err
}

// flush writes the dirty pages of a volume in use, so that the copy contains all data that was written before the copy. The
// kernel does this itself when it suspends the device of a filesystem, but before Linux 6.8 not for btrfs.
func (o *origin) flush() error {
	inUse, err := o.inUse()
	if err != nil || !inUse {
		return err
	}
	if !o.volume.Block {
		return o.flushFilesystem()
	}
	var device *os.File
	if o.container != "" {
		device, err = os.Open(luks.Path(string(o.container)))
	} else {
		device, err = o.id.Open(dm.Shared)
	}
	if err != nil {
		return err
	}
	return errors.Join(device.Sync(), device.Close())
}

// flushFilesystem writes the dirty pages of the filesystem, if it is mounted.
func (o *origin) flushFilesystem() error {
	device := blockdev.NodePath(deviceNode(o.volume.ID))
	if o.container != "" {
		device = luks.Path(string(o.container))
	}
	root, err := mount.OpenMounted(device)
	if err != nil || root == nil {
		return err
	}
	return errors.Join(mount.SyncFilesystem(root), root.Close())
}

// Snapshot implements backend.Snapshotter, for volumes in a thin pool.
func (b *Backend) Snapshot(ctx context.Context, volumes []volume.Volume, spec volume.SnapshotSpec) (volume.SnapshotSet, error) {
	expected := func(p *pool.Pool, v volume.Volume) (volume.Snapshot, error) { return storageOf(p).expected(ctx, v) }
	return b.Take(ctx, volumes, spec, expected, b.takeThin)
}

var _ backend.LiveSnapshotter = (*Backend)(nil)

// LiveSnapshots implements backend.LiveSnapshotter.
func (b *Backend) LiveSnapshots(v volume.Volume) bool {
	p, err := b.Set.ByID(v.ID)
	return err != nil || storageOf(p).thin != ""
}

// expected returns the expected record of a snapshot of a volume.
func (s *storage) expected(ctx context.Context, v volume.Volume) (volume.Snapshot, error) {
	n, err := s.mapped(context.WithoutCancel(ctx), v)
	return volume.Snapshot{Block: v.Block, FSType: v.FSType, SectorSize: v.SectorSize, Encryption: v.Encryption, Bytes: n, Shared: true}, err
}

// notThin is the error for a source without snapshots and clones on its node.
func notThin(source string) error {
	return volume.Errorf(volume.ErrInvalid, "%s is not in a thin pool: only volumes in thin pools have snapshots, and clones on the same node: use a pool with lvm.thinPool, or images", source)
}

// mapped returns the size of the blocks of a thin volume that were written, in bytes. The kernel knows it only while the
// volume is active.
func (s *storage) mapped(ctx context.Context, v volume.Volume) (n int64, err error) {
	return n, s.onVolume(ctx, v, func(g dm.Group, lv *dm.LogicalVolume) (err error) {
		if lv.Pool == "" {
			return notThin("volume " + v.ID.String())
		}
		var active bool
		if n, active, err = lv.ID.Mapped(); active || err != nil {
			return err
		}
		if _, err := g.Activate(ctx, lv.Name, lv.ID, 0); err != nil {
			return err
		}
		n, _, err = lv.ID.Mapped()
		return errors.Join(err, g.Deactivate(ctx, lv.Name, lv.ID))
	})
}

// takeThin creates the logical volumes of snapshots.
func (b *Backend) takeThin(ctx context.Context, c *backend.SnapshotCopy) error {
	s := storageOf(c.Pool)
	if err := s.checkRoom(c.Pool); err != nil {
		return err
	}
	all, err := b.lockOrigins(ctx, c.Pool, c.Volumes)
	if err != nil {
		return err
	}
	defer all.close()
	if err := all.check(c); err != nil {
		return err
	}
	copies := make([]snapshotCopy, len(all))
	for i := range all {
		copies[i] = snapshotCopy{Version: copyVersion, identity: identity{GUID: uuid.NewString(), Group: s.groupUUID()}, Encrypted: all[i].encrypted}
		if err := copies[i].write(c.Folders[i]); err != nil {
			return err
		}
		if err := all[i].flush(); err != nil {
			return err
		}
	}
	c.Record.Created = time.Now().UTC()
	if err := s.copyAll(ctx, c, all, copies); err != nil {
		return err
	}
	for i, o := range all {
		one := &c.Record.Snapshots[i]
		one.Size, one.Formatted = o.volume.Capacity, o.formatted
		if n, active, err := o.id.Mapped(); err == nil && active {
			one.Bytes = n
		}
		if err := copies[i].write(c.Folders[i]); err != nil {
			return err
		}
	}
	return nil
}

// check refuses a raw device in use that must be frozen, and a group in use if the pool forbids freezes.
func (all origins) check(c *backend.SnapshotCopy) error {
	for _, o := range all {
		inUse, err := o.inUse()
		switch {
		case err != nil:
			return err
		case inUse && o.volume.Block && c.Spec.Parameters.Consistency == volume.ConsistencyFrozen:
			return volume.Errorf(volume.ErrPrecondition, "volume %s is a raw device in use, which cannot be frozen: use %s=%s, or unpublish and unstage it first", o.volume.ID, volume.ParamConsistency, volume.ConsistencyCrash)
		case inUse && (len(all) > 1 || o.container != ""):
			if err := o.checkFreeze(c.Pool); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkFreeze refuses a volume in use that is copied by copyTogether, if the pool forbids freezes.
func (o *origin) checkFreeze(p *pool.Pool) error {
	if p.Config().FreezeTime() > 0 {
		return nil
	}
	return volume.Errorf(volume.ErrPrecondition, "volume %s is in use, and to copy a group or an encrypted volume requires a freeze, which freezeLimit of pool %q does not allow: unstage it first, or raise the limit", o.volume.ID, p.Name())
}

// mustPause reports whether the volumes must be copied by copyTogether.
func (all origins) mustPause() (bool, error) {
	if slices.ContainsFunc(all, func(o *origin) bool { return o.container != "" }) {
		return true, nil
	}
	inUse, err := all.countInUse()
	return len(all) > 1 && inUse > 0, err
}

// changeCopying is change with the current names of the volumes to copy. It needs no new report if all volumes still have the
// names in the last one.
func (s *storage) changeCopying(ctx context.Context, all origins, f func(g dm.Group, r *dm.Report) error) error {
	g, r := s.state()
	for _, o := range all {
		if lv, ok := r.Volume(o.id); !ok || !g.HasNamed(lv.Name, o.id) {
			return s.changeCurrent(ctx, f)
		}
	}
	return s.change(ctx, f)
}

// copyAll creates the logical volumes of snapshots of the same moment, and sets their UUIDs.
func (s *storage) copyAll(ctx context.Context, c *backend.SnapshotCopy, all origins, copies []snapshotCopy) error {
	return s.changeCopying(ctx, all, func(g dm.Group, r *dm.Report) (err error) {
		together, err := s.copyPaused(ctx, g, *r, all)
		if err != nil {
			return err
		}
		var created []string
		for i, o := range all {
			lv, err := s.locate(o.volume, *r)
			if err != nil {
				return err
			}
			tags := []string{poolTag + s.cfg.Name, snapshotTag + c.Record.Snapshots[i].ID.Name, guidTag + copies[i].GUID}
			made, err := copyThin(ctx, g, r, lv, copies[i].GUID, !c.Writable, tags)
			if err != nil {
				return err
			}
			copies[i].Volume = made.ID.Volume
			created = append(created, made.ID.Volume)
		}
		crashpoint.Here(crashpoint.CreateImage)
		if together {
			return s.replaceContent(ctx, g, *r, created)
		}
		return nil
	})
}

// countInUse returns the number of volumes that have a device.
func (all origins) countInUse() (n int, err error) {
	for _, o := range all {
		inUse, err := o.inUse()
		if err != nil {
			return n, err
		}
		if inUse {
			n++
		}
	}
	return n, nil
}

// copyPaused calls copyTogether if the volumes must be copied by it.
func (s *storage) copyPaused(ctx context.Context, g dm.Group, r dm.Report, all origins) (paused bool, err error) {
	if paused, err = all.mustPause(); err == nil && paused {
		err = s.copyTogether(ctx, g, r, all)
	}
	return paused, err
}

// copyTogether copies volumes at the same moment to temporary volumes of the thin pool. lvm(8) cannot do that: it suspends
// one volume at a time, and damages its metadata if the volume is already suspended. It also does not suspend the device in
// a container, so it does not freeze the filesystem there. Here all these devices are suspended, which freezes their
// filesystems, until all copies exist. That takes no process, and some milliseconds.
func (s *storage) copyTogether(ctx context.Context, g dm.Group, r dm.Report, all origins) (err error) {
	numbers, err := g.Numbers(ctx)
	if err != nil {
		return err
	}
	thin, _ := r.Named(s.thin)
	pause := &pause{config: s.cfg}
	defer func() { err = errors.Join(err, pause.end()) }()
	if err := pause.begin(all); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.FreezeFrozen)
	for i, o := range all {
		if err := thin.ID.CopyTemporary(numbers[o.id.Volume], i); err != nil {
			return err
		}
	}
	return nil
}

// replaceContent replaces the content of new logical volumes with the given UUIDs by that of the temporary volumes.
func (s *storage) replaceContent(ctx context.Context, g dm.Group, r dm.Report, created []string) error {
	numbers, err := g.Numbers(ctx)
	if err != nil {
		return err
	}
	thin, _ := r.Named(s.thin)
	for i, id := range created {
		if err := thin.ID.ReplaceByTemporary(numbers[id], i); err != nil {
			return err
		}
	}
	return nil
}

// copyThin creates a logical volume with a GUID as a copy of a thin volume, and adds it to the report.
func copyThin(ctx context.Context, g dm.Group, r *dm.Report, from dm.LogicalVolume, guid string, readOnly bool, tags []string) (dm.LogicalVolume, error) {
	lv := dm.LogicalVolume{Name: volumeName(guid), Size: from.Size, Tags: tags, Pool: from.Pool}
	var err error
	if lv.ID, err = g.CopyThin(ctx, from.Name, lv.Name, readOnly, tags); err == nil {
		r.Volumes = append(r.Volumes, lv)
	}
	return lv, err
}

// suspendable is a device of the device mapper.
type suspendable interface {
	Suspend() error
	Resume() error
}

// pause is the time for which the volumes of a group are suspended.
type pause struct {
	suspended []suspendable // a device before the one below it
	limit     *time.Timer
	expired   atomic.Bool
	config    pool.Config
}

// begin suspends the volumes that have a device. The caller calls end, also after an error.
func (p *pause) begin(all origins) error {
	for _, o := range all {
		inUse, err := o.inUse()
		if err != nil {
			return err
		}
		if o.container != "" {
			p.suspended = append(p.suspended, o.container)
		}
		if inUse {
			p.suspended = append(p.suspended, o.id)
		}
	}
	p.limit = time.AfterFunc(p.config.FreezeTime(), func() {
		p.expired.Store(true)
		_ = p.resume() // end tries it again
	})
	for _, device := range p.suspended {
		if err := device.Suspend(); err != nil {
			return fmt.Errorf("suspending the device of a volume: %w", err)
		}
	}
	return nil
}

func (p *pause) resume() (err error) {
	for _, device := range slices.Backward(p.suspended) {
		err = errors.Join(err, device.Resume())
	}
	return err
}

// end resumes the volumes. It returns ErrPrecondition if the limit passed before.
func (p *pause) end() error {
	if p.limit == nil {
		return nil
	}
	p.limit.Stop()
	err := p.resume()
	if p.expired.Load() {
		err = errors.Join(volume.Errorf(volume.ErrPrecondition, "copying the volumes takes longer than the freeze may last (freezeLimit %v of pool %q): retry when less data is being written, raise the limit, or unstage the volumes", p.config.FreezeTime(), p.config.Name), err)
	}
	return err
}

// createFrom creates a volume from a snapshot or from another volume.
func (b *Backend) createFrom(ctx context.Context, p *pool.Pool, spec volume.Spec) (v volume.Volume, err error) {
	from, err := b.Origin(p, spec)
	if err != nil {
		return v, err
	}
	if from.Pool != p {
		return v, volume.Errorf(volume.ErrInvalid, "volume_content_source: %v is in pool %q, the requested volume is in pool %q, and logical volumes are copied only within a thin pool: use a class of the source's pool", spec.Source, from.Pool.Name(), p.Name())
	}
	s := storageOf(p)
	if s.thin == "" {
		return v, notThin("volume_content_source: " + spec.Source.String())
	}
	if err := s.checkRoom(p); err != nil {
		return v, err
	}
	if v, err = b.newCopy(p, spec, from); err != nil {
		return v, err
	}
	o, err := b.openOrigin(ctx, from)
	if err != nil {
		return v, err
	}
	defer o.lock.Close()
	if o.blank() {
		if err := backend.SetMkfsOptions(&v, spec.Parameters); err != nil {
			return v, err
		}
	}
	return v, p.Create(ctx, v, func(dir *os.Root) error { return s.fill(ctx, dir, v, sectionOf(v), o) })
}

// newCopy returns the record of a new volume with the content of an origin.
func (b *Backend) newCopy(p *pool.Pool, spec volume.Spec, from *backend.Origin) (v volume.Volume, err error) {
	if err := from.CheckDevice(spec); err != nil {
		return v, err
	}
	s := storageOf(p)
	v = b.NewVolume(p, spec)
	from.SetDevice(&v, spec)
	if v.Capacity, err = from.Choose(spec, s.bounds(v)); err != nil {
		return v, err
	}
	v.Section = s.newSection(spec)
	return v, nil
}

// noLock is the lock of an origin that needs none.
type noLock struct{}

func (noLock) Close() error { return nil }

// openOrigin returns the source of a new volume.
func (b *Backend) openOrigin(ctx context.Context, from *backend.Origin) (*origin, error) {
	if from.Snapshot == nil {
		o, err := b.lockOrigin(ctx, from.Pool, from.Volume)
		if err != nil {
			return nil, err
		}
		if o.container != "" {
			err = o.checkFreeze(from.Pool)
		}
		if err == nil {
			err = o.flush()
		}
		if err != nil {
			return nil, errors.Join(err, o.lock.Close())
		}
		return o, nil
	}
	folder, err := from.Pool.Snapshots.Folder(*from.Snapshot)
	if err != nil {
		return nil, err
	}
	defer folder.Close()
	c, ok, err := readCopy(folder.FS(), ".")
	if err == nil && !ok {
		err = volume.Errorf(volume.ErrDamaged, "snapshot %s: its file %s is missing: restore it from a backup", from.Snapshot.ID, copyFile)
	}
	return &origin{volume: from.Volume, id: c.id(), formatted: from.Snapshot.Formatted, encrypted: c.Encrypted, lock: noLock{}}, err
}

// fill creates the logical volume of a new volume as a copy of its origin.
func (s *storage) fill(ctx context.Context, dir *os.Root, v volume.Volume, sec *section, o *origin) (err error) {
	if o.blank() {
		return s.build(ctx, v, nil)
	}
	err = s.changeCopying(ctx, origins{o}, func(g dm.Group, r *dm.Report) error {
		lv, ok := r.Volume(o.id)
		if !ok {
			return volume.Errorf(volume.ErrUnavailable, "%v: volume group %s has no logical volume with the UUID %s: if it was not deleted meanwhile, restore the group's metadata (vgcfgrestore)", v.Source, s.name, o.id.Volume)
		}
		if lv.Pool == "" {
			return notThin("volume_content_source: " + v.Source.String())
		}
		paused, err := s.copyPaused(ctx, g, *r, origins{o})
		if err != nil {
			return err
		}
		made, err := copyThin(ctx, g, r, lv, sec.GUID, false, s.tags(v))
		if err == nil && v.StorageSize() > lv.Size {
			err = extend(ctx, g, r, made, v.StorageSize())
		}
		if err != nil {
			return err
		}
		sec.Volume = made.ID.Volume
		if paused {
			err = s.replaceContent(ctx, g, *r, []string{sec.Volume})
		}
		return err
	})
	crashpoint.Here(crashpoint.CreateImage)
	if err == nil {
		err = backend.MarkCopied(dir, v, o.volume, o.formatted)
	}
	if err == nil && v.Encryption != nil {
		err = pool.MarkContainerCopied(dir)
	}
	return err
}

// reclaimSnapshots removes the logical volumes of the deleted or incomplete snapshots in a folder of the trash.
func (s *storage) reclaimSnapshots(ctx context.Context, folder *os.Root, path string) error {
	if err := s.removeTemporary(ctx, folder); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	for i := range volume.MaxGroup {
		c, ok, err := readCopy(folder.FS(), strconv.Itoa(i))
		if err != nil {
			return fmt.Errorf("%s has no readable record of a logical volume: restore it from a backup; or remove that folder, then trivet doctor shows its logical volume as orphaned: %w", path, err)
		}
		if !ok {
			continue
		}
		if err := s.removeCopy(ctx, c); err != nil {
			return fmt.Errorf("a snapshot that was deleted: %w; if its logical volume must be kept, remove %s", err, path)
		}
	}
	return nil
}

// removeTemporary removes the temporary volumes that a killed driver has left in the thin pool, if the folder is that of
// an incomplete volume or group.
func (s *storage) removeTemporary(ctx context.Context, folder *os.Root) error {
	abandoned, err := backend.HasFlag(folder, unusedFile)
	if err != nil || !abandoned || s.thin == "" {
		return err
	}
	return s.changeCurrent(ctx, func(_ dm.Group, r *dm.Report) error { // no group is being copied meanwhile
		thin, ok := r.Named(s.thin)
		if !ok {
			return nil
		}
		for i := range dm.MaxTemporary {
			if err := thin.ID.RemoveTemporary(i); err != nil {
				return err
			}
		}
		return nil
	})
}

// removeCopy removes the logical volume of a snapshot. A thin pool zeroes its blocks before another volume sees them.
func (s *storage) removeCopy(ctx context.Context, c snapshotCopy) error {
	g, lv, ok, err := s.find(ctx, c.identity)
	if err != nil || !ok {
		return err
	}
	if !lv.HasTag(guidTag + c.GUID) {
		return missingTag(g, lv, c.GUID)
	}
	return s.change(ctx, func(g dm.Group, r *dm.Report) error { return remove(ctx, g, r, lv) })
}
