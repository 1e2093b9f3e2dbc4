// Package loop is the backend of volumes that are image files, attached as loop devices. The capacity
// is enforced. A volume has any supported filesystem, or is a raw device. A pool is a directory that
// supports direct I/O, or an NFS export.
//
// flock(2) fences the image: the loop driver keeps the locked descriptor open, so the lock exists
// exactly as long as the device. Only the holder of the lock writes, deletes or checks the image.
// Over NFS the writes of the device carry the lock, and the server refuses them after it has revoked
// the lock.
//
// The image of a volume in an nfs pool is written only through its device, also by mkfs and
// fsck: a second open file of the image would write without the lock.
package loop

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/sys"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Name is the backend's name.
const Name = "loop"

// bounds are the size limits of raw devices. 4096 is the block size of all supported filesystems, and
// the largest sector size.
var bounds = volume.Bounds{Min: 4096, Granule: 4096}

// Backend creates loop volumes in directory pools, or in one nfs pool.
type Backend struct {
	backend.Devices
	backend.InlinePools
	swept sync.Once // see sweep
}

var (
	_ backend.Backend           = (*Backend)(nil)
	_ backend.Publisher         = (*Backend)(nil)
	_ backend.Expander          = (*Backend)(nil)
	_ backend.BlockProvider     = (*Backend)(nil)
	_ backend.HealthChecker     = (*Backend)(nil)
	_ backend.Snapshotter       = (*Backend)(nil)
	_ backend.ChangeTracker     = (*Backend)(nil)
	_ backend.Thawer            = (*Backend)(nil)
	_ backend.Transferrer       = (*Backend)(nil)
	_ backend.FilesystemChecker = (*Backend)(nil)
)

// Kind describes loop volumes.
var Kind = backend.Kind{
	Name: Name, Doc: "an image file in a pool, with a filesystem or as a raw device",
	Section: newSection,
	Media:   []pool.Kind{pool.KindDirectory, pool.KindExport},
	Parameters: []backend.Parameter{
		backend.FSType,
		{
			Key: paramAllocation, Values: []string{string(thin), string(thick)}, Default: string(thin),
			Doc: "`thin` allocates disk space when data is written, `thick` at creation. `thick` refuses discards (`fstrim`), and needs NFS 4.2 on an export.",
		},
		backend.MkfsOptions,
		backend.Encryption,
		backend.Copies,
		backend.Protect,
	},
	Examine: examine,
	New:     New,
}

// New creates the backend on the pools.
func New(pools *pool.Set) backend.Backend {
	accepts := func(c pool.Config) bool { return c.Section == nil }
	b := &Backend{}
	b.Devices = backend.Devices{
		Pools: backend.Pools{Backend: Name, Set: pools, Accepts: accepts, Explain: backend.NoRoom},
		Raw:   bounds, Formatter: blockdev.NewFormatter(), Loops: blockdev.NewLoopTags(isImage),
		ReadOnlyTag: func(id volume.ID) string { return b.tag(id) + readOnlySuffix }, OpenDevice: b.openDevice,
	}
	b.InlinePools = backend.InlinePools{Of: &b.Pools}
	return b
}

// Create implements backend.Backend.
func (b *Backend) Create(ctx context.Context, spec volume.Spec) (volume.Volume, error) {
	return b.FindOrCreate(spec, func(p *pool.Pool) (volume.Volume, error) {
		if spec.Source != nil {
			return b.createFrom(ctx, p, spec)
		}
		size, err := spec.Capacity.Choose(b.Bounds(spec.FSType(), spec.Block()))
		if err != nil {
			return volume.Volume{}, err
		}
		if err := backend.CheckMkfsOptions(spec.Parameters, spec.FSType(), size); err != nil {
			return volume.Volume{}, err
		}
		v := b.NewVolume(p, spec)
		v.Capacity, v.Block, v.FSType, v.SectorSize = size, spec.Block(), spec.FSType(), sectorSize(p, spec.Block())
		v.MkfsOptions, v.Section = spec.Parameters.MkfsOptions(), sectionFor(spec.Parameters)
		v.Encryption = backend.NewEncryption(spec.Parameters, v.Block, v.SectorSize)
		return v, p.Create(ctx, v, func(dir *os.Root) error { return b.makeImage(ctx, p, dir, v) })
	})
}

