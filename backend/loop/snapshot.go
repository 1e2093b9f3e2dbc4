package loop

import (
	"cmp"
	"context"
	"errors"
	"io"
	"iter"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/background"
	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/linux/freeze"
	"github.com/trivet-csi/trivet/linux/luks"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/linux/sys"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Snapshot implements backend.Snapshotter.
func (b *Backend) Snapshot(ctx context.Context, volumes []volume.Volume, spec volume.SnapshotSpec) (volume.SnapshotSet, error) {
	return b.Take(ctx, volumes, spec, expectedSnapshot, b.copyToSnapshots)
}

// expectedSnapshot returns the record of a snapshot before it is taken. Bytes is the allocated size
// of the image, which is the upper limit for the snapshot.
func expectedSnapshot(p *pool.Pool, v volume.Volume) (volume.Snapshot, error) {
	image, err := p.Images.Open(v.ID.Name, os.O_RDONLY)
	if err != nil {
		return volume.Snapshot{}, err
	}
	defer image.Close()
	s := volume.Snapshot{Block: v.Block, FSType: v.FSType, SectorSize: v.SectorSize, Encryption: v.Encryption}
	s.Bytes, err = allocatedBytes(image)
	return s, err
}

// allocatedBytes returns the allocated size of an image, including shared blocks.
func allocatedBytes(image *os.File) (int64, error) {
	info, err := image.Stat()
	if err != nil {
		return 0, err
	}
	st, _ := info.Sys().(*syscall.Stat_t) // always of this type on Linux
	return st.Blocks * 512, nil
}

// copyToSnapshots copies the images of volumes, all at the same point in time.
func (b *Backend) copyToSnapshots(ctx context.Context, c *backend.SnapshotCopy) error {
	all, err := b.openSources(ctx, c.Pool, c.Volumes)
	if err != nil {
		return err
	}
	defer all.close()
	for i, s := range all {
		if s.to, err = createImage(c.Pool, c.Folders[i]); err != nil {
			return err
		}
		defer s.to.Close()
	}
	c.Record.Created = time.Now().UTC()
	o := copyOptions{pool: c.Pool, budget: c.Pool.Background, freeze: c.Spec.Parameters.Consistency == volume.ConsistencyFrozen, job: c.Job}
	if err := b.copyAll(ctx, o, all); err != nil {
		return err
	}
	for i, from := range all {
		s := &c.Record.Snapshots[i]
		s.Size, s.Bytes, s.Shared, s.Formatted = from.v.Capacity, from.result.Bytes, from.result.Shared, from.formatted()
		if _, err := clone.SetImmutable(from.to, true); err != nil {
			return err
		}
	}
	return nil
}

// createImage creates the empty file of an image in the folder of a volume or snapshot.
func createImage(p *pool.Pool, dir *os.Root) (*os.File, error) {
	return dir.OpenFile(pool.ImageFile, p.OpenFlags(os.O_RDWR|os.O_CREATE|os.O_EXCL|sys.NonBlocking), 0o600)
}

// source is an image that is copied. No other call attaches, expands or formats the image until the
// source is closed.
type source struct {
	p     *pool.Pool
	v     volume.Volume
	state pool.FormatState
	image *os.File
	lock  io.Closer
	// staged is true if the image is attached on this node.
	staged bool
	// device is the device of a staged raw volume, root the root directory of a staged
	// filesystem.
	device *os.File
	root   *os.File
	// empty is true if an encrypted volume has no complete container, so that the image has no data.
	empty bool
	// to receives the copy.
	to *os.File
	// result describes the copy.
	result clone.Result
}

// sources are images that are copied together.
type sources []*source

// close releases all sources.
func (all sources) close() {
	for _, s := range all {
		for _, f := range []*os.File{s.root, s.device, s.image} {
			if f != nil {
				f.Close()
			}
		}
		s.lock.Close()
	}
}

// formatted reports whether the image has a complete filesystem.
func (s *source) formatted() bool {
	return !s.v.Block && (s.state == pool.Formatted || s.state == pool.Cloned)
}

// blank reports whether the image has no data to copy, because it has no complete filesystem or container.
func (s *source) blank() bool { return s.empty || !s.v.Block && !s.formatted() }

// openSources locks and opens the images of volumes, attached or not.
func (b *Backend) openSources(ctx context.Context, p *pool.Pool, volumes []volume.Volume) (sources, error) {
	var all sources
	for _, v := range volumes {
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

// openSource opens the image of a source whose volume is locked.
func (b *Backend) openSource(s *source) (err error) {
	if s.v, err = s.p.ByID(s.v.ID); err != nil {
		return err
	}
	if !s.v.Block {
		if s.state, err = s.p.Images.State(s.v.ID.Name); err != nil {
			return err
		}
	}
	if s.v.Encryption != nil {
		complete, err := b.ContainerComplete(s.v)
		if err != nil {
			return err
		}
		s.empty = !complete
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

// openStaged opens an image that is locked by the volume's device on this node. It returns the error
// inUse if there is no such device.
func (b *Backend) openStaged(s *source, inUse error) error {
	if _, ok, err := b.Loops.Find(b.tag(s.v.ID)); err != nil || !ok {
		return cmp.Or(err, inUse)
	}
	var err error
	if s.image, err = s.p.Images.Open(s.v.ID.Name, os.O_RDONLY); err != nil {
		return err
	}
	s.device, err = b.openDevice(s.v)
	if errors.Is(err, volume.ErrPrecondition) {
		return volume.Errorf(volume.ErrPending, "volume %s is being staged or unstaged: retry", s.v.ID)
	}
	if err != nil {
		return err
	}
	s.staged = true
	if s.v.Block {
		return nil
	}
	s.root, err = mount.OpenMounted(s.device.Name())
	err = errors.Join(err, s.device.Close()) // otherwise the device would stay bound after an unmount
	if s.device = nil; err == nil && s.root == nil {
		err = volume.Errorf(volume.ErrPending, "volume %s is being staged or unstaged: retry", s.v.ID)
	}
	return err
}

// copyOptions are the options of copying images.
type copyOptions struct {
	pool *pool.Pool
	// freeze means that staged filesystems are frozen even if the copy shares blocks.
	freeze bool
	// unshared means that the copy shares no blocks with its source.
	unshared bool
	job      *pool.Job
	// budget returns the budget of copying one file to another; it is Background of the pool with the copy.
	budget func(...*os.File) *background.Budget
}

// options are those of copying one file to another.
func (c copyOptions) options(to, from *os.File) clone.Options {
	return clone.Options{Unshared: c.unshared, Progress: c.job.Progress, Budget: c.budget(to, from)}
}

// copyAll copies images, all at the same point in time. The copy of a single image that shares
// blocks is atomic, and needs no freeze unless c.freeze is set. In all other cases, staged
// filesystems are frozen during the copy.
func (b *Backend) copyAll(ctx context.Context, c copyOptions, all sources) error {
	if err := all.flush(); err != nil {
		return err
	}
	const onlyShared = true
	switch {
	case !slices.ContainsFunc(all, func(s *source) bool { return s.staged }):
		return copyEach(ctx, c, all, !onlyShared)
	case !c.freeze && !c.unshared && len(all) == 1:
		err := copyEach(ctx, c, all, onlyShared)
		if !errors.Is(err, clone.ErrNotShared) {
			return err
		}
	}
	return b.copyFrozen(ctx, c, all)
}

// flush writes the dirty pages of staged sources, so that the copies contain all data that was
// written before the copy.
func (all sources) flush() error {
	for _, s := range all {
		var err error
		switch {
		case s.root != nil:
			err = mount.SyncFilesystem(s.root)
		case s.device != nil:
			err = s.device.Sync()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// copyEach copies the images one after the other. onlyShared is clone.Options.OnlyShared.
func copyEach(ctx context.Context, c copyOptions, all sources, onlyShared bool) error {
	for _, s := range all {
		o := c.options(s.to, s.image)
		o.OnlyShared = onlyShared
		var err error
		if s.blank() {
			err = errors.Join(s.to.Truncate(s.v.StorageSize()), s.to.Sync())
		} else {
			s.result, err = clone.File(ctx, s.to, s.image, o)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// copyFrozen copies images while their staged filesystems are frozen. ErrPrecondition if they cannot
// be frozen, or if the copy takes longer than the freeze limit of the pool.
func (b *Backend) copyFrozen(ctx context.Context, c copyOptions, all sources) error {
	limit := c.pool.Config().FreezeTime()
	var targets []freeze.Target
	for _, s := range all {
		switch {
		case !s.staged:
			continue
		case s.root == nil:
			return volume.Errorf(volume.ErrPrecondition, "volume %s is a raw device in use, which can be copied only alone, and only by sharing blocks: unpublish and unstage it first", s.v.ID)
		case limit == 0:
			return volume.Errorf(volume.ErrPrecondition, "volume %s is in use, and copying it requires a freeze, which freezeLimit of pool %q does not allow: unstage it first, raise the limit, or put the pool on xfs or btrfs, which share blocks", s.v.ID, c.pool.Name())
		}
		targets = append(targets, freeze.Target{Root: s.root, Name: s.v.ID.String()})
	}
	freezer := b.Set.Freezer()
	if freezer == nil {
		return volume.Errorf(volume.ErrPrecondition, "volume %s is in use, and this process cannot freeze it because it does not serve a node: unstage the volume first, or retry", targets[0].Name)
	}
	frozen, err := freezer.Freeze(ctx, limit, targets...)
	if err != nil {
		return c.notFrozen(all, err)
	}
	copyCtx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	go func() { // when no call waits for the copy any more, cancels the copy to end the freeze
		select {
		case <-c.job.Alone():
			cancel()
		case <-copyCtx.Done():
		}
	}()
	const onlyShared = false // files may be copied while they are frozen
	// The pods wait for the copy.
	c.budget = func(...*os.File) *background.Budget { return nil }
	err = copyEach(copyCtx, c, all, onlyShared)
	thawErr := frozen.Thaw()
	if errors.Is(copyCtx.Err(), context.DeadlineExceeded) || errors.Is(thawErr, freeze.ErrExpired) {
		return c.tooLong(all)
	}
	return errors.Join(err, thawErr)
}

// notFrozen returns ErrPrecondition if err means that a filesystem cannot be frozen, or not long enough.
func (c copyOptions) notFrozen(all sources, err error) error {
	switch {
	case errors.Is(err, freeze.ErrExpired):
		return c.tooLong(all)
	case errors.Is(err, syscall.EBUSY), errors.Is(err, syscall.EOPNOTSUPP):
		return volume.Errorf(volume.ErrPrecondition, "a volume that is in use must be frozen for the copy: %w", err)
	}
	return err
}

// tooLong is the error of a copy that takes longer than the freeze limit of the pool.
func (c copyOptions) tooLong(all sources) error {
	return volume.Errorf(volume.ErrPrecondition, "volume %s is in use, and copying it takes longer than the freeze may last (freezeLimit %v of pool %q): unstage it first, raise the limit, or put the pool on xfs or btrfs, which share blocks",
		all[0].v.ID, c.pool.Config().FreezeTime(), c.pool.Name())
}

// createFrom creates a volume from a snapshot or from another volume.
func (b *Backend) createFrom(ctx context.Context, p *pool.Pool, spec volume.Spec) (volume.Volume, error) {
	o, err := b.Origin(p, spec)
	if err != nil {
		return volume.Volume{}, err
	}
	v, err := b.newCopy(p, spec, o)
	if err != nil {
		return volume.Volume{}, err
	}
	return b.CopyAsJob(ctx, p, spec, func(ctx context.Context, j *pool.Job) error {
		c := copyOptions{pool: o.Pool, budget: p.Background, unshared: allocationOf(v) == thick, job: j}
		return p.Create(ctx, v, func(dir *os.Root) error { return b.fill(ctx, p, dir, v, o, c) })
	})
}

// newCopy returns the record of a new volume with the content of an origin.
func (b *Backend) newCopy(p *pool.Pool, spec volume.Spec, o *backend.Origin) (volume.Volume, error) {
	if err := o.CheckDevice(spec); err != nil {
		return volume.Volume{}, err
	}
	v := b.NewVolume(p, spec)
	var err error
	if v.Capacity, err = o.Choose(spec, bounds); err != nil {
		return volume.Volume{}, err
	}
	o.SetDevice(&v, spec)
	v.Section = sectionFor(spec.Parameters)
	return v, nil
}

// fill creates the image of a volume as a copy of its origin.
func (b *Backend) fill(ctx context.Context, p *pool.Pool, dir *os.Root, v volume.Volume, o *backend.Origin, c copyOptions) error {
	to, err := createImage(p, dir)
	if err != nil {
		return err
	}
	defer to.Close()
	formatted, err := b.copyOrigin(ctx, o, to, c)
	if err != nil {
		return err
	}
	return finishCopy(dir, to, v, o.Volume, formatted)
}

// finishCopy completes the folder of a volume whose image is a copy of an origin. formatted reports whether the image
// contains a complete filesystem.
func finishCopy(dir *os.Root, to *os.File, v, origin volume.Volume, formatted bool) error {
	if err := resize(to, v.StorageSize(), allocationOf(v)); err != nil {
		return err
	}
	if err := backend.MarkCopied(dir, v, origin, formatted); err != nil {
		return err
	}
	if v.Encryption != nil {
		encrypted, err := luks.HasHeader(to)
		if err == nil && encrypted {
			err = pool.MarkContainerCopied(dir)
		}
		if err != nil {
			return err
		}
	}
	return to.Sync()
}

// copyOrigin copies an origin. formatted reports whether the origin has a complete filesystem.
func (b *Backend) copyOrigin(ctx context.Context, o *backend.Origin, to *os.File, c copyOptions) (formatted bool, err error) {
	if s := o.Snapshot; s != nil {
		from, err := o.Pool.Snapshots.OpenImage(*s)
		if err != nil {
			return false, err
		}
		defer from.Close()
		_, err = clone.File(ctx, to, from, c.options(to, from))
		return s.Formatted, err
	}
	from, err := b.openSources(ctx, o.Pool, []volume.Volume{o.Volume})
	if err != nil {
		return false, err
	}
	defer from.close()
	from[0].to = to
	err = b.copyAll(ctx, c, from)
	return from[0].formatted(), err
}

// Allocated implements backend.ChangeTracker.
func (b *Backend) Allocated(ctx context.Context, s volume.Snapshot, from int64) iter.Seq2[clone.Range, error] {
	header := s.Overhead()
	return b.ranges([]volume.Snapshot{s}, func(_ *pool.Pool, f []*os.File) iter.Seq2[clone.Range, error] {
		return withoutHeader(clone.Allocated(ctx, f[0], from+header, s.Size+header), header)
	})
}

// Changed implements backend.ChangeTracker.
func (b *Backend) Changed(ctx context.Context, older, newer volume.Snapshot, from int64) iter.Seq2[clone.Range, error] {
	header := newer.Overhead()
	return b.ranges([]volume.Snapshot{older, newer}, func(p *pool.Pool, f []*os.File) iter.Seq2[clone.Range, error] {
		return withoutHeader(clone.Delta(ctx, f[0], f[1], from+header, p.Background(f...)), header)
	})
}

// withoutHeader converts ranges of an image, which begin after a header, to ranges of the device that the image shows. A
// sector of an encrypted volume is at the same place of the image and of the device.
func withoutHeader(ranges iter.Seq2[clone.Range, error], header int64) iter.Seq2[clone.Range, error] {
	return func(yield func(clone.Range, error) bool) {
		for r, err := range ranges {
			r.Offset -= header
			if !yield(r, err) {
				return
			}
		}
	}
}

// ranges opens the images of snapshots in one pool, and keeps them open while read yields their ranges.
func (b *Backend) ranges(snapshots []volume.Snapshot, read func(*pool.Pool, []*os.File) iter.Seq2[clone.Range, error]) iter.Seq2[clone.Range, error] {
	return func(yield func(clone.Range, error) bool) {
		p, err := b.Set.ByID(snapshots[0].ID)
		if err != nil {
			yield(clone.Range{}, err)
			return
		}
		var files []*os.File
		for _, s := range snapshots {
			f, err := p.Snapshots.OpenImage(s)
			if err != nil {
				yield(clone.Range{}, err)
				return
			}
			defer f.Close()
			files = append(files, f)
		}
		for r, err := range read(p, files) {
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
			return nil, nil // not a volume of this driver
		}
		if _, ok, err := b.Loops.Find(b.tag(id)); err != nil || !ok {
			return nil, err
		}
		device, err := b.openDevice(volume.Volume{ID: id})
		if err != nil {
			return nil, err
		}
		defer device.Close()
		return mount.OpenMounted(device.Name())
	})
}
