package loop

import (
	"context"
	"errors"
	"math"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Name is the backend's name.
const Name = "loop"

const (
	// granule divides the size of every image, in bytes: it is the block size of all supported
	// filesystems, and the largest sector size.
	granule = 4096
	// minBlock is the size of the smallest raw device, in bytes.
	minBlock = granule
)

// Backend creates loop volumes in directory pools, or in one nfs pool.
type Backend struct {
	backend.Pools
	backend.InlinePools
	formatter *blockdev.Formatter
	loops     *blockdev.LoopTags
	swept     sync.Once // see sweep
}

var (
	_ backend.Backend       = (*Backend)(nil)
	_ backend.Publisher     = (*Backend)(nil)
	_ backend.Expander      = (*Backend)(nil)
	_ backend.BlockProvider = (*Backend)(nil)
	_ backend.HealthChecker = (*Backend)(nil)
	_ backend.Snapshotter   = (*Backend)(nil)
	_ backend.ChangeTracker = (*Backend)(nil)
	_ backend.Thawer        = (*Backend)(nil)
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
			Doc: "`thin` allocates disk space when it is written. `thick` allocates all of it at creation and refuses discards (`fstrim`); on an nfs pool it needs NFS 4.2.",
		},
		backend.MkfsOptions,
	},
	Examine: examine,
	New:     New,
}

// New returns the backend for the pools.
func New(pools *pool.Set) backend.Backend {
	files := func(c pool.Config) bool { return c.Section == nil }
	b := &Backend{
		Pools:     backend.Pools{Backend: Name, Set: pools, Own: files, Explain: noRoom},
		formatter: blockdev.NewFormatter(), loops: blockdev.NewLoopTags(isImage),
	}
	b.InlinePools = backend.InlinePools{Of: &b.Pools}
	return b
}

// Supports implements backend.Backend: everything but access from several nodes.
func (b *Backend) Supports(c volume.Capability) error {
	switch {
	case c.Mode.MultiNode():
		return volume.Errorf(volume.ErrInvalid, "access mode %s: an image is attached to one node at a time: use ReadWriteOnce or ReadWriteOncePod, or another backend", c.Mode)
	case !c.Block && c.FSType != "" && !volume.ValidFSType(c.FSType):
		return volume.Errorf(volume.ErrInvalid, "volume_capability.mount.fs_type %q: want one of %s", c.FSType, strings.Join(volume.FSTypes, ", "))
	}
	return nil
}

func bounds(fsType string, block bool) volume.Bounds {
	if block {
		return volume.Bounds{Min: minBlock, Granule: granule}
	}
	return volume.Bounds{Min: blockdev.MinSize(fsType), Granule: granule}
}

// Create implements backend.Backend.
func (b *Backend) Create(ctx context.Context, spec volume.Spec) (volume.Volume, error) {
	p, err := b.Named(spec.Parameters.Pool)
	if err != nil {
		return volume.Volume{}, err
	}
	existing, err := b.Existing(p, spec)
	if !errors.Is(err, volume.ErrNotFound) {
		return existing, err
	}
	if spec.Source != nil {
		return b.createFrom(ctx, p, spec)
	}
	v, err := newVolume(p, spec)
	if err != nil {
		return volume.Volume{}, err
	}
	return v, noRoom(p, p.Create(ctx, v, func(dir *os.Root) error { return makeImage(p, dir, v) }))
}

// noRoom is ErrExhausted, with the pool, for an error of a full filesystem.
func noRoom(p *pool.Pool, err error) error {
	if errors.Is(err, volume.ErrExhausted) || !errors.Is(err, syscall.ENOSPC) && !errors.Is(err, syscall.EDQUOT) {
		return err
	}
	return volume.Errorf(volume.ErrExhausted, "pool %q: its filesystem has no room: %w: free space on it, or enlarge it", p.Name(), err)
}

func newVolume(p *pool.Pool, spec volume.Spec) (volume.Volume, error) {
	size, err := spec.Capacity.Choose(bounds(spec.FSType(), spec.Block()))
	if err != nil {
		return volume.Volume{}, err
	}
	if err := backend.CheckMkfsOptions(spec.Parameters, spec.FSType(), size); err != nil {
		return volume.Volume{}, err
	}
	return volume.Volume{
		Version:     volume.RecordVersion,
		ID:          p.ID(Name, spec.Name()),
		CoName:      spec.CoName,
		Capacity:    size,
		Block:       spec.Block(),
		FSType:      spec.FSType(),
		SectorSize:  sectorSize(p, spec.Block()),
		Section:     sectionFor(spec.Parameters),
		MkfsOptions: spec.Parameters.MkfsOptions(),
		Ephemeral:   spec.Ephemeral,
		Namespace:   spec.Parameters.Namespace,
		Created:     time.Now().UTC().Truncate(time.Second),
	}, nil
}

// sectorSize is the sector size of a volume's device in bytes: 4096 under a filesystem,
// whose blocks have that size. Users of raw devices may depend on 512. Direct I/O allows it
// if the pool's disk has such sectors, and over NFS.
func sectorSize(p *pool.Pool, block bool) int {
	if block && (p.Shared() || p.DirectIOAlign() <= 512) {
		return 512
	}
	return 4096
}