// sectorSize returns the sector size of a volume's device in bytes: 4096, the block size of the
// filesystems, or 512 for a raw device if direct I/O in the pool supports it (over NFS always), because
// programs may depend on 512.
func sectorSize(p *pool.Pool, block bool) int {
	if block && (p.Shared() || p.DirectIOAlign() <= 512) {
		return 512
	}
	return 4096
}

// makeImage creates the image of a new volume.
func (b *Backend) makeImage(ctx context.Context, p *pool.Pool, dir *os.Root, v volume.Volume) error {
	f, err := createImage(p, dir)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := resize(f, v.StorageSize(), allocationOf(v)); err != nil {
		return err
	}
	if err := b.formatNew(ctx, p, dir, f, v); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.CreateImage)
	return nil
}

// formatNew creates the filesystem in the image of a new volume. The image of some volumes stays blank until it is attached: an
// encrypted one has no container yet, one on an export is written only through its device, and some filesystems have no template.
// Volumes with options of mkfs stay blank: if mkfs refuses the options of a class, every create would start mkfs and fail.
func (b *Backend) formatNew(ctx context.Context, p *pool.Pool, dir *os.Root, image *os.File, v volume.Volume) error {
	if v.Block || v.Encryption != nil || p.Shared() || len(v.MkfsOptions) > 0 {
		return nil
	}
	formatted, err := b.Formatter.FormatNew(ctx, image, blockdev.FormatSpec{FSType: v.FSType, SectorSize: v.SectorSize})
	if err != nil || !formatted {
		return err
	}
	// The image gets its blocks now, so that the sync of the record commits them too, and that of the image needs no commit of the
	// journal.
	if err := sys.WriteBack(image); err != nil {
		return err
	}
	return pool.MarkCreated(dir)
}

// resize sets the size of an image in bytes, and allocates its blocks if it is thick.
func resize(f *os.File, size int64, a allocation) error {
	err := blockdev.Resize(f, size, a == thick)
	if errors.Is(err, syscall.EFBIG) {
		return volume.Errorf(volume.ErrOutOfRange, "the pool's filesystem does not support files of %s: request less", volume.ExactSize(size))
	}
	if a == thick && errors.Is(err, syscall.EOPNOTSUPP) {
		return volume.Errorf(volume.ErrPrecondition, "parameter %s=%s: the pool's filesystem cannot preallocate blocks (over NFS that requires version 4.2, and support by the server's filesystem): use %s", paramAllocation, a, thin)
	}
	return err
}

// Delete implements backend.Backend. It locks the image first, so that no device writes to a removed
// image. It waits for the lock, because the kernel may release a detached image a moment later.
func (b *Backend) Delete(ctx context.Context, id volume.ID) error {
	return b.DeleteUnpublished(id, func(p *pool.Pool, v volume.Volume) error {
		image, err := p.Images.AwaitLock(ctx, v.ID.Name)
		if errors.Is(err, volume.ErrDamaged) { // the image is missing; a device may still be bound to it
			return b.deleteDamaged(ctx, p, v)
		}
		if err != nil {
			return err
		}
		defer image.Close()
		return p.Remove(ctx, v)
	})
}

// deleteDamaged deletes a volume whose image is missing, unless a device is bound to the removed image.
func (b *Backend) deleteDamaged(ctx context.Context, p *pool.Pool, v volume.Volume) error {
	number, ok, err := b.Loops.Find(b.tag(v.ID))
	if err != nil {
		return err
	}
	if ok {
		return volume.Errorf(volume.ErrPrecondition, "volume %s is in use on this node: %s is bound to its image, which was removed from the pool", v.ID, blockdev.LoopPath(number))
	}
	return p.Remove(ctx, v)
}

// Expand implements backend.Expander. An image that an interrupted call has enlarged keeps its size,
// because its device may already have that size.
func (b *Backend) Expand(ctx context.Context, v volume.Volume, r volume.Range) (volume.Volume, error) {
	return b.Grow(ctx, v, r, func(p *pool.Pool, v volume.Volume) (int64, error) {
		size, err := r.Choose(bounds)
		if err != nil {
			return 0, err
		}
		current, err := imageSize(p, v)
		if err != nil {
			return 0, err
		}
		size = max(size, current)
		if err := backend.WithinLimit(size, r); err != nil {
			return 0, err
		}
		return size, p.Grow(ctx, v, size, func() error { return growImage(p, v, size) })
	})
}

