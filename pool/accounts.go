package pool

import (
	"context"
	"errors"
	"os"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/trivet-csi/trivet/linux/quota"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

// accounts reads the reservations and usage of a pool for its ledger. It implements ledger.Pool.
type accounts struct {
	*store
	quotas    *Quotas
	deleted   *Trash
	snapshots *Snapshots
}

// Drain waits until the trash is empty, except for entries whose removal keeps failing, or until atMost
// has passed.
func (c *accounts) Drain(atMost time.Duration) { c.deleted.reaper.drain(atMost) }

// rebuildLedger reads all records and measures the foreign use.
func (c *accounts) rebuildLedger(ctx context.Context) error {
	if err := c.Refresh(ctx, func(string) bool { return true }); err != nil {
		return err
	}
	c.ledger.Complete()
	return c.measure()
}

// Refresh sets the ledger to what the folders contain. It reads their names and inode numbers,
// and the records of volumes that are new, have grown or could not be read before. grown tells whether
// a known volume may have grown since its record was last read. Folders that this process is changing
// are left out.
func (c *accounts) Refresh(ctx context.Context, grown func(name string) bool) error {
	known, end := c.ledger.BeginReading()
	defer end()
	// The reservations in tmp, the volumes and the trash are read in the order in which folders move,
	// so that a folder that is moved meanwhile is counted twice rather than missed.
	reserved, err := c.medium.ReservedElsewhere()
	if err != nil {
		return err
	}
	found := map[string]bool{}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(16)
	// changed marks a folder as found, and tells whether it must be read because it is new or replaced
	// another one.
	changed := func(dir string, inode uint64) bool {
		found[dir] = true
		before, ok := known[dir]
		return !ok || before.Inode != inode
	}
	volumes, err := beneath.Inodes(c.volumes, ".")
	if err != nil {
		return err
	}
	sets, err := beneath.Inodes(c.store.snapshots, ".")
	if err != nil {
		return err
	}
	trashed, err := beneath.Names(c.trash, ".")
	if err != nil {
		return err
	}
	for name, inode := range volumes {
		dir := FolderPath(name)
		if changed(dir, inode) || known[dir].UnknownSubDir || grown(name) {
			group.Go(func() error {
				return c.recountUntouched(ctx, dir, inode, func() (ledger.Reservation, error) { return c.volumeReservation(name) })
			})
		}
	}
	for name, inode := range sets {
		if dir := snapshotDir(name); changed(dir, inode) {
			group.Go(func() error {
				return c.recountUntouched(ctx, dir, inode, func() (ledger.Reservation, error) { return c.snapshots.setReservation(name) })
			})
		}
	}
	for _, name := range trashed {
		dir := trashDir + "/" + name
		found[dir] = true
		if _, ok := known[dir]; !ok {
			group.Go(func() error { c.ledger.Set(dir, c.deleted.entryReservation(name)); return ctx.Err() })
		}
	}
	if err := c.readReceived(found); err != nil {
		return errors.Join(err, group.Wait())
	}
	if err := group.Wait(); err != nil {
		return err
	}
	for dir, r := range reserved {
		found[dir] = true
		c.ledger.Set(dir, r)
	}
	c.ledger.RemoveMissing(known, found)
	return nil
}

// readReceived reads the reservations of the images that are being received, and marks them as found.
func (c *accounts) readReceived(found map[string]bool) error {
	if c.Shared() {
		return nil
	}
	names, err := beneath.Names(c.dir, receivedDir)
	for _, name := range names {
		dir := receivedPath(name)
		found[dir] = true
		c.ledger.RecountUntouched(dir, c.receivedReservation(name), nil)
	}
	return beneath.IgnoreGone(err)
}

// recountUntouched reads the reservation of one folder into the ledger, unless this process is
// changing the folder. inode is that of the folder before it was read.
func (c *accounts) recountUntouched(ctx context.Context, dir string, inode uint64, read func() (ledger.Reservation, error)) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	r, err := read()
	if errors.Is(err, volume.ErrUnavailable) {
		return err
	}
	r.Inode = inode
	c.ledger.RecountUntouched(dir, r, err)
	return nil
}

// measure scans the storage of a pool that has one. For any other pool it measures the foreign use of
// the pool's filesystem: all allocated bytes less those of the volumes of the pools on it. A directory
// without a limit cannot be measured, and counts with its capacity.
func (c *accounts) measure() error {
	if c.storage != nil {
		return c.storage.Scan()
	}
	return c.ledger.Measure()
}

// Used measures what the pool's volumes use, in bytes.
func (c *accounts) Used() (used int64, err error) {
	all := c.ledger.Reservations()
	err = c.quotas.withQuota(func(fs *quota.FS) error {
		for dir, r := range all {
			used += c.measureOne(fs, dir, r)
		}
		return nil
	})
	return used, err
}

// measureOne measures what a volume or set uses, in bytes. A volume whose usage cannot be read counts
// with its promised bytes. This happens if the pool was copied from another filesystem, or if quota
// is off now.
func (c *accounts) measureOne(fs *quota.FS, dir string, r ledger.Reservation) int64 {
	if r.Snapshots != nil {
		return c.snapshots.measureSet(dir, r)
	}
	// A directory has a quota or is Unmeasured.
	switch image := r.Quota == (volume.Quota{}) && !r.Unmeasured; {
	case image && r.Cloned:
		return c.snapshots.unshared(dir + "/" + ImageFile)
	case image:
		return allocated(c.dir, dir+"/"+ImageFile)
	case r.Quota.Kind != string(fs.Kind()):
		return r.Bytes
	}
	u, err := fs.Usage(r.Quota.ID)
	if err != nil {
		return r.Bytes
	}
	if len(r.Owners) > 0 { // the shared data counts as usage of its owners
		return u.Bytes
	}
	return max(0, u.Bytes-r.Shared)
}

// allocated is the disk space of a file in bytes; 0 if the file does not exist.
func allocated(dir *os.File, path string) int64 {
	st, err := beneath.Stat(dir, path)
	if err != nil {
		return 0
	}
	return st.Blocks * 512
}
