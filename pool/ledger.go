package pool

import (
	"context"
	"errors"
	"maps"
	"math"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/trivet-csi/trivet/quota"
	"github.com/trivet-csi/trivet/volume"
)

// ledger counts what was promised: for each volume what its record says, or what
// a call under way has reserved for it, those in the trash included until their
// space is free. What it holds can be read from the disk again; it is changed by
// what is true of one volume, never by a difference.
type ledger struct {
	// The lock is that of all ledgers on the filesystem.
	*filesystem
	// pool is nil until the pool's directory is open; counted: its volumes have been read.
	pool    *Pool
	counted bool
	// used is what the pool's volumes use, and foreignHere what others use of what
	// statfs(2) shows of the pool's directory, as last measured.
	used, foreignHere int64

	stakes   map[string]stake // by the volume's folder, below the pool
	promised int64
	// snapshots counts them, sets the folders that they are in.
	snapshots, sets int
	// attached are the controller-published volumes of a node-local pool, by folder.
	attached map[string]bool
	// pending are the folders that this process is making, growing or removing, and
	// touched, while the folders are read, all that were pending at any moment of
	// that: what was read of them is not the last word.
	pending, touched map[string]bool
	readers          int
}

// newLedger is the ledger of a pool that shares its filesystem with no other.
func newLedger() *ledger { return new(filesystem).join() }

// stake is what a volume has in the ledger.
type stake struct {
	backend string
	bytes   int64
	// subDir is the directory that it has among others' in the pool, and retain
	// whether it outlives the volume; empty: none.
	subDir string
	retain bool
	// disk is the GUID of the volume's disk; empty: it is none.
	disk string
	// quota is what limits it; zero: nothing. unmeasured: it is a directory, and what it
	// uses is not known.
	quota      volume.Quota
	unmeasured bool
	// snapshots are those of a set; nil for a volume.
	snapshots []volume.Snapshot
	// shared is what a volume shared with its source when it was made, in bytes, and
	// cloned whether it was made of one.
	shared int64
	cloned bool
	// owners have written what it shared, and that counts with them.
	owners []volume.ID
	// unread: which directory that is nobody knows, for the record cannot be read.
	unread bool
	// ino is the inode number of the volume's folder, as it was before the record was
	// read; 0: not known. Another is another volume's of that name.
	ino uint64
}

func stakeOf(v volume.Volume) stake {
	s := stake{backend: v.ID.Backend, bytes: v.Capacity}
	if v.Source != nil {
		s.cloned, s.shared, s.owners = true, v.Source.Shared, v.Source.Owners
	}
	if len(s.owners) > 0 { // they may have as much beyond their size; see limitOf
		s.bytes += s.shared
	}
	if v.Disk != nil {
		s.disk = v.Disk.GUID
	}
	if v.Directory != nil {
		s.subDir, s.retain = v.Directory.SubDir, v.Directory.OnDelete == volume.OnDeleteRetain
		s.unmeasured = v.Directory.Quota == nil
		if q := v.Directory.Quota; q != nil {
			s.quota = *q
		}
	}
	return s
}

// trashed is the stake of a volume that was deleted.
func (s stake) trashed() stake {
	s.subDir, s.retain, s.unread = "", false, false
	return s
}

func stakeOfSet(s volume.SnapshotSet) stake {
	return stake{backend: s.ID.Backend, bytes: s.Bytes(), snapshots: slices.Clone(s.Snapshots)}
}

// writers are the volumes whose limits depend on this one's being there: they have written
// what it shares, or its snapshots have.
func (s stake) writers() []volume.ID {
	all := s.owners
	for _, one := range s.snapshots {
		if !one.Directory {
			continue
		}
		all = append(slices.Clip(all), one.Writers()...)
	}
	return all
}

func volumeDir(name string) string { return volumesDir + "/" + name }

// set is what the ledger holds of a volume from now on.
func (l *ledger) set(dir string, s stake) {
	have := l.stakes[dir]
	l.promised += s.bytes - have.bytes
	l.snapshots += len(s.snapshots) - len(have.snapshots)
	l.sets += sets(s) - sets(have)
	if s.ino == 0 {
		s.ino = have.ino
	}
	l.stakes[dir] = s
}

// sets is 1 for what is a set of snapshots, else 0.
func sets(s stake) int {
	if s.snapshots != nil {
		return 1
	}
	return 0
}

// learn sets what the ledger holds of a volume to what its record says.
func (l *ledger) learn(v volume.Volume) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.set(volumeDir(v.ID.Name), stakeOf(v))
}

func (l *ledger) remove(dir string) {
	have := l.stakes[dir]
	l.promised -= have.bytes
	l.snapshots -= len(have.snapshots)
	l.sets -= sets(have)
	delete(l.stakes, dir)
}

