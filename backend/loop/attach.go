package loop

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"strings"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/background"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// tagPrefix is the prefix of every tag of this driver.
const tagPrefix = "trivet:"

// readOnlySuffix is the suffix of the tag of a read-only device, which is stacked on the volume's own
// device.
const readOnlySuffix = ":ro"

// nodeMark precedes the node in the tag of a volume in a shared pool. Tags contain the node because
// several nodes may run on one kernel.
const nodeMark = "@"

// Tag returns the tag of a volume's device, without the node.
func Tag(id volume.ID) string {
	sum := sha256.Sum256([]byte(id.String()))
	return tagPrefix + hex.EncodeToString(sum[:20])
}

// VolumeTag returns the tag of the device without the node.
func (d Device) VolumeTag() string {
	tag, _, _ := strings.Cut(d.Tag, nodeMark)
	return tag
}

// tag returns Tag, and adds this node if the volume is in a shared pool.
func (b *Backend) tag(id volume.ID) string {
	if !id.Shared() {
		return Tag(id)
	}
	node := sha256.Sum256([]byte(b.Set.NodeID()))
	return Tag(id) + nodeMark + hex.EncodeToString(node[:4])
}

// Attach implements backend.Backend: it locks the image, creates or checks its filesystem,
// and binds the image to a loop device.
func (b *Backend) Attach(ctx context.Context, v volume.Volume, secrets volume.Secrets) (mount.Source, error) {
	p, err := b.Usable(v.ID)
	if err != nil {
		return nil, err
	}
	if v.Encryption != nil { // nothing is attached without the passphrase
		if err := secrets.CheckPassphrase(v.ID); err != nil {
			return nil, err
		}
	}
	if p.Shared() {
		return b.attachShared(ctx, p, v, secrets)
	}
	image, err := p.Images.Lock(v.ID.Name)
	if errors.Is(err, volume.ErrPrecondition) {
		source, ok, attachedErr := b.attached(ctx, v)
		if errors.Is(attachedErr, blockdev.ErrDeviceBusy) {
			attachedErr = errors.Join(err, attachedErr)
		}
		if ok || attachedErr != nil {
			return source, attachedErr
		}
		image, err = p.Images.AwaitLock(ctx, v.ID.Name)
	}
	if err != nil {
		return nil, err
	}
	return b.attachLocked(ctx, p, v, image, secrets)
}

// attached finds the volume's device on this node. It returns a raw device, which can be used again. The
// kernel frees the device of a filesystem after its last unmount; attached waits for that, and returns
// false.
func (b *Backend) attached(ctx context.Context, v volume.Volume) (source mount.Source, ok bool, err error) {
	number, ok, err := b.Loops.Find(b.tag(v.ID))
	if err != nil || !ok {
		return nil, false, err
	}
	if v.Encryption != nil {
		return b.attachedContainer(ctx, v, number)
	}
	device := blockdev.LoopPath(number)
	if v.Block {
		// An earlier call that attached or detached the device may have been interrupted.
		if ok, err = blockdev.RecoverLoop(number, b.tag(v.ID), allocationOf(v) == thick); ok || err != nil {
			return &blockdev.DeviceSource{Path: device}, ok, err
		}
	}
	mounts, err := mount.OfDevice(device)
	if err != nil {
		return nil, false, err
	}
	if len(mounts) > 0 {
		return nil, false, volume.Errorf(volume.ErrPrecondition, "volume %s is mounted at %s: unstage it there first", v.ID, mounts[0].Mountpoint)
	}
	return nil, false, blockdev.AwaitFree(ctx, number, blockdev.DiskSeq(number))
}

// attachLocked attaches a locked image. It closes the image after an error; otherwise closing the
// source closes it.
func (b *Backend) attachLocked(ctx context.Context, p *pool.Pool, v volume.Volume, image *os.File, secrets volume.Secrets) (mount.Source, error) {
	// The size of the image must not change after prepare has checked it.
	lock, err := p.LockVolume(ctx, v.ID.Name)
	if err != nil {
		return nil, errors.Join(err, image.Close())
	}
	defer lock.Close()
	fs, err := prepare(ctx, p, v.ID, image)
	if err != nil {
		return nil, errors.Join(err, image.Close())
	}
	v = fs.Volume
	var commit func() error
	if !p.Shared() && v.Encryption == nil {
		if commit, err = fs.Complete(ctx, b.Formatter, image); err != nil {
			return nil, errors.Join(err, image.Close())
		}
	}
	device, err := b.Loops.Attach(ctx, image, blockdev.LoopConfig{
		SectorSize:    v.SectorSize,
		Tag:           b.tag(v.ID),
		AutoClear:     !v.Block || v.Encryption != nil, // the mapped device keeps the device bound
		KeepAllocated: allocationOf(v) == thick,
	})
	if err != nil {
		return nil, errors.Join(err, image.Close())
	}
	crashpoint.Here(crashpoint.StageAttached)
	hold := backend.Closers{device, image}
	if v.Encryption != nil {
		return b.attachContainer(ctx, &backend.Container{
			Pool: p, Volume: v, Device: device.File(), Storage: image, Secrets: secrets,
			Spec: blockdev.FormatSpec{KeepAllocated: allocationOf(v) == thick},
		}, hold)
	}
	if p.Shared() {
		// mkfs and fsck run on the device, which writes through the locked descriptor. On the image
		// they would open their own descriptors. After the lock is lost, the server refuses only
		// writes through the descriptor that held the lock.
		if commit, err = fs.Complete(ctx, b.Formatter, device.File()); err != nil {
			return nil, errors.Join(err, hold.Close())
		}
	}
	return &blockdev.DeviceSource{Path: blockdev.LoopPath(device.Number), FSType: v.FSType, Commit: commit, Created: fs.Blank(), Hold: hold, Device: device.File()}, nil
}

