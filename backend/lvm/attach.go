package lvm

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"slices"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/dm"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// deviceNode returns the name of a volume's device node (blockdev.NodePath). It depends on the ID only, so that a
// volume can be unstaged without its record.
func deviceNode(id volume.ID) string { return id.Pool + "." + id.PoolUUID + "." + id.Name }

// readOnlyTag returns the tag of the read-only loop device on a volume's device.
func readOnlyTag(id volume.ID) string {
	sum := sha256.Sum256([]byte(id.String()))
	return "trivet-lvm:" + hex.EncodeToString(sum[:20])
}

// Attach implements backend.Backend: it activates the logical volume, creates the volume's device node, opens the
// container of an encrypted volume, and creates a filesystem if the volume never had one.
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
	device, lv, err := storageOf(p).attach(ctx, v)
	if err != nil {
		return nil, err
	}
	crashpoint.Here(crashpoint.StageAttached)
	return b.PrepareMarked(ctx, &backend.Marked{
		Pool: p, Volume: v, Device: device, Secrets: secrets, Used: !lv.HasTag(unusedTag),
		Foreign: lv.Pool == "", // the extents may contain signatures of removed logical volumes
		SetUsed: func(ctx context.Context) error { return storageOf(p).setUsed(ctx, v) },
		Shrunk: func(size int64) error {
			return volume.Errorf(volume.ErrDamaged, "volume %s: its logical volume has %s, but the record requires %s: nothing was changed; find out who has reduced it", v.ID, volume.ExactSize(size), volume.ExactSize(v.StorageSize()))
		},
		Detach: func(ctx context.Context) error { return b.deactivate(ctx, v) },
	})
}

// attach activates the logical volume of a volume, and opens its device node.
func (s *storage) attach(ctx context.Context, v volume.Volume) (device *os.File, found dm.LogicalVolume, err error) {
	id := sectionOf(v).id()
	err = s.onVolume(ctx, v, func(g dm.Group, lv *dm.LogicalVolume) error {
		found = *lv
		d, err := g.Activate(ctx, lv.Name, id, lv.Size)
		if err != nil {
			return err
		}
		return blockdev.MakeNode(deviceNode(v.ID), d.Number)
	})
	if err != nil {
		return nil, found, err
	}
	device, err = os.OpenFile(blockdev.NodePath(deviceNode(v.ID)), os.O_RDWR, 0)
	if err != nil {
		return nil, found, err
	}
	if ok, err := showsVolume(v); err != nil || !ok {
		return nil, found, errors.Join(err, volume.Errorf(volume.ErrUnavailable, "volume %s: its logical volume was deactivated by another program: retry", v.ID), device.Close())
	}
	return device, found, nil
}

// showsVolume reports whether the volume's device node exists and is that of its logical volume. Without a record, any
// logical volume is accepted.
func showsVolume(v volume.Volume) (bool, error) {
	number, err := blockdev.NodeNumber(blockdev.NodePath(deviceNode(v.ID)))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	id, ok := dm.IsVolume(number)
	return ok && (v.Section == nil || id == sectionOf(v).id()), nil
}

// setUsed durably records that the logical volume may contain data.
func (s *storage) setUsed(ctx context.Context, v volume.Volume) error {
	return s.onVolume(ctx, v, func(g dm.Group, lv *dm.LogicalVolume) error {
		if err := g.RemoveTag(ctx, lv.Name, lv.ID, unusedTag); err != nil {
			return err
		}
		crashpoint.Here(crashpoint.StageNoted)
		lv.Tags = slices.DeleteFunc(slices.Clone(lv.Tags), func(tag string) bool { return tag == unusedTag })
		return nil
	})
}

// Present implements backend.Backend: a volume is present while its device node shows its logical volume, and an encrypted
// volume while its container is open.
func (b *Backend) Present(_ context.Context, v volume.Volume) (mount.Source, bool, error) {
	if path, ok, err := b.Mapped(v); ok || err != nil || v.Encryption != nil {
		return &blockdev.DeviceSource{Path: path, FSType: v.FSType}, ok, err
	}
	ok, err := showsVolume(v)
	return &blockdev.DeviceSource{Path: blockdev.NodePath(deviceNode(v.ID)), FSType: v.FSType}, ok, err
}

