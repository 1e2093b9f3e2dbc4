package pool

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/blockdev"
	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/volume"
)

// Disks is a pool of whole disks of this node: a volume is one of them. Its records
// lie in the state directory.
type Disks struct {
	// Match are globs of device nodes, such as /dev/disk/by-id/nvme-*.
	Match []string `yaml:"match"`
}

// disksDir is where the records of disks pools lie, below the state directory.
const disksDir = "disks"

// What an entry of the trash says of its disk, by the name of an empty file.
const (
	// wipedFile: nothing of the volume is on it any more, and its mark may be gone too.
	wipedFile = "wiped"
	// unusedFile: it was being marked for a volume that never was, and may not have been.
	unusedFile = "unused"
	// wipingFile has the offset in bytes up to which the disk is zero.
	wipingFile = "wiping"
	// copyingFile is in the folder of a volume that is being made: another's data is
	// being copied to the disk.
	copyingFile = "copying"
)

func (d *Disks) validate() (key string, err error) {
	if d == nil {
		return "", nil
	}
	if len(d.Match) == 0 {
		return "disks.match", volume.Errorf(volume.ErrInvalid, "disks.match is empty: name the disks by globs, such as /dev/disk/by-id/nvme-*")
	}
	for _, glob := range d.Match {
		if _, err := filepath.Match(glob, ""); err != nil || !strings.HasPrefix(glob, "/dev/") {
			return "disks.match", volume.Errorf(volume.ErrInvalid, "disks.match %q: want a glob below /dev, such as /dev/disk/by-id/nvme-*", glob)
		}
	}
	return "", nil
}

// Arrange completes the configurations of the pools of one node by what each does not
// say: which pools come before it, whose the disks are that both match.
func Arrange(configs []Config) []Config {
	configs = slices.Clone(configs)
	var earlier []Config
	for i, c := range configs {
		if c.Disks != nil {
			configs[i].earlier = slices.Clone(earlier)
			earlier = append(earlier, c)
		}
	}
	return configs
}

// within is the configuration with the place of a disks pool's records.
func (c Config) within(stateDir string) Config {
	if c.Disks != nil {
		c.Directory.Path = RecordsOfDisks(c, stateDir)
	}
	return c
}

// RecordsOfDisks is where the records of a pool of disks lie.
func RecordsOfDisks(c Config, stateDir string) string {
	return filepath.Join(stateDir, disksDir, c.Name)
}

// OfDisks tells whether the pool's volumes are whole disks.
func (p *Pool) OfDisks() bool { return p.cfg.Disks != nil }

// The states of a disk beside those of package blockdev. One of a volume or in the
// trash is claimed.
const (
	// DiskOrphaned has a mark, and nothing here has a record of it.
	DiskOrphaned blockdev.Reason = "orphaned"
	// DiskWiping was of a volume that is deleted.
	DiskWiping blockdev.Reason = "wiping"
	// DiskOtherPool has a volume of another pool, or is an earlier one's by the
	// configuration.
	DiskOtherPool blockdev.Reason = "other-pool"
)

// DiskState is a disk that matches, and how it is.
type DiskState struct {
	Disk  blockdev.Disk
	State blockdev.Reason
	// Detail is for people; empty for a free disk.
	Detail string
	// Volume is the name of the volume that has it; empty: none.
	Volume string
	// Wiped is how many bytes of a disk that is being wiped are zero.
	Wiped int64
}

// disks is what a pool of disks knows of them.
type disks struct {
	// claiming: one call at a time looks for a free disk, and marks it.
	claiming chan struct{}
	// looking: what is seen of a disk is not replaced by what was seen before.
	looking sync.Mutex

	mu   sync.Mutex
	seen []DiskState
}

// DiskStates are the disks that match, as they were last looked at: a minute ago at
// most, unless a disk takes longer to answer.
func (p *Pool) DiskStates() []DiskState {
	p.disks.mu.Lock()
	defer p.disks.mu.Unlock()
	return slices.Clone(p.disks.seen)
}

// scan looks at all disks that match.
func (p *Pool) scan() error {
	p.disks.looking.Lock()
	defer p.disks.looking.Unlock()
	found, err := blockdev.FindDisks(p.cfg.Disks.Match)
	if err != nil {
		return fmt.Errorf("pool %q: disks.match: %w", p.cfg.Name, err)
	}
	seen := make([]DiskState, len(found))
	var all errgroup.Group
	for i, d := range found {
		all.Go(func() (err error) {
			seen[i], err = p.inspect(d)
			return err
		})
	}
	if err := all.Wait(); err != nil {
		return err
	}
	p.disks.mu.Lock()
	defer p.disks.mu.Unlock()
	p.disks.seen = seen
	return nil
}

