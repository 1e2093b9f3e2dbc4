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

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

const (
	// snapshotsDir contains a folder for each set of snapshots, with a numbered folder for each
	// snapshot.
	snapshotsDir = "snapshots"
	snapshotFile = "snapshot.json"
	// snapshotSuffix ends the names of sets in tmp.
	snapshotSuffix = ".snapshot"
)

func snapshotDir(set string) string { return snapshotsDir + "/" + set }

// SnapshotJob is the name in Jobs of the job that makes a set. The job that makes a volume has the
// volume's name.
func SnapshotJob(set string) string { return "snapshot " + set }

// Snapshots are the sets of snapshots in a pool.
type Snapshots struct {
	*store
	deleted  *Trash
	building *building
}

// Create makes a set of snapshots. The caller sets Bytes of each snapshot to its expected size. build
// writes the data of each snapshot durably into its folder, and sets Bytes to the actual size. One
// rename commits the set, as for a volume. ErrExists if another process has made the set meanwhile.
func (sn *Snapshots) Create(ctx context.Context, set *volume.SnapshotSet, build func(folders []*os.Root) error) error {
	if err := sn.Check(); err != nil {
		return err
	}
	ctx = context.WithoutCancel(ctx)
	dir := snapshotDir(set.ID.Name)
	defer sn.ledger.Begin(dir)()
	set.CreationID = uuid.NewString()
	entry, err := sn.medium.Entry(set.ID.Name, set.Bytes(), snapshotSuffix)
	if err == nil {
		err = sn.medium.Reserve(ctx, dir, ledger.OfSet(*set), func() error { return sn.building.makeTmp(ctx, entry) })
	}
	if err == nil {
		err = sn.buildAndCommit(ctx, entry, set, build)
	}
	if err == nil {
		err = sn.Sync()
	}
	if err != nil {
		sn.recountSet(set.ID.Name)
	}
	return sn.medium.Explain(err)
}

// Temporary makes a set as Create does, but does not commit it. release removes the set; if this process ends before, the next
// one does. No other set may have the set's name.
func (sn *Snapshots) Temporary(ctx context.Context, set *volume.SnapshotSet, build func(folders []*os.Root) error) (release func() error, err error) {
	if err := sn.Check(); err != nil {
		return nil, err
	}
	ctx = context.WithoutCancel(ctx)
	dir := snapshotDir(set.ID.Name)
	end := sn.ledger.Begin(dir)
	entry, err := sn.medium.Entry(set.ID.Name, set.Bytes(), snapshotSuffix)
	if err == nil {
		err = sn.medium.Reserve(ctx, dir, ledger.OfSet(*set), func() error { return sn.building.makeTmp(ctx, entry) })
	}
	if err != nil {
		end()
		return nil, sn.medium.Explain(err)
	}
	release = func() error {
		defer end()
		sn.ledger.Rename(dir, tmpDir+"/"+entry) // the space stays reserved until the entry is removed
		if err := sn.building.abandon(ctx, entry, ""); err != nil {
			return fmt.Errorf("removing %s/%s, which is tried again when the driver starts: %w", tmpDir, entry, err)
		}
		return nil
	}
	if err := sn.buildEntry(ctx, entry, set, build); err != nil {
		return nil, sn.medium.Explain(errors.Join(err, release()))
	}
	return release, nil
}

// recountSet updates the ledger from a set's record on the disk.
func (sn *Snapshots) recountSet(name string) {
	r, err := sn.setReservation(name)
	sn.ledger.Recount(snapshotDir(name), r, err)
}

// Sync makes the names of all sets durable. See SyncVolumes.
func (sn *Snapshots) Sync() error {
	if err := sn.snapshots.Sync(); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.SnapshotDone)
	return nil
}

