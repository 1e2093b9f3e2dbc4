package lvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/semaphore"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/trace"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/dm"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

// Tags of logical volumes. A logical volume of a volume has all of them but recordsTag; unusedTag is removed before the
// volume can contain data, and a logical volume that is taken over never has it.
const (
	tagPrefix  = "trivet."        // of all tags of the driver
	poolTag    = "trivet.pool."   // with the name of the pool
	volumeTag  = "trivet.volume." // with the name in the ID of the volume, for administrators
	guidTag    = "trivet.guid."   // with the GUID in the record
	unusedTag  = "trivet.unused"
	recordsTag = "trivet.records"
	growthTag  = "trivet.growth" // see growthSuffix
)

// volumeName returns the name that a logical volume has when it is created.
func volumeName(guid string) string { return "trivet." + guid }

// storage is the volume group of one pool.
type storage struct {
	cfg  pool.Config
	name string
	thin string // the name of the thin pool; empty if the volumes are thick
	// maintained reports whether this process maintains the pool. Other processes only read it.
	maintained func() bool

	// changing is held by a call that changes or reads the group, so that an older report does not replace a newer one.
	changing *semaphore.Weighted

	mu      sync.Mutex
	group   dm.Group
	report  dm.Report       // the last one, with the changes of this process since then
	devices []pool.Device   // at the last Scan
	growing map[string]bool // the GUIDs of the volumes that a running call expands

	// sent are the open devices of snapshots that are sent to other nodes. A call that holds changing reads and changes it.
	sent map[dm.VolumeID]*sentCopy
}

// storageOf returns the storage of a pool of a volume group.
func storageOf(p *pool.Pool) *storage {
	if s, ok := p.Storage().(thinStorage); ok {
		return s.storage
	}
	return p.Storage().(*storage)
}

// state returns the group, and its state at the last scan with the changes of this process since then.
func (s *storage) state() (dm.Group, dm.Report) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.group, s.report
}

// change calls f, which changes the group, and records the changes in the report.
func (s *storage) change(ctx context.Context, f func(g dm.Group, r *dm.Report) error) error {
	if err := trace.Acquire(ctx, s.changing, "wait for volume group"); err != nil {
		return err
	}
	defer s.changing.Release(1)
	g, r := s.state()
	r.Volumes = slices.Clone(r.Volumes)
	err := f(g, &r)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.report = r
	return err
}

// changeCurrent is change with a new report.
func (s *storage) changeCurrent(ctx context.Context, f func(g dm.Group, r *dm.Report) error) error {
	return s.change(ctx, func(g dm.Group, r *dm.Report) error {
		current, err := g.Report(ctx)
		if err != nil {
			return s.explain(err)
		}
		*r = current
		return f(g, r)
	})
}

// explain adds the pool to an error of the group.
func (s *storage) explain(err error) error {
	switch {
	case errors.Is(err, dm.ErrNoGroup):
		return volume.Errorf(volume.ErrPrecondition, "%w: attach its disks, or create it: pvcreate DISK && vgcreate %s DISK", err, s.name)
	case errors.Is(err, dm.ErrAmbiguous):
		return volume.Errorf(volume.ErrPrecondition, "volume group %s: %w: rename one of the groups (vgrename), or remove the copy from the machine", s.name, err)
	}
	return err
}

// findGroup finds the volume group of a pool. It never reads the data of volumes of this driver.
func findGroup(name, uuid string) (dm.Group, error) {
	return dm.FindGroup(name, uuid, func(device string) bool {
		return blockdev.IsClaimed(device) || backend.IsMapped(dm.NameOf(device))
	})
}

// Scan implements pool.Storage.
func (s *storage) Scan() error { return s.scan(context.Background()) }

func (s *storage) scan(ctx context.Context) error {
	if err := trace.Acquire(ctx, s.changing, "wait for volume group"); err != nil {
		return err
	}
	defer s.changing.Release(1)
	g, r, err := s.read(ctx)
	if err != nil {
		return fmt.Errorf("pool %q: %w", s.cfg.Name, s.explain(err))
	}
	known := s.recorded()
	if s.maintained() {
		s.removeGrowths(ctx, g, &r, known)
		s.deactivateCopies(ctx, g, r, known)
	}
	devices := s.inspect(r, known)
	s.mu.Lock()
	s.group, s.report, s.devices = g, r, devices
	s.mu.Unlock()
	if s.maintained() {
		s.resume(ctx, g, r, known)
		return s.activatePool(ctx, g, r)
	}
	return nil
}

