package pool

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/clone"
	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/volume"
)

const (
	// snapshotsDir has a folder for each set of snapshots, and in it one for each of
	// them, by its number.
	snapshotsDir = "snapshots"
	snapshotFile = "snapshot.json"
	// snapshotSuffix ends the names of sets that are being made.
	snapshotSuffix = ".snapshot"
)

func snapshotDir(set string) string { return snapshotsDir + "/" + set }

// SnapshotJob is the name of a set for Do and Cancel; a volume's is its own.
func SnapshotJob(set string) string { return "snapshot " + set }

// CreateSnapshots makes a set of snapshots. At the call each has in Bytes what it is
// expected to come to cost; build makes the data of all of them, each in a folder of its
// own, durable, and writes into the set what it has made. The set is committed by one
// rename, as a volume is. ErrExists if another process was faster.
func (p *Pool) CreateSnapshots(ctx context.Context, set *volume.SnapshotSet, build func(folders []*os.Root) error) error {
	if !p.Shared() {
		if err := p.Check(); err != nil {
			return err
		}
	}
	dir := snapshotDir(set.ID.Name)
	defer p.ledger.begin(dir)()
	if p.Shared() {
		set.Token = NewUUID()
	}
	err := p.createSet(context.WithoutCancel(ctx), set, build)
	if err == nil {
		err = p.SettleSnapshots()
	}
	if err != nil {
		s, unread := p.readSetStake(set.ID.Name)
		p.recounted(dir, s, unread)
	}
	return p.explain(err)
}

// SettleSnapshots is Settle for snapshots.
func (p *Pool) SettleSnapshots() error {
	if err := p.snapshots.Sync(); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.SnapshotDone)
	return nil
}

func (p *Pool) createSet(ctx context.Context, set *volume.SnapshotSet, build func(folders []*os.Root) error) error {
	entry, err := p.tmpSet(*set)
	if err != nil {
		return err
	}
	dir := snapshotDir(set.ID.Name)
	if err := p.promise(ctx, dir, stakeOfSet(*set), func() error { return p.makeTmp(ctx, entry) }); err != nil {
		return err
	}
	err = p.buildSet(ctx, entry, set, build)
	if err == nil {
		crashpoint.Here(crashpoint.SnapshotBuilt)
		err = p.commitSet(*set, entry)
	}
	if err != nil {
		return errors.Join(err, p.abandon(ctx, entry))
	}
	p.ledger.mu.Lock()
	p.ledger.set(dir, stakeOfSet(*set))
	p.ledger.mu.Unlock()
	crashpoint.Here(crashpoint.SnapshotCommitted)
	return nil
}

// tmpSet names a set that is being made.
func (p *Pool) tmpSet(set volume.SnapshotSet) (string, error) {
	if !p.Shared() {
		return set.ID.Name + snapshotSuffix, nil
	}
	name, _, _ := strings.Cut(set.ID.Name, ".")
	return p.tmpName(name, strconv.FormatInt(set.Bytes(), 10)+snapshotSuffix)
}

func (p *Pool) buildSet(ctx context.Context, entry string, set *volume.SnapshotSet, build func(folders []*os.Root) error) error {
	dir, err := openRootIn(p.tmp, entry)
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := noteSet(dir, *set); err != nil {
		return err
	}
	folders, err := makeFolders(dir, len(set.Snapshots))
	defer func() {
		for _, f := range folders {
			_ = f.Close()
		}
	}()
	if err != nil {
		return err
	}
	if err := build(folders); err != nil {
		return err
	}
	// What it has is known only now.
	if err := p.promise(ctx, snapshotDir(set.ID.Name), stakeOfSet(*set), func() error { return nil }); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.SnapshotData)
	if err := noteSet(dir, *set); err != nil {
		return err
	}
	return p.syncSet(dir, len(folders))
}

// noteSet writes the record, which says what is being made to whoever clears it after a
// crash. Nobody else reads it before it is durable and the set is committed.
func noteSet(dir *os.Root, set volume.SnapshotSet) error {
	b, err := set.Marshal()
	if err != nil {
		return err
	}
	return dir.WriteFile(snapshotFile, b, 0o600)
}