// buildAndCommit fills an entry of tmp and commits it as a set. After an error it removes the entry.
func (sn *Snapshots) buildAndCommit(ctx context.Context, entry string, set *volume.SnapshotSet, build func(folders []*os.Root) error) error {
	err := sn.buildEntry(ctx, entry, set, build)
	if err == nil {
		crashpoint.Here(crashpoint.SnapshotBuilt)
		err = sn.building.commit(entry, sn.snapshots, set.ID.Name, set.CreationID, func() (string, error) {
			existing, err := sn.readSet(set.ID.Name)
			return existing.CreationID, err
		})
	}
	if err != nil {
		return errors.Join(err, sn.building.abandon(ctx, entry, ""))
	}
	sn.ledger.Set(snapshotDir(set.ID.Name), ledger.OfSet(*set))
	crashpoint.Here(crashpoint.SnapshotCommitted)
	return nil
}

// buildEntry fills the folder of a set in tmp, and makes it durable. It writes the record before the data, so
// that a process that removes the entry after a crash knows the volumes of the set.
func (sn *Snapshots) buildEntry(ctx context.Context, entry string, set *volume.SnapshotSet, build func(folders []*os.Root) error) error {
	dir, err := beneath.OpenRoot(sn.tmp, entry)
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := writeSet(dir, *set); err != nil {
		return err
	}
	folders, err := makeMemberFolders(dir, len(set.Snapshots))
	defer func() {
		for _, f := range folders {
			_ = f.Close()
		}
	}()
	if err != nil {
		return err
	}
	if sn.storage != nil { // after a power failure the folders identify the data that must be freed
		if err := errors.Join(atomicfile.Sync(dir, snapshotFile), atomicfile.Sync(dir, "."), sn.tmp.Sync()); err != nil {
			return err
		}
	}
	if err := build(folders); err != nil {
		return err
	}
	// The actual size is known only now.
	if err := sn.medium.Reserve(ctx, snapshotDir(set.ID.Name), ledger.OfSet(*set), func() error { return nil }); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.SnapshotData)
	if err := writeSet(dir, *set); err != nil {
		return err
	}
	if err := atomicfile.Sync(dir, snapshotFile); err != nil {
		return err
	}
	names := []string{"."} // build has made the files in the folders durable
	for i := range folders {
		names = append(names, strconv.Itoa(i))
	}
	return sn.medium.SyncFiles(dir, names...)
}

// writeSet writes the record without a sync: before the commit, the record is only read by a process
// that discards the entry after a crash.
func writeSet(dir *os.Root, set volume.SnapshotSet) error {
	b, err := set.Marshal()
	if err != nil {
		return err
	}
	return dir.WriteFile(snapshotFile, b, 0o600)
}