func makeImage(p *pool.Pool, dir *os.Root, v volume.Volume) error {
	f, err := createImage(p, dir)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := resize(f, v.Capacity, allocationOf(v)); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.CreateImage)
	return nil
}

// resize sets the size of an image in bytes, and allocates its blocks if it is thick.
func resize(f *os.File, size int64, a allocation) error {
	err := blockdev.Resize(f, size, a == thick)
	if errors.Is(err, syscall.EFBIG) {
		return volume.Errorf(volume.ErrOutOfRange, "the pool's filesystem does not support files of %d bytes: request less", size)
	}
	if a == thick && errors.Is(err, syscall.EOPNOTSUPP) {
		return volume.Errorf(volume.ErrPrecondition, "parameter %s=%s: the pool's filesystem cannot preallocate blocks (over NFS that requires version 4.2, and support by the server's filesystem): use %s", paramAllocation, a, thin)
	}
	return err
}

// Delete implements backend.Backend. It locks the image first, because writes to the device
// of a removed image would be lost.
func (b *Backend) Delete(ctx context.Context, id volume.ID) error {
	p, v, err := b.LookupToDelete(id)
	if errors.Is(err, volume.ErrNotFound) {
		return p.SyncVolumes()
	}
	if err != nil {
		return err
	}
	if err := p.Attachments.Unpublished(id); err != nil {
		return err
	}
	image, err := p.Images.Lock(v.ID.Name)
	if errors.Is(err, volume.ErrDamaged) { // the image is missing; a device may still be bound to it
		return b.deleteDamaged(ctx, p, v)
	}
	if err != nil {
		return err
	}
	defer image.Close()
	return p.Remove(ctx, v)
}

func (b *Backend) deleteDamaged(ctx context.Context, p *pool.Pool, v volume.Volume) error {
	number, ok, err := b.loops.Find(b.tag(v.ID))
	if err != nil {
		return err
	}
	if ok {
		return volume.Errorf(volume.ErrPrecondition, "volume %s is in use on this node: %s is bound to its image, which was removed from the pool", v.ID, blockdev.LoopPath(number))
	}
	return p.Remove(ctx, v)
}

// Capacity implements backend.Backend.
func (b *Backend) Capacity(_ context.Context, q backend.CapacityQuery) (backend.Capacity, error) {
	if err := backend.CheckMkfsOptions(q.Parameters, q.FSType, math.MaxInt64); err != nil {
		return backend.Capacity{}, err
	}
	return b.Room(q.Parameters, bounds(q.FSType, q.Block))
}

// Expand implements backend.Expander.
func (b *Backend) Expand(ctx context.Context, v volume.Volume, r volume.Range) (volume.Volume, error) {
	return b.Grow(ctx, v, r, func(p *pool.Pool, v volume.Volume) (int64, error) {
		size, err := r.Choose(volume.Bounds{Min: minBlock, Granule: granule})
		if err != nil {
			return 0, err
		}
		if size, err = atLeastImage(p, v, size); err != nil {
			return 0, err
		}
		if err := backend.WithinLimit(size, r); err != nil {
			return 0, err
		}
		return size, p.Grow(ctx, v, size, func() error { return growImage(p, v, size) })
	})
}

// atLeastImage is size, or the size of the image if an interrupted call has made it larger:
// its device may have that size already.
func atLeastImage(p *pool.Pool, v volume.Volume, size int64) (int64, error) {
	image, err := p.Images.Open(v.ID.Name, os.O_RDONLY)
	if err != nil {
		return 0, err
	}
	defer image.Close()
	current, err := checkSize(image, v)
	return max(size, current), err
}

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
	if current >= size { // an interrupted call has grown it
		return image.Sync()
	}
	if err := resize(image, size, allocationOf(v)); err != nil {
		// fallocate may have grown it in part. No device has the new size yet.
		return errors.Join(err, image.Truncate(current))
	}
	return image.Sync()
}

// checkSize returns the size of an image in bytes. ErrDamaged if that is less than the
// capacity of its volume, or the image has another name (checkLinks).
func checkSize(image *os.File, v volume.Volume) (int64, error) {
	if err := checkLinks(image, v); err != nil {
		return 0, err
	}
	size, err := blockdev.Size(image)
	if err != nil {
		return 0, err
	}
	if size < v.Capacity {
		return 0, volume.Errorf(volume.ErrDamaged, "volume %s: its image %s has %d bytes, its record says %d: it was truncated; restore it, nothing was changed", v.ID, image.Name(), size, v.Capacity)
	}
	return size, nil
}

// checkLinks refuses an image in a shared pool that has several hard links: another client of
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
		return volume.Errorf(volume.ErrDamaged, "volume %s: its image %s has %d hard links: it may be the image of another volume as well; remove the other links, nothing was changed", v.ID, image.Name(), st.Nlink)
	}
	return nil
}