// syncSet makes all durable but the data.
func (p *Pool) syncSet(dir *os.Root, folders int) error {
	names := []string{snapshotFile}
	if !p.Shared() { // NFS makes names durable
		names = append(names, ".")
		for i := range folders {
			names = append(names, strconv.Itoa(i))
		}
	}
	for _, name := range names {
		if err := atomicfile.Sync(dir, name); err != nil {
			return err
		}
	}
	return nil
}

func makeFolders(dir *os.Root, n int) (folders []*os.Root, err error) {
	for i := range n {
		name := strconv.Itoa(i)
		if err := dir.Mkdir(name, 0o700); err != nil {
			return folders, err
		}
		f, err := dir.OpenRoot(name)
		if err != nil {
			return folders, err
		}
		folders = append(folders, f)
	}
	return folders, nil
}

// commitSet is commit for a set.
func (p *Pool) commitSet(set volume.SnapshotSet, entry string) error {
	failed := renameat(p.tmp, entry, p.snapshots, set.ID.Name)
	if errors.Is(failed, unix.ENOTEMPTY) || errors.Is(failed, unix.EEXIST) {
		failed = volume.Errorf(ErrExists, "snapshot %q in pool %q was made meanwhile: try again", set.ID.Name, p.cfg.Name)
	}
	if failed == nil || !p.Shared() {
		return failed
	}
	have, err := p.Snapshots(set.ID)
	switch {
	case err == nil && have.Token == set.Token: // the reply was lost
		return nil
	case err != nil && !errors.Is(err, volume.ErrNotFound):
		return err
	case isNotExist(failed):
		return volume.Errorf(volume.ErrUnavailable, "snapshot %q in pool %q: another process has cleared what was being made: try again", set.ID.Name, p.cfg.Name)
	}
	return failed
}

// Snapshots reads the record of a set. ErrNotFound if there is none, ErrDamaged if it
// cannot be read.
func (p *Pool) Snapshots(id volume.ID) (volume.SnapshotSet, error) {
	set, err := p.readSet(id.Name)
	if p.Shared() && errors.Is(err, volume.ErrNotFound) {
		if err := p.checkExport(); err != nil {
			return volume.SnapshotSet{}, err
		}
	}
	if err == nil && set.ID != id {
		err = volume.Errorf(volume.ErrNotFound, "snapshot %s does not exist: what has its name is %s", id, set.ID)
	}
	if err != nil {
		return volume.SnapshotSet{}, err
	}
	return set, nil
}

// Snapshot is Snapshots for the ID of one, be it of a group.
func (p *Pool) Snapshot(id volume.ID) (volume.Snapshot, error) {
	of := id
	of.Name = volume.SetOf(id.Name)
	set, err := p.Snapshots(of)
	if err != nil {
		return volume.Snapshot{}, err
	}
	for _, s := range set.Members() {
		if s.ID == id {
			return s, nil
		}
	}
	return volume.Snapshot{}, volume.Errorf(volume.ErrNotFound, "snapshot %s is not in its group %s", id, of)
}

func (p *Pool) readSet(name string) (volume.SnapshotSet, error) {
	if p.snapshots == nil { // of an older version, that is only looked at
		return volume.SnapshotSet{}, noSnapshot(name, p.cfg.Name)
	}
	b, there, err := p.readIn(p.snapshots, name, snapshotFile)
	switch {
	case !there && err == nil:
		return volume.SnapshotSet{}, noSnapshot(name, p.cfg.Name)
	case !there, err != nil && p.saysNothing(err):
		return volume.SnapshotSet{}, p.unreadable(err)
	case err != nil:
		return volume.SnapshotSet{}, volume.Errorf(volume.ErrDamaged, "snapshot %q in pool %q: its record: %w: restore it from a backup; its data was not touched", name, p.cfg.Name, err)
	}
	set, err := volume.ParseSnapshotSet(b)
	if err != nil {
		return volume.SnapshotSet{}, fmt.Errorf("snapshot %q in pool %q: %w", name, p.cfg.Name, err)
	}
	if set.ID != p.ID(set.ID.Backend, name) {
		return volume.SnapshotSet{}, volume.Errorf(volume.ErrDamaged, "snapshot %q in pool %q has the record of %s: was a folder copied or renamed?", name, p.cfg.Name, set.ID)
	}
	return set, nil
}

