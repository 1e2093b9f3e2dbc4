package disk

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// deviceName returns the name of a volume's device node (blockdev.NodePath). It depends on the ID
// only, so that a volume can be unstaged without its record.
func deviceName(id volume.ID) string { return id.Pool + "." + id.PoolUUID + "." + id.Name }

// Attach implements backend.Backend: it creates the volume's device node, opens the container of an encrypted volume, and
// creates a filesystem if the volume never had one.
func (b *Backend) Attach(ctx context.Context, v volume.Volume, secrets volume.Secrets) (mount.Source, error) {
	p, v, lock, err := b.Lock(ctx, v.ID) // expansion uses the same lock
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	if v.Encryption != nil { // nothing is attached without the passphrase
		if err := secrets.CheckPassphrase(v.ID); err != nil {
			return nil, err
		}
	}
	d, m, err := storageOf(p).locate(v)
	if err != nil {
		return nil, err
	}
	device, err := d.Attach(ctx, sectionOf(v).GUID, deviceName(v.ID))
	if err != nil {
		return nil, explainDisk(v, err)
	}
	crashpoint.Here(crashpoint.StageAttached)
	return b.PrepareMarked(ctx, &backend.Marked{
		Pool: p, Volume: v, Device: device, Secrets: secrets, Used: m.Used,
		SetUsed: func(ctx context.Context) error { return explainDisk(v, d.SetUsed(ctx, sectionOf(v).GUID)) },
		Shrunk: func(size int64) error {
			return volume.Errorf(volume.ErrDamaged, "volume %s: the partition %s has %s, but the record requires %s: nothing was changed; find out which program has changed the partition table", v.ID, device.Name(), volume.ExactSize(size), volume.ExactSize(v.StorageSize()))
		},
		Detach: func(ctx context.Context) error {
			return explainDisk(v, blockdev.Detach(ctx, sectionOf(v).GUID, deviceName(v.ID)))
		},
	})
}

// explainDisk adds the volume and the remedy to an error of an attached disk.
func explainDisk(v volume.Volume, err error) error {
	switch {
	case errors.Is(err, blockdev.ErrDiskBusy):
		return volume.Errorf(volume.ErrInUse, "volume %s: %w: a program has it open (find it with fuser or lsblk), or it is mounted in another mount namespace (grep %s /proc/*/mountinfo): stop that program", v.ID, err, blockdev.NodePath(deviceName(v.ID)))
	case errors.Is(err, blockdev.ErrDiskGone):
		return volume.Errorf(volume.ErrUnavailable, "volume %s: %w: insert the disk again, or read in dmesg why the kernel removed it", v.ID, err)
	case errors.Is(err, blockdev.ErrNoMark):
		return volume.Errorf(volume.ErrDamaged, "volume %s: %w: nothing was changed; find out which program has overwritten the partition table", v.ID, err)
	}
	return err
}

// Present implements backend.Backend: a disk is present while its device node exists, and an encrypted volume while its
// container is open.
func (b *Backend) Present(_ context.Context, v volume.Volume) (mount.Source, bool, error) {
	if path, ok, err := b.Mapped(v); ok || err != nil || v.Encryption != nil {
		return &blockdev.DeviceSource{Path: path, FSType: v.FSType}, ok, err
	}
	ok, _, err := blockdev.Present(sectionOf(v).GUID, deviceName(v.ID))
	return &blockdev.DeviceSource{Path: blockdev.NodePath(deviceName(v.ID)), FSType: v.FSType}, ok, err
}

// Detach implements backend.Backend. It succeeds for a disk that was removed from the machine.
func (b *Backend) Detach(ctx context.Context, v volume.Volume) error {
	device := blockdev.NodePath(deviceName(v.ID))
	mounts, err := mount.OfDevice(device)
	if err != nil {
		return err
	}
	if len(mounts) > 0 {
		return volume.Errorf(volume.ErrInUse, "volume %s is in use on this node: %s is mounted at %s: unpublish and unstage the volume there first", v.ID, device, mounts[0].Mountpoint)
	}
	if err := b.Loops.Detach(ctx, readOnlyTag(v.ID)); err != nil {
		return backend.ExplainDetach(v, err)
	}
	if err := b.CloseContainer(ctx, v, device); err != nil {
		return err
	}
	return explainDisk(v, blockdev.Detach(ctx, sectionOf(v).GUID, deviceName(v.ID)))
}

