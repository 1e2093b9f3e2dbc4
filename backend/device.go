package backend

import (
	"context"
	"math"
	"os"

	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// Devices implements the parts of a backend that do not depend on the medium of its block devices.
// A backend embeds it.
type Devices struct {
	Pools
	// Raw bounds raw volumes. Its granule is that of all volumes.
	Raw       volume.Bounds
	Formatter *blockdev.Formatter
	Loops     *blockdev.LoopTags
	// ReadOnlyTag returns the tag of a volume's read-only device.
	ReadOnlyTag func(volume.ID) string
	// OpenDevice opens the device of an attached volume (ErrPrecondition if there is none).
	OpenDevice func(volume.Volume) (*os.File, error)
}

// Bounds bounds volumes with a filesystem, or raw volumes.
func (d *Devices) Bounds(fsType string, block bool) volume.Bounds {
	b := d.Raw
	if !block {
		b.Min = blockdev.MinSize(fsType)
	}
	return b
}

// Capacity implements Backend.
func (d *Devices) Capacity(_ context.Context, q CapacityQuery) (Capacity, error) {
	if err := CheckMkfsOptions(q.Parameters, q.FSType, math.MaxInt64); err != nil {
		return Capacity{}, err
	}
	return d.Room(q.Parameters, d.Bounds(q.FSType, q.Block))
}

// ReadOnlyDevice implements BlockProvider: a read-only loop device on the volume's device.
func (d *Devices) ReadOnlyDevice(ctx context.Context, v volume.Volume) (mount.BlockDevice, error) {
	return d.Loops.AttachReadOnly(ctx, d.ReadOnlyTag(v.ID), v.SectorSize, func() (*os.File, error) { return d.OpenDevice(v) })
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
