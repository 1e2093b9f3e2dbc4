package pool

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/volume"
)

const (
	recordFile = "volume.json"
	// ImageFile is the name of a volume's image in its folder.
	ImageFile = "image"
)

func volumePath(name, file string) string { return volumesDir + "/" + name + "/" + file }

// Create makes a volume: build fills its folder, then record and folder are
// committed by one rename. Nothing of it is there before, all of it after, and
// what it returns is durable. The caller has checked that there is none yet;
// ErrExists if another process was faster.
//
// What changes a pool runs to its end, here and below: the end of ctx does not end it.
func (p *Pool) Create(ctx context.Context, v volume.Volume, build func(dir *os.Root) error) error {
	return p.make(ctx, v, build, func(string) error { return nil })
}

// make is Create; place, given the folder's name in tmp, moves out of it what does
// not stay there.
func (p *Pool) make(ctx context.Context, v volume.Volume, build func(dir *os.Root) error, place func(entry string) error) error {
	if !p.Shared() { // there the caller's Lookup, which found none, has checked
		if err := p.Check(); err != nil {
			return err
		}
	}
	defer p.ledger.begin(volumeDir(v.ID.Name))()
	if p.Shared() {
		v.Token = NewUUID()
	}
	err := p.create(context.WithoutCancel(ctx), v, build, place)
	if err == nil {
		err = p.Settle()
	}
	if err != nil {
		p.recount(v.ID.Name)
	}
	return p.explain(err)
}

// Settle makes the names of all volumes durable. A caller that finds a volume
// made, or gone, by a call that failed or was killed settles before it answers.
func (p *Pool) Settle() error {
	if err := p.volumes.Sync(); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.CreateDone)
	return nil
}

func (p *Pool) create(ctx context.Context, v volume.Volume, build func(dir *os.Root) error, place func(entry string) error) error {
	entry, err := p.tmpName(v.ID.Name, strconv.FormatInt(v.Capacity, 10))
	if err != nil {
		return err
	}
	fill := func() error { return p.fill(ctx, v, entry, build, place) }
	if hasSubDir(v) { // from the check of its place to the commit nobody else makes one
		return p.promise(ctx, volumeDir(v.ID.Name), stakeOf(v), func() error {
			if err := p.makeTmp(ctx, entry); err != nil {
				return err
			}
			return fill()
		})
	}
	if err := p.promise(ctx, volumeDir(v.ID.Name), stakeOf(v), func() error { return p.makeTmp(ctx, entry) }); err != nil {
		return err
	}
	return fill()
}

// makeTmp makes the folder of a volume that is being made.
func (p *Pool) makeTmp(ctx context.Context, entry string) error {
	err := unix.Mkdirat(int(p.tmp.Fd()), entry, 0o700)
	if errors.Is(err, unix.EEXIST) { // a call that failed could not clean up
		if err = p.abandon(ctx, entry); err == nil {
			err = unix.Mkdirat(int(p.tmp.Fd()), entry, 0o700)
		}
	}
	if err != nil {
		return writing(p.cfg, &fs.PathError{Op: "mkdir", Path: tmpDir + "/" + entry, Err: err})
	}
	crashpoint.Here(crashpoint.CreateReserved)
	return nil
}

func (p *Pool) fill(ctx context.Context, v volume.Volume, entry string, build func(dir *os.Root) error, place func(entry string) error) error {
	err := p.buildTmp(entry, v, build)
	if err == nil {
		err = place(entry)
	}
	if err == nil {
		crashpoint.Here(crashpoint.CreateBuilt)
		err = p.commit(v, entry)
	}
	if err != nil {
		return errors.Join(err, p.takeBack(entry, v.ID.Name), p.abandon(ctx, entry))
	}
	if v.Directory != nil { // whose limit was not known before
		p.ledger.learn(v)
	}
	crashpoint.Here(crashpoint.CreateCommitted)
	return nil
}

// abandon clears what was being made. In a shared pool it may have been committed
// without our knowing: then nothing is there to be cleared.
func (p *Pool) abandon(ctx context.Context, entry string) error {
	if p.Shared() {
		return p.discard(entry)
	}
	return p.clearEntry(ctx, entry)
}

