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
	// granule is what the size of an image is a multiple of: the block of every
	// filesystem here, and the largest sector.
	granule = 4096
	// minBlock is the smallest raw device.
	minBlock = granule
)

// Backend makes loop volumes in directory pools, or in one nfs pool.
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
	Media: []pool.Kind{pool.KindDirectory, pool.KindExport},
	Parameters: []backend.Parameter{
		backend.FSType,
		{
			Key: volume.ParamAllocation, Values: []string{string(volume.Thin), string(volume.Thick)}, Default: string(volume.Thin),
			Doc: "`thin` allocates disk space when it is written. `thick` allocates all of it at creation and refuses discards (`fstrim`); on an nfs pool it needs NFS 4.2.",
		},
		backend.MkfsOptions,
	},
	Examine: examine,
	New:     New,
}

// New makes the backend on the pools.
func New(pools *pool.Set) backend.Backend {
	files := func(c pool.Config) bool { return c.Section == nil }
	b := &Backend{
		Pools:     backend.Pools{Backend: Name, Set: pools, Own: files, Explain: noRoom},
		formatter: blockdev.NewFormatter(), loops: blockdev.NewLoopTags(mayBeOurs),
	}
	b.InlinePools = backend.InlinePools{Of: &b.Pools}
	return b
}

// Supports implements backend.Backend: everything but access from several
// nodes, since an image is on one.
func (b *Backend) Supports(c volume.Capability) error {
	switch {
	case c.Mode.MultiNode():
		return volume.Errorf(volume.ErrInvalid, "access mode %s: an image is on one node at a time: use ReadWriteOnce or ReadWriteOncePod, or a backend that shares", c.Mode)
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
	have, err := b.Existing(p, spec)
	if !errors.Is(err, volume.ErrNotFound) {
		return have, err
	}
	if spec.Source != nil {
		return b.createOf(ctx, p, spec)
	}
	v, err := newVolume(p, spec)
	if err != nil {
		return volume.Volume{}, err
	}
	return v, noRoom(p, p.Create(ctx, v, func(dir *os.Root) error { return makeImage(p, dir, v) }))
}

// noRoom says whose disk is full.
func noRoom(p *pool.Pool, err error) error {
	if errors.Is(err, volume.ErrExhausted) || !errors.Is(err, syscall.ENOSPC) && !errors.Is(err, syscall.EDQUOT) {
		return err
	}
	return volume.Errorf(volume.ErrExhausted, "pool %q: its filesystem has no room now: %w: free space there, or make it larger", p.Name(), err)
}

func newVolume(p *pool.Pool, spec volume.Spec) (volume.Volume, error) {
	size, err := spec.Capacity.Choose(bounds(spec.FSType(), spec.Block()))
	if err != nil {
		return volume.Volume{}, err
	}
	if err := checkOptions(spec.FSType(), spec.Parameters.MkfsOptions(), size); err != nil {
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
		Allocation:  volume.Allocation(spec.Parameters.Get(volume.ParamAllocation)),
		MkfsOptions: spec.Parameters.MkfsOptions(),
		Ephemeral:   spec.Ephemeral,
		Namespace:   spec.Parameters.Namespace,
		Created:     time.Now().UTC().Truncate(time.Second),
	}, nil
}

func checkOptions(fsType string, words []string, size int64) error {
	if err := blockdev.CheckOptions(fsType, words, size); err != nil {
		return volume.Errorf(volume.ErrInvalid, "parameter %s: %w", volume.ParamMkfsOptions, err)
	}
	return nil
}

// sectorSize is 4096 under a filesystem, whose blocks are that anyway. Users of
// raw devices may count on 512, which they get where the pool's disk has it, and
// over NFS, where direct I/O has no alignment.
func sectorSize(p *pool.Pool, block bool) int {
	if block && (p.Shared() || p.DirectIOAlign() <= 512) {
		return 512
	}
	return 4096
}

func makeImage(p *pool.Pool, dir *os.Root, v volume.Volume) error {
	f, err := dir.OpenFile(pool.ImageFile, p.OpenFlags(os.O_RDWR|os.O_CREATE|os.O_EXCL), 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := resize(f, v.Capacity, v.Allocation); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.CreateImage)
	return nil
}

// resize gives an image its size, and its blocks if it is thick.
func resize(f *os.File, size int64, a volume.Allocation) error {
	err := blockdev.Resize(f, size, a == volume.Thick)
	if errors.Is(err, syscall.EFBIG) {
		return volume.Errorf(volume.ErrOutOfRange, "the pool's filesystem has no files of %d bytes: ask for less", size)
	}
	if a == volume.Thick && errors.Is(err, syscall.EOPNOTSUPP) {
		return volume.Errorf(volume.ErrPrecondition, "parameter %s=%s: the pool's filesystem allocates no blocks ahead (over NFS that takes version 4.2, and a server's filesystem that can): use %s", volume.ParamAllocation, a, volume.Thin)
	}
	return err
}

// Delete implements backend.Backend. The image lock is taken first: a removed
// image would go on taking writes into nothing.
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
	if errors.Is(err, volume.ErrDamaged) { // no image to lock; a device may still have it
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
		return volume.Errorf(volume.ErrPrecondition, "volume %s is in use on this node: %s still has its image, which was removed from the pool", v.ID, blockdev.LoopPath(number))
	}
	return p.Remove(ctx, v)
}

