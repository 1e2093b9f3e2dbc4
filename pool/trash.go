package pool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/luks"
	"github.com/trivet-csi/trivet/linux/quota"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

// Trash contains deleted volumes and snapshots until they are removed.
type Trash struct {
	*store
	quotas *Quotas
	reaper *reaper
	// maintained means that this process maintains the pool: it removes the entries of ended processes
	// and empties the trash.
	maintained bool
}

// entryReservation reads the reservation of an entry.
func (t *Trash) entryReservation(name string) ledger.Reservation {
	if v, err := t.readVolume(t.trash, name+"/"+recordFile); err == nil {
		return ledger.OfVolume(v).InTrash()
	}
	b, err := t.files.Read(t.trash, name+"/"+snapshotFile)
	if err == nil {
		if set, err := t.forms.ParseSnapshotSet(b); err == nil {
			return ledger.OfSet(set).InTrash()
		}
	}
	return ledger.Reservation{Backend: ledger.UnknownBackend}
}

// startTasks starts the pool's background work.
func (p *Pool) startTasks(ctx context.Context) error {
	entries, err := beneath.Names(p.trash, ".")
	if err != nil {
		return err
	}
	log := klog.LoggerWithValues(klog.FromContext(ctx), "pool", p.cfg.Name)
	ctx, p.stop = context.WithCancel(context.WithoutCancel(ctx))
	p.Trash.reaper.add(entries...)
	notify(p.Trash.reaper.wake)
	p.tasks.Go(func() { p.Trash.reap(ctx, log) })
	p.tasks.Go(func() { p.medium.Maintain(ctx, log) })
	if !p.Shared() {
		p.tasks.Go(func() { p.expireReceived(ctx, log) })
	}
	return nil
}

// reapInterval is the time between two listings of the trash, to which other processes may add entries.
const reapInterval = 30 * time.Second