// clearEntry clears an entry of tmp of a node-local pool. One that has a limited
// directory goes to the trash: the limit has to be given back, when the directory is
// gone. So does one that may have marked a disk, and one of snapshots, which may be
// large.
func (p *Pool) clearEntry(ctx context.Context, entry string) error {
	if _, err := statBeneath(p.tmp, entry+"/"+recordFile); err == nil && p.OfDisks() {
		return p.discardDisk(entry)
	}
	if err := p.takeBack(entry, ""); err != nil {
		return err
	}
	if p.hasDirectory(entry) || strings.HasSuffix(entry, snapshotSuffix) {
		return p.discard(entry)
	}
	return p.removeTree(ctx, p.tmp, entry)
}

// commit makes a volume of what was built. In a shared pool an error means little:
// the record that is there then tells whose volume it is.
func (p *Pool) commit(v volume.Volume, entry string) error {
	failed := renameat(p.tmp, entry, p.volumes, v.ID.Name)
	if failed == nil || !p.Shared() {
		return failed
	}
	have, err := p.Lookup(v.ID.Name)
	switch {
	case err == nil && have.Token == v.Token:
		return nil
	case err == nil:
		return volume.Errorf(ErrExists, "volume %q in pool %q was made by another process meanwhile: try again", v.ID.Name, p.cfg.Name)
	case !errors.Is(err, volume.ErrNotFound):
		return err
	case isNotExist(failed):
		return volume.Errorf(volume.ErrUnavailable, "volume %q in pool %q: another process has cleared what was being made: try again", v.ID.Name, p.cfg.Name)
	}
	return failed
}

func (p *Pool) buildTmp(entry string, v volume.Volume, build func(dir *os.Root) error) error {
	dir, err := openRootIn(p.tmp, entry)
	if err != nil {
		return err
	}
	defer dir.Close()
	if v.Disk != nil {
		record, err := v.MarshalRecord()
		if err != nil {
			return err
		}
		return p.buildDisk(dir, record, build)
	}
	if err := build(dir); err != nil {
		return err
	}
	record, err := v.MarshalRecord() // after build, which says in it what it has made
	if err != nil {
		return err
	}
	if p.Shared() { // NFS makes names durable, and files when they are closed
		return writeSynced(dir, recordFile, record)
	}
	// Made here, where one fsync covers it, for the calls that publish.
	if err := dir.Mkdir(attachedDir, 0o700); err != nil {
		return err
	}
	if err := dir.WriteFile(recordFile, record, 0o600); err != nil {
		return err
	}
	if v.Directory != nil {
		return syncAll(dir, recordFile, ".")
	}
	return syncAll(dir, recordFile, ImageFile, ".")
}

// writeSynced writes a new file, and makes its content durable.
func writeSynced(dir *os.Root, name string, b []byte) error {
	f, err := dir.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	return errors.Join(err, f.Sync(), f.Close())
}

// syncAll makes files durable that were all written before: a journal takes
// them with its first commit, and the other calls find nothing left to do.
func syncAll(dir *os.Root, names ...string) error {
	for _, name := range names {
		if err := atomicfile.Sync(dir, name); err != nil {
			return err
		}
	}
	return nil
}

// ByID is Lookup for an ID. A pool has volumes of several backends, and an ID that
// somebody made up of one's name is of no volume: ErrNotFound.
func (p *Pool) ByID(id volume.ID) (volume.Volume, error) {
	v, err := p.Lookup(id.Name)
	if err == nil && v.ID != id {
		err = volume.Errorf(volume.ErrNotFound, "volume %s does not exist: what has its name is %s", id, v.ID)
	}
	if err != nil {
		return volume.Volume{}, err
	}
	return v, nil
}

// Lookup reads a volume's record from the disk. ErrNotFound if there is no
// such volume, ErrDamaged if its record is missing or unreadable.
//
// That there is none in a shared pool is only believed while the pool itself is there:
// another export would have none of its volumes.
func (p *Pool) Lookup(name string) (volume.Volume, error) {
	v, err := p.lookup(name)
	if p.Shared() && errors.Is(err, volume.ErrNotFound) {
		if err := p.checkExport(); err != nil {
			return volume.Volume{}, err
		}
	}
	return v, err
}