// rescan looks at one disk again, of which a call has changed something.
func (p *Pool) rescan(path string) {
	p.disks.looking.Lock()
	defer p.disks.looking.Unlock()
	found, err := blockdev.FindDisks([]string{path})
	if err != nil || len(found) == 0 {
		return // the next scan tells
	}
	if s, err := p.inspect(found[0]); err == nil {
		p.disks.saw(s)
	}
}

func (d *disks) saw(s DiskState) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for i := range d.seen {
		if d.seen[i].Disk.Same(s.Disk) {
			d.seen[i] = s
		}
	}
}

// inspect looks at a disk. One that has a volume is that volume's, whichever pools match
// it.
func (p *Pool) inspect(d blockdev.Disk) (DiskState, error) {
	s := DiskState{Disk: d}
	f := d.Inspect()
	s.State, s.Detail = f.Reason, f.Detail
	if f.Reason == blockdev.DiskClaimed {
		if s = p.claimant(d, f.Mark); s.State != DiskOrphaned {
			return s, nil
		}
	}
	other, err := p.cfg.earlierWith(d)
	if err != nil {
		return DiskState{}, err
	}
	if other != "" {
		return DiskState{Disk: d, State: DiskOtherPool, Detail: fmt.Sprintf("pools %q and %q both match it: it is the first one's", other, p.cfg.Name)}, nil
	}
	return s, nil
}

// earlierWith is the pool before this one that has a disk; empty: none.
func (c Config) earlierWith(d blockdev.Disk) (string, error) {
	for _, other := range c.earlier {
		theirs, err := blockdev.FindDisks(other.Disks.Match)
		if err != nil {
			return "", err
		}
		if slices.ContainsFunc(theirs, d.OneDisk) {
			return other.Name, nil
		}
	}
	return "", nil
}

// claimant finds what has a disk with a mark.
func (p *Pool) claimant(d blockdev.Disk, m blockdev.Mark) DiskState {
	pool, dir := p.cfg.Name, p.ledger.withDisk(m.GUID.String())
	if dir == "" {
		pool, dir = p.recordedWith(m.GUID.String())
	}
	name, live := strings.CutPrefix(dir, volumesDir+"/")
	switch {
	case dir == "":
		return DiskState{Disk: d, State: DiskOrphaned, Detail: fmt.Sprintf("claimed as %s (%s), of which no pool here has a record: put the records back, or if nothing on it is needed any more, and no other driver has it: %s", m.GUID, m.Name, d.Clearing())}
	case pool != p.cfg.Name:
		return DiskState{Disk: d, State: DiskOtherPool, Detail: fmt.Sprintf("it is %s of pool %q (%s): if that is this one under an older name, give it that again", filepath.Base(dir), pool, filepath.Join(filepath.Dir(p.cfg.Directory.Path), pool))}
	case live:
		return DiskState{Disk: d, State: blockdev.DiskClaimed, Volume: name, Detail: "volume " + name}
	}
	wiped := min(p.wipedUpTo(p.dir, dir+"/"+wipingFile), d.Size)
	return DiskState{
		Disk: d, State: DiskWiping, Wiped: wiped,
		Detail: fmt.Sprintf("of a deleted volume, in the trash as %s: %d%% wiped", filepath.Base(dir), wiped*100/d.Size),
	}
}

// withDisk is the folder of what has a disk; empty: none.
func (l *ledger) withDisk(guid string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	for dir, s := range l.stakes {
		if s.disk == guid {
			return dir
		}
	}
	return ""
}

// recordedWith looks for what has a disk in the records of all pools of disks that were
// ever in the configuration: its pool, and its folder there; empty: none.
func (p *Pool) recordedWith(guid string) (pool, dir string) {
	all := os.DirFS(filepath.Dir(p.cfg.Directory.Path))
	for _, kind := range []string{volumesDir, tmpDir, trashDir} {
		records, _ := fs.Glob(all, "*/"+kind+"/*/"+recordFile) // of a good pattern
		for _, record := range records {
			b, err := fs.ReadFile(all, record)
			if err != nil {
				continue
			}
			if v, err := volume.ParseRecord(b); err == nil && v.Disk != nil && v.Disk.GUID == guid {
				pool, dir, _ = strings.Cut(filepath.Dir(record), "/")
				return pool, dir
			}
		}
	}
	return "", ""
}

