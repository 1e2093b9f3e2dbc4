package disk

import (
	"context"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Expand implements backend.Expander.
func (b *Backend) Expand(ctx context.Context, v volume.Volume, r volume.Range) (volume.Volume, error) {
	return b.Grow(ctx, v, r, func(p *pool.Pool, v volume.Volume) (int64, error) { return grow(ctx, p, v, r) })
}

// grow expands the volume to the size of its disk.
func grow(ctx context.Context, p *pool.Pool, v volume.Volume, r volume.Range) (int64, error) {
	d, err := of(p).own(v)
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
		_, err := d.Grow(ctx, sectionOf(v).GUID)
		return explain(v, err)
	})
}

// ResizeDevice implements backend.Expander: it makes the kernel's partition as large as the
// volume, and the read-only device on it.
func (b *Backend) ResizeDevice(ctx context.Context, v volume.Volume) error {
	p, err := b.Set.ByID(v.ID)
	if err != nil {
		return err
	}
	var size int64
	d, err := of(p).own(v)
	if err == nil {
		size, err = d.Grow(ctx, sectionOf(v).GUID)
	}
	if err != nil {
		return explain(v, err)
	}
	crashpoint.Here(crashpoint.GrowDevice)
	return b.GrowReadOnly(v, size)
}