// Detach implements backend.Backend.
func (b *Backend) Detach(ctx context.Context, v volume.Volume) error {
	device := blockdev.NodePath(deviceNode(v.ID))
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
	return b.deactivate(ctx, v)
}

// deactivate deactivates the logical volume of a volume that has a device node, and removes the node.
func (b *Backend) deactivate(ctx context.Context, v volume.Volume) error {
	present, err := showsVolume(v)
	if err != nil {
		return err
	}
	if p, poolErr := b.Set.ByID(v.ID); present && poolErr == nil && v.Section != nil {
		s := storageOf(p)
		err = s.onVolume(ctx, v, func(g dm.Group, lv *dm.LogicalVolume) error { return g.Deactivate(ctx, lv.Name, lv.ID) })
	}
	if err != nil {
		return err
	}
	return blockdev.RemoveNode(deviceNode(v.ID))
}

// release detaches a volume that is being deleted. It returns ErrInUse if a program has the logical volume open.
func (b *Backend) release(ctx context.Context, v volume.Volume) error {
	if err := b.Detach(ctx, v); err != nil {
		return err
	}
	d, ok, err := sectionOf(v).id().Device()
	if err == nil && ok && d.Opens > 0 {
		err = volume.Errorf(volume.ErrInUse, "volume %s: a program has its logical volume open, or it is mounted (lsblk): stop that program", v.ID)
	}
	return err
}

// Expand implements backend.Expander.
func (b *Backend) Expand(ctx context.Context, v volume.Volume, r volume.Range) (volume.Volume, error) {
	p, err := b.Usable(v.ID)
	if err != nil {
		return v, err
	}
	if storageOf(p).showsExtents(v) {
		return b.expandRaw(ctx, p, v, r)
	}
	return b.Grow(ctx, v, r, func(p *pool.Pool, v volume.Volume) (int64, error) {
		s := storageOf(p)
		size, err := r.Choose(s.bounds(v))
		if err != nil {
			return 0, err
		}
		if err := s.awaitRoom(ctx, p, size-v.Capacity); err != nil {
			return 0, err
		}
		return size, p.Grow(ctx, v, size, func() error { return s.extend(ctx, v, size+v.Overhead()) })
	})
}

// extend enlarges the logical volume to a size in bytes. It does nothing if an interrupted call has done so.
func (s *storage) extend(ctx context.Context, v volume.Volume, size int64) error {
	return s.explainVolume(v, s.changeCurrent(ctx, func(g dm.Group, r *dm.Report) error {
		lv, err := s.locate(v, *r)
		if err != nil || lv.Size >= size {
			return err
		}
		return extend(ctx, g, r, lv, size)
	}))
}

// ResizeDevice implements backend.Expander. The device has the size of the logical volume, unless the command that
// enlarged it was killed.
func (b *Backend) ResizeDevice(ctx context.Context, v volume.Volume, secrets volume.Secrets) error {
	p, err := b.Usable(v.ID)
	if err != nil {
		return err
	}
	err = storageOf(p).onVolume(ctx, v, func(g dm.Group, lv *dm.LogicalVolume) error {
		_, err := g.Activate(ctx, lv.Name, lv.ID, v.StorageSize())
		return err
	})
	if err != nil {
		return err
	}
	crashpoint.Here(crashpoint.GrowDevice)
	if err := b.GrowMapped(ctx, v, secrets); err != nil {
		return err
	}
	return b.GrowReadOnly(v, v.Capacity)
}

// openDevice opens the device of an attached volume, to create the read-only device on it. That device is a loop
// device, because BLKROSET would make the device itself read-only.
func (b *Backend) openDevice(v volume.Volume) (*os.File, error) {
	return b.OpenAttached(v, deviceNode(v.ID))
}