// Claim is a free disk that is held for a volume which is being made. Until it is closed
// nobody else in the pool looks for one: two names may lead to it.
type Claim struct {
	*blockdev.Claim
	claiming chan struct{}
}

// Close lets go of the disk.
func (c *Claim) Close() error {
	defer func() { <-c.claiming }()
	return c.Claim.Close()
}

// ClaimDisk takes the smallest free disk that holds a range, and at least some bytes;
// the caller closes the claim. ErrExhausted if there is none. What was deleted makes
// room once it is wiped; that is waited for.
func (p *Pool) ClaimDisk(ctx context.Context, r volume.Range, least int64) (*Claim, error) {
	if err := r.Validate(); err != nil {
		return nil, err
	}
	if r.Limit > 0 && r.Limit < least {
		return nil, volume.Errorf(volume.ErrOutOfRange, "capacity_range.limit_bytes %d: the smallest volume of this kind is %d bytes: raise it", r.Limit, least)
	}
	c, err := p.claimAfter(ctx, p.Check, r, least)
	if !errors.Is(err, volume.ErrExhausted) {
		return c, err
	}
	// Wiping takes longer than the wait: calls for disks that are free go on meanwhile.
	if p.ledger.hasTrash() {
		p.reaper.drain(drainTime)
	}
	return p.claimAfter(ctx, p.scan, r, least)
}

