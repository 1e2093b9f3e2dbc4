package pool

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/pool/ledger"
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

// Snapshots are the sets of snapshots in a pool.
type Snapshots struct {
	*store
	deleted  *Trash
	building *building
}

// Create makes a set of snapshots. At the call each has in Bytes what it is
// expected to come to cost; build makes the data of all of them, each in a folder of its
// own, durable, and writes into the set what it has made. The set is committed by one
// rename, as a volume is. ErrExists if another process was faster.
func (sn *Snapshots) Create(ctx context.Context, set *volume.SnapshotSet, build func(folders []*os.Root) error) error {
	if err := sn.Check(); err != nil {
		return err
	}
	dir := snapshotDir(set.ID.Name)
	defer sn.ledger.Begin(dir)()
	set.Token = NewUUID()
	err := sn.createSet(context.WithoutCancel(ctx), set, build)
	if err == nil {
		err = sn.Sync()
	}
	if err != nil {
		s, unread := sn.readSetReservation(set.ID.Name)
		sn.recounted(dir, s, unread)
	}
	return sn.medium.Explain(err)
}

// Sync is SyncVolumes for snapshots.
func (sn *Snapshots) Sync() error {
	if err := sn.snapshots.Sync(); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.SnapshotDone)
	return nil
}

func (sn *Snapshots) createSet(ctx context.Context, set *volume.SnapshotSet, build func(folders []*os.Root) error) error {
	entry, err := sn.medium.Entry(set.ID.Name, set.Bytes(), snapshotSuffix)
	if err != nil {
		return err
	}
	dir := snapshotDir(set.ID.Name)
	if err := sn.medium.Reserve(ctx, dir, ledger.OfSet(*set), func() error { return sn.building.makeTmp(ctx, entry) }); err != nil {
		return err
	}
	err = sn.buildSet(ctx, entry, set, build)
	if err == nil {
		crashpoint.Here(crashpoint.SnapshotBuilt)
		err = sn.commitSet(*set, entry)
	}
	if err != nil {
		return errors.Join(err, sn.building.abandon(ctx, entry, ""))
	}
	sn.ledger.Set(dir, ledger.OfSet(*set))
	crashpoint.Here(crashpoint.SnapshotCommitted)
	return nil
}