func (p *Pool) lookup(name string) (volume.Volume, error) {
	v, err := p.readRecord(name)
	if err != nil {
		return volume.Volume{}, err
	}
	if v.ID != p.ID(v.ID.Backend, name) {
		return volume.Volume{}, volume.Errorf(volume.ErrDamaged, "volume %q in pool %q has the record of %s: was a folder copied or renamed?", name, p.cfg.Name, v.ID)
	}
	return v, nil
}

// readRecord is lookup for a record of whatever volume.
func (p *Pool) readRecord(name string) (volume.Volume, error) {
	b, there, err := p.readIn(p.volumes, name, recordFile)
	switch {
	case !there && err == nil:
		return volume.Volume{}, volume.Errorf(volume.ErrNotFound, "volume %q is not in pool %q", name, p.cfg.Name)
	case !there:
		return volume.Volume{}, p.unreadable(err)
	}
	if isNotExist(err) {
		return volume.Volume{}, volume.Errorf(volume.ErrDamaged, "volume %q in pool %q has no %s: restore it from a backup; its data was not touched", name, p.cfg.Name, recordFile)
	}
	if err != nil && p.saysNothing(err) {
		return volume.Volume{}, p.unreadable(err)
	}
	if err != nil {
		return volume.Volume{}, volume.Errorf(volume.ErrDamaged, "volume %q in pool %q: its record: %w: restore it from a backup; its data was not touched", name, p.cfg.Name, err)
	}
	v, err := volume.ParseRecord(b)
	if err != nil {
		return volume.Volume{}, fmt.Errorf("volume %q in pool %q: %w", name, p.cfg.Name, err)
	}
	return v, nil
}

// readIn reads a file that each folder in dir has. there is false if there is no folder
// of that name; with an error it is not known.
func (p *Pool) readIn(dir *os.File, name, file string) (b []byte, there bool, err error) {
	for range 2 { // another process may make the folder between the two looks
		if b, err = p.readBeneath(dir, name+"/"+file); !isNotExist(err) {
			break
		}
		st, looked := statBeneath(dir, name)
		if isNotExist(looked) || looked == nil && st.Mode&unix.S_IFMT != unix.S_IFDIR {
			return nil, false, nil
		}
		if looked != nil {
			return nil, false, looked
		}
	}
	return b, true, err
}

// List returns up to limit volumes of a backend whose names come after `after`,
// by name, and whether there are more. Of a volume whose record cannot be read
// it has the ID alone.
func (p *Pool) List(backend, after string, limit int) (volumes []volume.Volume, more bool, err error) {
	names, err := namesIn(p.volumes, ".")
	if err != nil {
		return nil, false, err
	}
	first, found := slices.BinarySearch(names, after)
	if found {
		first++
	}
	for _, name := range names[first:] {
		if len(volumes) == limit {
			return volumes, true, nil
		}
		v, err := p.Lookup(name)
		if errors.Is(err, volume.ErrNotFound) || name != volume.NameFor(name) { // a stray file or folder
			continue
		}
		if errors.Is(err, volume.ErrDamaged) {
			v, err = volume.Volume{ID: p.ID(p.probably(name), name)}, nil
		}
		if err != nil {
			return nil, false, err
		}
		if v.ID.Backend == backend {
			volumes = append(volumes, v)
		}
	}
	return volumes, false, nil
}

// probably is the backend of a volume whose record cannot be read.
func (p *Pool) probably(name string) string {
	_, noImage := statBeneath(p.volumes, name+"/"+ImageFile)
	_, noData := statBeneath(p.volumes, name+"/"+DataDir)
	switch {
	case noImage == nil:
		return volume.BackendLoop
	case p.Shared():
		return volume.BackendNFS
	case noData == nil, p.OfDisks():
		return volume.BackendLocal
	}
	return volume.BackendLoop
}