// claimAfter takes a free disk after a step, while no other call does.
func (p *Pool) claimAfter(ctx context.Context, step func() error, r volume.Range, least int64) (*Claim, error) {
	select {
	case p.disks.claiming <- struct{}{}:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	err := step()
	if err == nil {
		var c *blockdev.Claim
		if c, err = p.claimDisk(ctx, r, least); err == nil {
			return &Claim{c, p.disks.claiming}, nil
		}
	}
	<-p.disks.claiming
	return nil, err
}

// claimDisk takes a disk that was free when it was last looked at.
func (p *Pool) claimDisk(ctx context.Context, r volume.Range, least int64) (*blockdev.Claim, error) {
	all := p.DiskStates()
	slices.SortStableFunc(all, func(a, b DiskState) int { return int(min(1, max(-1, a.Disk.Room()-b.Disk.Room()))) })
	free, wiping := 0, 0
	for _, s := range all {
		switch s.State {
		case blockdev.DiskFree:
			free++
		case DiskWiping:
			wiping++
			continue
		default:
			continue
		}
		if room := s.Disk.Room(); room < least || !r.Holds(room) {
			continue
		}
		c, err := s.Disk.Claim(ctx)
		if err == nil {
			return c, nil
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		klog.FromContext(ctx).Error(err, "Claiming a free disk failed; the next one is tried", "pool", p.cfg.Name, "disk", s.Disk.Path)
	}
	return nil, volume.Errorf(volume.ErrExhausted, "pool %q has no free disk of at least %d bytes%s: of %d disks that match, %d are free and %d are being wiped: add disks, delete volumes, wait until disks are wiped, or ask for another size (trivet doctor describes each disk)",
		p.cfg.Name, max(r.Required, least), atMost(r.Limit), len(all), free, wiping)
}

func atMost(limit int64) string {
	if limit == 0 {
		return ""
	}
	return fmt.Sprintf(" and at most %d", limit)
}

// CreateDisk is Create for a volume that is the disk of a claim. ErrDiskRefuses if that
// cannot be written: it is not taken for free until it is next looked at, and another may
// be claimed. With fill the volume has content: fill writes it to the disk, in as much
// time as that takes, and notes in dir how far its filesystem is.
func (p *Pool) CreateDisk(ctx context.Context, v volume.Volume, c *Claim, fill func(dir *os.Root) error) error {
	marked := sync.OnceFunc(func() {
		_ = c.Claim.Close() // what it holds can be looked at from now on
		p.rescan(c.Disk.Path)
		<-c.claiming
	})
	err := p.make(ctx, v, func(dir *os.Root) error {
		if err := c.Mark(v.CoName); err != nil || fill == nil {
			return err
		}
		marked()
		return fillDisk(dir, fill)
	}, func(string) error { return nil })
	marked()
	if errors.Is(err, blockdev.ErrDiskRefuses) {
		p.disks.saw(DiskState{Disk: c.Disk, State: blockdev.DiskUnreadable, Detail: err.Error()})
	}
	return err
}

// fillDisk fills a disk. Until that is done it is wiped if nothing comes of the volume.
func fillDisk(dir *os.Root, fill func(dir *os.Root) error) error {
	if err := dir.WriteFile(copyingFile, nil, 0o600); err != nil {
		return err
	}
	if err := atomicfile.Sync(dir, "."); err != nil {
		return err
	}
	if err := fill(dir); err != nil {
		return err
	}
	if err := dir.Remove(copyingFile); err != nil {
		return err
	}
	return atomicfile.Sync(dir, ".")
}

// buildDisk makes a volume whose disk is marked by build. The record is durable before:
// by it a mark is known that no volume came of.
func (p *Pool) buildDisk(dir *os.Root, record []byte, build func(dir *os.Root) error) error {
	if err := dir.Mkdir(attachedDir, 0o700); err != nil {
		return err
	}
	if err := atomicfile.Write(dir, recordFile, record); err != nil {
		return err
	}
	if err := p.tmp.Sync(); err != nil {
		return err
	}
	return build(dir)
}

// discardDisk moves what was being made to the trash, where its mark is removed.
func (p *Pool) discardDisk(entry string) error {
	dir, err := openDirBeneath(p.tmp, entry)
	if err != nil {
		return err
	}
	defer dir.Close()
	filled, err := noted(dir, copyingFile)
	if err == nil && !filled {
		err = note(dir, unusedFile)
	}
	if err != nil {
		return err
	}
	return p.discard(entry)
}

// note makes an empty file in a folder, durably.
func note(folder *os.File, name string) error {
	dir, err := openRootIn(folder, ".")
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := dir.WriteFile(name, nil, 0o600); err != nil {
		return err
	}
	return atomicfile.Sync(dir, ".")
}

// FindDisk finds the disk of a volume, wherever it is now. ErrUnavailable if it is not
// there, ErrDamaged if its mark is not whole, ErrPrecondition if two disks have it.
func (p *Pool) FindDisk(v volume.Volume) (blockdev.Disk, blockdev.Mark, error) {
	d, m, err := blockdev.SearchClaim(p.cfg.Disks.Match, v.Disk.GUID)
	return d, m, p.explainDisk(v, d, m, err)
}

// OwnDisk is FindDisk for a caller that changes the disk: it has to be among those that
// match, and surely the one that was claimed. ErrUnavailable if one that may be it cannot
// be read, ErrPrecondition if what has its mark is another.
func (p *Pool) OwnDisk(v volume.Volume) (blockdev.Disk, error) {
	d, m, err := blockdev.FindClaim(p.cfg.Disks.Match, claimed(v))
	return d, p.explainDisk(v, d, m, err)
}

func claimed(v volume.Volume) blockdev.Claimed {
	return blockdev.Claimed{GUID: v.Disk.GUID, Identity: v.Disk.Identity}
}

// explainDisk says what it means that the disk of a volume was not found, or as it is.
func (p *Pool) explainDisk(v volume.Volume, d blockdev.Disk, m blockdev.Mark, err error) error {
	switch {
	case err == nil && !m.Complete:
		return volume.Errorf(volume.ErrDamaged, "volume %s: the partition table of its disk %s is damaged at both ends: restore it (one partition of %d bytes from byte %d on, with GUID %s), or if nothing on it is needed any more: %s; nothing was changed", v.ID, d.Path, v.Capacity, volume.MiB, v.Disk.GUID, d.Clearing())
	case errors.Is(err, blockdev.ErrNoMark):
		return volume.Errorf(volume.ErrUnavailable, "volume %s: %w: see what wrote to it; nothing was changed", v.ID, err)
	case errors.Is(err, blockdev.ErrDiskUnread):
		return volume.Errorf(volume.ErrUnavailable, "volume %s: %w: take it out, or see why it does not read (dmesg)", v.ID, err)
	case errors.Is(err, blockdev.ErrDiskGone):
		return volume.Errorf(volume.ErrUnavailable, "volume %s: its disk is not there (%w): put it back in, or see why the kernel lost it (dmesg)", v.ID, err)
	case errors.Is(err, blockdev.ErrDiskBusy):
		return volume.Errorf(volume.ErrPrecondition, "volume %s: %w: take one of them out", v.ID, err)
	case errors.Is(err, blockdev.ErrDiskOther):
		return volume.Errorf(volume.ErrPrecondition, "volume %s: %w: take the copy out, or if it replaces the disk for good, give identity that value in %s", v.ID, err, filepath.Join(p.cfg.Directory.Path, volumePath(v.ID.Name, recordFile)))
	}
	return err
}

// usageOfDisks is Usage of a pool of disks: what they have for data, and nothing else.
func (p *Pool) usageOfDisks(u Usage) Usage {
	for _, s := range p.DiskStates() {
		if s.State == blockdev.DiskFree {
			u.Room += s.Disk.Room()
			u.Largest = max(u.Largest, s.Disk.Room())
		}
	}
	u.Used, u.Free, u.Total = u.Promised, u.Room, u.Promised+u.Room
	u.Full = p.full(u)
	return u
}

func (p *Pool) watchDisks(ctx context.Context, log klog.Logger) {
	tick := time.NewTicker(foreignInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if err := p.scan(); err != nil {
				log.Error(err, "Looking for disks failed")
			}
		}
	}
}

// wipeDisk makes the disk of a deleted volume free.
func (p *Pool) wipeDisk(ctx context.Context, entry *os.File, name string) error {
	b, err := p.readBeneath(entry, recordFile)
	if isNotExist(err) { // the disk was wiped
		return nil
	}
	place := filepath.Join(p.cfg.Directory.Path, trashDir, name)
	if err != nil {
		return fmt.Errorf("%s: %w", place, err)
	}
	v, err := volume.ParseRecord(b)
	if err != nil || v.Disk == nil {
		return errors.Join(fmt.Errorf("%s has no record of a disk: see with trivet doctor which disk is orphaned, and remove it", place), err)
	}
	if err := p.wipeDiskOf(ctx, v, entry); err != nil {
		return fmt.Errorf("volume %s, which was deleted: %w: put its disk in as it was, and it is wiped; if it is lost, or another's now, remove %s", v.ID, err, place)
	}
	return nil
}

// wipeDiskOf wipes what is surely the volume's disk.
func (p *Pool) wipeDiskOf(ctx context.Context, v volume.Volume, entry *os.File) error {
	wiped, err := noted(entry, wipedFile)
	if err != nil {
		return err
	}
	unused, err := noted(entry, unusedFile)
	if err != nil {
		return err
	}
	d, m, err := blockdev.FindClaim(p.cfg.Disks.Match, claimed(v))
	// Of a disk that tells no identity this is all that can be known of its mark.
	unmarked := errors.Is(err, blockdev.ErrNoMark) || errors.Is(err, blockdev.ErrDiskGone) && v.Disk.Identity == ""
	switch {
	case unmarked && (wiped || unused):
		return nil
	case err != nil:
		return err
	}
	defer p.rescan(d.Path)
	switch {
	case unused && m.Used:
		return fmt.Errorf("%s has data, and by this record it never had: %s is of an older backup", d.Path, p.cfg.Directory.Path)
	case unused, wiped && (!m.Complete || m.Damaged):
		return d.Unmark(ctx, v.Disk.GUID)
	}
	err = p.wipe(ctx, d, v, entry)
	if errors.Is(err, blockdev.ErrNotBlank) { // what was zeroed is not any more
		_ = unix.Unlinkat(int(entry.Fd()), wipingFile, 0) // the next try begins anew
	}
	return err
}

// wipe wipes a disk from where an earlier call, or an earlier driver, stopped.
func (p *Pool) wipe(ctx context.Context, d blockdev.Disk, v volume.Volume, entry *os.File) error {
	dir, err := openRootIn(entry, ".")
	if err != nil {
		return err
	}
	defer dir.Close()
	var saved time.Time
	return d.Wipe(ctx, v.Disk.GUID, blockdev.WipeOptions{
		Keep:    v.Disk.Wipe == volume.WipeNone,
		Release: v.Disk.Wipe == volume.WipeDiscard,
		From:    p.wipedUpTo(entry, wipingFile),
		Progress: func(upTo int64) error {
			if time.Since(saved) < saveInterval {
				return nil
			}
			saved = time.Now()
			err := atomicfile.Write(dir, wipingFile, strconv.AppendInt(nil, upTo, 10))
			crashpoint.Here(crashpoint.ReapZeroed)
			return err
		},
		Wiped: func() error { return note(entry, wipedFile) },
	})
}

// wipedUpTo reads how far a disk is wiped. Without a good record that is nothing: to begin
// anew is safe.
func (p *Pool) wipedUpTo(dir *os.File, path string) int64 {
	b, err := p.readBeneath(dir, path)
	if err != nil {
		return 0
	}
	upTo, _ := strconv.ParseInt(string(b), 10, 64)
	return upTo
}

// saveInterval is how often it is recorded how far a disk is wiped.
const saveInterval = 30 * time.Second

func noted(entry *os.File, name string) (bool, error) {
	_, err := statBeneath(entry, name)
	if isNotExist(err) {
		return false, nil
	}
	return err == nil, err
}
