package sixthkind

import (
	"context"
	"errors"
	"os"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Create implements backend.Backend. The pool commits the directory and the record together.
func (b *Backend) Create(ctx context.Context, spec volume.Spec) (volume.Volume, error) {
	p, err := b.Named(spec.Parameters.Pool)
	if err != nil {
		return volume.Volume{}, err
	}
	have, err := b.Existing(p, spec)
	if !errors.Is(err, volume.ErrNotFound) {
		return have, err
	}
	size, err := spec.Capacity.Choose(bounds)
	if err != nil {
		return volume.Volume{}, err
	}
	var asked volume.DirectoryParameters
	v := backend.DirectoryRecord(p.ID(Name, spec.Name()), spec, size, asked)
	return v, p.Create(ctx, v, func(folder *os.Root) error {
		if err := folder.Mkdir(pool.DataDir, 0o700); err != nil {
			return err
		}
		data, err := folder.Open(pool.DataDir)
		if err != nil {
			return err
		}
		const made = true
		err = backend.PrepareDirectory(data, made, asked, v.Directory)
		return errors.Join(err, data.Sync(), data.Close())
	})
}

// Delete implements backend.Backend. The pool moves the volume to its trash and empties
// that in the background.
func (b *Backend) Delete(ctx context.Context, id volume.ID) error {
	p, v, err := b.LookupToDelete(id)
	if errors.Is(err, volume.ErrNotFound) {
		return p.SyncVolumes()
	}
	if err == nil {
		err = p.Attachments.Unpublished(id)
	}
	if err == nil {
		err = b.Detach(ctx, v)
	}
	if err != nil {
		return err
	}
	return p.Remove(ctx, v)
}

// Expand implements backend.Expander: the pool promises more bytes to the volume.
func (b *Backend) Expand(ctx context.Context, v volume.Volume, r volume.Range) (volume.Volume, error) {
	return b.Grow(ctx, v, r, func(p *pool.Pool, v volume.Volume) (int64, error) {
		size, err := r.Choose(bounds)
		if err != nil {
			return 0, err
		}
		return size, p.Grow(ctx, v, size, func() error { return nil })
	})
}

// ResizeDevice implements backend.Expander: a directory has no device.
func (b *Backend) ResizeDevice(context.Context, volume.Volume) error { return nil }
