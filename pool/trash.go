package pool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/quota"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

func (p *Pool) removeToTrash(v volume.Volume) error {
	entry := v.ID.Name + "." + NewUUID()[:8]
	if err := p.takeOut(v.ID.Name, p.trash, entry); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.DeleteRenamed)
	p.Trash.movedToTrash(volumeDir(v.ID.Name), entry, ledger.OfVolume(v))
	if err := errors.Join(p.volumes.Sync(), p.trash.Sync()); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.DeleteDone)
	return nil
}

// Trash is what was deleted and is not removed yet.
type Trash struct {
	*store
	quotas *Quotas
	reaper *reaper
	// maintained: this process maintains the pool: it clears what ended processes left, and
	// empties the trash.
	maintained bool
}

// movedToTrash moves what the ledger holds of a folder to its trash entry, and hands
// that to the reaper.
func (t *Trash) movedToTrash(dir, entry string, r ledger.Reservation) {
	t.ledger.Move(dir, trashDir+"/"+entry, r)
	t.reaper.add(entry)
}

// readTrashReservation is what an entry of the trash still promises. Its directory among
// others' is its own no more.
func (t *Trash) readTrashReservation(name string) ledger.Reservation {
	b, err := t.files.Read(t.trash, name+"/"+recordFile)
	if err != nil {
		return t.readTrashedSet(name)
	}
	v, err := volume.ParseRecord(b)
	if err != nil {
		return ledger.Reservation{Backend: ledger.UnknownBackend}
	}
	return ledger.OfVolume(v).InTrash()
}

// readTrashedSet is readTrashReservation for snapshots.
func (t *Trash) readTrashedSet(name string) ledger.Reservation {
	b, err := t.files.Read(t.trash, name+"/"+snapshotFile)
	if err != nil {
		return ledger.Reservation{Backend: ledger.UnknownBackend}
	}
	set, err := volume.ParseSnapshotSet(b)
	if err != nil {
		return ledger.Reservation{Backend: ledger.UnknownBackend}
	}
	return ledger.OfSet(set).InTrash()
}

// startTasks begins the pool's background work.
func (p *Pool) startTasks(ctx context.Context) error {
	left, err := beneath.Names(p.trash, ".")
	if err != nil {
		return err
	}
	log := klog.LoggerWithValues(klog.FromContext(ctx), "pool", p.cfg.Name)
	ctx, p.stop = context.WithCancel(context.WithoutCancel(ctx))
	p.Trash.reaper.add(left...)
	notify(p.Trash.reaper.wake)
	p.tasks.Go(func() { p.Trash.reap(ctx, log) })
	p.tasks.Go(func() { p.medium.Maintain(ctx, log) })
	return nil
}

// reapInterval is how often the trash is listed: another process may have filled it.
const reapInterval = 30 * time.Second

// reap empties the trash, whoever filled it, unless another process does. Entries on storage
// are all reclaimed at once: each may take hours to be wiped, or wait for a device that is
// missing.
func (t *Trash) reap(ctx context.Context, log klog.Logger) {
	limit := reapAtOnce
	if t.storage != nil {
		limit = -1
	}
	var removing errgroup.Group
	removing.SetLimit(limit)
	defer removing.Wait() //nolint:errcheck // it returns none
	tick := time.NewTicker(reapInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.reaper.wake:
		case <-tick.C:
		}
		if !t.reaper.pause(ctx) {
			return
		}
		if err := t.reapAll(ctx, log, &removing); err != nil {
			log.Error(t.medium.Explain(err), "Emptying the trash failed; it is tried again")
		}
	}
}

// reapAll begins to remove all that is in the trash.
func (t *Trash) reapAll(ctx context.Context, log klog.Logger, removing *errgroup.Group) error {
	release, err := t.medium.HoldTrash()
	if release == nil {
		return err
	}
	defer release()
	names, err := beneath.Names(t.trash, ".")
	if err != nil {
		return err
	}
	t.reaper.add(names...)
	for e, ok := t.reaper.take(); ok && ctx.Err() == nil; e, ok = t.reaper.take() {
		release, err := t.medium.HoldTrash() // until the entry was tried
		if release == nil {
			return err
		}
		removing.Go(func() error {
			defer release()
			t.reapOne(ctx, log, e)
			return nil
		})
	}
	return nil
}