// begin marks a folder as pending until the returned function is called.
func (l *ledger) begin(dir string) (end func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pending[dir], l.touched[dir] = true, true
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.pending, dir)
	}
}

// hasTrash tells whether deleted volumes are still counted.
func (l *ledger) hasTrash() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for dir, s := range l.stakes {
		if s.bytes > 0 && strings.HasPrefix(dir, trashDir+"/") {
			return true
		}
	}
	return false
}

// read begins a reading of the folders, which ends when the function is called. known
// is what the ledger has.
func (l *ledger) read() (known map[string]stake, end func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.readers++; l.readers == 1 {
		l.touched = maps.Clone(l.pending)
	}
	return maps.Clone(l.stakes), func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.readers--
	}
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
	// Room is what can still be promised, Largest what a single volume can have of it.
	Room, Largest int64
	// Reserve is what is kept from being promised.
	Reserve int64
	// OtherPools is what other pools on the filesystem have of it: what they promised,
	// divided by their overcommit, or what their volumes use, if that is more.
	OtherPools int64
	Volumes    int
	// Snapshots counts those of groups one by one.
	Snapshots int
	// Copies are under way, and Copied is what copies of this process have copied since
	// it started, in bytes.
	Copies int
	Copied int64
	// Trash counts what was deleted and is not removed, TrashStuck those of it that could
	// not be removed.
	Trash, TrashStuck int
	// Full: the pool has its maxVolumes.
	Full bool
	// Attached is the number of controller-published volumes; 0 for a shared pool,
	// where it is not counted.
	Attached int
}

// Low tells whether thin volumes of this pool may soon fail to get the space
// that was promised to them: what is free has fallen below the reserve.
func (u Usage) Low() bool { return u.Free < u.Reserve }

// Usage reads the pool's capacity. Of a shared pool what other processes promised
// in the last minute may be missing, and in one that serves a node alone all that
// is promised.
func (p *Pool) Usage() (Usage, error) {
	s, err := p.space()
	if err != nil {
		return Usage{}, err
	}
	if p.Shared() {
		p.dropRemovedTrash()
	}
	p.ledger.mu.Lock()
	defer p.ledger.mu.Unlock()
	u := p.usageLocked(s)
	u.Trash, u.TrashStuck = p.reaper.count(), len(p.reaper.stuck())
	return u, nil
}

// VolumesByBackend counts the volumes of each backend, those in the trash
// included.
func (p *Pool) VolumesByBackend() map[string]int {
	p.ledger.mu.Lock()
	defer p.ledger.mu.Unlock()
	n := map[string]int{}
	for _, s := range p.ledger.stakes {
		if s.snapshots == nil {
			n[s.backend]++
		}
	}
	return n
}

// AttachedCount is the number of controller-published volumes of a backend; 0 for a
// shared pool: where each of its volumes is published is on the export alone.
func (p *Pool) AttachedCount(backend string) int {
	p.ledger.mu.Lock()
	defer p.ledger.mu.Unlock()
	n := 0
	for dir := range p.ledger.attached {
		if p.ledger.stakes[dir].backend == backend {
			n++
		}
	}
	return n
}

func (p *Pool) usageLocked(s space) Usage {
	u := Usage{
		Total: s.here.total, Free: s.here.free,
		Promised: p.ledger.promised, Attached: len(p.ledger.attached),
		Volumes: len(p.ledger.stakes) - p.ledger.sets, Snapshots: p.ledger.snapshots,
	}
	u.Copies, u.Copied = p.jobs.state()
	if p.OfDisks() {
		return p.usageOfDisks(u)
	}
	u.Used = s.here.total - u.Free
	if p.limits.size > 0 {
		u.Total = min(u.Total, p.limits.size)
	}
	u.Reserve = p.limits.reserve.of(u.Total)
	u.OtherPools = p.ledger.otherPools(p.ledger)
	base := min(u.Total, p.ownShare(s, u)) - u.Reserve
	promisable := math.Max(0, float64(base)*p.cfg.overcommit())
	u.Full = p.full(u)
	u.Room = max(0, int64(math.Min(promisable, math.MaxInt64/2))-u.Promised)
	if len(p.ledger.unread) > 0 {
		u.Room = 0
	}
	u.Largest = u.Room
	return u
}

// ownShare is what others leave to the pool. What directories hold cannot be measured
// over the wire: what a shared pool's filesystem has given away beyond all that was
// promised is theirs, or more than a volume was promised.
func (p *Pool) ownShare(s space, u Usage) int64 {
	if p.Shared() {
		return s.here.total - max(0, u.Used-u.Promised)
	}
	return min(s.here.total-p.ledger.foreignHere, s.whole.total-p.ledger.foreign-u.OtherPools)
}

