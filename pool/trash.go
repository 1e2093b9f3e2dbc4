package pool

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/volume"
)

// foreignInterval is how often others' use of the pool's filesystem is
// measured again.
const foreignInterval = time.Minute

// trashEntry is a volume that was deleted and is not yet removed.
type trashEntry struct {
	name     string // of its folder in the trash
	promised int64
}

// reaper removes what is in the trash, one entry after the other.
type reaper struct {
	mu      sync.Mutex
	pending []trashEntry
	wake    chan struct{}
}

func (r *reaper) add(entries ...trashEntry) {
	r.mu.Lock()
	r.pending = append(r.pending, entries...)
	r.mu.Unlock()
	select {
	case r.wake <- struct{}{}:
	default: // it is awake already
	}
}

func (r *reaper) take() (trashEntry, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.pending) == 0 {
		return trashEntry{}, false
	}
	e := r.pending[0]
	r.pending = r.pending[1:]
	return e, true
}

// Remove deletes a volume: one rename into the trash, durable when it returns.
// The space comes back in the background and is promised again only then. The
// caller holds the volume's image lock.
func (p *Pool) Remove(v volume.Volume) error {
	if err := p.Check(); err != nil {
		return err
	}
	entry := trashEntry{name: v.ID.Name + "." + NewUUID()[:8], promised: v.Capacity}
	if err := p.root.Rename(volumesDir+"/"+v.ID.Name, trashDir+"/"+entry.name); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.DeleteRenamed)
	if err := errors.Join(p.volumes.Sync(), p.trash.Sync()); err != nil {
		return err
	}
	p.reaper.add(entry)
	crashpoint.Here(crashpoint.DeleteDone)
	return nil
}

// trashed lists what is in the trash, with what each entry still promises.
func (p *Pool) trashed() ([]trashEntry, error) {
	entries, err := fs.ReadDir(p.root.FS(), trashDir)
	if err != nil {
		return nil, err
	}
	var out []trashEntry
	for _, e := range entries {
		t := trashEntry{name: e.Name()}
		if b, err := p.root.ReadFile(trashDir + "/" + t.name + "/" + recordFile); err == nil {
			if v, err := volume.ParseRecord(b); err == nil {
				t.promised = v.Capacity
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
	p.reaper.wake = make(chan struct{}, 1)
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
		for entry, ok := p.reaper.take(); ok && ctx.Err() == nil; entry, ok = p.reaper.take() {
			if err := p.reapEntry(entry); err != nil {
				log.Error(err, "Emptying the trash failed; it is tried again when the driver starts", "entry", entry.name)
			}
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
	p.promise(-entry.promised, -1)
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
	if on := info.Sys().(*unixStat).Dev; on != dev {
		return volume.Errorf(volume.ErrPrecondition, "%s/%s is on another filesystem than its pool: unmount what is mounted there", root.Name(), path)
	}
	if info.IsDir() {
		entries, err := fs.ReadDir(root.FS(), path)
		if err != nil {
			return err
		}
		for _, e := range entries {
			if err := removeTree(root, path+"/"+e.Name(), dev); err != nil {
				return err
			}
		}
	}
	if err := root.Remove(path); err != nil && !isNotExist(err) {
		return fmt.Errorf("removing from the pool: %w", err)
	}
	return nil
}