// Grow promises the volume its new, larger capacity, lets apply make it true,
// and records it. Nothing stays promised if apply fails. The caller holds the
// volume's folder (LockVolume).
func (p *Pool) Grow(ctx context.Context, v volume.Volume, capacity int64, apply func() error) error {
	if err := p.Check(); err != nil {
		return err
	}
	if err := p.TellGrowth(ctx, v.ID.Name); err != nil {
		return p.explain(err)
	}
	defer p.ledger.begin(volumeDir(v.ID.Name))()
	more := capacity - v.Capacity
	v.Capacity = capacity
	err := p.promise(context.WithoutCancel(ctx), volumeDir(v.ID.Name), stakeOf(v), func() error { return p.showGrowth(v.ID.Name, more) })
	if err == nil {
		err = apply()
	}
	if err == nil {
		err = p.recordGrowth(ctx, v)
	} else {
		err = errors.Join(err, p.hideGrowth(v.ID.Name))
	}
	if err != nil {
		p.recount(v.ID.Name)
	}
	return p.explain(err)
}

// Adopt records that a volume has become larger than its record says: by a call
// that was cut off after the image, or because the record is an old one from a
// backup. The bytes are there, so they count as promised, room or not. The caller
// holds the volume's folder (LockVolume).
func (p *Pool) Adopt(ctx context.Context, v volume.Volume, capacity int64) error {
	err := p.showGrowth(v.ID.Name, capacity-v.Capacity)
	if err == nil {
		v.Capacity = capacity
		err = p.recordGrowth(ctx, v)
	}
	return p.explain(err)
}

func (p *Pool) recordGrowth(ctx context.Context, v volume.Volume) error {
	crashpoint.Here(crashpoint.GrowImage)
	record, err := v.MarshalRecord()
	if err != nil {
		return err
	}
	if err := p.rewrite(v.ID.Name, record); err != nil {
		return err
	}
	p.recount(v.ID.Name)
	crashpoint.Here(crashpoint.GrowRecord)
	return p.TellGrowth(ctx, v.ID.Name)
}

// SetNamespace records the only namespace whose pods may mount the volume. The caller
// holds the volume's folder (LockVolume).
func (p *Pool) SetNamespace(v volume.Volume, namespace string) error {
	if err := p.Check(); err != nil {
		return err
	}
	v.Namespace = namespace
	record, err := v.MarshalRecord()
	if err != nil {
		return err
	}
	return p.rewrite(v.ID.Name, record)
}

// rewrite replaces a volume's record.
func (p *Pool) rewrite(name string, record []byte) error {
	folder, err := openDirBeneath(p.volumes, name)
	if err != nil {
		return p.explain(err)
	}
	defer folder.Close()
	root, err := openRootIn(folder, ".")
	if err != nil {
		return p.explain(err)
	}
	defer root.Close()
	return atomicfile.Write(root, recordFile, record)
}

// SettleVolume makes durable what a call that failed or was killed may have left
// visible of a volume.
func (p *Pool) SettleVolume(name string) error {
	if p.Shared() { // what can be read there is durable
		_, err := statBeneath(p.volumes, name)
		return err
	}
	dir, err := p.root.OpenRoot(volumeDir(name))
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := atomicfile.Sync(dir, attachedDir+"/"+singleFile); err != nil && !isNotExist(err) {
		return err
	}
	return syncAll(dir, recordFile, attachedDir, ".")
}

// LockVolume keeps other processes from growing the volume, or binding it to a
// device of the size it has, until the lock is closed. ErrPending if another has
// it for over a second.
func (p *Pool) LockVolume(ctx context.Context, name string) (io.Closer, error) {
	f, err := p.openLock(name)
	if isNotExist(err) {
		return nil, volume.Errorf(volume.ErrNotFound, "volume %q is not in pool %q", name, p.cfg.Name)
	}
	if err != nil {
		return nil, p.explain(err)
	}
	err = flockPatiently(ctx, f)
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = volume.Errorf(volume.ErrPending, "volume %q is being grown, staged or copied by another call: try again", name)
	}
	if p.Shared() && noLocks(err) {
		err = nil
	}
	if err != nil {
		return nil, errors.Join(p.explain(err), f.Close())
	}
	return f, nil
}

// volumeLock is the file that LockVolume locks in a shared pool: NFS has no locks of
// directories.
const volumeLock = "lock"

func (p *Pool) openLock(name string) (*os.File, error) {
	if !p.Shared() {
		return p.root.Open(volumeDir(name))
	}
	f, err := p.openRegular(p.volumes, name+"/"+volumeLock, os.O_RDWR|os.O_CREATE, 0o600)
	if errors.Is(err, errIrregular) {
		err = p.strange(volumePath(name, volumeLock), err)
	}
	return f, err
}

