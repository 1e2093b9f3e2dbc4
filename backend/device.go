package backend

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"

	"github.com/trivet-csi/trivet/internal/command"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Devices implements the parts of a backend that do not depend on the medium of its block devices.
// A backend embeds it.
type Devices struct {
	Pools
	// Raw are the bounds of raw volumes. Their granule applies to all volumes.
	Raw       volume.Bounds
	Formatter *blockdev.Formatter
	Loops     *blockdev.LoopTags
	// ReadOnlyTag returns the tag of a volume's read-only device.
	ReadOnlyTag func(volume.ID) string
	// OpenDevice opens the device of an attached volume (ErrPrecondition if there is none).
	OpenDevice func(volume.Volume) (*os.File, error)
}

// Bounds returns the bounds of raw volumes if block is true, otherwise of volumes with a filesystem.
func (d *Devices) Bounds(fsType string, block bool) volume.Bounds {
	b := d.Raw
	if !block {
		b.Min, b.FSType = blockdev.MinSize(fsType), fsType
	}
	return b
}

// Capacity implements Backend.
func (d *Devices) Capacity(_ context.Context, q CapacityQuery) (Capacity, error) {
	if err := CheckMkfsOptions(q.Parameters, q.FSType, math.MaxInt64); err != nil {
		return Capacity{}, err
	}
	room, err := d.Room(q.Parameters, d.Bounds(q.FSType, q.Block))
	return WithoutHeader(room, q.Parameters), err
}

// DeleteReleased implements Delete. release detaches the device, or returns ErrInUse. The volume is locked until it is
// removed, so that no other call attaches it after release.
func (d *Devices) DeleteReleased(ctx context.Context, id volume.ID, release func(*pool.Pool, volume.Volume) error) error {
	return d.DeleteUnpublished(id, func(p *pool.Pool, _ volume.Volume) error {
		_, v, lock, err := d.Lock(ctx, id)
		if errors.Is(err, volume.ErrNotFound) { // another call has removed it in the meantime
			return p.SyncVolumes()
		}
		if err != nil {
			return err
		}
		defer lock.Close()
		if err := release(p, v); err != nil {
			return err
		}
		return p.Remove(ctx, v)
	})
}

// ChangeIOLimits implements IOLimiter.
func (d *Devices) ChangeIOLimits(ctx context.Context, id volume.ID, change func(volume.IOLimits) (volume.IOLimits, error)) error {
	p, v, lock, err := d.Lock(ctx, id)
	if err != nil {
		return err
	}
	defer lock.Close()
	limits, err := change(v.Limits())
	if err != nil {
		return err
	}
	return d.Explain(p, p.SetIOLimits(v, limits))
}

// IOLimited implements IOLimiter.
func (d *Devices) IOLimited() ([]volume.ID, error) {
	var ids []volume.ID
	var errs []error
	for _, p := range d.OpenPools() {
		volumes, _, err := p.List(d.Backend, "", math.MaxInt)
		errs = append(errs, d.Explain(p, err))
		for _, v := range volumes {
			if v.IOLimits != nil {
				ids = append(ids, v.ID)
			}
		}
	}
	return ids, errors.Join(errs...)
}

// ReadOnlyDevice implements BlockProvider: a read-only loop device on the volume's device.
func (d *Devices) ReadOnlyDevice(ctx context.Context, v volume.Volume) (mount.BlockDevice, error) {
	open := func() (*os.File, error) { return d.OpenDevice(v) }
	return d.Loops.AttachReadOnly(ctx, d.ReadOnlyTag(v.ID), v.SectorSize, open)
}

// PresentReadOnly implements BlockProvider.
func (d *Devices) PresentReadOnly(_ context.Context, v volume.Volume) (mount.BlockDevice, bool, error) {
	number, ok, err := d.Loops.FindKnown(d.ReadOnlyTag(v.ID))
	return &blockdev.DeviceSource{Path: blockdev.LoopPath(number)}, ok, err
}

// ReleaseReadOnly implements BlockProvider. The device stays while it is published.
func (d *Devices) ReleaseReadOnly(ctx context.Context, v volume.Volume) error {
	return ExplainDetach(v, d.Loops.DetachUnmounted(ctx, d.ReadOnlyTag(v.ID)))
}

// GrowReadOnly makes the read-only device, if there is one, as large as the volume's device.
func (d *Devices) GrowReadOnly(v volume.Volume, size int64) error {
	number, ok, err := d.Loops.FindKnown(d.ReadOnlyTag(v.ID))
	if err != nil || !ok {
		return err
	}
	return blockdev.GrowLoop(number, size)
}