func noSnapshot(name, pool string) error {
	return volume.Errorf(volume.ErrNotFound, "snapshot %q is not in pool %q", name, pool)
}

// ListSnapshots returns up to limit snapshots of a backend, those of groups too, whose
// names come after `after`, by name, and whether there are more. Of a set whose record
// cannot be read it has one, and that has the ID alone.
func (p *Pool) ListSnapshots(backend, after string, limit int) (out []volume.Snapshot, more bool, err error) {
	names, err := p.sets()
	if err != nil {
		return nil, false, err
	}
	for _, name := range names {
		if after != "" && lastName(name) <= after {
			continue
		}
		set, err := p.readSet(name)
		if errors.Is(err, volume.ErrNotFound) || !volume.ValidSetName(name) { // a stray file or folder
			continue
		}
		if errors.Is(err, volume.ErrDamaged) {
			set, err = p.damagedSet(name), nil
		}
		if err != nil {
			return nil, false, err
		}
		for _, s := range set.Members() {
			if s.ID.Backend != backend || s.ID.Name <= after {
				continue
			}
			if len(out) == limit {
				return out, true, nil
			}
			out = append(out, s)
		}
	}
	return out, false, nil
}

// sets are the names of all sets, in the order of the names of what is in them.
func (p *Pool) sets() ([]string, error) {
	if p.snapshots == nil {
		return nil, nil
	}
	names, err := namesIn(p.snapshots, ".")
	slices.SortFunc(names, func(a, b string) int { return cmp.Compare(lastName(a), lastName(b)) })
	return names, err
}

// lastName is no less than the name of any snapshot in a set.
func lastName(set string) string {
	if volume.IsGroup(set) {
		return volume.MemberName(set, 999)
	}
	return set
}

func (p *Pool) damagedSet(name string) volume.SnapshotSet {
	backend := volume.BackendLocal
	if _, err := statBeneath(p.snapshots, name+"/0/"+ImageFile); err == nil {
		backend = volume.BackendLoop
	} else if p.Shared() {
		backend = volume.BackendNFS
	}
	set := volume.SnapshotSet{ID: p.ID(backend, name)}
	member := set.ID
	if set.IsGroup() {
		member.Name = volume.MemberName(name, 0)
	}
	set.Snapshots = []volume.Snapshot{{ID: member}}
	return set
}

// snapshotPlace is where a snapshot lies, below the snapshots.
func snapshotPlace(s volume.Snapshot) string {
	set := volume.SetOf(s.ID.Name)
	if !volume.IsGroup(set) {
		return set + "/0"
	}
	n, _ := strconv.Atoi(s.ID.Name[strings.LastIndex(s.ID.Name, ".")+1:]) // three digits
	return set + "/" + strconv.Itoa(n)
}

// OpenSnapshotImage opens the image of a snapshot to read it. ErrDamaged if it is
// missing or no regular file.
func (p *Pool) OpenSnapshotImage(s volume.Snapshot) (*os.File, error) {
	f, err := p.openRegular(p.snapshots, snapshotPlace(s)+"/"+ImageFile, os.O_RDONLY, 0)
	if isNotExist(err) || errors.Is(err, errIrregular) {
		return nil, volume.Errorf(volume.ErrDamaged, "snapshot %s: its image is missing, or not the file that this driver made: restore it: %w", s.ID, err)
	}
	return f, p.explain(err)
}