// prepare verifies the locked image of a volume, and prepares an image without a filesystem for
// mkfs. It reads the record again, because the volume may have been deleted or expanded before the
// image was locked.
func prepare(ctx context.Context, p *pool.Pool, id volume.ID, image *os.File) (*backend.Filesystem, error) {
	v, err := p.ByID(id)
	if err != nil {
		return nil, err
	}
	fs, err := backend.FilesystemOf(p, v, p.ImagePath(id.Name), blockdev.FormatSpec{SectorSize: v.SectorSize, KeepAllocated: allocationOf(v) == thick})
	if err != nil {
		return nil, err
	}
	state := fs.State
	if v.Encryption != nil {
		if state, err = p.Images.ContainerState(id.Name); err != nil {
			return nil, err
		}
	}
	if err := p.Images.BeginChange(id.Name); err != nil {
		return nil, err
	}
	if state == pool.Formatting || state == pool.Encrypting {
		if err := restoreSize(image, v); err != nil {
			return nil, err
		}
	}
	size, err := checkSize(image, v)
	if err != nil {
		return nil, err
	}
	if size > v.Capacity {
		// The call that enlarged the image may have been killed before it made the size durable.
		if err := image.Sync(); err != nil {
			return nil, err
		}
		if err := p.RaiseCapacity(ctx, v, size); err != nil {
			return nil, err
		}
		fs.Volume.Capacity = size
	}
	crashpoint.Here(crashpoint.StageLocked)
	if v.Encryption != nil { // the filesystem is in the container, which is not open yet
		return fs, nil
	}
	return fs, fs.Prepare(image)
}

// restoreSize restores the size of an image that an interrupted blockdev.WipeImage has
// truncated. The image has no data yet.
func restoreSize(image *os.File, v volume.Volume) error {
	size, err := blockdev.Size(image)
	if err != nil || size >= v.StorageSize() {
		return err
	}
	return resize(image, v.StorageSize(), allocationOf(v))
}

// attachContainer opens the container of an encrypted volume on its loop device. After an error it closes hold.
func (b *Backend) attachContainer(ctx context.Context, c *backend.Container, hold backend.Closers) (mount.Source, error) {
	e, err := b.PrepareContainer(ctx, c)
	if err != nil {
		return nil, errors.Join(err, hold.Close())
	}
	return &blockdev.DeviceSource{
		Path: e.Mapped.Name(), FSType: c.Volume.FSType, Commit: e.Commit, Created: e.FS.Blank(), Hold: append(backend.Closers{e.Mapped}, hold...),
	}, nil
}

// attachedContainer does the same as attached for an encrypted volume that has a loop device. Without a mount, only the
// mapped device of a raw volume is used again.
func (b *Backend) attachedContainer(ctx context.Context, v volume.Volume, number int) (source mount.Source, ok bool, err error) {
	path, ok, err := b.MappedRaw(v)
	if ok || err != nil {
		return &blockdev.DeviceSource{Path: path}, ok, err
	}
	sequence := blockdev.DiskSeq(number)
	if err := b.closeContainer(ctx, v, number); err != nil {
		return nil, false, err
	}
	return nil, false, blockdev.AwaitFree(ctx, number, sequence)
}

// closeContainer closes the container of an encrypted volume on a loop device, unless it is in use.
func (b *Backend) closeContainer(ctx context.Context, v volume.Volume, number int) error {
	device, err := blockdev.OpenLoop(number)
	if err != nil {
		return err
	}
	return errors.Join(b.CloseContainer(ctx, v, device.File().Name()), device.Close())
}

// Present implements backend.Backend. An encrypted volume is present while its container is open: a loop device without
// the container is being attached, or a killed driver has left it.
func (b *Backend) Present(_ context.Context, v volume.Volume) (mount.Source, bool, error) {
	path, ok, err := b.Mapped(v)
	if !ok && err == nil && v.Encryption == nil {
		var number int
		number, ok, err = b.findDevice(v.ID)
		path = blockdev.LoopPath(number)
	}
	source := &blockdev.DeviceSource{Path: path, FSType: v.FSType}
	if v.ID.Shared() {
		source.Abort = func(ctx context.Context) error { return b.abort(ctx, v) }
	}
	return source, ok, err
}

