package local

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/blockdev"
	"github.com/trivet-csi/trivet/internal/command"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// minDisk is the smallest disk for a raw device, in bytes.
const minDisk = volume.MiB

// onDisk tells whether a volume is a whole disk; its ID is enough.
func (b *Backend) onDisk(id volume.ID) bool {
	c, _ := b.Set.Config(id.Pool)
	return c.Disks != nil
}

// haveDisks tells whether a pool of disks is configured.
func (b *Backend) haveDisks() bool {
	for _, s := range b.Set.States() {
		if c, _ := b.Set.Config(s.Name); c.Disks != nil {
			return true
		}
	}
	return false
}

// supportsDisk is Supports for whole disks.
func supportsDisk(c volume.Capability) error {
	if !c.Block && c.FSType != "" && !volume.ValidFSType(c.FSType) {
		return volume.Errorf(volume.ErrInvalid, "volume_capability.mount.fs_type %q: want one of %s", c.FSType, strings.Join(volume.FSTypes, ", "))
	}
	return nil
}

// suits refuses what the pool that parameters name does not make: Supports cannot know
// it.
func suits(p *pool.Pool, spec volume.Spec) error {
	if p.OfDisks() {
		return suitsDisk(p, spec.Parameters)
	}
	for _, c := range spec.Capabilities {
		if err := supportsDirectory(c); err != nil {
			return err
		}
	}
	return suitsDirectory(p, spec.Parameters)
}

// suitsDisk refuses parameters of directories.
func suitsDisk(p *pool.Pool, given volume.Parameters) error {
	d := given.Directory
	for key, has := range map[string]bool{
		volume.ParamSubDir: d.SubDir != "", volume.ParamOnDelete: d.OnDelete != "",
		volume.ParamMode: d.Mode != nil, volume.ParamUID: d.UID != nil, volume.ParamGID: d.GID != nil,
	} {
		if has {
			return volume.Errorf(volume.ErrInvalid, "parameter %s is of directories, pool %q has whole disks: remove it, or name a directory pool in %s", key, p.Name(), volume.ParamPool)
		}
	}
	return nil
}

// suitsDirectory refuses parameters of disks.
func suitsDirectory(p *pool.Pool, given volume.Parameters) error {
	for key, has := range map[string]bool{
		volume.ParamFSType: given.FSType != "", volume.ParamMkfsOptions: len(given.MkfsOptions) > 0, volume.ParamWipe: given.Wipe != "",
	} {
		if has {
			return volume.Errorf(volume.ErrInvalid, "parameter %s is of whole disks, volumes of pool %q are directories: remove it, or name a pool of disks in %s", key, p.Name(), volume.ParamPool)
		}
	}
	return nil
}

func diskBounds(fsType string, block bool) volume.Bounds {
	if block {
		return volume.Bounds{Min: minDisk, Granule: volume.MiB}
	}
	return volume.Bounds{Min: blockdev.MinSize(fsType), Granule: volume.MiB}
}

// createDisk makes a volume of the smallest free disk that is large enough, and can be
// written.
func createDisk(ctx context.Context, p *pool.Pool, spec volume.Spec) (volume.Volume, error) {
	for tries := len(p.DiskStates()); ; tries-- {
		v, err := claimDisk(ctx, p, spec)
		if !errors.Is(err, blockdev.ErrDiskRefuses) || tries <= 1 {
			return v, err
		}
		klog.FromContext(ctx).Error(err, "Marking a free disk failed; the next one is tried", "pool", p.Name())
	}
}

func claimDisk(ctx context.Context, p *pool.Pool, spec volume.Spec) (volume.Volume, error) {
	claim, err := p.ClaimDisk(ctx, spec.Capacity, diskBounds(spec.FSType(), spec.Block()).Min)
	if err != nil {
		return volume.Volume{}, err
	}
	v := volume.Volume{
		Version:     volume.RecordVersion,
		ID:          p.ID(Name, spec.Name()),
		CoName:      spec.CoName,
		Capacity:    claim.Disk.Room(),
		Block:       spec.Block(),
		FSType:      spec.FSType(),
		SectorSize:  claim.Disk.SectorSize,
		MkfsOptions: spec.Parameters.MkfsOptions,
		Disk:        &volume.Disk{GUID: claim.GUID.String(), Identity: claim.Disk.Identity, Wipe: cmp.Or(spec.Parameters.Wipe, volume.WipeDiscard)},
		Created:     time.Now().UTC().Truncate(time.Second),
	}
	if err := blockdev.CheckOptions(v.FSType, v.MkfsOptions, v.Capacity); err != nil {
		return volume.Volume{}, errors.Join(volume.Errorf(volume.ErrInvalid, "parameter %s: %w", volume.ParamMkfsOptions, err), claim.Close())
	}
	return v, noRoom(p, p.CreateDisk(ctx, v, claim, nil))
}