// OpenSnapshotDirectory opens the directory of a snapshot. ErrDamaged if it is missing.
func (p *Pool) OpenSnapshotDirectory(s volume.Snapshot) (*os.File, error) {
	f, err := openDirBeneath(p.snapshots, snapshotPlace(s)+"/"+DataDir)
	if isNotExist(err) || errors.Is(err, unix.ELOOP) {
		return nil, volume.Errorf(volume.ErrDamaged, "snapshot %s: its directory is missing, or not the one that this driver made: restore it: %w", s.ID, err)
	}
	return f, p.explain(err)
}

// OpenData is OpenDirectory for who reads what is in the directory.
func (p *Pool) OpenData(v volume.Volume) (*os.File, error) {
	at, err := p.OpenDirectory(v)
	if err != nil {
		return nil, err
	}
	defer at.Close()
	f, err := openDirBeneath(at, ".")
	return f, p.explain(err)
}

// RemoveSnapshots deletes a set: one rename into the trash, durable when it returns.
func (p *Pool) RemoveSnapshots(set volume.SnapshotSet) error {
	if err := p.Check(); err != nil {
		return err
	}
	dir := snapshotDir(set.ID.Name)
	defer p.ledger.begin(dir)()
	entry := trashEntry{name: set.ID.Name + "." + NewUUID()[:8], stake: stakeOfSet(set)}
	err := moveUnique(p.snapshots, set.ID.Name, p.trash, entry.name)
	if p.Shared() && isNotExist(err) { // another process has
		p.recounted(dir, stake{}, noSnapshot(set.ID.Name, p.cfg.Name))
		return nil
	}
	if err != nil {
		return p.explain(err)
	}
	crashpoint.Here(crashpoint.SnapshotDeleted)
	p.bury(dir, entry)
	return p.explain(errors.Join(p.snapshots.Sync(), p.trash.Sync()))
}

// readSetStake is readStake for a set.
func (p *Pool) readSetStake(name string) (stake, error) {
	set, err := p.readSet(name)
	switch {
	case err == nil:
		return stakeOfSet(set), nil
	case errors.Is(err, volume.ErrNotFound), errors.Is(err, volume.ErrUnavailable):
		return stake{}, err
	}
	s := stake{backend: unknownBackend, snapshots: []volume.Snapshot{}}
	if names, err := namesIn(p.snapshots, name); err == nil {
		for _, n := range names {
			s.bytes += allocated(p.snapshots, name+"/"+n+"/"+ImageFile)
		}
	}
	return s, nil
}

// countSnapshots adds all sets to the ledger.
func (p *Pool) countSnapshots(ctx context.Context) error {
	names, err := p.sets()
	for _, name := range names {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		s, err := p.readSetStake(name)
		p.recounted(snapshotDir(name), s, err)
	}
	return err
}

// measureSet is measureOne for snapshots. What they share is counted with who had it
// first; of directories nothing else is known.
func (p *Pool) measureSet(dir string, s stake) (sum int64) {
	for i, one := range s.snapshots {
		switch {
		case !one.Directory && one.Shared:
			sum += p.unshared(dir + "/" + strconv.Itoa(i) + "/" + ImageFile)
		case !one.Shared:
			sum += one.Bytes
		}
	}
	return sum
}

// unshared is how much of an image no other file has, in bytes.
func (p *Pool) unshared(path string) int64 {
	f, err := p.openRegular(p.dir, path, os.O_RDONLY, 0)
	if err != nil {
		return 0
	}
	defer f.Close()
	n, ok, err := clone.Unshared(f)
	if err != nil || !ok {
		return allocated(p.dir, path)
	}
	return n
}

// keptOf is how much of what a volume has written snapshots and copies may keep, in bytes.
func (l *ledger) keptOf(v volume.ID) (sum int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.stakes {
		if slices.Contains(s.owners, v) {
			sum += s.shared
		}
		for _, one := range s.snapshots {
			if slices.Contains(one.Writers(), v) {
				sum += one.Bytes
			}
		}
	}
	return sum
}

// openSnapshots opens the folder of snapshots; one that is only looked at may have none.
func (p *Pool) openSnapshots() (err error) {
	p.snapshots, err = p.root.Open(snapshotsDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