// releaseDisk detaches the volume, and removes its partition from the kernel, so that no program can
// open the partition. It returns ErrInUse if the volume is in use. It ignores a missing or unreadable
// disk, because Reclaim searches for the disk again before it wipes.
func (b *Backend) releaseDisk(ctx context.Context, p *pool.Pool, v volume.Volume) error {
	if err := b.Detach(ctx, v); err != nil {
		return err
	}
	d, err := storageOf(p).locateForChange(v)
	if errors.Is(err, volume.ErrUnavailable) {
		return nil
	}
	if err == nil {
		err = explainDisk(v, d.Hide(ctx))
	}
	return err
}

// VerifyOwnership implements backend.OwnershipVerifier. It returns ErrUnavailable if the disk of an
// attached volume was removed from the machine.
func (b *Backend) VerifyOwnership(_ context.Context, v volume.Volume) error {
	ok, removed, err := blockdev.Present(sectionOf(v).GUID, deviceName(v.ID))
	if err == nil && (removed || !ok) {
		err = volume.Errorf(volume.ErrUnavailable, "volume %s: its disk was removed, or the kernel has removed it after errors (dmesg): insert the disk again, stop the volume's pods on this node, and stage the volume again", v.ID)
	}
	return err
}

// Expand implements backend.Expander.
func (b *Backend) Expand(ctx context.Context, v volume.Volume, r volume.Range) (volume.Volume, error) {
	return b.Grow(ctx, v, r, func(p *pool.Pool, v volume.Volume) (int64, error) { return grow(ctx, p, v, r) })
}

// grow expands the volume to the size of its disk.
func grow(ctx context.Context, p *pool.Pool, v volume.Volume, r volume.Range) (int64, error) {
	d, err := storageOf(p).locateForChange(v)
	if err != nil {
		return 0, err
	}
	size := d.Room() - v.Overhead()
	if size < r.Required {
		return 0, volume.Errorf(volume.ErrOutOfRange, "capacity_range.required_bytes %s: the disk %s of volume %s has %s for data: enlarge the disk at its source and rescan it, or copy the data to a larger volume", volume.ExactSize(r.Required), d.Path, v.ID, volume.ExactSize(size))
	}
	if err := backend.WithinLimit(size, r); err != nil {
		return 0, err
	}
	return size, p.Grow(ctx, v, size, func() error {
		_, err := d.Grow(ctx, sectionOf(v).GUID)
		return explainDisk(v, err)
	})
}

// ResizeDevice implements backend.Expander: it grows the kernel's partition, the container of an encrypted volume, and the
// read-only device, to the size of the volume.
func (b *Backend) ResizeDevice(ctx context.Context, v volume.Volume, secrets volume.Secrets) error {
	p, err := b.Set.ByID(v.ID)
	if err != nil {
		return err
	}
	var size int64
	d, err := storageOf(p).locateForChange(v)
	if err == nil {
		size, err = d.Grow(ctx, sectionOf(v).GUID)
	}
	if err != nil {
		return explainDisk(v, err)
	}
	crashpoint.Here(crashpoint.GrowDevice)
	v.Capacity = size - v.Overhead()
	if err := b.GrowMapped(ctx, v, secrets); err != nil {
		return err
	}
	return b.GrowReadOnly(v, v.Capacity)
}

// readOnlyTag returns the tag of the read-only loop device on a volume's disk.
func readOnlyTag(id volume.ID) string {
	sum := sha256.Sum256([]byte(id.String()))
	return "trivet-disk:" + hex.EncodeToString(sum[:20])
}

// openDevice opens the device of an attached volume, to create the read-only device on it. That device is a
// loop device, because BLKROSET would make the device itself read-only.
func (b *Backend) openDevice(v volume.Volume) (*os.File, error) {
	return b.OpenAttached(v, deviceName(v.ID))
}