// promise reserves in the ledger what a folder is to have, and lets mark show it to
// other processes: in a shared pool nobody else promises anything meanwhile.
func (p *Pool) promise(ctx context.Context, dir string, want stake, mark func() error) error {
	if p.Shared() {
		return p.promiseShared(ctx, dir, want, mark)
	}
	if err := p.reserve(dir, want); err != nil {
		return err
	}
	return mark()
}

func (p *Pool) promiseShared(ctx context.Context, dir string, want stake, mark func() error) error {
	reserve := func(r *round) error { return p.reserveShared(ctx, r, dir, want, mark) }
	err := p.inRound(ctx, reserve)
	if errors.Is(err, volume.ErrExhausted) && p.drainShared() {
		return p.inRound(ctx, reserve)
	}
	return err
}

// reserveShared refuses nothing by what another process may have given back.
func (p *Pool) reserveShared(ctx context.Context, r *round, dir string, want stake, mark func() error) error {
	if err := p.refreshed(ctx, r); err != nil {
		return err
	}
	if err := p.orReread(ctx, r, func() error { return p.tryReserve(dir, want, r.space) }); err != nil {
		return err
	}
	return mark()
}

// drainTime is how long a call waits for the trash to make room for it.
const drainTime = 5 * time.Second

// reserve promises a folder what it is to have, or says why not (ErrExhausted). What was
// deleted makes room once it is removed; that is waited for.
func (p *Pool) reserve(dir string, want stake) error {
	p.ledger.awaitRead(claimPatience)
	err := p.reserveNow(dir, want)
	if errors.Is(err, volume.ErrExhausted) {
		p.ledger.drain(drainTime)
		return p.reserveNow(dir, want)
	}
	return err
}

func (p *Pool) reserveNow(dir string, want stake) error {
	s, err := p.space()
	if err != nil {
		return err
	}
	return p.tryReserve(dir, want, s)
}

func (p *Pool) tryReserve(dir string, want stake, s space) error {
	p.ledger.mu.Lock()
	defer p.ledger.mu.Unlock()
	u := p.usageLocked(s)
	have, known := p.ledger.stakes[dir]
	if err := p.ledger.subDirFree(dir, want); err != nil {
		return err
	}
	more := want.bytes - have.bytes
	if unread, _ := p.ledger.firstUnread(); unread != "" && more > 0 {
		return volume.Errorf(volume.ErrUnavailable, "pool %q promises nothing until the volumes of pool %q on the same filesystem have been read: retry; if this lasts, see why pool %[2]q is not open (trivet doctor)", p.cfg.Name, unread)
	}
	if more > u.Room && !p.OfDisks() { // whose disk is had already
		return volume.Errorf(volume.ErrExhausted, "pool %q has room for %d bytes more (%s of %s promised, %s reserved%s), asked for are %d: delete volumes, grow the pool, or %s",
			p.cfg.Name, u.Room, volume.FormatSize(u.Promised), volume.FormatSize(u.Total), volume.FormatSize(u.Reserve), p.ledger.ofOthers(u), more, p.cfg.raiseOvercommit())
	}
	if !known && want.snapshots == nil && p.full(u) {
		return volume.Errorf(volume.ErrExhausted, "pool %q has its maxVolumes of %d: delete volumes or raise maxVolumes", p.cfg.Name, p.cfg.MaxVolumes)
	}
	p.ledger.set(dir, want)
	return nil
}

// full tells whether the pool may have no more volumes.
func (p *Pool) full(u Usage) bool { return p.cfg.MaxVolumes > 0 && u.Volumes >= p.cfg.MaxVolumes }

// recount sets what the ledger holds of a volume to what the disk says. A call
// that failed may have done its work all the same.
func (p *Pool) recount(name string) {
	s, err := p.readStake(name)
	p.recounted(volumeDir(name), s, err)
}

// recounted sets what the ledger holds of a folder to what was read of it.
func (p *Pool) recounted(dir string, s stake, err error) {
	if p.Shared() && errors.Is(err, volume.ErrNotFound) && p.checkExport() != nil {
		return
	}
	p.ledger.mu.Lock()
	defer p.ledger.mu.Unlock()
	p.ledger.follow(dir, s, err)
}

// follow sets what the ledger holds of a volume to what readStake said.
func (l *ledger) follow(dir string, s stake, err error) {
	switch {
	case err == nil:
		l.set(dir, s)
	case errors.Is(err, volume.ErrNotFound):
		l.remove(dir)
	}
}