// dropRemovedTrash forgets entries of the trash that another process removed. Where there is
// none, an entry stays until this process has given back what is reserved for it.
func (t *Trash) dropRemovedTrash() {
	if t.medium.SoleWriter() {
		return
	}
	removed := t.reaper.queued() // read first: an entry that is added later may not be listed
	if len(removed) == 0 {
		return
	}
	names, err := beneath.Names(t.trash, ".")
	if err != nil { // they count until it is known
		return
	}
	for _, name := range names {
		delete(removed, name)
	}
	t.reaper.drop(removed)
}

// AwaitTrash waits until the trash is empty but for stuck entries, whichever process empties
// it, at most ledger.DrainTime. A process that never empties it cannot tell which of the
// others' entries are stuck, and waits only for its own. It returns false if the trash was
// empty when the ledger was read, and is empty now.
func (t *Trash) AwaitTrash() bool {
	notify(t.reaper.hurry)
	end, waited := time.Now().Add(ledger.DrainTime), t.ledger.HasTrash()
	for {
		names, err := beneath.Names(t.trash, ".")
		if err != nil || !t.reaper.waitsFor(names, t.maintained) || time.Now().After(end) {
			return waited
		}
		waited = true
		time.Sleep(ledger.DrainTime / 50)
	}
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

func (t *Trash) reapOne(ctx context.Context, log klog.Logger, e *trashEntry) {
	err := t.medium.Explain(t.reapEntry(ctx, e))
	switch {
	case err == nil:
		t.reaper.finish(e)
	case ctx.Err() == nil:
		if e.tries%loggedTries == 0 && (e.tries > 0 || !errors.Is(err, quota.ErrBusy)) {
			log.Error(err, "Removing an entry of the trash failed; it is tried again", "entry", e.name, "tries", e.tries+1)
		}
		t.reaper.retry(e, err)
	}
}

// Errors are why entries of the trash cannot be removed.
func (t *Trash) Errors() []error {
	var errs []error
	for _, e := range t.reaper.stuck() {
		if t.storage == nil { // else the error names it
			e.err = fmt.Errorf("%s/%s/%s: %w", t.cfg.place(), trashDir, e.name, e.err)
		}
		errs = append(errs, e.err)
	}
	return errs
}

// reapEntry removes one entry's data first and its record last, so that the
// ledger of a restarted driver still counts what is not yet free. The entry remembers
// which limits are to be set until they are set.
func (t *Trash) reapEntry(ctx context.Context, e *trashEntry) error {
	if err := t.reapContent(ctx, e.name); err != nil {
		return err
	}
	if err := t.removeFolder(ctx, t.trash, e.name); err != nil {
		return err
	}
	t.quotas.limiting.Lock()
	defer t.quotas.limiting.Unlock()
	if r, counted := t.ledger.Remove(trashDir + "/" + e.name); counted {
		e.relimit = r.Writers()
	}
	return t.quotas.relimit(e.relimit)
}

func (t *Trash) reapContent(ctx context.Context, name string) error {
	entry, err := beneath.OpenDir(t.trash, name)
	if errors.Is(err, unix.ELOOP) { // somebody's link
		return nil
	}
	if err != nil { // gone, or a file that was being made
		return beneath.IgnoreGone(err)
	}
	defer entry.Close()
	if t.storage != nil {
		err = t.reclaimOnStorage(ctx, entry, name)
	} else {
		err = t.removeData(ctx, entry)
	}
	if err != nil {
		return err
	}
	crashpoint.Here(crashpoint.ReapStarted)
	_ = unix.Unlinkat(int(entry.Fd()), recordFile, 0) // else it is in the way of what follows
	return nil
}

// removeData removes all but the records from a folder of the trash, directories as
// their filesystem does that best, and gives the volume's limit back when all of it is
// gone: until then it is quota.ErrBusy.
func (t *Trash) removeData(ctx context.Context, folder *os.File) error {
	return t.quotas.withQuota(func(fs *quota.FS) error {
		id, stays := t.quotaIn(fs, folder)
		if err := t.removeContent(ctx, fs, folder); err != nil {
			return err
		}
		crashpoint.Here(crashpoint.ReapRemoved)
		if id == 0 || fs.Kind() == quota.None {
			return nil
		}
		err := fs.Release(id)
		if errors.Is(err, quota.ErrBusy) {
			if stays {
				return nil
			}
			t.shrinkReservation(fs, folder, id)
		}
		return err
	})
}

func (t *Trash) removeContent(ctx context.Context, fs *quota.FS, folder *os.File) error {
	names, err := beneath.Names(folder, ".")
	if err != nil {
		return beneath.IgnoreGone(err)
	}
	var failed error
	for _, name := range names {
		if name != recordFile && name != snapshotFile && name != quotaFile {
			failed = errors.Join(failed, beneath.IgnoreGone(t.removeOne(ctx, fs, folder, name)))
		}
	}
	return failed
}

func (t *Trash) removeOne(ctx context.Context, fs *quota.FS, folder *os.File, name string) error {
	st, err := beneath.Stat(folder, name)
	if err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		if done, err := fs.RemoveDir(folder, name); done || err != nil {
			return err
		}
	}
	return t.removeFolder(ctx, folder, name)
}