// read returns the group and its state. It searches for physical volumes only if one is missing, because a read of a
// device that does not answer blocks.
func (s *storage) read(ctx context.Context) (dm.Group, dm.Report, error) {
	g, _ := s.state()
	if g.UUID != "" {
		if r, err := g.Report(ctx); err == nil && !lacksPhysical(r) {
			return g, r, nil
		}
	}
	known, err := readPin(s.cfg)
	if err != nil {
		return g, dm.Report{}, err
	}
	if g, err = findGroup(s.name, known.Group); err != nil {
		return g, dm.Report{}, err
	}
	r, err := g.Report(ctx)
	return g, r, err
}

// lacksPhysical reports whether a physical volume is missing.
func lacksPhysical(r dm.Report) bool {
	return slices.ContainsFunc(r.Physical, func(p dm.PhysicalVolume) bool { return p.Missing })
}

// resume resumes the devices that a killed command or driver left suspended: first those of logical volumes, and then those
// in containers.
func (s *storage) resume(ctx context.Context, g dm.Group, r dm.Report, known inventory) {
	for _, lv := range r.Volumes {
		if !lv.HasTag(poolTag + s.cfg.Name) {
			continue
		}
		d, ok, err := lv.ID.Device()
		if err == nil && ok && d.Suspended {
			_, err = g.Activate(ctx, lv.Name, lv.ID, lv.Size)
		}
		if err != nil {
			klog.FromContext(ctx).Error(err, "Resuming a logical volume failed", "pool", s.cfg.Name, "volume", lv.Name)
		}
	}
	for _, record := range known.volumes {
		if record.Volume.Encryption == nil {
			continue
		}
		name := backend.MappedName(record.Volume.ID)
		d, ok, err := dm.Named(name)
		if err == nil && ok && d.Suspended {
			err = dm.DeviceName(name).Resume()
		}
		if err != nil {
			klog.FromContext(ctx).Error(err, "Resuming the device of an encrypted volume failed", "pool", s.cfg.Name, "volume", record.Volume.ID)
		}
	}
}

// bounds returns the sizes that a request for a volume can have. The size of the logical volume is rounded up to extents.
func (s *storage) bounds(v volume.Volume) volume.Bounds {
	_, r := s.state()
	b := volume.Bounds{Min: 1, Granule: max(r.ExtentSize, volume.MiB), Overhead: v.Overhead()}
	if !v.Block {
		b.Min, b.FSType = blockdev.MinSize(v.FSType), v.FSType
	}
	return b
}

// sectorSize returns the logical block size of the logical volumes in bytes.
func (s *storage) sectorSize() int {
	g, _ := s.state()
	return max(g.SectorSize, 512)
}

func (s *storage) groupUUID() string {
	g, _ := s.state()
	return g.UUID
}

// room returns the number of bytes in free extents; 0 while a physical volume is missing, because LVM then refuses
// changes.
func (s *storage) room() int64 {
	_, r := s.state()
	if lacksPhysical(r) {
		return 0
	}
	return r.Free * r.ExtentSize
}

// awaitRoom waits a limited time until the group has free extents of a size in bytes. It returns ErrExhausted if it
// has not.
func (s *storage) awaitRoom(ctx context.Context, p *pool.Pool, size int64) error {
	if s.thin != "" {
		return s.checkRoom(p)
	}
	if s.room() >= size {
		return nil
	}
	p.Trash.AwaitEmpty()
	if err := s.scan(ctx); err != nil {
		return err
	}
	if room := s.room(); room < size {
		return volume.Errorf(volume.ErrExhausted, "pool %q has room for %s more in the free extents of volume group %s, the request needs %s: delete volumes, wait until deleted volumes are wiped, or extend the group (vgextend)",
			s.cfg.Name, volume.ExactSize(room), s.name, volume.ExactSize(size))
	}
	return nil
}

// tags returns the tags of a new logical volume of a volume.
func (s *storage) tags(v volume.Volume) []string { return append(s.usedTags(v), unusedTag) }

// usedTags returns the tags of a logical volume that may contain data of a volume.
func (s *storage) usedTags(v volume.Volume) []string {
	return []string{poolTag + s.cfg.Name, volumeTag + v.ID.Name, guidTag + sectionOf(v).GUID}
}

// create creates the logical volume of a new volume, whose durable record contains the GUID. It is active if its extents must
// be zeroed.
func (s *storage) create(ctx context.Context, v volume.Volume) (id dm.VolumeID, err error) {
	return s.allocate(ctx, dm.LogicalVolume{Name: volumeName(sectionOf(v).GUID), Size: v.StorageSize(), Tags: s.tags(v), Pool: s.thin}, s.showsExtents(v))
}

// allocate creates a logical volume. If active is set, it activates a thick one.
func (s *storage) allocate(ctx context.Context, lv dm.LogicalVolume, active bool) (id dm.VolumeID, err error) {
	return id, s.change(ctx, func(g dm.Group, r *dm.Report) error {
		if s.thin != "" {
			id, err = g.CreateThin(ctx, s.thin, lv.Name, lv.Size, lv.Tags)
		} else {
			id, err = g.Create(ctx, lv.Name, lv.Size, lv.Tags, active)
		}
		if err != nil {
			return err
		}
		lv.ID = id
		r.Volumes = append(r.Volumes, lv)
		r.Free -= extentsOf(lv, *r)
		return nil
	})
}