// diskRoom is Capacity for a pool of disks.
func diskRoom(p *pool.Pool, q backend.CapacityQuery) (backend.Capacity, error) {
	u, err := p.Usage()
	if err != nil {
		return backend.Capacity{}, err
	}
	room := backend.Capacity{Available: u.Room, Max: u.Largest, Min: diskBounds(q.FSType, q.Block).Min}
	if u.Full {
		room.Available, room.Max = 0, 0
	}
	return room, nil
}

// node names the device node of a volume (blockdev.PartitionPath). It is had from the ID
// alone, so that what is mounted can go without a record.
func node(id volume.ID) string { return id.Pool + "." + id.PoolUUID + "." + id.Name }

// guid is what the volume's disk says; empty while its record cannot be read.
func guid(v volume.Volume) string {
	if v.Disk == nil {
		return ""
	}
	return v.Disk.GUID
}

// attachDisk makes the volume's device, and its filesystem if it never had one.
func (b *Backend) attachDisk(ctx context.Context, p *pool.Pool, v volume.Volume) (mount.Source, error) {
	lock, err := p.LockVolume(ctx, v.ID.Name) // against growing
	if err != nil {
		return mount.Source{}, err
	}
	defer lock.Close()
	if v, err = p.ByID(v.ID); err != nil {
		return mount.Source{}, err
	}
	d, m, err := p.FindDisk(v)
	if err != nil {
		return mount.Source{}, err
	}
	device, err := d.Attach(ctx, v.Disk.GUID, node(v.ID))
	if err != nil {
		return mount.Source{}, diskFailed(v, err)
	}
	crashpoint.Here(crashpoint.StageAttached)
	hold := &holding{device, v}
	settle, err := b.prepareDisk(ctx, &attaching{p, v, d, m, device})
	if err != nil {
		return mount.Source{}, errors.Join(err, hold.Close()) //nolint:contextcheck // what was attached is detached, whatever becomes of the call
	}
	if v.Block { // it stays by itself
		return mount.Source{Device: device.Name()}, device.Close()
	}
	return mount.Source{Device: device.Name(), Settle: settle, Hold: hold}, nil
}

// holding keeps a disk attached until it is mounted.
type holding struct {
	device *os.File
	v      volume.Volume
}

// Close lets go of the disk; with nothing mounted from it, it is detached.
func (h *holding) Close() error {
	err := h.device.Close()
	mounts, unread := mount.OfDevice(h.device.Name())
	if unread == nil && len(mounts) == 0 && !h.v.Block {
		return errors.Join(err, diskFailed(h.v, blockdev.Detach(context.Background(), guid(h.v), node(h.v.ID))))
	}
	return errors.Join(err, unread)
}

// diskFailed explains what a disk refused.
func diskFailed(v volume.Volume, err error) error {
	switch {
	case errors.Is(err, blockdev.ErrDiskBusy):
		return volume.Errorf(volume.ErrInUse, "volume %s: %w: some program has it (fuser, lsblk), or has it mounted in a namespace of its own (grep %s /proc/*/mountinfo)", v.ID, err, blockdev.PartitionPath(node(v.ID)))
	case errors.Is(err, blockdev.ErrDiskGone):
		return volume.Errorf(volume.ErrUnavailable, "volume %s: %w: put it back in, or see why the kernel lost it (dmesg)", v.ID, err)
	case errors.Is(err, blockdev.ErrNoMark):
		return volume.Errorf(volume.ErrDamaged, "volume %s: %w: nothing was changed", v.ID, err)
	}
	return err
}

// attaching is a volume whose disk is attached, and what that says.
type attaching struct {
	p      *pool.Pool
	v      volume.Volume
	disk   blockdev.Disk
	mark   blockdev.Mark
	device *os.File
}