// quotaIn is the ID of the volume in a folder of the trash; 0 for none. stays: what
// counts on it is kept, and so is its limit.
func (t *Trash) quotaIn(fs *quota.FS, folder *os.File) (id uint64, stays bool) {
	data, err := beneath.OpenDir(folder, DataDir)
	if err == nil {
		defer data.Close()
	}
	v, unread := t.recordIn(folder)
	if unread == nil && v.Directory != nil && v.Directory.Quota != nil {
		id = v.Directory.Quota.ID
		if v.Directory.Quota.Kind != string(fs.Kind()) { // a copy from another filesystem, or limits are off
			return 0, false
		}
		if err == nil {
			if has, err := fs.Has(data, id); err == nil && !has { // a copy, whose ID may be another's
				return 0, false
			}
		}
		return id, hasSubDir(v) && v.Directory.OnDelete == volume.OnDeleteRetain
	}
	// A call was killed before it wrote the record.
	if b, err := t.files.Read(folder, quotaFile); err == nil {
		id, _ = strconv.ParseUint(string(b), 10, 64)
		return id, false
	}
	if err != nil {
		return 0, false
	}
	if id, err = fs.ID(data); err != nil || id == 0 {
		return 0, false
	}
	t.noteQuota(folder, id)
	return id, false
}

// noteQuota keeps an ID for when the directory that has it is gone. Without it nothing
// is lost but an ID.
func (t *Trash) noteQuota(folder *os.File, id uint64) {
	f, err := t.files.Open(folder, quotaFile, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return
	}
	defer f.Close()
	if _, err := f.WriteString(strconv.FormatUint(id, 10)); err == nil {
		_ = f.Sync()
	}
}

func (t *Trash) recordIn(folder *os.File) (volume.Volume, error) {
	b, err := t.files.Read(folder, recordFile)
	if err != nil {
		return volume.Volume{}, err
	}
	return volume.ParseRecord(b)
}

// shrinkReservation lets an entry of the trash promise no more than what is left of it.
func (t *Trash) shrinkReservation(fs *quota.FS, folder *os.File, id uint64) {
	u, err := fs.Usage(id)
	if err != nil {
		return
	}
	dir := trashDir + folder.Name()[strings.LastIndex(folder.Name(), "/"):]
	t.ledger.Shrink(dir, u.Bytes)
}
