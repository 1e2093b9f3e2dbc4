package pool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/quota"
	"github.com/trivet-csi/trivet/volume"
)

// foreignInterval is how often others' use of the pool's filesystem is
// measured again.
const foreignInterval = time.Minute

// unknownBackend stands for the backend of a volume whose record cannot be read.
const unknownBackend = "unknown"

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
	p.tasks.Go(func() { p.reap(ctx, log) })
	if p.OfDisks() {
		p.tasks.Go(func() { p.watchDisks(ctx, log) })
		return nil
	}
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
	// sweepEvery is how many times foreignInterval passes until what others left is
	// looked for again.
	sweepEvery = 10
)

// trashLock keeps other processes from emptying a shared pool's trash, while it has users.
type trashLock struct {
	mu    sync.Mutex
	users int
	file  *os.File
}

// reapShared empties the trash of a shared pool whenever no other process does.
func (p *Pool) reapShared(ctx context.Context, log klog.Logger) {
	tick := time.NewTicker(reapInterval)
	defer tick.Stop()
	removing := newRemoving(reapAtOnce)
	defer removing.Wait() //nolint:errcheck // it returns none
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.reaper.wake:
		case <-tick.C:
		}
		if !p.reaper.pause(ctx) {
			return
		}
		if err := p.reapTrash(ctx, log, removing); err != nil {
			log.Error(err, "Emptying the trash failed; it is tried again")
		}
	}
}

// reapTrash begins to remove what is in the trash, whoever put it there. Without locks (see
// noLocks) two processes may do so: what the other removes first is removed.
func (p *Pool) reapTrash(ctx context.Context, log klog.Logger, removing *errgroup.Group) error {
	held, err := p.lockTrash()
	if !held {
		return p.explain(err)
	}
	defer p.unlockTrash()
	names, err := namesIn(p.trash, ".")
	if err != nil {
		return p.explain(err)
	}
	for _, name := range names {
		p.reaper.add(trashEntry{name: name})
	}
	p.reapQueue(ctx, log, removing, func() func() {
		_, _ = p.lockTrash() // this process has the lock, so this only counts a user
		return p.unlockTrash
	})
	return nil
}

// lockTrash takes the lock, or counts another user of it; false if another process has it.
func (p *Pool) lockTrash() (held bool, err error) {
	l := &p.trashLock
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.users == 0 {
		if l.file, err = p.openRegular(p.dir, reaperFile, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
			return false, p.strange(reaperFile, err)
		}
		err = unix.Flock(int(l.file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err != nil && !noLocks(err) {
			_ = l.file.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				err = nil
			}
			return false, err
		}
	}
	l.users++
	return true, nil
}

func (p *Pool) unlockTrash() {
	l := &p.trashLock
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.users--; l.users == 0 {
		_ = l.file.Close()
	}
}

// dropRemovedTrash forgets entries of a shared pool's trash that another process removed.
func (p *Pool) dropRemovedTrash() {
	removed := p.reaper.queued() // read first: an entry that is added later may not be listed
	if len(removed) == 0 {
		return
	}
	names, err := namesIn(p.trash, ".")
	if err != nil { // they count until it is known
		return
	}
	for _, name := range names {
		delete(removed, name)
	}
	p.reaper.drop(removed)
}

// drainShared waits until a shared pool's trash is empty but for stuck entries, whichever
// process empties it, at most drainTime. A process that never empties it cannot tell which
// of the others' entries are stuck, and waits only for its own. It returns false if the
// trash was empty when the ledger was read, and is empty now.
func (p *Pool) drainShared() bool {
	notify(p.reaper.hurry)
	end, waited := time.Now().Add(drainTime), p.ledger.hasTrash()
	for {
		names, err := namesIn(p.trash, ".")
		if err != nil || !p.reaper.waitsFor(names, p.cleans) || time.Now().After(end) {
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

// reap empties the trash. Disks are all wiped at once: that takes hours for each, and some
// may be gone.
func (p *Pool) reap(ctx context.Context, log klog.Logger) {
	limit := reapAtOnce
	if p.OfDisks() {
		limit = -1
	}
	removing := newRemoving(limit)
	defer removing.Wait() //nolint:errcheck // it returns none
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.reaper.wake:
		}
		if !p.reaper.pause(ctx) {
			return
		}
		p.reapQueue(ctx, log, removing, func() func() { return func() {} })
	}
}

func newRemoving(limit int) *errgroup.Group {
	var g errgroup.Group
	g.SetLimit(limit)
	return &g
}

// pause waits for reapDelay, or until somebody is in a hurry; false when ctx ends.
func (r *reaper) pause(ctx context.Context) bool {
	select {
	case <-ctx.Done():
		return false
	case <-r.hurry:
	case <-time.After(reapDelay):
	}
	return true
}

// reapQueue removes all that is queued, some of it at once. What hold returns is called
// when an entry was tried.
func (p *Pool) reapQueue(ctx context.Context, log klog.Logger, removing *errgroup.Group, hold func() (release func())) {
	for e, ok := p.reaper.take(); ok && ctx.Err() == nil; e, ok = p.reaper.take() {
		release := hold()
		removing.Go(func() error {
			defer release()
			p.reapOne(ctx, log, e)
			return nil
		})
	}
}

func (p *Pool) reapOne(ctx context.Context, log klog.Logger, e *trashEntry) {
	err := p.explain(p.reapEntry(ctx, e))
	switch {
	case err == nil:
		p.reaper.finish(e)
	case ctx.Err() == nil:
		if e.tries%loggedTries == 0 && (e.tries > 0 || !errors.Is(err, quota.ErrBusy)) {
			log.Error(err, "Removing an entry of the trash failed; it is tried again", "entry", e.name, "tries", e.tries+1)
		}
		p.reaper.retry(e, err)
	}
}

// TrashErrors are why entries of the trash cannot be removed.
func (p *Pool) TrashErrors() []error {
	var errs []error
	for _, e := range p.reaper.stuck() {
		if !p.OfDisks() { // there the error names it
			e.err = fmt.Errorf("%s/%s/%s: %w", p.cfg.place(), trashDir, e.name, e.err)
		}
		errs = append(errs, e.err)
	}
	return errs
}

// reapEntry removes one entry's data first and its record last, so that the
// ledger of a restarted driver still counts what is not yet free. The entry remembers
// which limits are to be set until they are set.
func (p *Pool) reapEntry(ctx context.Context, e *trashEntry) error {
	if err := p.reapContent(ctx, e.name); err != nil {
		return err
	}
	if err := p.removeFolder(ctx, p.trash, e.name); err != nil {
		return err
	}
	p.limiting.Lock()
	defer p.limiting.Unlock()
	p.ledger.mu.Lock()
	if s, counted := p.ledger.stakes[trashDir+"/"+e.name]; counted {
		e.relimit = s.writers()
		p.ledger.remove(trashDir + "/" + e.name)
	}
	p.ledger.mu.Unlock()
	return p.relimit(e.relimit)
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
			if !p.ledger.leads() {
				continue
			}
			if err := p.measureForeign(); err != nil {
				log.Error(err, "Measuring what others use on the pool's filesystem failed")
			}
		}
	}
}