// Capacity implements backend.Backend.
func (b *Backend) Capacity(_ context.Context, q backend.CapacityQuery) (backend.Capacity, error) {
	if err := checkOptions(q.FSType, q.Parameters.MkfsOptions(), math.MaxInt64); err != nil {
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

// atLeastImage is size, or the image's size if a call that was cut off has made
// that larger: its device may be so already.
func atLeastImage(p *pool.Pool, v volume.Volume, size int64) (int64, error) {
	image, err := p.Images.Open(v.ID.Name, os.O_RDONLY)
	if err != nil {
		return 0, err
	}
	defer image.Close()
	have, err := checkSize(image, v)
	return max(size, have), err
}

func growImage(p *pool.Pool, v volume.Volume, size int64) error {
	image, err := p.Images.Open(v.ID.Name, os.O_RDWR)
	if err != nil {
		return err
	}
	defer image.Close()
	have, err := checkSize(image, v)
	if err != nil {
		return err
	}
	if have >= size { // grown before a crash
		return image.Sync()
	}
	if err := resize(image, size, v.Allocation); err != nil {
		// fallocate may stop half way. No device knows of the new tail yet.
		return errors.Join(err, image.Truncate(have))
	}
	return image.Sync()
}

// checkSize refuses an image that is shorter than its volume, or not its volume's alone.
func checkSize(image *os.File, v volume.Volume) (int64, error) {
	if err := checkLinks(image, v); err != nil {
		return 0, err
	}
	size, err := blockdev.Size(image)
	if err != nil {
		return 0, err
	}
	if size < v.Capacity {
		return 0, volume.Errorf(volume.ErrDamaged, "volume %s: its image %s has %d bytes, its record says %d: it was cut short; restore it, nothing was changed", v.ID, image.Name(), size, v.Capacity)
	}
	return size, nil
}

// checkLinks refuses an image in a shared pool that has another name: whoever can write
// to the export may have made it of another volume's image.
func checkLinks(image *os.File, v volume.Volume) error {
	if !v.ID.Shared() {
		return nil
	}
	info, err := image.Stat()
	if err != nil {
		return err
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Nlink != 1 {
		return volume.Errorf(volume.ErrDamaged, "volume %s: its image %s has %d names: it may be another volume's too; remove the other hard links, nothing was changed", v.ID, image.Name(), st.Nlink)
	}
	return nil
}