// prepareDisk makes sure that the device is whole, and has its filesystem. What it
// returns makes durable what was written; nil if nothing was.
func (b *Backend) prepareDisk(ctx context.Context, a *attaching) (settle func() error, err error) {
	if err := a.adopt(ctx); err != nil {
		return nil, err
	}
	if a.v.Block {
		return nil, a.noteUsed(ctx)
	}
	mounts, err := mount.OfDevice(a.device.Name())
	if err != nil {
		return nil, err
	}
	if len(mounts) > 0 {
		return nil, volume.Errorf(volume.ErrPrecondition, "volume %s is mounted at %s: unstage it there first", a.v.ID, mounts[0].Mountpoint)
	}
	state, err := a.p.FormatState(a.v.ID.Name)
	if err != nil {
		return nil, err
	}
	if state == pool.Cloned {
		return b.identifyDisk(ctx, a)
	}
	if state == pool.Formatted || a.mark.Used {
		return nil, a.settled(ctx, state)
	}
	if err := a.blank(state); err != nil {
		return nil, err
	}
	return b.formatDisk(ctx, a)
}

// adopt makes sure that the device has the size that was promised.
func (a *attaching) adopt(ctx context.Context) error {
	size, err := blockdev.Size(a.device)
	if err != nil {
		return err
	}
	if size < a.v.Capacity {
		return volume.Errorf(volume.ErrDamaged, "volume %s: its disk %s has %d bytes for data, its record says %d: nothing was changed", a.v.ID, a.device.Name(), size, a.v.Capacity)
	}
	if size > a.v.Capacity { // a call that grew it was cut off
		err = a.p.Adopt(ctx, a.v, size)
		a.v.Capacity = size
	}
	return err
}

// noteUsed notes on the disk that there may be data.
func (a *attaching) noteUsed(ctx context.Context) error {
	if a.mark.Used {
		return nil
	}
	return diskFailed(a.v, a.disk.SetUsed(context.WithoutCancel(ctx), a.v.Disk.GUID))
}

// settled checks a disk that was formatted: so say its record, or the disk itself where
// a call was cut off in between, or the record is of a backup.
func (a *attaching) settled(ctx context.Context, state pool.FormatState) error {
	if err := checkDisk(ctx, a.v, a.device); err != nil {
		return err
	}
	if err := a.noteUsed(ctx); err != nil {
		return err
	}
	return endFormat(a.p, a.v.ID.Name, state)
}

func endFormat(p *pool.Pool, name string, state pool.FormatState) error {
	if state == pool.Unformatted {
		if err := p.BeginFormat(name); err != nil {
			return err
		}
	}
	if state == pool.Formatted {
		return nil
	}
	return p.EndFormat(name)
}

func checkDisk(ctx context.Context, v volume.Volume, device *os.File) error {
	// A check of a large filesystem may need longer than its caller waits. It
	// goes on, and the caller's next try finds the filesystem clean.
	err := blockdev.Check(context.WithoutCancel(ctx), device, v.FSType)
	if errors.Is(err, blockdev.ErrNoFS) || errors.Is(err, blockdev.ErrUnclean) {
		return volume.Errorf(volume.ErrDamaged, "volume %s: %w: nothing was changed; look at %s with the tools of %s", v.ID, err, device.Name(), v.FSType)
	}
	return err
}

// blank makes sure that the disk of a volume that never had a filesystem has none.
func (a *attaching) blank(state pool.FormatState) error {
	look := blockdev.RequireNoSignature
	if state == pool.Formatting {
		look = blockdev.EraseHalfMade
	}
	err := look(a.device)
	if errors.Is(err, blockdev.ErrNotBlank) {
		return volume.Errorf(volume.ErrDamaged, "volume %s was never formatted, yet %w: it is not formatted over; remove what does not belong there", a.v.ID, err)
	}
	if err != nil || state == pool.Formatting {
		return err
	}
	if err := a.p.BeginFormat(a.v.ID.Name); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.StageFormatting)
	return nil
}