// open activates a logical volume, and opens its device.
func open(ctx context.Context, g dm.Group, lv dm.LogicalVolume, access dm.Access) (*os.File, error) {
	if _, err := g.Activate(ctx, lv.Name, lv.ID, lv.Size); err != nil {
		return nil, err
	}
	return lv.ID.Open(access)
}

// deactivateNew deactivates the logical volume of a volume that does not exist yet. A program of the node may examine the new
// device at that moment; then it stays active.
func (s *storage) deactivateNew(ctx context.Context, v volume.Volume) error {
	err := s.onVolume(ctx, v, func(g dm.Group, lv *dm.LogicalVolume) error { return g.Deactivate(ctx, lv.Name, lv.ID) })
	if errors.Is(err, volume.ErrInUse) {
		return nil
	}
	return err
}

// remove removes a logical volume, and removes it from the report.
func remove(ctx context.Context, g dm.Group, r *dm.Report, lv dm.LogicalVolume) error {
	if err := g.Remove(ctx, lv.Name, lv.ID); err != nil {
		return err
	}
	r.Volumes = slices.DeleteFunc(r.Volumes, func(other dm.LogicalVolume) bool { return other.ID == lv.ID })
	r.Free += extentsOf(lv, *r)
	return nil
}

// extend enlarges a logical volume to a size in bytes, if ranges are given with their extents, and changes the report.
func extend(ctx context.Context, g dm.Group, r *dm.Report, lv dm.LogicalVolume, size int64, ranges ...string) error {
	if err := g.Extend(ctx, lv.Name, size, ranges...); err != nil {
		return err
	}
	i := slices.IndexFunc(r.Volumes, func(other dm.LogicalVolume) bool { return other.ID == lv.ID })
	r.Free += extentsOf(lv, *r)
	r.Volumes[i].Size = size
	r.Free -= extentsOf(r.Volumes[i], *r)
	return nil
}

// extentsOf returns the number of extents of the group that a logical volume has.
func extentsOf(lv dm.LogicalVolume, r dm.Report) int64 {
	if lv.Pool != "" { // its blocks are in the extents of the thin pool
		return 0
	}
	return lv.Size / r.ExtentSize
}

// locate finds the logical volume of a volume in a report (ErrUnavailable if it is missing).
func (s *storage) locate(v volume.Volume, r dm.Report) (dm.LogicalVolume, error) {
	lv, ok := r.Volume(sectionOf(v).id())
	if !ok {
		return lv, volume.Errorf(volume.ErrUnavailable, "volume %s: volume group %s has no logical volume with the UUID %s: find out who removed %s, and restore the group's metadata (vgcfgrestore) or delete the volume", v.ID, s.name, sectionOf(v).Volume, sectionOf(v).name())
	}
	return lv, nil
}

// onVolume calls f with the logical volume of a volume. If its name has changed since the last report, it calls f again
// with the current name.
func (s *storage) onVolume(ctx context.Context, v volume.Volume, f func(g dm.Group, lv *dm.LogicalVolume) error) error {
	call := func(g dm.Group, r *dm.Report) error {
		lv, err := s.locate(v, *r)
		if err != nil {
			return err
		}
		if err := f(g, &lv); err != nil {
			return err
		}
		r.Volumes[slices.IndexFunc(r.Volumes, func(o dm.LogicalVolume) bool { return o.ID == lv.ID })] = lv
		return nil
	}
	err := s.change(ctx, call)
	if errors.Is(err, dm.ErrMissing) || errors.Is(err, volume.ErrUnavailable) {
		err = s.changeCurrent(ctx, call)
	}
	return s.explainVolume(v, err)
}

// explainVolume adds the volume to an error of its logical volume.
func (s *storage) explainVolume(v volume.Volume, err error) error {
	switch {
	case errors.Is(err, dm.ErrInUse):
		return volume.Errorf(volume.ErrInUse, "volume %s: %w: a program has it open (find it with fuser or lsblk), or it is mounted in another mount namespace: stop that program", v.ID, err)
	case errors.Is(err, dm.ErrMissing):
		return volume.Errorf(volume.ErrUnavailable, "volume %s: %w", v.ID, err)
	}
	return err
}

// Usage implements pool.Storage.
func (s *storage) Usage(u ledger.Usage) ledger.Usage {
	_, r := s.state()
	u.Total, u.Free = r.Extents*r.ExtentSize, r.Free*r.ExtentSize
	u.Used, u.Room = u.Total-u.Free, s.room()
	u.Largest = u.Room
	return u
}

