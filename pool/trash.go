package pool

import (
	"context"
	"errors"
	"maps"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/quota"
	"github.com/trivet-csi/trivet/volume"
)

// foreignInterval is how often others' use of the pool's filesystem is
// measured again.
const foreignInterval = time.Minute

// reapDelay lets a burst of deletes be answered before the journal, which each
// of them waits for, is filled with the removal of the first ones.
const reapDelay = 200 * time.Millisecond

// busyDelay is how long an entry is left alone of which the filesystem still has
// something, at first: data is removed in the background.
const busyDelay = 100 * time.Millisecond

// unknownBackend stands for the backend of a volume whose record cannot be read.
const unknownBackend = "unknown"

// trashEntry is a volume that was deleted and is not yet removed.
type trashEntry struct {
	name  string // of its folder in the trash
	stake stake
	tries int // in vain, because something of it was still there
}

// reaper removes what is in the trash, one entry after the other.
type reaper struct {
	mu      sync.Mutex
	pending []trashEntry
	// later is how many are to be tried again, and not pending meanwhile.
	later int
	// drained is closed when nothing is pending; nil at first.
	drained chan struct{}
	wake    chan struct{}
	hurry   chan struct{}
}

func newReaper() *reaper {
	return &reaper{wake: make(chan struct{}, 1), hurry: make(chan struct{}, 1)}
}

func (r *reaper) add(entries ...trashEntry) {
	if len(entries) == 0 {
		return
	}
	r.mu.Lock()
	if len(r.pending)+r.later == 0 {
		r.drained = make(chan struct{})
	}
	r.pending = append(r.pending, entries...)
	r.mu.Unlock()
	notify(r.wake)
}

// notify wakes who waits on c, or will.
func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default: // it is told already
	}
}

// first is the entry to be removed next; done takes it off.
func (r *reaper) first() (trashEntry, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.pending) == 0 {
		return trashEntry{}, false
	}
	return r.pending[0], true
}

func (r *reaper) done() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.pending = r.pending[1:]; len(r.pending)+r.later == 0 {
		close(r.drained)
	}
}

// postpone takes the first off, for a time that grows with its tries.
func (r *reaper) postpone() {
	e, _ := r.take()
	r.again(e)
}

// again brings back an entry that was taken, after a time.
func (r *reaper) again(e trashEntry) {
	delay := min(busyDelay<<min(e.tries, 16), foreignInterval)
	e.tries++
	time.AfterFunc(delay, func() {
		r.mu.Lock()
		r.pending, r.later = append(r.pending, e), r.later-1
		r.mu.Unlock()
		notify(r.wake)
	})
}

func (r *reaper) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.pending)
}

// passed takes the first n off.
func (r *reaper) passed(n int) {
	for range n {
		r.done()
	}
}

// drain waits until the trash is empty, at most for a time.
func (r *reaper) drain(atMost time.Duration) {
	r.mu.Lock()
	pending, drained := len(r.pending)+r.later, r.drained
	r.mu.Unlock()
	if pending == 0 {
		return
	}
	notify(r.hurry)
	select {
	case <-drained:
	case <-time.After(atMost):
	}
}

func (p *Pool) removeToTrash(v volume.Volume) error {
	entry := trashEntry{name: v.ID.Name + "." + NewUUID()[:8], stake: stakeOf(v).trashed()}
	if err := p.takeOut(v.ID.Name, p.trash, entry.name); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.DeleteRenamed)
	p.bury(volumeDir(v.ID.Name), entry)
	if err := errors.Join(p.volumes.Sync(), p.trash.Sync()); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.DeleteDone)
	return nil
}

// bury moves what the ledger holds of a folder to its trash entry, and hands
// that to the reaper.
func (p *Pool) bury(dir string, entry trashEntry) {
	p.ledger.mu.Lock()
	if have, ok := p.ledger.stakes[dir]; ok {
		entry.stake = have.trashed()
	}
	p.ledger.remove(dir)
	p.ledger.set(trashDir+"/"+entry.name, entry.stake)
	p.ledger.mu.Unlock()
	p.reaper.add(entry)
}