func (b *Backend) formatDisk(ctx context.Context, a *attaching) (settle func() error, err error) {
	// 4096 suits every disk: no filesystem here has smaller blocks.
	err = b.formatter.Format(ctx, a.device, blockdev.FormatSpec{FSType: a.v.FSType, SectorSize: 4096, Options: a.v.MkfsOptions, Stale: true})
	var failed *command.Error
	if errors.As(err, &failed) {
		return nil, volume.Errorf(volume.ErrPrecondition, "volume %s cannot be formatted: %w: if its mkfsOptions do not suit its size, delete it and make it with others", a.v.ID, err)
	}
	if err != nil {
		return nil, fmt.Errorf("volume %s: %w", a.v.ID, err)
	}
	crashpoint.Here(crashpoint.StageFormatted)
	return func() error {
		if err := a.device.Sync(); err != nil {
			return err
		}
		if err := a.noteUsed(ctx); err != nil {
			return err
		}
		if err := a.p.EndFormat(a.v.ID.Name); err != nil {
			return err
		}
		crashpoint.Here(crashpoint.StageMarked)
		return nil
	}, nil
}

// presentDisk is Present for a disk, which is present while it has its node.
func presentDisk(v volume.Volume) (mount.Source, bool, error) {
	ok, _, err := blockdev.Present(guid(v), node(v.ID))
	return mount.Source{Device: blockdev.PartitionPath(node(v.ID))}, ok, err
}

// detachDisk is Detach for a disk; also for one that was pulled.
func detachDisk(ctx context.Context, v volume.Volume) error {
	if err := unmounted(v); err != nil {
		return err
	}
	if err := freeReadOnly(ctx, v); err != nil {
		return err
	}
	return diskFailed(v, blockdev.Detach(ctx, guid(v), node(v.ID)))
}

func unmounted(v volume.Volume) error {
	device := blockdev.PartitionPath(node(v.ID))
	mounts, err := mount.OfDevice(device)
	if err == nil && len(mounts) > 0 {
		err = volume.Errorf(volume.ErrInUse, "volume %s is in use on this node: %s is mounted at %s: unpublish and unstage it there first", v.ID, device, mounts[0].Mountpoint)
	}
	return err
}

// unusedDisk refuses a volume whose disk somebody has, and takes it from the kernel, so
// that nobody gets it any more. A disk that is not there, or does not read, is used by
// nobody; it is looked for again before it is wiped.
func unusedDisk(ctx context.Context, p *pool.Pool, v volume.Volume) error {
	if err := detachDisk(ctx, v); err != nil {
		return err
	}
	d, err := p.OwnDisk(v)
	if errors.Is(err, volume.ErrUnavailable) {
		return nil
	}
	if err == nil {
		err = diskFailed(v, d.Hide(ctx))
	}
	return err
}

// growDisk makes the volume as large as its disk has become.
func growDisk(ctx context.Context, p *pool.Pool, v volume.Volume, r volume.Range) (int64, error) {
	d, err := p.OwnDisk(v)
	if err != nil {
		return 0, err
	}
	size := d.Room()
	if size < r.Required {
		return 0, volume.Errorf(volume.ErrOutOfRange, "capacity_range.required_bytes %d: the disk %s of volume %s has %d bytes for data: enlarge it where it comes from and rescan it, or copy the data to a larger volume", r.Required, d.Path, v.ID, size)
	}
	if err := backend.WithinLimit(size, r); err != nil {
		return 0, err
	}
	return size, p.Grow(ctx, v, size, func() error {
		_, err := d.Grow(ctx, v.Disk.GUID)
		return diskFailed(v, err)
	})
}

// followDisk makes the kernel's partition as large as the volume, and the read-only
// device on it.
func (b *Backend) followDisk(ctx context.Context, v volume.Volume) error {
	p, err := b.Set.ByID(v.ID)
	if err != nil {
		return err
	}
	d, err := p.OwnDisk(v)
	if err == nil {
		_, err = d.Grow(ctx, v.Disk.GUID)
	}
	if err != nil {
		return diskFailed(v, err)
	}
	crashpoint.Here(crashpoint.GrowDevice)
	return followReadOnly(v)
}

// Keeps implements backend.Keeper: a disk that was pulled is nobody's any more.
func (b *Backend) Keeps(_ context.Context, v volume.Volume) error {
	if !b.onDisk(v.ID) {
		return nil
	}
	ok, gone, err := blockdev.Present(guid(v), node(v.ID))
	if err == nil && (gone || !ok) {
		err = volume.Errorf(volume.ErrUnavailable, "volume %s: its disk was pulled, or the kernel has given it up (dmesg): put it back in, stop the volume's pods here, and stage it again", v.ID)
	}
	return err
}
