package pool

import (
	"context"
	"errors"
	"math"
	"os"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/volume"
)

// ledger counts what was promised: for each volume what its record says, or what
// a call under way has reserved for it, those in the trash included until their
// space is free. What it holds can be read from the disk again; it is changed by
// what is true of one volume, never by a difference.
type ledger struct {
	mu       sync.Mutex
	stakes   map[string]stake // by the volume's folder, below the pool
	promised int64
	attached int
	// foreign is what others use on the pool's filesystem, as last measured.
	foreign int64
}

// stake is what a volume has in the ledger.
type stake struct {
	backend string
	bytes   int64
}

func stakeOf(v volume.Volume) stake { return stake{v.ID.Backend, v.Capacity} }

func volumeDir(name string) string { return volumesDir + "/" + name }

// set is what the ledger holds of a volume from now on.
func (l *ledger) set(dir string, s stake) {
	l.promised += s.bytes - l.stakes[dir].bytes
	l.stakes[dir] = s
}

func (l *ledger) remove(dir string) {
	l.promised -= l.stakes[dir].bytes
	delete(l.stakes, dir)
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
	// Full: the pool has its maxVolumes.
	Full bool
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
	n := map[string]int{}
	for _, s := range p.ledger.stakes {
		n[s.backend]++
	}
	return n
}

// AttachedCount is the number of controller-published volumes.
func (p *Pool) AttachedCount() int {
	p.ledger.mu.Lock()
	defer p.ledger.mu.Unlock()
	return p.ledger.attached
}

func (p *Pool) usageLocked(st *unix.Statfs_t) Usage {
	// What a filesystem keeps for root keeps a node alive whose disk is full. It
	// is not promised.
	fsTotal := int64(st.Blocks-(st.Bfree-st.Bavail)) * st.Frsize
	u := Usage{
		Total: fsTotal, Free: int64(st.Bavail) * st.Frsize,
		Promised: p.ledger.promised, Volumes: len(p.ledger.stakes), Attached: p.ledger.attached,
	}
	u.Used = fsTotal - u.Free
	if p.limits.size > 0 {
		u.Total = min(fsTotal, p.limits.size)
	}
	u.Reserve = p.limits.reserve.of(u.Total)
	base := min(u.Total, fsTotal-p.ledger.foreign) - u.Reserve
	promisable := math.Max(0, float64(base)*p.cfg.overcommit())
	u.Full = p.full(u)
	u.Room = max(0, int64(math.Min(promisable, math.MaxInt64/2))-u.Promised)
	return u
}

// drainTime is how long a call waits for the trash to make room for it.
const drainTime = 5 * time.Second

// reserve promises a volume its size, or says why not (ErrExhausted). What was
// deleted makes room once it is removed; that is waited for.
func (p *Pool) reserve(v volume.Volume) error {
	err := p.tryReserve(v)
	if errors.Is(err, volume.ErrExhausted) {
		p.reaper.drain(drainTime)
		return p.tryReserve(v)
	}
	return err
}

func (p *Pool) tryReserve(v volume.Volume) error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(p.volumes.Fd()), &st); err != nil {
		return err
	}
	p.ledger.mu.Lock()
	defer p.ledger.mu.Unlock()
	u, dir := p.usageLocked(&st), volumeDir(v.ID.Name)
	have, known := p.ledger.stakes[dir]
	if more := v.Capacity - have.bytes; more > u.Room {
		return volume.Errorf(volume.ErrExhausted, "pool %q has room for %d bytes more (%s of %s promised, %s reserved), asked for are %d: delete volumes, grow the pool, or raise its overcommit",
			p.cfg.Name, u.Room, volume.FormatSize(u.Promised), volume.FormatSize(u.Total), volume.FormatSize(u.Reserve), more)
	}
	if !known && p.full(u) {
		return volume.Errorf(volume.ErrExhausted, "pool %q has its maxVolumes of %d: delete volumes or raise maxVolumes", p.cfg.Name, p.cfg.MaxVolumes)
	}
	p.ledger.set(dir, stakeOf(v))
	return nil
}

// full tells whether the pool may have no more volumes.
func (p *Pool) full(u Usage) bool { return p.cfg.MaxVolumes > 0 && u.Volumes >= p.cfg.MaxVolumes }

// recount sets what the ledger holds of a volume to what the disk says. A call
// that failed may have done its work all the same. A volume whose record cannot
// be read counts with the size of its image.
func (p *Pool) recount(name string) {
	v, err := p.Lookup(name)
	if errors.Is(err, volume.ErrNotFound) {
		p.ledger.mu.Lock()
		defer p.ledger.mu.Unlock()
		p.ledger.remove(volumeDir(name))
		return
	}
	s := stakeOf(v)
	if err != nil {
		s = stake{unknownBackend, p.imageSize(name)}
	}
	p.ledger.mu.Lock()
	defer p.ledger.mu.Unlock()
	p.ledger.set(volumeDir(name), s)
}

// imageSize is the size of a volume's image in bytes; 0 if there is none.
func (p *Pool) imageSize(name string) int64 {
	st, err := statBeneath(p.volumes, name+"/"+ImageFile)
	if err != nil {
		return 0
	}
	return st.Size
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
		p.ledger.set(trashDir+"/"+t.name, t.stake)
	}
	p.ledger.mu.Unlock()
	return p.measureForeign()
}

// count adds one volume to the ledger.
func (p *Pool) count(name string) {
	p.recount(name)
	if p.isAttached(name) {
		p.ledger.mu.Lock()
		defer p.ledger.mu.Unlock()
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