// Marked is an attached device whose storage records by a mark that it may contain data.
type Marked struct {
	Pool    *pool.Pool
	Volume  volume.Volume
	Device  *os.File
	Secrets volume.Secrets
	// Used is the mark. SetUsed sets it durably.
	Used    bool
	SetUsed func(context.Context) error
	// Foreign means that a device that is not used may have signatures of other data, which are erased.
	Foreign bool
	// Shrunk returns the error for a device that is smaller than the record requires.
	Shrunk func(size int64) error
	// Detach detaches the device.
	Detach func(context.Context) error
}

// PrepareMarked checks the size of a device, opens the container of an encrypted volume, and creates the filesystem if the
// device was never used. The device is marked before it can be used. After an error, and when the source is closed, the
// device is closed, and detached if nothing uses it.
func (d *Devices) PrepareMarked(ctx context.Context, m *Marked) (mount.Source, error) {
	hold := Closers{&holding{d, m}}
	source, err := d.prepareMarked(ctx, m)
	if err != nil {
		return nil, errors.Join(err, hold.Close())
	}
	if source.Hold != nil { // the device in the container is closed first
		hold = append(Closers{source.Hold}, hold...)
	}
	source.Hold = hold
	return source, nil
}

// holding keeps a volume attached while it is not mounted yet.
type holding struct {
	d *Devices
	m *Marked
}

// Close closes the device, and detaches it if nothing uses it.
func (h *holding) Close() error {
	ctx := context.Background()
	err := h.m.Device.Close()
	idle, idleErr := h.d.idle(ctx, h.m.Volume, h.m.Device.Name())
	if idle {
		return errors.Join(err, h.m.Detach(ctx))
	}
	return errors.Join(err, idleErr)
}

func (d *Devices) prepareMarked(ctx context.Context, m *Marked) (*blockdev.DeviceSource, error) {
	if err := m.Pool.Images.BeginChange(m.Volume.ID.Name); err != nil {
		return nil, err
	}
	if err := m.syncCapacity(ctx); err != nil {
		return nil, err
	}
	if m.Volume.Encryption != nil {
		return d.prepareEncrypted(ctx, m)
	}
	if !m.Used && m.Foreign {
		if err := blockdev.EraseSignatures(m.Device); err != nil {
			return nil, err
		}
	}
	commit, err := d.prepareContent(ctx, m, m.Device)
	return &blockdev.DeviceSource{Path: m.Device.Name(), FSType: m.Volume.FSType, Commit: commit}, err
}

// prepareEncrypted is prepareMarked for an encrypted volume. The open container of a raw volume is used again.
func (d *Devices) prepareEncrypted(ctx context.Context, m *Marked) (*blockdev.DeviceSource, error) {
	path, ok, err := d.MappedRaw(m.Volume)
	if ok && err == nil {
		return &blockdev.DeviceSource{Path: path}, m.setUsed(ctx)
	}
	if err != nil {
		return nil, err
	}
	mapped, err := d.OpenContainer(ctx, &Container{
		Pool: m.Pool, Volume: m.Volume, Device: m.Device, Storage: m.Device, Secrets: m.Secrets,
		Spec: blockdev.FormatSpec{Stale: true}, Used: m.Used, Foreign: m.Foreign,
	})
	if err != nil {
		return nil, err
	}
	commit, err := d.prepareContent(ctx, m, mapped)
	if err != nil {
		return nil, errors.Join(err, mapped.Close(), d.CloseMapped(context.WithoutCancel(ctx), m.Volume))
	}
	return &blockdev.DeviceSource{Path: mapped.Name(), FSType: m.Volume.FSType, Commit: commit, Hold: mapped}, nil
}

// prepareContent creates the filesystem on a device, which is the marked device or that of its container. commit makes
// the writes durable; it is nil if there is nothing to make durable.
func (d *Devices) prepareContent(ctx context.Context, m *Marked, device *os.File) (commit func() error, err error) {
	if m.Volume.Block {
		return nil, m.setUsed(ctx)
	}
	mounts, err := mount.OfDevice(device.Name())
	if err != nil {
		return nil, err
	}
	if len(mounts) > 0 {
		return nil, volume.Errorf(volume.ErrPrecondition, "volume %s is mounted at %s: unstage the volume there first", m.Volume.ID, mounts[0].Mountpoint)
	}
	// Every supported filesystem has blocks of at least 4096 bytes, so this sector size is valid even
	// on a device with smaller sectors.
	fs, err := FilesystemOf(m.Pool, m.Volume, device.Name(), blockdev.FormatSpec{SectorSize: 4096, Stale: true})
	if err != nil {
		return nil, err
	}
	if fs.State == pool.Formatted || m.Used && fs.State != pool.Cloned { // a used device has a filesystem
		return nil, m.checkFormatted(ctx, fs, device)
	}
	fs.MarkUsed = func() error { return m.setUsed(ctx) }
	if fs.State == pool.Cloned { // the device has data of its source
		if err := m.setUsed(ctx); err != nil {
			return nil, err
		}
	}
	if err := fs.Prepare(device); err != nil {
		return nil, err
	}
	return fs.Complete(ctx, d.Formatter, device)
}

