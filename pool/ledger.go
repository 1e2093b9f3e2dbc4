package pool

import (
	"context"
	"errors"
	"maps"
	"math"
	"os"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/volume"
)

// ledger counts what was promised. What it holds is the sum of the records on
// the disk, those in the trash included until their space is free, plus what
// calls under way have reserved.
type ledger struct {
	mu       sync.Mutex
	promised int64
	volumes  map[string]int // by backend
	attached int
	// foreign is what others use on the pool's filesystem, as last measured.
	foreign int64
}

// stake is what a volume has in the ledger, or more of it, or less.
type stake struct {
	backend string
	bytes   int64
	volumes int
}

// stakeOf is what the ledger has of a whole volume.
func stakeOf(v volume.Volume) stake { return stake{v.ID.Backend, v.Capacity, 1} }

// negative takes a stake back.
func (s stake) negative() stake { return stake{s.backend, -s.bytes, -s.volumes} }

func (l *ledger) add(s stake) {
	l.promised += s.bytes
	if s.volumes != 0 {
		l.volumes[s.backend] += s.volumes
	}
}

func (l *ledger) count() int {
	n := 0
	for _, of := range l.volumes {
		n += of
	}
	return n
}

// Usage is a pool's capacity in bytes at one moment.
type Usage struct {
	// Total is the size of the pool: of its filesystem, or as configured.
	Total int64
	// Used is what its filesystem has allocated to anybody, Free what it has
	// left for the driver.
	Used, Free int64
	// Promised is the sum of all volumes' sizes.
	Promised int64
	// Room is what can still be promised.
	Room int64
	// Reserve is what is kept from being promised.
	Reserve int64
	Volumes int
	// Attached is the number of controller-published volumes.
	Attached int
}

// Low tells whether thin volumes of this pool may soon fail to get the space
// that was promised to them: what is free has fallen below the reserve.
func (u Usage) Low() bool { return u.Free < u.Reserve }

// Usage reads the pool's capacity.
func (p *Pool) Usage() (Usage, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(p.volumes.Fd()), &st); err != nil {
		return Usage{}, err
	}
	p.ledger.mu.Lock()
	defer p.ledger.mu.Unlock()
	return p.usageLocked(&st), nil
}

// VolumesByBackend counts the volumes of each backend, those in the trash
// included.
func (p *Pool) VolumesByBackend() map[string]int {
	p.ledger.mu.Lock()
	defer p.ledger.mu.Unlock()
	return maps.Clone(p.ledger.volumes)
}

// AttachedCount is the number of controller-published volumes.
func (p *Pool) AttachedCount() int {
	p.ledger.mu.Lock()
	defer p.ledger.mu.Unlock()
	return p.ledger.attached
}

func (p *Pool) usageLocked(st *unix.Statfs_t) Usage {
	fsTotal := int64(st.Blocks) * st.Frsize
	u := Usage{
		Total: fsTotal, Free: int64(st.Bfree) * st.Frsize,
		Promised: p.ledger.promised, Volumes: p.ledger.count(), Attached: p.ledger.attached,
	}
	u.Used = fsTotal - u.Free
	if p.limits.size > 0 {
		u.Total = min(fsTotal, p.limits.size)
	}
	u.Reserve = p.limits.reserve.of(u.Total)
	base := min(u.Total, fsTotal-p.ledger.foreign) - u.Reserve
	promisable := math.Max(0, float64(base)*p.cfg.overcommit())
	u.Room = max(0, int64(math.Min(promisable, math.MaxInt64/2))-u.Promised)
	return u
}

// drainTime is how long a call waits for the trash to make room for it.
const drainTime = 5 * time.Second

// reserve promises more, or says why not (ErrExhausted). What was deleted makes
// room once it is removed; that is waited for.
func (p *Pool) reserve(s stake) error {
	err := p.tryReserve(s)
	if errors.Is(err, volume.ErrExhausted) && p.reaper.drain(drainTime) {
		return p.tryReserve(s)
	}
	return err
}

func (p *Pool) tryReserve(s stake) error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(p.volumes.Fd()), &st); err != nil {
		return err
	}
	p.ledger.mu.Lock()
	defer p.ledger.mu.Unlock()
	u := p.usageLocked(&st)
	if s.bytes > u.Room {
		return volume.Errorf(volume.ErrExhausted, "pool %q has room for %d bytes more (%s of %s promised, %s reserved), asked for are %d: delete volumes, grow the pool, or raise its overcommit",
			p.cfg.Name, u.Room, volume.FormatSize(u.Promised), volume.FormatSize(u.Total), volume.FormatSize(u.Reserve), s.bytes)
	}
	if p.cfg.MaxVolumes > 0 && u.Volumes+s.volumes > p.cfg.MaxVolumes {
		return volume.Errorf(volume.ErrExhausted, "pool %q has its maxVolumes of %d: delete volumes or raise maxVolumes", p.cfg.Name, p.cfg.MaxVolumes)
	}
	p.ledger.add(s)
	return nil
}

// promise counts a stake, whether there is room or not.
func (p *Pool) promise(s stake) {
	p.ledger.mu.Lock()
	defer p.ledger.mu.Unlock()
	p.ledger.add(s)
}

// rebuildLedger adds up the records on the disk.
func (p *Pool) rebuildLedger(ctx context.Context) error {
	names, err := sortedNames(p.root, volumesDir)
	if err != nil {
		return err
	}
	trashed, err := p.trashed()
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	const readers = 4
	for r := range readers {
		group.Go(func() error {
			for i := r; i < len(names) && ctx.Err() == nil; i += readers {
				p.count(names[i])
			}
			return ctx.Err()
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	p.ledger.mu.Lock()
	for _, t := range trashed {
		p.ledger.add(t.stake)
	}
	p.ledger.mu.Unlock()
	return p.measureForeign()
}

// unknownBackend stands for the backend of a volume whose record cannot be read.
const unknownBackend = "unknown"

// count adds one volume to the ledger. One whose record cannot be read
// promises nothing that could be known; calls for it say what is wrong.
func (p *Pool) count(name string) {
	v, err := p.Lookup(name)
	if errors.Is(err, volume.ErrNotFound) {
		return // a stray file
	}
	attached := p.isAttached(name)
	p.ledger.mu.Lock()
	defer p.ledger.mu.Unlock()
	if err != nil {
		v = volume.Volume{ID: volume.ID{Backend: unknownBackend}}
	}
	p.ledger.add(stakeOf(v))
	if attached {
		p.ledger.attached++
	}
}

// measureForeign finds out how much of the pool's filesystem is used by others:
// all that is allocated there, less what the pool's images have.
func (p *Pool) measureForeign() error {
	names, err := sortedNames(p.root, volumesDir)
	if err != nil {
		return err
	}
	var ours int64
	for _, name := range names {
		ours += allocated(p.volumes, name+"/"+ImageFile)
	}
	trashed, err := p.trashed()
	if err != nil {
		return err
	}
	for _, t := range trashed {
		ours += allocated(p.trash, t.name+"/"+ImageFile)
	}
	u, err := p.Usage()
	if err != nil {
		return err
	}
	p.ledger.mu.Lock()
	defer p.ledger.mu.Unlock()
	p.ledger.foreign = max(0, u.Used-ours)
	return nil
}

// allocated is the disk space of one file in bytes; 0 if there is none.
func allocated(dir *os.File, path string) int64 {
	st, err := statBeneath(dir, path)
	if err != nil {
		return 0
	}
	return st.Blocks * 512
}