// reap empties the trash until ctx ends, unless another process empties it. All entries on storage
// are reclaimed concurrently, because each may take hours to wipe, or wait for a missing device.
func (t *Trash) reap(ctx context.Context, log klog.Logger) {
	limit := reapAtOnce
	if t.storage != nil {
		limit = -1 // no limit
	}
	var removing errgroup.Group
	removing.SetLimit(limit)
	defer removing.Wait() //nolint:errcheck // its functions return no errors
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

// reapAll starts the removal of all entries.
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
	for e, ok := t.reaper.next(); ok && ctx.Err() == nil; e, ok = t.reaper.next() {
		release, err := t.medium.HoldTrash() // held until the end of this attempt
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

// dropRemovedTrash drops entries that another process removed. In a pool with one writer an
// entry stays until this process has released its reservation.
func (t *Trash) dropRemovedTrash() {
	if t.medium.SoleWriter() {
		return
	}
	removed := t.reaper.queued() // read first: an entry that is added later may not be listed
	if len(removed) == 0 {
		return
	}
	names, err := beneath.Names(t.trash, ".")
	if err != nil { // the entries count until the trash can be listed
		return
	}
	for _, name := range names {
		delete(removed, name)
	}
	t.reaper.drop(removed)
}

// AwaitEmpty waits up to ledger.DrainTime until the trash is empty, except for entries whose removal
// keeps failing. In a pool that other processes also write, use AwaitTrash.
func (t *Trash) AwaitEmpty() {
	if t.ledger.HasTrash() {
		t.reaper.drain(ledger.DrainTime)
	}
}

// AwaitTrash is AwaitEmpty for a pool whose trash any of several processes may empty. A process that
// does not maintain the pool does not know which removals keep failing in other processes, and waits
// only for its own entries. AwaitTrash returns false if there was nothing to wait for.
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

// reapOne removes an entry, or queues another attempt.
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

// Errors returns an error for each entry that cannot be removed.
func (t *Trash) Errors() []error {
	var errs []error
	for _, e := range t.reaper.stuck() {
		if t.storage == nil { // the errors of storage name the entry
			e.err = fmt.Errorf("%s/%s/%s: %w", t.cfg.place(), trashDir, e.name, e.err)
		}
		errs = append(errs, e.err)
	}
	return errs
}

// reapEntry removes one entry's data first and its record last, so that the ledger of a restarted
// driver still counts the space that is not free yet. e.relimit is kept until the limits are set.
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

// reapContent removes the data of an entry, or frees its storage, and then removes the record of a
// volume.
func (t *Trash) reapContent(ctx context.Context, name string) error {
	entry, err := beneath.OpenDir(t.trash, name)
	if errors.Is(err, unix.ELOOP) { // a link, which the driver did not make
		return nil
	}
	if err != nil { // it was removed, or is a file from tmp
		return beneath.IgnoreGone(err)
	}
	defer entry.Close()
	path := filepath.Join(t.cfg.place(), trashDir, name)
	if err = t.eraseHeader(ctx, entry); err != nil && t.storage != nil { // Errors adds the path if there is no storage
		err = fmt.Errorf("%s: %w", path, err)
	}
	if err != nil {
		return err
	}
	if t.storage != nil {
		var dir *os.Root
		if dir, err = beneath.OpenRoot(entry, "."); err == nil {
			defer dir.Close()
			err = t.storage.Reclaim(ctx, dir, path)
		}
	} else {
		err = t.removeData(ctx, entry)
	}
	if err != nil {
		return err
	}
	crashpoint.Here(crashpoint.ReapStarted)
	_ = unix.Unlinkat(int(entry.Fd()), recordFile, 0) // so that rmdir(2) can remove the folder
	return nil
}

// eraseNow erases the header of a volume that was just moved to the trash. If that fails, reapContent tries again, and
// Errors reports why.
func (t *Trash) eraseNow(ctx context.Context, name string) {
	entry, err := beneath.OpenDir(t.trash, name)
	if err != nil {
		return
	}
	defer entry.Close()
	_ = t.eraseHeader(ctx, entry)
}

// eraseHeader durably erases the LUKS2 header of a deleted volume, so that its data cannot be decrypted any more. It does
// nothing if the volume is not encrypted, or the folder has no readable record.
func (t *Trash) eraseHeader(ctx context.Context, folder *os.File) error {
	v, err := t.readVolume(folder, recordFile)
	if beneath.IsNotExist(err) || errors.Is(err, volume.ErrDamaged) {
		return nil
	}
	if err != nil || v.Encryption == nil {
		return err
	}
	if eraser, ok := t.storage.(HeaderEraser); ok {
		var dir *os.Root
		if dir, err = beneath.OpenRoot(folder, "."); err == nil {
			defer dir.Close()
			err = eraser.EraseHeader(ctx, dir, v)
		}
	} else {
		err = t.eraseImageHeader(folder)
	}
	if err != nil {
		return fmt.Errorf("volume %s, which was deleted: erasing its LUKS2 header: %w", v.ID, err)
	}
	crashpoint.Here(crashpoint.DeleteErased)
	return nil
}

// eraseImageHeader erases the header in the image of a deleted volume. It leaves an image with several hard links alone,
// because another client of an export may have linked the image of another volume.
func (t *Trash) eraseImageHeader(folder *os.File) error {
	image, err := t.files.Open(folder, ImageFile, unix.O_RDWR, 0)
	if beneath.IsNotExist(err) || errors.Is(err, beneath.ErrIrregular) {
		return nil
	}
	if err != nil {
		return err
	}
	defer image.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(image.Fd()), &st); err != nil || st.Nlink != 1 {
		return err
	}
	return luks.Erase(image)
}

// removeData removes all but the records from an entry, and then releases the volume's quota ID.
// quota.ErrBusy while the filesystem still counts data with that ID.
func (t *Trash) removeData(ctx context.Context, folder *os.File) error {
	return t.quotas.withQuota(func(fs *quota.FS) error {
		id, retained := t.quotaIn(fs, folder)
		if err := t.removeContent(ctx, fs, folder); err != nil {
			return err
		}
		crashpoint.Here(crashpoint.ReapRemoved)
		if id == 0 || fs.Kind() == quota.None {
			return nil
		}
		err := fs.Release(id)
		if errors.Is(err, quota.ErrBusy) {
			if retained {
				return nil
			}
			t.shrinkReservation(fs, folder, id)
		}
		return err
	})
}

// removeContent removes all but the records and the quota file from an entry.
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

// removeOne removes a file, a directory with its content, or a subvolume.
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

// quotaIn returns the quota ID to release with an entry; 0 if there is none. retained means that the
// directory with the ID is not deleted, and keeps its limit.
func (t *Trash) quotaIn(fs *quota.FS, folder *os.File) (id uint64, retained bool) {
	data, err := beneath.OpenDir(folder, DataDir)
	if err == nil {
		defer data.Close()
	}
	v, recordErr := t.readVolume(folder, recordFile)
	if recordErr == nil && v.Directory != nil && v.Directory.Quota != nil {
		id = v.Directory.Quota.ID
		if v.Directory.Quota.Kind != string(fs.Kind()) { // copied from another filesystem, or quota is off
			return 0, false
		}
		if err == nil {
			if has, err := fs.Has(data, id); err == nil && !has { // a copy, and the ID may be another volume's
				return 0, false
			}
		}
		return id, hasSubDir(v) && v.Directory.OnDelete == volume.OnDeleteRetain
	}
	// There is no record if the driver was killed before it wrote one.
	if b, err := t.files.Read(folder, quotaFile); err == nil {
		if id, err := strconv.ParseUint(string(b), 10, 64); err == nil { // the file was written completely
			return id, false
		}
	}
	if err != nil {
		return 0, false
	}
	if id, err = fs.ID(data); err != nil || id == 0 {
		return 0, false
	}
	t.writeQuotaFile(folder, id)
	return id, false
}

// writeQuotaFile records the ID of an entry without a record, because the directory is removed before
// the ID is released. If writing fails, the ID may never be released.
func (t *Trash) writeQuotaFile(folder *os.File, id uint64) {
	f, err := t.files.Open(folder, quotaFile, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return
	}
	defer f.Close()
	if _, err := f.WriteString(strconv.FormatUint(id, 10)); err == nil {
		_ = f.Sync()
	}
}

// readVolume reads the record of a volume at a path below dir.
func (t *Trash) readVolume(dir *os.File, path string) (volume.Volume, error) {
	b, err := t.files.Read(dir, path)
	if err != nil {
		return volume.Volume{}, err
	}
	return t.forms.ParseVolume(b)
}

// shrinkReservation reduces the reservation of an entry to its remaining usage.
func (t *Trash) shrinkReservation(fs *quota.FS, folder *os.File, id uint64) {
	if u, err := fs.Usage(id); err == nil {
		t.ledger.Shrink(trashDir+"/"+filepath.Base(folder.Name()), u.Bytes)
	}
}
