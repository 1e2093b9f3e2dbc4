package pool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/volume"
)

// foreignInterval is how often others' use of the pool's filesystem is
// measured again.
const foreignInterval = time.Minute

// reapDelay lets a burst of deletes be answered before the journal, which each
// of them waits for, is filled with the removal of the first ones.
const reapDelay = 200 * time.Millisecond

// unknownBackend stands for the backend of a volume whose record cannot be read.
const unknownBackend = "unknown"

// trashEntry is a volume that was deleted and is not yet removed.
type trashEntry struct {
	name  string // of its folder in the trash
	stake stake
}

// reaper removes what is in the trash, one entry after the other.
type reaper struct {
	mu      sync.Mutex
	pending []trashEntry
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
	if len(r.pending) == 0 {
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
	if r.pending = r.pending[1:]; len(r.pending) == 0 {
		close(r.drained)
	}
}

// drain waits until the trash is empty, at most for a time.
func (r *reaper) drain(atMost time.Duration) {
	r.mu.Lock()
	pending, drained := len(r.pending), r.drained
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

// Remove deletes a volume: one rename into the trash, durable when it returns.
// The space comes back in the background and is promised again only then. The
// caller holds the volume's image lock.
func (p *Pool) Remove(v volume.Volume) error {
	if err := p.Check(); err != nil {
		return err
	}
	entry := trashEntry{name: v.ID.Name + "." + NewUUID()[:8], stake: stakeOf(v)}
	if err := p.root.Rename(volumeDir(v.ID.Name), trashDir+"/"+entry.name); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.DeleteRenamed)
	p.bury(v.ID.Name, entry)
	if err := errors.Join(p.volumes.Sync(), p.trash.Sync()); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.DeleteDone)
	return nil
}

// bury moves what the ledger holds of a volume to its trash entry, and hands
// that to the reaper.
func (p *Pool) bury(name string, entry trashEntry) {
	p.ledger.mu.Lock()
	if have, ok := p.ledger.stakes[volumeDir(name)]; ok {
		entry.stake = have
	}
	p.ledger.remove(volumeDir(name))
	p.ledger.set(trashDir+"/"+entry.name, entry.stake)
	p.ledger.mu.Unlock()
	p.reaper.add(entry)
}

// trashed lists what is in the trash, with what each entry still promises.
func (p *Pool) trashed() ([]trashEntry, error) {
	names, err := sortedNames(p.root, trashDir)
	if err != nil {
		return nil, err
	}
	var out []trashEntry
	for _, name := range names {
		t := trashEntry{name: name, stake: stake{backend: unknownBackend}}
		if b, err := readBeneath(p.trash, name+"/"+recordFile); err == nil {
			if v, err := volume.ParseRecord(b); err == nil {
				t.stake = stakeOf(v)
			}
		}
		out = append(out, t)
	}
	return out, nil
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
	p.tasks.Go(func() { p.watchForeign(ctx, log) })
	return nil
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
			if err := p.reapEntry(entry); err != nil {
				log.Error(err, "Emptying the trash failed; it is tried again when the driver starts", "entry", entry.name)
			}
			p.reaper.done()
		}
	}
}

// reapEntry removes one entry's image first and its record last, so that the
// ledger of a restarted driver still counts what is not yet free.
func (p *Pool) reapEntry(entry trashEntry) error {
	path := trashDir + "/" + entry.name
	if err := p.root.Remove(path + "/" + ImageFile); err != nil && !isNotExist(err) {
		return err
	}
	crashpoint.Here(crashpoint.ReapStarted)
	if err := removeTree(p.root, path, p.dev); err != nil {
		return err
	}
	p.ledger.mu.Lock()
	defer p.ledger.mu.Unlock()
	p.ledger.remove(path)
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

// removeTree removes path and all below it, and stops at the first thing that
// is on another filesystem: where something is mounted nothing is removed.
// Links are removed, not followed (os.Root).
func removeTree(root *os.Root, path string, dev uint64) error {
	info, err := root.Lstat(path)
	if isNotExist(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if on := info.Sys().(*syscall.Stat_t).Dev; on != dev {
		return volume.Errorf(volume.ErrPrecondition, "%s/%s is on another filesystem than its pool: unmount what is mounted there", root.Name(), path)
	}
	if info.IsDir() {
		names, err := sortedNames(root, path)
		if err != nil {
			return err
		}
		for _, name := range names {
			if err := removeTree(root, path+"/"+name, dev); err != nil {
				return err
			}
		}
	}
	if err := root.Remove(path); err != nil && !isNotExist(err) {
		return fmt.Errorf("removing from the pool: %w", err)
	}
	return nil
}
