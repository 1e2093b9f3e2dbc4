package sixthkind

import (
	"context"
	"errors"
	"os"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Name is the kind's name in StorageClasses and volume IDs.
const Name = "sixth"

// Kind describes the volumes.
var Kind = backend.Kind{
	Name: Name, Doc: "a directory of a node that nothing limits",
	Media: []pool.Kind{pool.KindDirectory}, Directories: true,
	New: func(pools *pool.Set) backend.Backend {
		accepts := func(c pool.Config) bool { return c.Kind() == pool.KindDirectory }
		return &Backend{backend.Pools{Backend: Name, Set: pools, Accepts: accepts, Explain: backend.NoRoom}}
	},
}

// Backend creates the volumes. The embedded type reads records, lists volumes, and records
// where they are published.
type Backend struct{ backend.Pools }

// The interfaces that the backend implements: the first is required, and the others are
// found by type assertion.
var (
	_ backend.Backend       = (*Backend)(nil)
	_ backend.Publisher     = (*Backend)(nil)
	_ backend.Expander      = (*Backend)(nil)
	_ backend.HealthChecker = (*Backend)(nil)
	_ backend.Limiter       = (*Backend)(nil)
)

var bounds = volume.Bounds{Min: volume.MiB, Granule: 4096}

// Create implements backend.Backend. The pool commits the directory and the record together.
func (b *Backend) Create(ctx context.Context, spec volume.Spec) (volume.Volume, error) {
	return b.FindOrCreate(spec, func(p *pool.Pool) (v volume.Volume, err error) {
		var asked volume.DirectoryParameters
		v = b.NewDirectory(p, spec, asked)
		if v.Capacity, err = spec.Capacity.Choose(bounds); err != nil {
			return v, err
		}
		return v, p.Create(ctx, v, func(folder *os.Root) error {
			if err := folder.Mkdir(pool.DataDir, 0o700); err != nil {
				return err
			}
			data, err := folder.Open(pool.DataDir)
			if err != nil {
				return err
			}
			const empty = true
			err = backend.PrepareDirectory(data, empty, asked, v.Directory)
			return errors.Join(err, data.Sync(), data.Close())
		})
	})
}

// Delete implements backend.Backend. The pool moves the volume to its trash and empties
// that in the background.
func (b *Backend) Delete(ctx context.Context, id volume.ID) error {
	return b.DeleteUnpublished(id, func(p *pool.Pool, v volume.Volume) error {
		if err := b.Detach(ctx, v); err != nil {
			return err
		}
		return p.Remove(ctx, v)
	})
}

// Capacity implements backend.Backend.
func (b *Backend) Capacity(_ context.Context, q backend.CapacityQuery) (backend.Capacity, error) {
	return b.Room(q.Parameters, bounds)
}

// Attach implements backend.Backend. The source keeps the directory open until it is mounted.
func (b *Backend) Attach(ctx context.Context, v volume.Volume, _ volume.Secrets) (mount.Source, error) {
	p, err := b.Usable(v.ID)
	if err != nil {
		return nil, err
	}
	return b.AttachNodeDirectory(ctx, p, v)
}

// Present implements backend.Backend: a directory is always present.
func (b *Backend) Present(_ context.Context, v volume.Volume) (mount.Source, bool, error) {
	source, err := b.NodeDirectory(v)
	return source, err == nil, err
}

// Detach implements backend.Backend: it refuses a volume that is still mounted.
func (b *Backend) Detach(_ context.Context, v volume.Volume) error {
	source, err := b.NodeDirectory(v)
	if err != nil {
		return err
	}
	return backend.CheckUnmounted(v, source)
}

// Expand implements backend.Expander: the pool reserves more bytes for the volume.
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
func (b *Backend) ResizeDevice(context.Context, volume.Volume, volume.Secrets) error { return nil }

// Health implements backend.HealthChecker. StorageHealth is that of the pools.
func (b *Backend) Health(_ context.Context, v volume.Volume) []backend.Condition {
	return b.Examine(v, backend.DirectoryHealth, backend.AlmostFull)
}

// Enforced implements backend.Limiter: nothing limits a volume to its size.
func (b *Backend) Enforced(volume.Volume) string { return backend.EnforcedNot }