// Find implements pool.Storage.
func (s *storage) Find(v volume.Volume) (device string, used int64, err error) {
	_, r := s.state()
	lv, err := s.locate(v, r)
	if err != nil {
		return "", 0, err
	}
	used = lv.Size
	if lv.Pool != "" {
		used, _, err = lv.ID.Mapped() // 0 for an inactive volume
	}
	return "/dev/" + s.name + "/" + lv.Name, used, err
}

// Devices implements pool.Storage.
func (s *storage) Devices() []pool.Device {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.devices)
}

// The states of the physical volumes of a group, and of logical volumes that belong to no existing volume.
const (
	deviceInUse    = "in-use"
	deviceMissing  = "missing"
	deviceOrphaned = "orphaned"
	deviceWiping   = "wiping"
)

// inventory contains the records of a pool by the GUIDs in them.
type inventory struct {
	volumes   map[string]pool.Recorded
	snapshots map[string]string // the UUIDs of the logical volumes
	complete  bool              // all records could be read
}

// recorded returns the records of the pool. It is called after a report, because a record is written before its logical
// volume is created, and removed after it.
func (s *storage) recorded() inventory {
	all, unreadable := pool.RecordsIn(forms, s.cfg.Directory.Path)
	snapshots, err := snapshotsIn(s.cfg.Directory.Path)
	known := inventory{volumes: map[string]pool.Recorded{}, snapshots: snapshots, complete: err == nil && len(unreadable) == 0}
	for _, record := range all {
		known.volumes[sectionOf(record.Volume).GUID] = record
	}
	return known
}

// hasSnapshot reports whether a logical volume is that of a snapshot.
func (i inventory) hasSnapshot(lv dm.LogicalVolume) bool {
	return slices.ContainsFunc(lv.Tags, func(tag string) bool { _, ok := i.snapshots[guidOf(tag)]; return ok })
}

// inspect returns the physical volumes, and the logical volumes of this pool that belong to no existing volume.
func (s *storage) inspect(r dm.Report, known inventory) (devices []pool.Device) {
	for _, p := range r.Physical {
		d := pool.Device{Path: p.Path, Size: p.Size, State: deviceInUse, Detail: "a physical volume of " + s.name}
		if p.Missing {
			d.State, d.Detail, d.Advice = deviceMissing, "physical volume "+p.UUID, "attach the disk; or remove it and every logical volume with data on it: vgreduce --removemissing --force "+s.name
		}
		devices = append(devices, d)
	}
	for _, lv := range r.Volumes {
		if !lv.HasTag(poolTag+s.cfg.Name) || lv.HasTag(recordsTag) {
			continue
		}
		if known.hasSnapshot(lv) {
			continue
		}
		i := slices.IndexFunc(lv.Tags, func(tag string) bool { return known.volumes[guidOf(tag)].Folder != "" })
		d := pool.Device{Path: "/dev/" + s.name + "/" + lv.Name, Size: lv.Size}
		switch {
		case i < 0 && known.complete:
			d.State, d.Detail = deviceOrphaned, "no record of this pool has the GUID in its tags"
			d.Advice = s.orphanAdvice(lv)
		case i >= 0 && known.volumes[guidOf(lv.Tags[i])].Trashed && lv.Pool == "":
			record := known.volumes[guidOf(lv.Tags[i])]
			wiped := min(backend.WipedOffset(os.DirFS(record.Folder)), lv.Size)
			d.State, d.Unwiped = deviceWiping, lv.Size-wiped
			d.Detail = fmt.Sprintf("of a deleted volume, in the trash as %s: %d%% wiped", filepath.Base(record.Folder), wiped*100/lv.Size)
		default:
			continue
		}
		devices = append(devices, d)
	}
	return devices
}

// orphanAdvice says what to do with an orphaned logical volume.
func (s *storage) orphanAdvice(lv dm.LogicalVolume) string {
	remove := "if the data is not needed: lvremove " + s.name + "/" + lv.Name
	if lv.HasTag(unusedTag) {
		return "restore the record from a backup; or " + remove
	}
	return "restore the record from a backup; or let a volume take the logical volume over, with the StorageClass parameter " + paramLogicalVolume + "; or " + remove
}

// guidOf returns the GUID in a tag; empty if it has none.
func guidOf(tag string) string {
	guid, ok := strings.CutPrefix(tag, guidTag)
	if !ok {
		return ""
	}
	return guid
}

// Summary implements pool.Storage.
func (s *storage) Summary(u ledger.Usage) (found, advice string) {
	found = fmt.Sprintf("%s of %s are free in volume group %s", volume.FormatSize(u.Free), volume.FormatSize(u.Total), s.name)
	if u.Room == 0 {
		return found, "no volume can be created: delete volumes, extend the group (vgextend), or attach missing physical volumes"
	}
	return found, ""
}
