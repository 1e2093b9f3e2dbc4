package disk

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"golang.org/x/sync/semaphore"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

// The states of a disk in addition to those of package blockdev. A disk of an existing volume is
// blockdev.DiskClaimed.
const (
	// diskOrphaned means that the disk has a mark, and no record on this node has the GUID of the mark.
	diskOrphaned blockdev.Reason = "orphaned"
	// diskWiping means that the volume on the disk is deleted, and the disk is not wiped completely yet.
	diskWiping blockdev.Reason = "wiping"
	// diskOtherPool means that the disk has a volume of another pool, or also matches a pool that is
	// earlier in the configuration.
	diskOtherPool blockdev.Reason = "other-pool"
)

// diskState is the state of a disk that matches the configuration.
type diskState struct {
	disk   blockdev.Disk
	reason blockdev.Reason
	// detail describes the state in words; empty for a free disk.
	detail string
	// wiped is the number of zeroed bytes of a disk that is being wiped.
	wiped int64
}

// storage is the disks of one pool.
type storage struct {
	cfg   pool.Config
	match []string

	// claiming is held by the call that claims and marks a free disk.
	claiming *semaphore.Weighted
	// scanning is locked during a scan, so that an older result does not replace a newer one.
	scanning sync.Mutex

	mu   sync.Mutex
	seen []diskState // the result of the last scan
}

// storageOf returns the storage of a pool of disks.
func storageOf(p *pool.Pool) *storage { return p.Storage().(*storage) }

// states returns the states of the matching disks at the last scan, which is at most a minute ago unless
// a disk is slow to answer.
func (s *storage) states() []diskState {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.seen)
}

// Scan implements pool.Storage: it inspects all matching disks.
func (s *storage) Scan() error {
	s.scanning.Lock()
	defer s.scanning.Unlock()
	found, err := blockdev.FindDisks(s.match)
	if err != nil {
		return fmt.Errorf("pool %q: disks.match: %w", s.cfg.Name, err)
	}
	seen, err := s.inspect(found)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen = seen
	return nil
}

// rescan inspects one disk again after a call has changed it.
func (s *storage) rescan(path string) {
	s.scanning.Lock()
	defer s.scanning.Unlock()
	found, err := blockdev.FindDisks([]string{path})
	if err != nil || len(found) == 0 {
		return // the next scan inspects the disk again
	}
	if seen, err := s.inspect(found); err == nil {
		s.replaceState(seen[0])
	}
}

// replaceState replaces the state of one disk.
func (s *storage) replaceState(current diskState) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.seen {
		if s.seen[i].disk.Same(current.disk) {
			s.seen[i] = current
		}
	}
}

// inspect determines the states of disks. A disk with a volume belongs to the pool of that volume,
// even if other pools match it. The records are read after all marks, because a record is written
// before the mark of its disk, and removed after the mark.
func (s *storage) inspect(found []blockdev.Disk) ([]diskState, error) {
	seen, marks := make([]diskState, len(found)), make([]blockdev.Mark, len(found))
	var group sync.WaitGroup
	for i, d := range found {
		group.Go(func() {
			f := d.Inspect()
			seen[i], marks[i] = diskState{disk: d, reason: f.Reason, detail: f.Detail}, f.Mark
		})
	}
	group.Wait()
	records, unreadable := s.records()
	for i, d := range found {
		if seen[i].reason == blockdev.DiskClaimed {
			if seen[i] = s.claimedState(d, marks[i], records[marks[i].GUID.String()], unreadable); seen[i].reason != diskOrphaned {
				continue
			}
		}
		other, err := s.earlierPool(d) // to which a disk without a known volume belongs
		if err != nil {
			return nil, err
		}
		if other != "" {
			seen[i] = diskState{disk: d, reason: diskOtherPool, detail: fmt.Sprintf("pools %q and %q both match the disk: it belongs to the first pool", other, s.cfg.Name)}
		}
	}
	return seen, nil
}

// earlierPool returns the name of the pool that matches a disk and is earlier in the configuration;
// empty if there is none.
func (s *storage) earlierPool(d blockdev.Disk) (string, error) {
	for _, other := range s.cfg.Earlier() {
		disks, err := blockdev.FindDisks(other.Section.(*Disks).Match)
		if err != nil {
			return "", err
		}
		if slices.ContainsFunc(disks, d.OneDisk) {
			return other.Name, nil
		}
	}
	return "", nil
}