// syncCapacity returns the error of Shrunk if the device is smaller than the record says. If it is larger, an expansion
// was interrupted, and syncCapacity records the new size.
func (m *Marked) syncCapacity(ctx context.Context) error {
	size, err := blockdev.Size(m.Device)
	if err != nil {
		return err
	}
	if size < m.Volume.StorageSize() {
		return m.Shrunk(size)
	}
	if capacity := size - m.Volume.Overhead(); capacity > m.Volume.Capacity {
		err = m.Pool.RaiseCapacity(ctx, m.Volume, capacity)
		m.Volume.Capacity = capacity
	}
	return err
}

// idle reports whether nothing uses the device of a volume that was being attached, so that it can be detached. It closes
// the container of a filesystem that is not mounted. A raw device counts as used, unless its container is not open.
func (d *Devices) idle(ctx context.Context, v volume.Volume, device string) (bool, error) {
	switch {
	case v.Encryption == nil:
		mounts, err := mount.OfDevice(device)
		return len(mounts) == 0 && !v.Block, err
	case v.Block:
		_, open, err := d.Mapped(v)
		return !open, err
	}
	err := d.CloseMapped(ctx, v)
	if errors.Is(err, volume.ErrInUse) {
		return false, nil
	}
	return err == nil, err
}

// OpenAttached opens the device of an attached volume: that of the container of an encrypted volume, or a device node
// (blockdev.NodePath).
func (d *Devices) OpenAttached(v volume.Volume, node string) (*os.File, error) {
	path, ok, err := d.Mapped(v)
	switch {
	case err != nil:
		return nil, err
	case ok:
		return os.Open(path)
	case v.Encryption != nil:
		return nil, volume.Errorf(volume.ErrPrecondition, "volume %s has no device on this node: stage it first", v.ID)
	}
	device, err := blockdev.OpenNode(node)
	if err != nil {
		err = volume.Errorf(volume.ErrPrecondition, "volume %s has no device on this node: %w: stage it first", v.ID, err)
	}
	return device, err
}

// setUsed sets the mark, unless it is set.
func (m *Marked) setUsed(ctx context.Context) error {
	if m.Used {
		return nil
	}
	return m.SetUsed(context.WithoutCancel(ctx))
}

// checkFormatted checks an existing filesystem. Then it sets the mark, and records in the pool that the filesystem is
// formatted, if either is missing. The state in the pool may be missing because a call was interrupted after it had set
// the mark, or because the volume's folder was restored from a backup.
func (m *Marked) checkFormatted(ctx context.Context, fs *Filesystem, device *os.File) error {
	if err := fs.Check(ctx, device); err != nil {
		return err
	}
	if err := m.setUsed(ctx); err != nil || fs.State == pool.Formatted {
		return err
	}
	if err := m.Pool.Images.BeginFormat(m.Volume.ID.Name); err != nil {
		return err
	}
	return m.Pool.Images.MarkFormatted(m.Volume.ID.Name, pool.Formatting)
}

// Filesystem creates and checks the filesystem of a volume on a block device or in an image. A raw
// volume has no filesystem, and the methods do nothing for it.
type Filesystem struct {
	Volume volume.Volume
	State  pool.FormatState
	// MarkUsed, if not nil, is called after the filesystem is durable, and before its state
	// is recorded as formatted.
	MarkUsed func() error

	images *pool.Images
	path   string
	spec   blockdev.FormatSpec
}

// FilesystemOf reads the state of the volume's filesystem. path is the image or device, for error
// messages. FilesystemOf sets the type and the mkfs options in spec.
func FilesystemOf(p *pool.Pool, v volume.Volume, path string, spec blockdev.FormatSpec) (*Filesystem, error) {
	spec.FSType, spec.Options = v.FSType, v.MkfsOptions
	f := &Filesystem{Volume: v, images: p.Images, path: path, spec: spec}
	if v.Block {
		return f, nil
	}
	var err error
	f.State, err = p.Images.State(v.ID.Name)
	return f, err
}

// SetMkfsOptions sets the mkfs options of the class in the record of a volume that is formatted when it is first staged, because its
// source has no filesystem.
func SetMkfsOptions(v *volume.Volume, p volume.Parameters) error {
	if v.Block {
		return nil
	}
	v.MkfsOptions = p.MkfsOptions()
	return CheckMkfsOptions(p, v.FSType, v.Capacity)
}