// imageSize returns the capacity that a volume's image has; see checkSize.
func imageSize(p *pool.Pool, v volume.Volume) (int64, error) {
	image, err := p.Images.Open(v.ID.Name, os.O_RDONLY)
	if err != nil {
		return 0, err
	}
	defer image.Close()
	return checkSize(image, v)
}

// growImage enlarges the image to size. It reads the size again, because on an export without locks
// another node may have made the image larger meanwhile, and truncate(2) would remove data.
func growImage(p *pool.Pool, v volume.Volume, size int64) error {
	image, err := p.Images.Open(v.ID.Name, os.O_RDWR)
	if err != nil {
		return err
	}
	defer image.Close()
	current, err := checkSize(image, v)
	if err != nil {
		return err
	}
	if current >= size {
		return image.Sync()
	}
	if err := resize(image, size+v.Overhead(), allocationOf(v)); err != nil {
		// fallocate(2) may have enlarged the image partially. No device has the new size yet.
		return errors.Join(err, image.Truncate(current+v.Overhead()))
	}
	return image.Sync()
}

// checkSize returns the capacity that an image has in bytes, without the header of an encrypted volume. ErrDamaged if the size is less than the
// capacity of the volume, or the image has several hard links (checkLinks).
func checkSize(image *os.File, v volume.Volume) (int64, error) {
	if err := checkLinks(image, v); err != nil {
		return 0, err
	}
	size, err := blockdev.Size(image)
	if err != nil {
		return 0, err
	}
	if size -= v.Overhead(); size < v.Capacity {
		return 0, volume.Errorf(volume.ErrDamaged, "volume %s: its image %s was truncated to %s, its record says %s: restore the image; nothing was changed", v.ID, image.Name(), volume.ExactSize(size+v.Overhead()), volume.ExactSize(v.StorageSize()))
	}
	return size, nil
}

// checkLinks refuses an image in a shared pool that has several hard links, because another client of
// the export may have linked the image of another volume.
func checkLinks(image *os.File, v volume.Volume) error {
	if !v.ID.Shared() {
		return nil
	}
	info, err := image.Stat()
	if err != nil {
		return err
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Nlink != 1 {
		return volume.Errorf(volume.ErrDamaged, "volume %s: its image %s has %d hard links, so it may be the image of another volume as well: remove the other links; nothing was changed", v.ID, image.Name(), st.Nlink)
	}
	return nil
}

// Health implements backend.HealthChecker.
func (b *Backend) Health(_ context.Context, v volume.Volume) []backend.Condition {
	checks := []backend.Check{imageCondition, b.ownerCondition, backend.FilesystemCondition}
	if allocationOf(v) == thin {
		checks = append(checks, backend.AlmostFull)
	}
	return b.Examine(v, checks...)
}

// ownerCondition reports a volume that is attached on this node, but is published only to another node
// or has lost the lock on its image.
func (b *Backend) ownerCondition(p *pool.Pool, v volume.Volume) *backend.Condition {
	if !p.Shared() || b.Set.NodeID() == "" {
		return nil
	}
	number, ok, err := b.Loops.Find(b.tag(v.ID))
	if err != nil || !ok {
		return nil
	}
	lost := cmp.Or(b.checkOwner(p, v), b.checkLock(v))
	if lost == nil {
		return nil
	}
	return &backend.Condition{
		Severity: backend.Inaccessible, Reason: backend.ReasonLockLost,
		Message: fmt.Sprintf("%s is still attached on this node: %v; writes to it may be lost, stop its pods on this node", blockdev.LoopPath(number), lost),
	}
}

// imageCondition reports an image that is missing, cannot be read or is too short.
func imageCondition(p *pool.Pool, v volume.Volume) *backend.Condition {
	image, err := p.Images.Open(v.ID.Name, os.O_RDONLY)
	if errors.Is(err, volume.ErrDamaged) {
		return &backend.Condition{Severity: backend.DataLoss, Reason: backend.ReasonImageMissing, Message: err.Error()}
	}
	if err != nil {
		return &backend.Condition{Severity: backend.Inaccessible, Reason: backend.ReasonImageUnreadable, Message: err.Error()}
	}
	defer image.Close()
	if _, err := checkSize(image, v); err != nil {
		return &backend.Condition{Severity: backend.DataLoss, Reason: backend.ReasonImageTruncated, Message: err.Error()}
	}
	return nil
}
