package disk

import (
	"context"
	"errors"
	"os"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// node returns the name of a volume's device node (blockdev.PartitionPath). It depends on the ID
// only, so that a volume can be unstaged without its record.
func node(id volume.ID) string { return id.Pool + "." + id.PoolUUID + "." + id.Name }

// Attach implements backend.Backend: it creates the volume's device node, and a filesystem if
// the volume never had one.
func (b *Backend) Attach(ctx context.Context, v volume.Volume) (mount.Source, error) {
	p, err := b.Set.ByID(v.ID)
	if err != nil {
		return nil, err
	}
	if err := p.Check(); err != nil {
		return nil, err
	}
	lock, err := p.LockVolume(ctx, v.ID.Name) // against growing
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	if v, err = p.ByID(v.ID); err != nil {
		return nil, err
	}
	d, m, err := of(p).locate(v)
	if err != nil {
		return nil, err
	}
	device, err := d.Attach(ctx, sectionOf(v).GUID, node(v.ID))
	if err != nil {
		return nil, failed(v, err)
	}
	crashpoint.Here(crashpoint.StageAttached)
	hold := &holding{device, v}
	commit, err := b.prepare(ctx, &attaching{p, v, d, m, device})
	if err != nil {
		return nil, errors.Join(err, hold.Close()) //nolint:contextcheck // the device is detached even if the call has ended
	}
	if v.Block { // it stays by itself
		return &blockdev.DeviceSource{Path: device.Name()}, device.Close()
	}
	return &blockdev.DeviceSource{Path: device.Name(), FSType: v.FSType, Commit: commit, Hold: hold}, nil
}

// holding keeps a disk attached until it is mounted.
type holding struct {
	device *os.File
	v      volume.Volume
}

// Close releases the disk. If nothing is mounted from it, it is detached.
func (h *holding) Close() error {
	err := h.device.Close()
	mounts, unread := mount.OfDevice(h.device.Name())
	if unread == nil && len(mounts) == 0 && !h.v.Block {
		return errors.Join(err, failed(h.v, blockdev.Detach(context.Background(), sectionOf(h.v).GUID, node(h.v.ID))))
	}
	return errors.Join(err, unread)
}

// failed adds the remedy to an error of a disk.
func failed(v volume.Volume, err error) error {
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

// attaching is a volume whose disk is attached, with the state of the disk.
type attaching struct {
	p      *pool.Pool
	v      volume.Volume
	disk   blockdev.Disk
	mark   blockdev.Mark
	device *os.File
}

// prepare checks the size of the device, and creates its filesystem if necessary. The returned
// function makes its writes durable; it is nil if nothing was written.
func (b *Backend) prepare(ctx context.Context, a *attaching) (commit func() error, err error) {
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
	// 4096 works on every disk: no supported filesystem has smaller blocks.
	fs, err := backend.FilesystemOf(a.p, a.v, a.device.Name(), blockdev.FormatSpec{SectorSize: 4096, Stale: true})
	if err != nil {
		return nil, err
	}
	if fs.State == pool.Formatted || a.mark.Used && fs.State != pool.Cloned {
		return nil, a.checkFormatted(ctx, fs)
	}
	fs.MarkUsed = func() error { return a.noteUsed(ctx) }
	if err := fs.Prepare(a.device); err != nil {
		return nil, err
	}
	return fs.Complete(ctx, b.formatter, a.device)
}

// adopt checks that the device has the recorded capacity.
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

// noteUsed records on the disk that it may contain data.
func (a *attaching) noteUsed(ctx context.Context) error {
	if a.mark.Used {
		return nil
	}
	return failed(a.v, a.disk.SetUsed(context.WithoutCancel(ctx), sectionOf(a.v).GUID))
}

// checkFormatted checks the filesystem of a disk that was formatted according to its record, or
// according to the disk itself: a call was interrupted in between, or the record is of a backup.
func (a *attaching) checkFormatted(ctx context.Context, fs *backend.Filesystem) error {
	if err := fs.Check(ctx, a.device); err != nil {
		return err
	}
	if err := a.noteUsed(ctx); err != nil || fs.State == pool.Formatted {
		return err
	}
	if err := a.p.Images.BeginFormat(a.v.ID.Name); err != nil {
		return err
	}
	return a.p.Images.EndFormat(a.v.ID.Name)
}

// Present implements backend.Backend: a disk is present while its device node exists.
func (b *Backend) Present(_ context.Context, v volume.Volume) (mount.Source, bool, error) {
	ok, _, err := blockdev.Present(sectionOf(v).GUID, node(v.ID))
	return &blockdev.DeviceSource{Path: blockdev.PartitionPath(node(v.ID)), FSType: v.FSType}, ok, err
}

// Detach implements backend.Backend. It succeeds for a disk that was removed from the machine.
func (b *Backend) Detach(ctx context.Context, v volume.Volume) error {
	if err := unmounted(v); err != nil {
		return err
	}
	if err := b.loops.Detach(ctx, readOnlyTag(v.ID)); err != nil {
		return backend.ExplainDetach(v, err)
	}
	return failed(v, blockdev.Detach(ctx, sectionOf(v).GUID, node(v.ID)))
}

func unmounted(v volume.Volume) error {
	device := blockdev.PartitionPath(node(v.ID))
	mounts, err := mount.OfDevice(device)
	if err == nil && len(mounts) > 0 {
		err = volume.Errorf(volume.ErrInUse, "volume %s is in use on this node: %s is mounted at %s: unpublish and unstage it there first", v.ID, device, mounts[0].Mountpoint)
	}
	return err
}

// unused returns an error if the volume's disk is in use. Otherwise it removes the partition from
// the kernel, so that the disk cannot be opened any more. A disk that is missing or unreadable is
// not in use; Reclaim searches for it again before it wipes.
func (b *Backend) unused(ctx context.Context, p *pool.Pool, v volume.Volume) error {
	if err := b.Detach(ctx, v); err != nil {
		return err
	}
	d, err := of(p).own(v)
	if errors.Is(err, volume.ErrUnavailable) {
		return nil
	}
	if err == nil {
		err = failed(v, d.Hide(ctx))
	}
	return err
}

// VerifyOwnership implements backend.OwnershipVerifier: the node loses a disk that is
// removed from the machine.
func (b *Backend) VerifyOwnership(_ context.Context, v volume.Volume) error {
	ok, gone, err := blockdev.Present(sectionOf(v).GUID, node(v.ID))
	if err == nil && (gone || !ok) {
		err = volume.Errorf(volume.ErrUnavailable, "volume %s: its disk was pulled, or the kernel has given it up (dmesg): put it back in, stop the volume's pods here, and stage it again", v.ID)
	}
	return err
}