// readStake reads what a volume has: ErrNotFound if there is none, ErrUnavailable if
// that cannot be told. The volumes of a direct pool that another of its names was
// used for are the server's as much. What has a record that cannot be read counts
// with the size of its image; without an image, or data in its own folder, it may
// have a directory anywhere.
func (p *Pool) readStake(name string) (stake, error) {
	v, err := p.readRecord(name)
	if err == nil && (v.ID == p.ID(v.ID.Backend, name) || p.alias(v.ID, name)) {
		return stakeOf(v), nil
	}
	if errors.Is(err, volume.ErrNotFound) || errors.Is(err, volume.ErrUnavailable) {
		return stake{}, err
	}
	s := stake{backend: unknownBackend}
	if image, err := statBeneath(p.volumes, name+"/"+ImageFile); err == nil {
		s.bytes = image.Size
		return s, nil
	}
	_, err = statBeneath(p.volumes, name+"/"+DataDir)
	s.unread = err != nil
	return s, nil
}

// alias tells whether an ID is of this pool's volume name under another direct name
// of the export.
func (p *Pool) alias(id volume.ID, name string) bool {
	_, _, direct := volume.ParseDirectPool(p.cfg.Name)
	_, _, madeDirect := volume.ParseDirectPool(id.Pool)
	return direct && madeDirect && id.Name == name
}

// rebuildLedger adds up the records on the disk.
func (p *Pool) rebuildLedger(ctx context.Context) error {
	if p.Shared() {
		return p.refresh(ctx, func(string) bool { return true })
	}
	names, err := namesIn(p.volumes, ".")
	if err != nil {
		return err
	}
	trashed, err := p.trashed()
	if err != nil {
		return err
	}
	group, counting := errgroup.WithContext(ctx)
	const readers = 4
	for r := range readers {
		group.Go(func() error {
			for i := r; i < len(names) && counting.Err() == nil; i += readers {
				p.count(names[i])
			}
			return counting.Err()
		})
	}
	if err := errors.Join(group.Wait(), p.countSnapshots(ctx)); err != nil {
		return err
	}
	p.ledger.mu.Lock()
	for _, t := range trashed {
		p.ledger.set(trashDir+"/"+t.name, t.stake)
	}
	p.ledger.counted = true
	p.ledger.mu.Unlock()
	return p.measureForeign()
}

// count adds one volume to the ledger. What cannot be read may be a volume.
func (p *Pool) count(name string) {
	s, err := p.readStake(name)
	if errors.Is(err, volume.ErrUnavailable) {
		s, err = stake{backend: unknownBackend, unread: true}, nil
	}
	p.recounted(volumeDir(name), s, err)
	if p.isAttached(name) {
		p.ledger.mu.Lock()
		defer p.ledger.mu.Unlock()
		p.ledger.attached[volumeDir(name)] = true
	}
}

// measureForeign finds out how much of the pool's filesystem is used by others:
// all that is allocated there, less what the volumes of its pools have. Of a directory
// that nothing limits that is not known: it counts with all that it was promised.
func (p *Pool) measureForeign() error {
	if p.OfDisks() {
		return p.scan()
	}
	return p.ledger.measure()
}

// measure adds up what the pool's volumes use, in bytes.
func (p *Pool) measure() (ours int64, err error) {
	p.ledger.mu.Lock()
	stakes := maps.Clone(p.ledger.stakes)
	p.ledger.mu.Unlock()
	err = p.withQuota(func(fs *quota.FS) error {
		for dir, s := range stakes {
			ours += p.measureOne(fs, dir, s)
		}
		return nil
	})
	return ours, err
}

// measureOne takes a volume for full whose limit cannot be asked about: the limit is of
// another filesystem that the pool was copied from, or switched off now.
func (p *Pool) measureOne(fs *quota.FS, dir string, s stake) int64 {
	if s.snapshots != nil {
		return p.measureSet(dir, s)
	}
	if s.cloned && s.quota == (volume.Quota{}) && !s.unmeasured {
		return p.unshared(dir + "/" + ImageFile)
	}
	if s.quota == (volume.Quota{}) && !s.unmeasured {
		return allocated(p.dir, dir+"/"+ImageFile)
	}
	if s.quota.Kind != string(fs.Kind()) {
		return s.bytes
	}
	u, err := fs.Usage(s.quota.ID)
	if err != nil {
		return s.bytes
	}
	if len(s.owners) > 0 { // it has none of what it shared
		return u.Bytes
	}
	return max(0, u.Bytes-s.shared)
}

// allocated is the disk space of one file in bytes; 0 if there is none.
func allocated(dir *os.File, path string) int64 {
	st, err := statBeneath(dir, path)
	if err != nil {
		return 0
	}
	return st.Blocks * 512
}
