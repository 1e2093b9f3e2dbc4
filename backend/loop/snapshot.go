package loop

import (
	"context"
	"errors"
	"io"
	"iter"
	"os"
	"syscall"
	"time"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/linux/freeze"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Snapshot implements backend.Snapshotter.
func (b *Backend) Snapshot(ctx context.Context, of []volume.Volume, spec volume.SnapshotSpec) (volume.SnapshotSet, error) {
	return b.Take(ctx, of, spec, expect, b.cut)
}

// expect is what a snapshot of an image is like. It has no more than the image.
func expect(p *pool.Pool, v volume.Volume) (volume.Snapshot, error) {
	image, err := p.Images.Open(v.ID.Name, os.O_RDONLY)
	if err != nil {
		return volume.Snapshot{}, err
	}
	defer image.Close()
	info, err := image.Stat()
	s := volume.Snapshot{Block: v.Block, FSType: v.FSType, SectorSize: v.SectorSize}
	if err == nil {
		if st, ok := info.Sys().(*syscall.Stat_t); ok {
			s.Bytes = st.Blocks * 512
		}
	}
	return s, err
}

// cut copies the images of volumes, all at one moment.
func (b *Backend) cut(ctx context.Context, c *backend.Cut) error {
	sources, err := b.openSources(ctx, c.Pool, c.Of)
	if err != nil {
		return err
	}
	defer sources.close()
	var copies []imageCopy
	for i, s := range sources {
		to, err := createImage(c.Pool, c.Folders[i])
		if err != nil {
			return err
		}
		defer to.Close()
		copies = append(copies, imageCopy{from: s, to: to})
	}
	c.Moment()
	err = b.copyAll(ctx, copying{
		pool: c.Pool, freeze: c.Spec.Parameters.Consistency == volume.ConsistencyFrozen, job: c.Job,
	}, copies)
	if err != nil {
		return err
	}
	for i, one := range copies {
		s := &c.Set.Snapshots[i]
		s.Size, s.Bytes, s.Shared, s.Formatted = one.from.v.Capacity, one.made.Bytes, one.made.Shared, one.from.formatted()
		if _, err := clone.SetImmutable(one.to, true); err != nil {
			return err
		}
	}
	return nil
}

func createImage(p *pool.Pool, dir *os.Root) (*os.File, error) {
	return dir.OpenFile(pool.ImageFile, p.OpenFlags(os.O_RDWR|os.O_CREATE|os.O_EXCL), 0o600)
}

// source is an image that is to be copied, held so that nobody attaches it, grows it or
// makes its filesystem meanwhile.
type source struct {
	p     *pool.Pool
	v     volume.Volume
	state pool.FormatState
	image *os.File
	lock  io.Closer
	// staged: a device of this node has the image, and root is the directory at which its
	// filesystem is mounted; nil for a raw one.
	staged bool
	device *blockdev.Loop
	root   *os.File
}

type sources []*source

// close lets go of all. Nothing was written.
func (all sources) close() {
	for _, s := range all {
		for _, f := range []*os.File{s.root, s.image} {
			if f != nil {
				f.Close()
			}
		}
		if s.device != nil {
			s.device.Close()
		}
		s.lock.Close()
	}
}

// formatted tells whether there is a complete filesystem in the image.
func (s *source) formatted() bool {
	return !s.v.Block && (s.state == pool.Formatted || s.state == pool.Cloned)
}

// blank tells whether nothing of the image is to be copied: its filesystem is not
// complete.
func (s *source) blank() bool { return !s.v.Block && !s.formatted() }

func (b *Backend) openSources(ctx context.Context, p *pool.Pool, of []volume.Volume) (sources, error) {
	var all sources
	for _, v := range of {
		lock, err := p.LockVolume(ctx, v.ID.Name)
		if err == nil {
			all = append(all, &source{p: p, v: v, lock: lock})
			err = b.openSource(all[len(all)-1])
		}
		if err != nil {
			all.close()
			return nil, err
		}
	}
	return all, nil
}

func (b *Backend) openSource(s *source) (err error) {
	if s.v, err = s.p.ByID(s.v.ID); err != nil {
		return err
	}
	if !s.v.Block {
		if s.state, err = s.p.Images.State(s.v.ID.Name); err != nil {
			return err
		}
	}
	s.image, err = s.p.Images.Lock(s.v.ID.Name)
	if errors.Is(err, volume.ErrInUse) {
		return b.openStaged(s, err)
	}
	if err == nil {
		_, err = checkSize(s.image, s.v)
	}
	return err
}

// openStaged is for an image that somebody has: a device of this node, or inUse says who.
func (b *Backend) openStaged(s *source, inUse error) error {
	number, ok, err := b.loops.Find(b.tag(s.v.ID))
	if err != nil {
		return err
	}
	if !ok {
		return inUse
	}
	if s.image, err = s.p.Images.Open(s.v.ID.Name, os.O_RDONLY); err != nil {
		return err
	}
	if s.device, err = blockdev.OpenLoop(number); err != nil {
		return err
	}
	s.staged = true
	if s.v.Block {
		return nil
	}
	s.root, err = openMounted(s.device.File())
	err = errors.Join(err, s.device.Close()) // while it is open, it could not clear itself
	if s.device = nil; err == nil && s.root == nil {
		err = volume.Errorf(volume.ErrPending, "volume %s is being staged or unstaged: try again", s.v.ID)
	}
	return err
}

// openMounted opens the root of the filesystem that is mounted from a device; nil: none
// is, where this process can see it.
func openMounted(device *os.File) (*os.File, error) {
	mounts, err := mount.OfDevice(device.Name())
	if err != nil {
		return nil, err
	}
	for _, e := range mounts {
		if root := mount.OpenShown(e); root != nil {
			return root, nil
		}
	}
	return nil, nil
}

// imageCopy is one image that is copied.
type imageCopy struct {
	from *source
	to   *os.File
	made clone.Result
}

// copying is how images are copied.
type copying struct {
	pool *pool.Pool
	// freeze: filesystems that are in use are frozen for it in any case.
	freeze   bool
	unshared bool
	job      *pool.Job
}

// copyAll copies images, all at one moment. What shares blocks is of one moment by
// itself; else, and for several, what is in use is frozen meanwhile.
func (b *Backend) copyAll(ctx context.Context, c copying, all []imageCopy) error {
	if err := flush(all); err != nil {
		return err
	}
	inUse := 0
	for _, one := range all {
		if one.from.staged {
			inUse++
		}
	}
	switch {
	case inUse == 0:
		return copyEach(ctx, c, all, false)
	case !c.freeze && !c.unshared && len(all) == 1:
		err := copyEach(ctx, c, all, true)
		if !errors.Is(err, clone.ErrNotShared) {
			return err
		}
	}
	return b.copyFrozen(ctx, c, all)
}

// flush writes what the node has not written yet of what is in use, so that all is in
// the copy that was written before.
func flush(all []imageCopy) error {
	for _, one := range all {
		var err error
		switch s := one.from; {
		case s.root != nil:
			err = mount.SyncFilesystem(s.root)
		case s.device != nil:
			err = s.device.File().Sync()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func copyEach(ctx context.Context, c copying, all []imageCopy, onlyShared bool) error {
	for i := range all {
		if err := all[i].copy(ctx, clone.Options{Unshared: c.unshared, OnlyShared: onlyShared, Progress: c.job.Progress}); err != nil {
			return err
		}
	}
	return nil
}

func (one *imageCopy) copy(ctx context.Context, o clone.Options) (err error) {
	if one.from.blank() {
		if err := one.to.Truncate(one.from.v.Capacity); err != nil {
			return err
		}
		return one.to.Sync()
	}
	one.made, err = clone.File(ctx, one.to, one.from.image, o)
	return err
}

// copyFrozen copies images whose filesystems, where they are in use, are frozen
// meanwhile. ErrPrecondition if that cannot be, or takes longer than it may.
func (b *Backend) copyFrozen(ctx context.Context, c copying, all []imageCopy) error {
	limit := c.pool.Config().FreezeTime()
	var targets []freeze.Target
	for _, one := range all {
		s := one.from
		switch {
		case !s.staged:
			continue
		case s.root == nil:
			return volume.Errorf(volume.ErrPrecondition, "volume %s is a raw device in use: without shared blocks, or with others, no one moment of it can be had: unpublish and unstage it first", s.v.ID)
		case limit == 0:
			return volume.Errorf(volume.ErrPrecondition, "volume %s is in use, and would have to be frozen while it is copied, which freezeLimit of pool %q does not allow: unstage it first, raise that, or put the pool on xfs or btrfs, which share blocks", s.v.ID, c.pool.Name())
		}
		targets = append(targets, freeze.Target{Root: s.root, Name: s.v.ID.String()})
	}
	freezer := b.Set.Freezer()
	if freezer == nil {
		return volume.Errorf(volume.ErrPrecondition, "volume %s is in use, and this process serves no node that could freeze it", all[0].from.v.ID)
	}
	frozen, err := freezer.Freeze(ctx, limit, targets...)
	if err != nil {
		return c.notFrozen(all, err)
	}
	within, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	go func() { // nothing stays frozen that nobody waits for
		select {
		case <-c.job.Alone():
			cancel()
		case <-within.Done():
		}
	}()
	err = copyEach(within, c, all, false)
	thawed := frozen.Thaw()
	if errors.Is(within.Err(), context.DeadlineExceeded) || errors.Is(thawed, freeze.ErrExpired) {
		return c.tooLong(all)
	}
	return errors.Join(err, thawed)
}

// notFrozen explains why what is in use could not be frozen.
func (c copying) notFrozen(all []imageCopy, err error) error {
	switch {
	case errors.Is(err, freeze.ErrExpired):
		return c.tooLong(all)
	case errors.Is(err, syscall.EBUSY), errors.Is(err, syscall.EOPNOTSUPP):
		return volume.Errorf(volume.ErrPrecondition, "a volume that is in use has to be frozen for it: %w", err)
	}
	return err
}

func (c copying) tooLong(all []imageCopy) error {
	return volume.Errorf(volume.ErrPrecondition, "volume %s is in use, and to copy it takes longer than it may be frozen (freezeLimit %v of pool %q): unstage it first, raise that, or put the pool on xfs or btrfs, which share blocks",
		all[0].from.v.ID, c.pool.Config().FreezeTime(), c.pool.Name())
}

// createOf makes a volume of a snapshot, or of another volume.
func (b *Backend) createOf(ctx context.Context, p *pool.Pool, spec volume.Spec) (volume.Volume, error) {
	o, err := b.Origin(p, spec)
	if err != nil {
		return volume.Volume{}, err
	}
	v, err := volumeOf(p, spec, o)
	if err != nil {
		return volume.Volume{}, err
	}
	err = p.Jobs.Do(ctx, v.ID.Name, func(ctx context.Context, j *pool.Job) error {
		c := copying{pool: o.Pool, unshared: v.Allocation == volume.Thick, job: j}
		return p.Create(ctx, v, func(dir *os.Root) error { return b.fill(ctx, p, dir, v, o, c) })
	})
	if err != nil && !errors.Is(err, pool.ErrExists) {
		return volume.Volume{}, noRoom(p, err)
	}
	return b.Existing(p, spec)
}

// volumeOf is the record of a volume that is made of an origin.
func volumeOf(p *pool.Pool, spec volume.Spec, o *backend.Origin) (volume.Volume, error) {
	block, fsType, sectorSize := o.Volume.Block, o.Volume.FSType, o.Volume.SectorSize
	if s := o.Snapshot; s != nil {
		block, fsType, sectorSize = s.Block, s.FSType, s.SectorSize
	}
	switch {
	case spec.Block() != block:
		return volume.Volume{}, volume.Errorf(volume.ErrInvalid, "volume_capabilities ask for block %t, %v has block %t: ask for the same", spec.Block(), spec.Source, block)
	case spec.AsksFSType() && spec.FSType() != fsType:
		return volume.Volume{}, volume.Errorf(volume.ErrInvalid, "volume_capabilities or parameter %s ask for filesystem %s, %v has %s: ask for that, or for none", volume.ParamFSType, spec.FSType(), spec.Source, fsType)
	}
	size, err := o.Choose(spec, volume.Bounds{Min: minBlock, Granule: granule})
	if err != nil {
		return volume.Volume{}, err
	}
	return volume.Volume{
		Version: volume.RecordVersion, ID: p.ID(Name, spec.Name()), CoName: spec.CoName, Capacity: size,
		Block: block, FSType: fsType, SectorSize: sectorSize, Allocation: volume.Allocation(spec.Parameters.Get(volume.ParamAllocation)),
		Source: spec.Source, Created: time.Now().UTC().Truncate(time.Second),
	}, nil
}

// fill makes the image of a volume that is a copy.
func (b *Backend) fill(ctx context.Context, p *pool.Pool, dir *os.Root, v volume.Volume, o *backend.Origin, c copying) error {
	to, err := createImage(p, dir)
	if err != nil {
		return err
	}
	defer to.Close()
	formatted, err := b.copyOrigin(ctx, o, to, c)
	if err != nil {
		return err
	}
	if err := resize(to, v.Capacity, v.Allocation); err != nil {
		return err
	}
	if formatted {
		if err := pool.MarkCloned(dir); err != nil {
			return err
		}
	}
	return to.Sync()
}

// copyOrigin copies what a volume is made of, and tells whether it has a filesystem.
func (b *Backend) copyOrigin(ctx context.Context, o *backend.Origin, to *os.File, c copying) (formatted bool, err error) {
	if s := o.Snapshot; s != nil {
		from, err := o.Pool.Snapshots.OpenImage(*s)
		if err != nil {
			return false, err
		}
		defer from.Close()
		_, err = clone.File(ctx, to, from, clone.Options{Unshared: c.unshared, Progress: c.job.Progress})
		return s.Formatted, err
	}
	from, err := b.openSources(ctx, o.Pool, []volume.Volume{o.Volume})
	if err != nil {
		return false, err
	}
	defer from.close()
	err = b.copyAll(ctx, c, []imageCopy{{from: from[0], to: to}})
	return from[0].formatted(), err
}

// Allocated implements backend.ChangeTracker.
func (b *Backend) Allocated(ctx context.Context, s volume.Snapshot, from int64) iter.Seq2[clone.Range, error] {
	return b.ranges([]volume.Snapshot{s}, func(f []*os.File) iter.Seq2[clone.Range, error] {
		return clone.Allocated(ctx, f[0], from, s.Size)
	})
}

// Changed implements backend.ChangeTracker.
func (b *Backend) Changed(ctx context.Context, older, newer volume.Snapshot, from int64) iter.Seq2[clone.Range, error] {
	return b.ranges([]volume.Snapshot{older, newer}, func(f []*os.File) iter.Seq2[clone.Range, error] {
		return clone.Delta(ctx, f[0], f[1], from)
	})
}

// ranges opens images of snapshots for as long as ranges in them are read.
func (b *Backend) ranges(of []volume.Snapshot, read func([]*os.File) iter.Seq2[clone.Range, error]) iter.Seq2[clone.Range, error] {
	return func(yield func(clone.Range, error) bool) {
		var files []*os.File
		for _, s := range of {
			p, err := b.Set.ByID(s.ID)
			var f *os.File
			if err == nil {
				f, err = p.Snapshots.OpenImage(s)
			}
			if err != nil {
				yield(clone.Range{}, err)
				return
			}
			defer f.Close()
			files = append(files, f)
		}
		for r, err := range read(files) {
			if !yield(r, err) || err != nil {
				return
			}
		}
	}
}

// Thaw implements backend.Thawer.
func (b *Backend) Thaw(ctx context.Context) error {
	freezer := b.Set.Freezer()
	if freezer == nil {
		return nil
	}
	return freezer.Recover(ctx, func(name string) (*os.File, error) {
		id, err := volume.ParseID(name)
		if err != nil {
			return nil, nil // none of ours
		}
		number, ok, err := b.loops.Find(b.tag(id))
		if err != nil || !ok {
			return nil, err
		}
		device, err := blockdev.OpenLoop(number)
		if err != nil {
			return nil, err
		}
		defer device.Close()
		return openMounted(device.File())
	})
}