// trashed lists what is in the trash, with what each entry still promises.
func (p *Pool) trashed() ([]trashEntry, error) {
	names, err := namesIn(p.trash, ".")
	if err != nil {
		return nil, err
	}
	var out []trashEntry
	for _, name := range names {
		out = append(out, trashEntry{name: name, stake: p.trashedStake(name)})
	}
	return out, nil
}

// trashedStake is what an entry of the trash still promises. Its directory among
// others' is its own no more.
func (p *Pool) trashedStake(name string) stake {
	b, err := p.readBeneath(p.trash, name+"/"+recordFile)
	if err != nil {
		return p.trashedSet(name)
	}
	v, err := volume.ParseRecord(b)
	if err != nil {
		return stake{backend: unknownBackend}
	}
	return stakeOf(v).trashed()
}

// trashedSet is trashedStake for snapshots.
func (p *Pool) trashedSet(name string) stake {
	b, err := p.readBeneath(p.trash, name+"/"+snapshotFile)
	if err != nil {
		return stake{backend: unknownBackend}
	}
	set, err := volume.ParseSnapshotSet(b)
	if err != nil {
		return stake{backend: unknownBackend}
	}
	return stakeOfSet(set)
}

// startTasks begins the pool's background work: emptying the trash, and
// measuring what others use.
func (p *Pool) startTasks(ctx context.Context) error {
	left, err := p.trashed()
	if err != nil {
		return err
	}
	log := klog.LoggerWithValues(klog.FromContext(ctx), "pool", p.cfg.Name)
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	p.stop = cancel
	p.reaper.add(left...)
	if p.OfDisks() {
		p.startDiskTasks(ctx, log)
		return nil
	}
	p.tasks.Go(func() { p.reap(ctx, log) })
	p.tasks.Go(func() { p.watchForeign(ctx, log) })
	return nil
}

// startSharedTasks is startTasks for a process that cleans a shared pool.
func (p *Pool) startSharedTasks(ctx context.Context) {
	log := klog.LoggerWithValues(klog.FromContext(ctx), "pool", p.cfg.Name)
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	p.stop = cancel
	notify(p.reaper.wake)
	p.tasks.Go(func() { p.reapShared(ctx, log) })
	p.tasks.Go(func() { p.tend(ctx, log) })
}

const (
	// reaperFile is locked by who empties a shared pool's trash.
	reaperFile = ".trivet/reaper"
	// reapInterval is how often that is tried.
	reapInterval = 30 * time.Second
	// stuckTime is how long what could not be removed is left alone.
	stuckTime = 10 * time.Minute
	// sweepEvery is how many times foreignInterval passes until what others left is
	// looked for again.
	sweepEvery = 10
)

// reapShared empties the trash of a shared pool whenever no other process does.
func (p *Pool) reapShared(ctx context.Context, log klog.Logger) {
	tick := time.NewTicker(reapInterval)
	defer tick.Stop()
	stuck := map[string]time.Time{}
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.reaper.wake:
		case <-tick.C:
		}
		select {
		case <-ctx.Done():
			return
		case <-p.reaper.hurry:
		case <-time.After(reapDelay):
		}
		if err := p.reapTrash(ctx, log, stuck); err != nil {
			log.Error(err, "Emptying the trash failed; it is tried again")
		}
	}
}

// reapTrash removes all that is in the trash but what is stuck, which it adds to.
// Without locks (see noLocks) two processes may do so: what the other removes first
// is removed.
func (p *Pool) reapTrash(ctx context.Context, log klog.Logger, stuck map[string]time.Time) error {
	defer p.reaper.passed(p.reaper.count())
	lock, err := p.openRegular(p.dir, reaperFile, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return p.explain(p.strange(reaperFile, err))
	}
	defer lock.Close()
	err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil
	}
	if err != nil && !noLocks(err) {
		return p.explain(err)
	}
	maps.DeleteFunc(stuck, func(_ string, since time.Time) bool { return time.Since(since) >= stuckTime })
	names, err := namesIn(p.trash, ".")
	if err != nil {
		return p.explain(err)
	}
	for _, name := range names {
		if !stuck[name].IsZero() || ctx.Err() != nil {
			continue
		}
		if err := p.explain(p.reapEntry(ctx, name)); errors.Is(err, volume.ErrUnavailable) {
			return err
		} else if err != nil && ctx.Err() == nil {
			stuck[name] = time.Now()
			log.Error(err, "Removing an entry of the trash failed; it is tried again later", "entry", name, "after", stuckTime)
		}
	}
	return nil
}