// CheckMkfsOptions returns ErrInvalid if the mkfs options in p are not allowed for fsType, or do not fit
// a filesystem of size bytes.
func CheckMkfsOptions(p volume.Parameters, fsType string, size int64) error {
	if err := blockdev.CheckOptions(fsType, p.MkfsOptions(), size); err != nil {
		return volume.Errorf(volume.ErrInvalid, "parameter %s: %w", volume.ParamMkfsOptions, err)
	}
	return nil
}

// journal returns the functions that record the steps of mkfs in the volume's folder.
func (f *Filesystem) journal() blockdev.FormatJournal {
	name := f.Volume.ID.Name
	return blockdev.FormatJournal{
		Interrupted: f.State == pool.Formatting,
		Begin:       func() error { return f.images.BeginFormat(name) },
		End: func() error {
			if f.MarkUsed != nil {
				if err := f.MarkUsed(); err != nil {
					return err
				}
			}
			return f.images.MarkFormatted(name, pool.Formatting)
		},
	}
}

// Blank reports whether the volume needs a new filesystem.
func (f *Filesystem) Blank() bool {
	return !f.Volume.Block && f.State != pool.Formatted && f.State != pool.Cloned
}

// Prepare prepares a device for mkfs. It erases the data of an interrupted mkfs, and returns ErrDamaged
// if the device contains other data. Then it records that the device is being formatted. It does
// nothing for a raw, formatted or cloned volume.
func (f *Filesystem) Prepare(device *os.File) error {
	if !f.Blank() {
		return nil
	}
	err := f.journal().Prepare(device, f.spec)
	if errors.Is(err, blockdev.ErrNotBlank) {
		return volume.Errorf(volume.ErrDamaged, "volume %s was never formatted, but %w: nothing was changed; if the data is not needed, delete the volume", f.Volume.ID, err)
	}
	return err
}

// Complete is called after Prepare. It creates a new filesystem, checks an existing one, or changes the
// UUID of a cloned one. The device may differ from that of Prepare, but must show the same storage.
// commit makes the changes durable, and records them; it is nil if there are no changes.
func (f *Filesystem) Complete(ctx context.Context, formatter *blockdev.Formatter, device *os.File) (commit func() error, err error) {
	switch {
	case f.Volume.Block:
		return nil, nil
	case f.State == pool.Formatted:
		return nil, f.Check(ctx, device)
	case f.State == pool.Cloned:
		return f.reidentify(ctx, device)
	}
	commit, err = formatter.FormatPrepared(ctx, device, f.spec, f.journal())
	var mkfs *command.Error
	if errors.As(err, &mkfs) {
		return nil, volume.Errorf(volume.ErrPrecondition, "volume %s cannot be formatted: %w: if the mkfsOptions do not fit the size of the volume, delete the volume and create it with other mkfsOptions", f.Volume.ID, err)
	}
	if err != nil {
		return nil, fmt.Errorf("volume %s: %w", f.Volume.ID, err)
	}
	return commit, nil
}

// Check checks a filesystem that was not cleanly unmounted, and makes only safe repairs. It
// continues after ctx ends, because it may take longer than the deadline of a call. The next call
// then finds a clean filesystem.
func (f *Filesystem) Check(ctx context.Context, device *os.File) error {
	err := blockdev.Check(context.WithoutCancel(ctx), device, f.spec.FSType)
	if errors.Is(err, blockdev.ErrNoFS) || errors.Is(err, blockdev.ErrUnclean) {
		return volume.Errorf(volume.ErrDamaged, "volume %s: %w: nothing was changed; examine %s with the tools of %s", f.Volume.ID, err, f.path, f.spec.FSType)
	}
	return err
}

// reidentify checks a cloned filesystem, and gives it a UUID of its own. commit records that.
func (f *Filesystem) reidentify(ctx context.Context, device *os.File) (commit func() error, err error) {
	if err := f.Check(ctx, device); err != nil {
		return nil, err
	}
	if err := blockdev.Reidentify(context.WithoutCancel(ctx), device, f.spec.FSType); err != nil {
		return nil, fmt.Errorf("volume %s: changing the UUID of the filesystem, which is a clone of %v: %w", f.Volume.ID, f.Volume.Source, err)
	}
	crashpoint.Here(crashpoint.StageIdentified)
	return func() error {
		if err := device.Sync(); err != nil {
			return err
		}
		return f.images.MarkFormatted(f.Volume.ID.Name, pool.Cloned)
	}, nil
}