// makeMemberFolders makes and opens the numbered folders of n snapshots.
func makeMemberFolders(dir *os.Root, n int) (folders []*os.Root, err error) {
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

// Set reads the record of a set. ErrNotFound if it does not exist, ErrDamaged if its record
// cannot be read.
func (sn *Snapshots) Set(id volume.ID) (volume.SnapshotSet, error) {
	set, err := sn.readSet(id.Name)
	if err == nil && set.ID != id {
		return volume.SnapshotSet{}, volume.Errorf(volume.ErrNotFound, "snapshot %s does not exist: snapshot %s has that name", id, set.ID)
	}
	return set, err
}

// Get reads one snapshot by its ID, also a member of a group.
func (sn *Snapshots) Get(id volume.ID) (volume.Snapshot, error) {
	setID := id
	setID.Name = volume.SetOf(id.Name)
	set, err := sn.Set(setID)
	if err != nil {
		return volume.Snapshot{}, err
	}
	members := set.Members()
	if i := slices.IndexFunc(members, func(s volume.Snapshot) bool { return s.ID == id }); i >= 0 {
		return members[i], nil
	}
	return volume.Snapshot{}, volume.Errorf(volume.ErrNotFound, "snapshot %s is not in its group %s", id, setID)
}

// readSet is Set for a name: the set may be of any backend.
func (sn *Snapshots) readSet(name string) (volume.SnapshotSet, error) {
	set, err := parseIn(sn.store, "snapshot", sn.snapshots, name, snapshotFile, sn.forms.ParseSnapshotSet)
	if err == nil && set.ID != sn.ID(set.ID.Backend, name) {
		return volume.SnapshotSet{}, volume.Errorf(volume.ErrDamaged, "snapshot %q in pool %q has the record of %s: was a folder copied or renamed?", name, sn.cfg.Name, set.ID)
	}
	return set, err
}

// List returns up to limit snapshots of a backend, members of groups included, whose names come
// after `after`, in the order of their names, and whether there are more. A set whose record
// cannot be read is listed as one snapshot, which has only its ID.
func (sn *Snapshots) List(backend, after string, limit int) (out []volume.Snapshot, more bool, err error) {
	names, err := sn.setNames()
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

// setNames returns the names of all sets, in the order of the names of their snapshots.
func (sn *Snapshots) setNames() ([]string, error) {
	names, err := beneath.Names(sn.snapshots, ".")
	slices.SortFunc(names, func(a, b string) int { return cmp.Compare(lastName(a), lastName(b)) })
	return names, err
}

// lastName is the greatest name that a snapshot of a set can have.
func lastName(set string) string {
	if volume.IsGroup(set) {
		return volume.MemberName(set, 999) // the numbers of members have three digits
	}
	return set
}

// damagedSet is how List shows a set whose record cannot be read.
func (sn *Snapshots) damagedSet(name string) volume.SnapshotSet {
	set := volume.SnapshotSet{ID: sn.ID(sn.guessBackend(sn.snapshots, name+"/0"), name)}
	member := set.ID
	if set.IsGroup() {
		member.Name = volume.MemberName(name, 0)
	}
	set.Snapshots = []volume.Snapshot{{ID: member}}
	return set
}

// snapshotPath is the path of a snapshot's folder below snapshotsDir.
func snapshotPath(s volume.Snapshot) string {
	set := volume.SetOf(s.ID.Name)
	if !volume.IsGroup(set) {
		return set + "/0"
	}
	n, _ := strconv.Atoi(s.ID.Name[strings.LastIndex(s.ID.Name, ".")+1:]) // three digits
	return set + "/" + strconv.Itoa(n)
}

// Folder opens the folder of a snapshot, in which the storage of the pool has its records.
func (sn *Snapshots) Folder(s volume.Snapshot) (*os.Root, error) {
	return beneath.OpenRoot(sn.snapshots, snapshotPath(s))
}

// OpenImage opens the image of a snapshot for reading. ErrDamaged if it is missing or not a
// regular file.
func (sn *Snapshots) OpenImage(s volume.Snapshot) (*os.File, error) {
	f, err := sn.files.Open(sn.snapshots, snapshotPath(s)+"/"+ImageFile, os.O_RDONLY, 0)
	if beneath.IsNotExist(err) || errors.Is(err, beneath.ErrIrregular) {
		return nil, volume.Errorf(volume.ErrDamaged, "snapshot %s: its image is missing, or not the file that this driver made: restore it: %w", s.ID, err)
	}
	return f, sn.medium.Explain(err)
}

// OpenDirectory opens the directory of a snapshot. ErrDamaged if it is missing.
func (sn *Snapshots) OpenDirectory(s volume.Snapshot) (*os.File, error) {
	f, err := beneath.OpenDir(sn.snapshots, snapshotPath(s)+"/"+DataDir)
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
	entry := set.ID.Name + "." + uuid.NewString()[:8]
	err := beneath.MoveUnique(sn.snapshots, set.ID.Name, sn.trash, entry)
	if beneath.IsNotExist(err) { // another process has removed it
		sn.recountSet(set.ID.Name)
		return nil
	}
	if err != nil {
		return sn.medium.Explain(err)
	}
	crashpoint.Here(crashpoint.SnapshotDeleted)
	sn.ledger.Move(dir, trashDir+"/"+entry, ledger.OfSet(set))
	sn.deleted.reaper.add(entry)
	return sn.medium.Explain(errors.Join(sn.snapshots.Sync(), sn.trash.Sync()))
}

// setReservation reads a set's reservation. ErrNotFound if the set does not exist, ErrUnavailable if
// that is not known. A set whose record cannot be read counts with the disk space of its images.
func (sn *Snapshots) setReservation(name string) (ledger.Reservation, error) {
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

// measureSet measures the usage of a set, in bytes. Data that a snapshot shares with a volume counts
// as usage of the volume that wrote it. Snapshots that share no data count with their recorded size.
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

// unshared returns the size of an image's data that no other file shares, in bytes.
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