// drainShared waits until a shared pool's trash is empty, whoever empties it, at most
// drainTime; false if it was empty when the ledger was read, and is.
func (p *Pool) drainShared() bool {
	notify(p.reaper.hurry)
	end, waited := time.Now().Add(drainTime), p.ledger.hasTrash()
	for {
		names, err := namesIn(p.trash, ".")
		if err != nil || len(names) == 0 || time.Now().After(end) {
			return waited
		}
		waited = true
		time.Sleep(drainTime / 50)
	}
}

// tend keeps the ledger near the truth, and clears what processes that ended left.
func (p *Pool) tend(ctx context.Context, log klog.Logger) {
	tick := time.NewTicker(foreignInterval)
	defer tick.Stop()
	for n := 1; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if err := p.explain(p.refresh(ctx, nothingGrew)); err != nil && ctx.Err() == nil {
			log.Error(err, "Reading which volumes there are failed")
		}
		if n%sweepEvery != 0 {
			continue
		}
		if err := p.explain(p.sweep(ctx)); err != nil {
			log.Error(err, "Clearing what others left failed")
		}
	}
}

func (p *Pool) reap(ctx context.Context, log klog.Logger) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.reaper.wake:
		}
		select {
		case <-ctx.Done():
			return
		case <-p.reaper.hurry:
		case <-time.After(reapDelay):
		}
		for entry, ok := p.reaper.first(); ok && ctx.Err() == nil; entry, ok = p.reaper.first() {
			err := p.reapEntry(ctx, entry.name)
			if errors.Is(err, quota.ErrBusy) {
				p.reaper.postpone()
				continue
			}
			if err != nil && ctx.Err() == nil {
				log.Error(err, "Emptying the trash failed; it is tried again when the driver starts", "entry", entry.name)
			}
			p.reaper.done()
		}
	}
}

// reapEntry removes one entry's data first and its record last, so that the
// ledger of a restarted driver still counts what is not yet free.
func (p *Pool) reapEntry(ctx context.Context, name string) error {
	if err := p.reapContent(ctx, name); err != nil {
		return err
	}
	if err := p.removeFolder(ctx, p.trash, name); err != nil {
		return err
	}
	p.limiting.Lock()
	defer p.limiting.Unlock()
	p.ledger.mu.Lock()
	of := p.ledger.stakes[trashDir+"/"+name].writers()
	p.ledger.remove(trashDir + "/" + name)
	p.ledger.mu.Unlock()
	return p.relimit(of)
}

func (p *Pool) reapContent(ctx context.Context, name string) error {
	entry, err := openDirBeneath(p.trash, name)
	if errors.Is(err, unix.ELOOP) { // somebody's link
		return nil
	}
	if err != nil { // gone, or a file that was being made
		return orGone(err)
	}
	defer entry.Close()
	switch {
	case p.Shared():
		err = errors.Join(p.removeTree(ctx, entry, ImageFile), p.removeFolder(ctx, entry, DataDir))
	case p.OfDisks():
		err = p.wipeDisk(ctx, entry, name)
	default:
		err = p.removeLimited(ctx, entry)
	}
	if err != nil {
		return err
	}
	crashpoint.Here(crashpoint.ReapStarted)
	_ = unix.Unlinkat(int(entry.Fd()), recordFile, 0) // else it is in the way of what follows
	return nil
}

func (p *Pool) watchForeign(ctx context.Context, log klog.Logger) {
	tick := time.NewTicker(foreignInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if err := p.measureForeign(); err != nil {
				log.Error(err, "Measuring what others use on the pool's filesystem failed")
			}
		}
	}
}