// findDevice returns the number of the volume's loop device. Only this process attaches the images of a locked pool, so that
// one scan of all devices is enough for all volumes without a device.
func (b *Backend) findDevice(id volume.ID) (number int, ok bool, err error) {
	if p, err := b.Set.ByID(id); err == nil {
		if since, locked := p.LockedSince(); locked {
			return b.Loops.FindSince(b.tag(id), since)
		}
	}
	return b.Loops.Find(b.tag(id))
}

// Detach implements backend.Backend. It frees a raw device; after an error the device is unchanged. The
// kernel itself frees the device of a filesystem after its last unmount.
func (b *Backend) Detach(ctx context.Context, v volume.Volume) error {
	if v.ID.Shared() {
		return b.detachShared(ctx, v)
	}
	if b.unlocked(v) {
		b.Loops.Forget(b.tag(v.ID))
		return b.CloseMapped(ctx, v)
	}
	err := b.detachDevices(ctx, v)
	if err == nil && v.Encryption != nil {
		b.awaitClosed(ctx, v)
	}
	return err
}

// awaitClosed waits up to a second until the kernel has closed the image of an encrypted volume. If the kernel itself closes
// the container, it closes the image some milliseconds after the loop device is free (fput of a kernel thread is delayed).
// The device is free, so it is no error if the image cannot be locked: a copy may have it open, or it may be missing.
func (b *Backend) awaitClosed(ctx context.Context, v volume.Volume) {
	p, err := b.Set.ByID(v.ID)
	if err != nil {
		return
	}
	if image, err := p.Images.AwaitLock(ctx, v.ID.Name); err == nil {
		_ = image.Close()
	}
}

// detachDevices frees the devices that the volume has on this node.
func (b *Backend) detachDevices(ctx context.Context, v volume.Volume) error {
	if err := b.Loops.Detach(ctx, b.ReadOnlyTag(v.ID)); err != nil {
		return backend.ExplainDetach(v, err)
	}
	number, ok, err := b.Loops.Find(b.tag(v.ID))
	if err == nil && ok {
		err = b.CloseContainer(ctx, v, blockdev.LoopPath(number))
	} else if err == nil {
		err = b.CloseMapped(ctx, v) // removes the device node
	}
	if err != nil {
		return err
	}
	return backend.ExplainDetach(v, b.Loops.Detach(ctx, b.tag(v.ID)))
}

// unlocked reports whether the image is not locked. Then no device is bound to the image.
func (b *Backend) unlocked(v volume.Volume) bool {
	p, err := b.Set.ByID(v.ID)
	if err != nil {
		return false
	}
	image, err := p.Images.Lock(v.ID.Name)
	if err != nil {
		return false
	}
	return image.Close() == nil
}

// openDevice opens the volume's device. A read-only device that is stacked on the volume's device keeps
// the latter bound, so that the image remains locked.
func (b *Backend) openDevice(v volume.Volume) (*os.File, error) {
	if path, ok, err := b.Mapped(v); err != nil {
		return nil, err
	} else if ok {
		return os.Open(path)
	}
	number, ok, err := b.Loops.Find(b.tag(v.ID))
	if err != nil {
		return nil, err
	}
	if !ok || v.Encryption != nil {
		return nil, volume.Errorf(volume.ErrPrecondition, "volume %s has no device on this node: stage it first", v.ID)
	}
	own, err := blockdev.OpenLoop(number)
	if err != nil {
		return nil, err
	}
	return own.File(), nil
}

// ResizeDevice implements backend.Expander.
func (b *Backend) ResizeDevice(ctx context.Context, v volume.Volume, secrets volume.Secrets) error {
	number, ok, err := b.Loops.Find(b.tag(v.ID))
	if err == nil && ok && v.ID.Shared() {
		err = b.revalidate(v.ID)
	}
	if err == nil && ok {
		err = blockdev.GrowLoop(number, v.StorageSize())
	}
	if err == nil {
		err = b.GrowMapped(ctx, v, secrets)
	}
	if err != nil || !v.Block {
		return err
	}
	return b.GrowReadOnly(v, v.Capacity)
}

// isImage reports whether a device with this backing file may belong to a volume. The backing file of a
// read-only device is the volume's own loop device, or the mapped device of an encrypted volume.
func isImage(backingFile string) bool {
	base := filepath.Base(backingFile)
	return base == pool.ImageFile || strings.HasPrefix(base, "loop") || backend.IsMapped(base)
}

// CheckTrim implements backend.Trimmer.
func (b *Backend) CheckTrim(v volume.Volume) error {
	if allocationOf(v) == thick {
		return volume.Errorf(volume.ErrPrecondition, "volume %s is thick: its image stays allocated", v.ID)
	}
	return b.CheckTrimmable(v)
}

// TrimBudget implements backend.Trimmer.
func (b *Backend) TrimBudget(v volume.Volume) (*background.Budget, error) {
	p, err := b.Usable(v.ID)
	if err != nil {
		return nil, err
	}
	image, err := p.Images.Open(v.ID.Name, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer image.Close()
	return p.Background(image), nil
}