// record is the record of a volume and the name of its pool.
type record struct {
	pool.Recorded
	pool string
}

// records returns the records of all pools of disks that were ever configured, by the GUID of the disk.
// If several records have the same GUID, a record of this pool takes precedence. unreadable contains the
// errors of the records that cannot be read.
func (s *storage) records() (byGUID map[string]record, unreadable []error) {
	byGUID = map[string]record{}
	parent := filepath.Dir(s.cfg.Directory.Path)
	add := func(name string) {
		found, errs := pool.RecordsIn(forms, filepath.Join(parent, name))
		unreadable = append(unreadable, errs...)
		for _, r := range found {
			byGUID[sectionOf(r.Volume).GUID] = record{r, name}
		}
	}
	pools, err := os.ReadDir(parent)
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // the directory is missing until the first pool is opened
		unreadable = append(unreadable, err)
	}
	for _, other := range pools {
		add(other.Name())
	}
	add(s.cfg.Name)
	return byGUID, unreadable
}

// claimedState returns the state of a disk with a mark. While a record cannot be read, no disk is
// reported as orphaned, because the unreadable record may be that of the disk, and the advice for an
// orphaned disk destroys its data.
func (s *storage) claimedState(d blockdev.Disk, m blockdev.Mark, r record, unreadable []error) diskState {
	name := filepath.Base(r.Folder)
	switch {
	case r.Folder == "" && len(unreadable) > 0:
		return diskState{disk: d, reason: blockdev.DiskClaimed, detail: fmt.Sprintf("claimed as %s (volume %s), and a record that may belong to the disk cannot be read (%v): restore that record from a backup, or run the driver that wrote it; do not clear the disk", m.GUID, m.Name, unreadable[0])}
	case r.Folder == "":
		return diskState{disk: d, reason: diskOrphaned, detail: fmt.Sprintf("claimed as %s (volume %s), but no pool of this driver has a record with this GUID: restore the records from a backup; or if the data is not needed and no other driver uses the disk: %s", m.GUID, m.Name, d.Clearing())}
	case r.pool != s.cfg.Name:
		return diskState{disk: d, reason: diskOtherPool, detail: fmt.Sprintf("the disk contains volume %s of pool %q (records in %s): if that is an older name of this pool, use that name again", name, r.pool, filepath.Join(filepath.Dir(s.cfg.Directory.Path), r.pool))}
	case !r.Trashed:
		return diskState{disk: d, reason: blockdev.DiskClaimed, detail: "volume " + r.Volume.ID.Name}
	}
	wiped := min(backend.WipedOffset(os.DirFS(r.Folder)), d.Size)
	return diskState{
		disk: d, reason: diskWiping, wiped: wiped,
		detail: fmt.Sprintf("of a deleted volume, in the trash as %s: %d%% wiped", name, wiped*100/d.Size),
	}
}

// Usage implements pool.Storage. A disk counts with the size of its data partition.
func (s *storage) Usage(u ledger.Usage) ledger.Usage {
	for _, st := range s.states() {
		if st.reason == blockdev.DiskFree {
			u.Room += st.disk.Room()
			u.Largest = max(u.Largest, st.disk.Room())
		}
	}
	u.Used, u.Free, u.Total = u.Promised, u.Room, u.Promised+u.Room
	return u
}

// Find implements pool.Storage.
func (s *storage) Find(v volume.Volume) (device string, used int64, err error) {
	d, _, err := s.locate(v)
	return d.Path, v.StorageSize(), err
}

// Devices implements pool.Storage.
func (s *storage) Devices() []pool.Device {
	var devices []pool.Device
	for _, st := range s.states() {
		d := pool.Device{Path: st.disk.Path, Size: st.disk.Size, State: string(st.reason), Detail: st.detail}
		switch st.reason {
		case diskOrphaned:
			d.Advice = "no volume is created on the disk until it is cleared"
		case diskOtherPool:
			d.Advice = "change disks.match of one of the two pools"
		case blockdev.DiskUnreadable:
			d.Advice = "check the kernel log and the disk's own log (smartctl)"
		case diskWiping:
			d.Unwiped = st.disk.Size - st.wiped
		default: // free, claimed by a volume, or in use by another program
		}
		devices = append(devices, d)
	}
	return devices
}