func (sn *Snapshots) buildSet(ctx context.Context, entry string, set *volume.SnapshotSet, build func(folders []*os.Root) error) error {
	dir, err := beneath.OpenRoot(sn.tmp, entry)
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
	if err := sn.medium.Reserve(ctx, snapshotDir(set.ID.Name), ledger.OfSet(*set), func() error { return nil }); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.SnapshotData)
	if err := noteSet(dir, *set); err != nil {
		return err
	}
	return sn.syncSet(dir, len(folders))
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
func (sn *Snapshots) syncSet(dir *os.Root, folders int) error {
	if err := atomicfile.Sync(dir, snapshotFile); err != nil {
		return err
	}
	names := []string{"."}
	for i := range folders {
		names = append(names, strconv.Itoa(i))
	}
	return sn.medium.SyncFiles(dir, names...)
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
func (sn *Snapshots) commitSet(set volume.SnapshotSet, entry string) error {
	failed := beneath.Rename(sn.tmp, entry, sn.snapshots, set.ID.Name)
	if errors.Is(failed, unix.ENOTEMPTY) || errors.Is(failed, unix.EEXIST) {
		failed = volume.Errorf(ErrExists, "snapshot %q in pool %q was made meanwhile: try again", set.ID.Name, sn.cfg.Name)
	}
	if failed == nil {
		return nil
	}
	have, err := sn.Set(set.ID)
	switch {
	case err == nil && have.Token == set.Token: // the reply was lost
		return nil
	case err != nil && !errors.Is(err, volume.ErrNotFound):
		return err
	case beneath.IsNotExist(failed):
		return volume.Errorf(volume.ErrUnavailable, "snapshot %q in pool %q: another process has cleared what was being made: try again", set.ID.Name, sn.cfg.Name)
	}
	return failed
}

// Set reads the record of a set. ErrNotFound if there is none, ErrDamaged if it
// cannot be read.
func (sn *Snapshots) Set(id volume.ID) (volume.SnapshotSet, error) {
	set, err := sn.readSet(id.Name)
	if errors.Is(err, volume.ErrNotFound) {
		if err := sn.medium.ConfirmAbsence(); err != nil {
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

// Get is Snapshots for the ID of one, be it of a group.
func (sn *Snapshots) Get(id volume.ID) (volume.Snapshot, error) {
	of := id
	of.Name = volume.SetOf(id.Name)
	set, err := sn.Set(of)
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

func (sn *Snapshots) readSet(name string) (volume.SnapshotSet, error) {
	b, there, err := sn.readIn(sn.snapshots, name, snapshotFile)
	switch {
	case !there && err == nil:
		return volume.SnapshotSet{}, noSnapshot(name, sn.cfg.Name)
	case !there, err != nil && sn.inconclusive(err):
		return volume.SnapshotSet{}, sn.medium.Unreadable(err)
	case err != nil:
		return volume.SnapshotSet{}, volume.Errorf(volume.ErrDamaged, "snapshot %q in pool %q: its record: %w: restore it from a backup; its data was not touched", name, sn.cfg.Name, err)
	}
	set, err := volume.ParseSnapshotSet(b)
	if err != nil {
		return volume.SnapshotSet{}, fmt.Errorf("snapshot %q in pool %q: %w", name, sn.cfg.Name, err)
	}
	if set.ID != sn.ID(set.ID.Backend, name) {
		return volume.SnapshotSet{}, volume.Errorf(volume.ErrDamaged, "snapshot %q in pool %q has the record of %s: was a folder copied or renamed?", name, sn.cfg.Name, set.ID)
	}
	return set, nil
}

func noSnapshot(name, pool string) error {
	return volume.Errorf(volume.ErrNotFound, "snapshot %q is not in pool %q", name, pool)
}

// List returns up to limit snapshots of a backend, those of groups too, whose
// names come after `after`, by name, and whether there are more. Of a set whose record
// cannot be read it has one, and that has the ID alone.
func (sn *Snapshots) List(backend, after string, limit int) (out []volume.Snapshot, more bool, err error) {
	names, err := sn.sets()
	if err != nil {
		return nil, false, err
	}
	for _, name := range names {
		if after != "" && lastName(name) <= after {
			continue
		}
		set, err := sn.readSet(name)
		if errors.Is(err, volume.ErrNotFound) || !volume.ValidSetName(name) { // a stray file or folder
			continue
		}
		if errors.Is(err, volume.ErrDamaged) {
			set, err = sn.damagedSet(name), nil
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
func (sn *Snapshots) sets() ([]string, error) {
	names, err := beneath.Names(sn.snapshots, ".")
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

func (sn *Snapshots) damagedSet(name string) volume.SnapshotSet {
	backend := volume.BackendLocal
	if _, err := beneath.Stat(sn.snapshots, name+"/0/"+ImageFile); err == nil {
		backend = volume.BackendLoop
	} else if sn.cfg.Shared() {
		backend = volume.BackendNFS
	}
	set := volume.SnapshotSet{ID: sn.ID(backend, name)}
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

// OpenImage opens the image of a snapshot to read it. ErrDamaged if it is
// missing or no regular file.
func (sn *Snapshots) OpenImage(s volume.Snapshot) (*os.File, error) {
	f, err := sn.files.Open(sn.snapshots, snapshotPlace(s)+"/"+ImageFile, os.O_RDONLY, 0)
	if beneath.IsNotExist(err) || errors.Is(err, beneath.ErrIrregular) {
		return nil, volume.Errorf(volume.ErrDamaged, "snapshot %s: its image is missing, or not the file that this driver made: restore it: %w", s.ID, err)
	}
	return f, sn.medium.Explain(err)
}

// OpenDirectory opens the directory of a snapshot. ErrDamaged if it is missing.
func (sn *Snapshots) OpenDirectory(s volume.Snapshot) (*os.File, error) {
	f, err := beneath.OpenDir(sn.snapshots, snapshotPlace(s)+"/"+DataDir)
	if beneath.IsNotExist(err) || errors.Is(err, unix.ELOOP) {
		return nil, volume.Errorf(volume.ErrDamaged, "snapshot %s: its directory is missing, or not the one that this driver made: restore it: %w", s.ID, err)
	}
	return f, sn.medium.Explain(err)
}

// Remove deletes a set: one rename into the trash, durable when it returns.
func (sn *Snapshots) Remove(set volume.SnapshotSet) error {
	if err := sn.Check(); err != nil {
		return err
	}
	dir := snapshotDir(set.ID.Name)
	defer sn.ledger.Begin(dir)()
	entry := set.ID.Name + "." + NewUUID()[:8]
	err := beneath.MoveUnique(sn.snapshots, set.ID.Name, sn.trash, entry)
	if beneath.IsNotExist(err) { // another process has
		sn.recounted(dir, ledger.Reservation{}, noSnapshot(set.ID.Name, sn.cfg.Name))
		return nil
	}
	if err != nil {
		return sn.medium.Explain(err)
	}
	crashpoint.Here(crashpoint.SnapshotDeleted)
	sn.deleted.movedToTrash(dir, entry, ledger.OfSet(set))
	return sn.medium.Explain(errors.Join(sn.snapshots.Sync(), sn.trash.Sync()))
}

// readSetReservation is readReservation for a set.
func (sn *Snapshots) readSetReservation(name string) (ledger.Reservation, error) {
	set, err := sn.readSet(name)
	switch {
	case err == nil:
		return ledger.OfSet(set), nil
	case errors.Is(err, volume.ErrNotFound), errors.Is(err, volume.ErrUnavailable):
		return ledger.Reservation{}, err
	}
	r := ledger.Reservation{Backend: ledger.UnknownBackend, Snapshots: []volume.Snapshot{}}
	if names, err := beneath.Names(sn.snapshots, name); err == nil {
		for _, n := range names {
			r.Bytes += allocated(sn.snapshots, name+"/"+n+"/"+ImageFile)
		}
	}
	return r, nil
}

// measureSet is measureOne for snapshots. What they share is counted with who had it
// first; of directories nothing else is known.
func (sn *Snapshots) measureSet(dir string, r ledger.Reservation) (sum int64) {
	for i, one := range r.Snapshots {
		switch {
		case !one.Directory && one.Shared:
			sum += sn.unshared(dir + "/" + strconv.Itoa(i) + "/" + ImageFile)
		case !one.Shared:
			sum += one.Bytes
		}
	}
	return sum
}

// unshared is how much of an image no other file has, in bytes.
func (sn *Snapshots) unshared(path string) int64 {
	f, err := sn.files.Open(sn.dir, path, os.O_RDONLY, 0)
	if err != nil {
		return 0
	}
	defer f.Close()
	n, ok, err := clone.Unshared(f)
	if err != nil || !ok {
		return allocated(sn.dir, path)
	}
	return n
}
