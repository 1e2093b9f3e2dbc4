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
	"github.com/trivet-csi/trivet/blockdev"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/mount"
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
	pools     *pool.Set
	formatter *blockdev.Formatter
	swept     sync.Once // see sweep

	mu sync.Mutex
	// numbers remembers where a tag was last seen; the kernel is asked whether
	// it is still so each time.
	numbers map[string]int
	// complete: all devices were looked at once (see findMade).
	complete bool
}

var (
	_ backend.Backend       = (*Backend)(nil)
	_ backend.Publisher     = (*Backend)(nil)
	_ backend.Expander      = (*Backend)(nil)
	_ backend.BlockProvider = (*Backend)(nil)
	_ backend.HealthChecker = (*Backend)(nil)
	_ backend.Aborter       = (*Backend)(nil)
)

// New makes the backend for the given pools.
func New(pools *pool.Set) backend.Backend {
	return &Backend{pools: pools, formatter: blockdev.NewFormatter(), numbers: map[string]int{}}
}

// Name implements backend.Backend.
func (b *Backend) Name() string { return Name }

// Supports implements backend.Backend: everything but access from several
// nodes, since an image is on one.
func (b *Backend) Supports(c volume.Capability) error {
	switch {
	case c.Mode.MultiNode():
		return volume.Errorf(volume.ErrInvalid, "access mode %s: an image is on one node at a time: use ReadWriteOnce or ReadWriteOncePod, or a backend that shares", c.Mode)
	case !c.Block && c.FSType != "" && !volume.ValidFSType(c.FSType):
		return volume.Errorf(volume.ErrInvalid, "volume_capability.mount.fs_type %q: want one of %s", c.FSType, strings.Join(volume.FSTypes, ", "))
	}
	if _, err := mount.ParseFlags(c.MountFlags); err != nil {
		return volume.Errorf(volume.ErrInvalid, "volume_capability.mount.mount_flags %q: %w: remove it from mountOptions", c.MountFlags, err)
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
func (b *Backend) Create(_ context.Context, spec volume.Spec) (volume.Volume, error) {
	p, err := b.pools.Named(spec.Parameters.Pool)
	if err != nil {
		return volume.Volume{}, err
	}
	have, err := p.Lookup(volume.NameFor(spec.CoName))
	switch {
	case err == nil:
		if have.ID.Backend != Name {
			return volume.Volume{}, volume.Errorf(volume.ErrIncompatible, "volume %q exists as %s, asked for is backend %s: use another name", spec.CoName, have.ID, Name)
		}
		if err := have.Satisfies(spec); err != nil {
			return volume.Volume{}, err
		}
		return have, p.Settle()
	case !errors.Is(err, volume.ErrNotFound):
		return volume.Volume{}, err
	}
	if other := b.pools.Elsewhere(p, volume.NameFor(spec.CoName)); other != nil {
		return volume.Volume{}, volume.Errorf(volume.ErrIncompatible, "volume %q exists in pool %q, asked for is pool %q: use another name", spec.CoName, other.Name(), p.Name())
	}
	v, err := newVolume(p, spec)
	if err != nil {
		return volume.Volume{}, err
	}
	return v, noRoom(p, p.Create(v, func(dir *os.Root) error { return makeImage(p, dir, v) })) //nolint:contextcheck // what changes a pool runs to its end, whatever becomes of the call
}

// noRoom says whose disk is full.
func noRoom(p *pool.Pool, err error) error {
	if errors.Is(err, volume.ErrExhausted) || !errors.Is(err, syscall.ENOSPC) && !errors.Is(err, syscall.EDQUOT) {
		return err
	}
	return volume.Errorf(volume.ErrExhausted, "pool %q: its filesystem has no room for the image now: %w: free space there, or make it larger", p.Name(), err)
}

func newVolume(p *pool.Pool, spec volume.Spec) (volume.Volume, error) {
	size, err := spec.Capacity.Choose(bounds(spec.FSType(), spec.Block()))
	if err != nil {
		return volume.Volume{}, err
	}
	if err := checkOptions(spec.FSType(), spec.Parameters.MkfsOptions, size); err != nil {
		return volume.Volume{}, err
	}
	return volume.Volume{
		Version:     volume.RecordVersion,
		ID:          p.ID(Name, volume.NameFor(spec.CoName)),
		CoName:      spec.CoName,
		Capacity:    size,
		Block:       spec.Block(),
		FSType:      spec.FSType(),
		SectorSize:  sectorSize(p, spec.Block()),
		Allocation:  spec.Parameters.Allocation,
		MkfsOptions: spec.Parameters.MkfsOptions,
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
	f, err := dir.OpenFile(pool.ImageFile, p.Undelegated(os.O_RDWR|os.O_CREATE|os.O_EXCL), 0o600)
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

// Get implements backend.Backend.
func (b *Backend) Get(_ context.Context, id volume.ID) (volume.Volume, error) {
	p, err := b.pools.ByID(id)
	if err != nil {
		return volume.Volume{}, err
	}
	return lookup(p, id)
}

// lookup reads a volume's record. A shared pool has volumes of other backends too, and
// an ID that somebody made up of one's name is of no volume: ErrNotFound.
func lookup(p *pool.Pool, id volume.ID) (volume.Volume, error) {
	v, err := p.Lookup(id.Name)
	if err == nil && v.ID != id {
		err = volume.Errorf(volume.ErrNotFound, "volume %s does not exist: what has its name is %s", id, v.ID)
	}
	if err != nil {
		return volume.Volume{}, err
	}
	return v, nil
}

// Delete implements backend.Backend. The image lock is taken first: a removed
// image would go on taking writes into nothing.
func (b *Backend) Delete(_ context.Context, id volume.ID) error {
	p, err := b.pools.ByID(id)
	if err != nil {
		return err
	}
	v, err := lookup(p, id)
	if errors.Is(err, volume.ErrNotFound) {
		return p.Settle()
	}
	if err != nil {
		return err
	}
	a, err := p.Attached(id.Name)
	if err == nil {
		return volume.Errorf(volume.ErrPrecondition, "volume %s is published to node %q: unpublish it first", id, a.Node)
	}
	if !errors.Is(err, os.ErrNotExist) {
		return err
	}
	image, err := p.LockImage(v.ID.Name)
	if errors.Is(err, volume.ErrDamaged) { // no image to lock; a device may still have it
		return b.deleteDamaged(p, v) //nolint:contextcheck // what changes a pool runs to its end, whatever becomes of the call
	}
	if err != nil {
		return err
	}
	defer image.Close()
	return p.Remove(v) //nolint:contextcheck // what changes a pool runs to its end, whatever becomes of the call
}

func (b *Backend) deleteDamaged(p *pool.Pool, v volume.Volume) error {
	number, ok, err := b.find(b.tag(v.ID))
	if err != nil {
		return err
	}
	if ok {
		return volume.Errorf(volume.ErrPrecondition, "volume %s is in use on this node: %s still has its image, which was removed from the pool", v.ID, blockdev.LoopPath(number))
	}
	return p.Remove(v)
}

// List implements backend.Backend: pools in the order of the configuration, the
// volumes of each by name.
func (b *Backend) List(_ context.Context, after volume.ID, limit int) ([]volume.Volume, bool, error) {
	found := after == volume.ID{}
	var out []volume.Volume
	for _, s := range b.pools.States() {
		if s.Err != nil {
			return nil, false, volume.Errorf(volume.ErrUnavailable, "listing volumes: %w", s.Err)
		}
		name := ""
		if !found {
			if s.Pool.ID(Name, after.Name) != after {
				continue
			}
			found, name = true, after.Name
		}
		volumes, more, err := s.Pool.List(Name, name, limit-len(out))
		if err != nil {
			return nil, false, err
		}
		if out = append(out, volumes...); more {
			return out, true, nil
		}
	}
	if !found {
		return nil, false, volume.Errorf(volume.ErrStaleToken, "starting_token: its pool is not here any more: list from the beginning")
	}
	return out, false, nil
}

// Capacity implements backend.Backend.
func (b *Backend) Capacity(_ context.Context, q backend.CapacityQuery) (backend.Capacity, error) {
	least := bounds(q.FSType, q.Block).Min
	if err := checkOptions(q.FSType, q.Parameters.MkfsOptions, math.MaxInt64); err != nil {
		return backend.Capacity{}, err
	}
	p, err := b.pools.Named(q.Parameters.Pool)
	if errors.Is(err, volume.ErrInvalid) { // another node may have that pool
		return backend.Capacity{}, nil
	}
	if err != nil {
		return backend.Capacity{}, err
	}
	if err := p.Check(); err != nil {
		return backend.Capacity{}, err
	}
	u, err := p.Usage()
	if err != nil {
		return backend.Capacity{}, err
	}
	room := u.Room / granule * granule
	if u.Full {
		room = 0
	}
	return backend.Capacity{Available: room, Max: room, Min: least}, nil
}

// Expand implements backend.Expander.
func (b *Backend) Expand(ctx context.Context, v volume.Volume, r volume.Range) (volume.Volume, error) {
	if err := r.Validate(); err != nil {
		return v, err
	}
	p, err := b.pools.ByID(v.ID)
	if err != nil {
		return v, err
	}
	lock, err := p.LockVolume(ctx, v.ID.Name)
	if err != nil {
		return v, err
	}
	defer lock.Close()
	if v, err = lookup(p, v.ID); err != nil {
		return v, err
	}
	if v.Capacity >= r.Required {
		return v, errors.Join(withinLimit(v.Capacity, r), p.SettleVolume(v.ID.Name))
	}
	return b.expand(p, v, r) //nolint:contextcheck // what changes a pool runs to its end, whatever becomes of the call
}

// withinLimit refuses a volume that has more than may be.
func withinLimit(size int64, r volume.Range) error {
	if r.Limit > 0 && size > r.Limit {
		return volume.Errorf(volume.ErrOutOfRange, "capacity_range.limit_bytes %d is below the volume's %d bytes: volumes do not shrink", r.Limit, size)
	}
	return nil
}

func (b *Backend) expand(p *pool.Pool, v volume.Volume, r volume.Range) (volume.Volume, error) {
	size, err := r.Choose(volume.Bounds{Min: minBlock, Granule: granule})
	if err != nil {
		return v, err
	}
	if size, err = atLeastImage(p, v, size); err != nil {
		return v, err
	}
	if err := withinLimit(size, r); err != nil {
		return v, err
	}
	err = p.Grow(v, size, func() error { return growImage(p, v, size) })
	if errors.Is(err, volume.ErrExhausted) || errors.Is(err, syscall.ENOSPC) {
		// RESOURCE_EXHAUSTED would be tried again for ever.
		return v, volume.Errorf(volume.ErrOutOfRange, "capacity_range.required_bytes %d: %w", r.Required, err)
	}
	if err == nil {
		v.Capacity = size
	}
	return v, err
}

// atLeastImage is size, or the image's size if a call that was cut off has made
// that larger: its device may be so already.
func atLeastImage(p *pool.Pool, v volume.Volume, size int64) (int64, error) {
	image, err := p.OpenImage(v.ID.Name, os.O_RDONLY)
	if err != nil {
		return 0, err
	}
	defer image.Close()
	have, err := checkSize(image, v)
	return max(size, have), err
}

func growImage(p *pool.Pool, v volume.Volume, size int64) error {
	image, err := p.OpenImage(v.ID.Name, os.O_RDWR)
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

// Publish implements backend.Publisher.
func (b *Backend) Publish(_ context.Context, v volume.Volume, at backend.Publication) error {
	p, err := b.pools.ByID(v.ID)
	if err != nil {
		return err
	}
	return p.Attach(v.ID.Name, pool.Attachment{Node: at.Node, ReadOnly: at.ReadOnly})
}

// Unpublish implements backend.Publisher.
func (b *Backend) Unpublish(_ context.Context, id volume.ID, node string) error {
	p, err := b.pools.ByID(id)
	if err != nil {
		return err
	}
	if have, err := p.Lookup(id.Name); err == nil && have.ID != id { // what is published is another backend's
		return nil
	}
	return p.Detach(id.Name, node)
}

// PublishedNodes implements backend.Publisher.
func (b *Backend) PublishedNodes(_ context.Context, v volume.Volume) ([]string, error) {
	p, err := b.pools.ByID(v.ID)
	if err != nil {
		return nil, err
	}
	a, err := p.Attached(v.ID.Name)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	return []string{a.Node}, err
}

// PublishedCount implements backend.Publisher.
func (b *Backend) PublishedCount() int {
	n := 0
	for _, s := range b.pools.States() {
		if s.Pool != nil {
			n += s.Pool.AttachedCount()
		}
	}
	return n
}