// Summary implements pool.Storage.
func (s *storage) Summary(u ledger.Usage) (found, advice string) {
	all, free := s.states(), 0
	for _, st := range all {
		if st.reason == blockdev.DiskFree {
			free++
		}
	}
	switch links := blockdev.BrokenLinks(s.match); {
	case len(all) == 0 && len(links) > 0:
		return "no disk matches disks.match, because " + links[0] + " is a link to a path that does not exist for the driver", "name device nodes, or links to paths below /dev: in a container, the driver has only /dev of the host"
	case len(all) == 0:
		return "no disk matches disks.match", "correct disks.match in the configuration; in a container, mount the host's /dev"
	case free == 0:
		return "none of the disks is free", "no volume can be created: delete volumes, or add disks; the list shows the state of each disk"
	}
	return fmt.Sprintf("%d of %d disks are free, the largest with %s for a volume", free, len(all), volume.FormatSize(u.Largest)), ""
}

// locate finds the disk of a volume. The disk need not match the configuration. It returns
// ErrUnavailable if the disk is missing, ErrDamaged if both copies of its mark are damaged, and
// ErrPrecondition if two disks have the mark.
func (s *storage) locate(v volume.Volume) (blockdev.Disk, blockdev.Mark, error) {
	d, m, err := blockdev.SearchClaim(s.match, sectionOf(v).GUID)
	return d, m, s.explain(v, d, m, err)
}

// locateForChange finds the disk of a volume for a caller that changes the disk. In contrast to locate,
// the disk must match the configuration and have the recorded identity. It also returns ErrUnavailable if
// a disk that may be the volume's cannot be read, and ErrPrecondition if another disk has the mark.
func (s *storage) locateForChange(v volume.Volume) (blockdev.Disk, error) {
	d, m, err := blockdev.FindClaim(s.match, claimed(v))
	return d, s.explain(v, d, m, err)
}

// claimed returns what the record of a volume says about its disk.
func claimed(v volume.Volume) blockdev.Claimed {
	return blockdev.Claimed{GUID: sectionOf(v).GUID, Identity: sectionOf(v).Identity}
}

// explain adds the remedy to an error of locate or locateForChange. It returns ErrDamaged for a mark that
// is not complete.
func (s *storage) explain(v volume.Volume, d blockdev.Disk, m blockdev.Mark, err error) error {
	switch {
	case err == nil && !m.Complete:
		return volume.Errorf(volume.ErrDamaged, "volume %s: the partition table of its disk %s is damaged at both ends: restore it (one partition of %d bytes from byte %d on, with GUID %s), or if the data is not needed: %s; nothing was changed", v.ID, d.Path, v.StorageSize(), volume.MiB, sectionOf(v).GUID, d.Clearing())
	case errors.Is(err, blockdev.ErrNoMark):
		return volume.Errorf(volume.ErrUnavailable, "volume %s: %w: find out which program wrote to the disk; nothing was changed", v.ID, err)
	case errors.Is(err, blockdev.ErrDiskUnreadable):
		return volume.Errorf(volume.ErrUnavailable, "volume %s: %w: remove that disk from the machine, or read in dmesg why it fails", v.ID, err)
	case errors.Is(err, blockdev.ErrDiskGone):
		return volume.Errorf(volume.ErrUnavailable, "volume %s: its disk is missing (%w): insert the disk again, or read in dmesg why the kernel removed it", v.ID, err)
	case errors.Is(err, blockdev.ErrDiskBusy):
		return volume.Errorf(volume.ErrPrecondition, "volume %s: %w: remove one of the two disks from the machine", v.ID, err)
	case errors.Is(err, blockdev.ErrDiskOther):
		return volume.Errorf(volume.ErrPrecondition, "volume %s: %w: remove the copy from the machine, or if it replaces the disk permanently, set identity to that value in %s", v.ID, err, s.cfg.RecordPath(v.ID.Name))
	}
	return err
}