// OpenImage opens a volume's image. ErrDamaged if it is missing or no regular
// file: a link is not followed.
func (p *Pool) OpenImage(name string, flag int) (*os.File, error) {
	image, err := p.openRegular(p.volumes, name+"/"+ImageFile, flag, 0)
	switch {
	case isNotExist(err):
		return nil, p.noImage(name)
	case errors.Is(err, errIrregular):
		return nil, p.irregular(name)
	}
	return image, p.explain(err)
}

// noImage says what it means that an image is not there.
func (p *Pool) noImage(name string) error {
	if _, err := p.Lookup(name); errors.Is(err, volume.ErrNotFound) || errors.Is(err, volume.ErrUnavailable) {
		return err
	}
	return volume.Errorf(volume.ErrDamaged, "volume %q in pool %q: its image %s is missing: restore it from a backup", name, p.cfg.Name, p.ImagePath(name))
}

func (p *Pool) irregular(name string) error {
	return volume.Errorf(volume.ErrDamaged, "volume %q in pool %q: %s is not a regular file, so it is not the image that this driver made: put the image back", name, p.cfg.Name, p.ImagePath(name))
}

// LockImage opens a volume's image for writing and takes its lock, which lives
// as long as any descriptor made from this one. ErrInUse if the image is attached,
// or being formatted or checked, in a shared pool by any node.
func (p *Pool) LockImage(name string) (*os.File, error) {
	image, err := p.OpenImage(name, os.O_RDWR)
	if err != nil {
		return nil, err
	}
	return p.locked(name, image, flock(image))
}

// LockImageAt is LockImage through another mount: dir is the volume's folder there.
func (p *Pool) LockImageAt(dir *os.Root, name string) (*os.File, error) {
	folder, err := dir.Open(".")
	if err != nil {
		return nil, p.explain(err)
	}
	defer folder.Close()
	image, err := p.openRegular(folder, ImageFile, os.O_RDWR, 0)
	switch {
	case errors.Is(err, errIrregular):
		return nil, p.irregular(name)
	case isNotExist(err):
		return nil, p.noImage(name)
	case err != nil:
		return nil, p.explain(err)
	}
	return p.locked(name, image, flock(image))
}

func flock(f *os.File) error { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) }

// AwaitImageLock is LockImage, waiting up to a second for the lock.
func (p *Pool) AwaitImageLock(ctx context.Context, name string) (*os.File, error) {
	image, err := p.OpenImage(name, os.O_RDWR)
	if err != nil {
		return nil, err
	}
	return p.locked(name, image, flockPatiently(ctx, image))
}

// locked hands out an image, or closes it and explains why its lock was refused.
func (p *Pool) locked(name string, image *os.File, err error) (*os.File, error) {
	switch {
	case errors.Is(err, unix.EWOULDBLOCK) && p.Shared():
		err = volume.Errorf(volume.ErrInUse, "volume %q in pool %q is in use: its image is locked by a loop device or a program, of this node or another", name, p.cfg.Name)
	case errors.Is(err, unix.EWOULDBLOCK):
		err = volume.Errorf(volume.ErrInUse, "volume %q in pool %q is in use on this node: its image is locked by a loop device or a program (losetup -j %s)", name, p.cfg.Name, p.ImagePath(name))
	case err == nil:
		err = p.stillThere(name, image)
	}
	if err != nil {
		_ = image.Close()
		return nil, err
	}
	return image, nil
}

// stillThere makes sure that a locked image is the volume's: between open and
// lock another process may have deleted it, and made a new one of that name.
func (p *Pool) stillThere(name string, image *os.File) error {
	var locked unix.Stat_t
	if err := unix.Fstat(int(image.Fd()), &locked); err != nil {
		return err
	}
	now, err := statBeneath(p.volumes, name+"/"+ImageFile)
	if err == nil && now.Ino == locked.Ino {
		return nil
	}
	if err == nil || isGone(err) {
		return volume.Errorf(volume.ErrPending, "volume %q in pool %q was deleted or replaced meanwhile: try again", name, p.cfg.Name)
	}
	return err
}
