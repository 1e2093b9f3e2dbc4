package pool

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"syscall"

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
// what it returns is durable. The caller has checked that there is none yet.
func (p *Pool) Create(v volume.Volume, build func(dir *os.Root) error) error {
	if err := p.Check(); err != nil {
		return err
	}
	if err := p.reserve(v); err != nil {
		return err
	}
	err := p.create(v, build)
	if err == nil {
		err = p.Settle()
	}
	if err != nil {
		p.recount(v.ID.Name)
	}
	return err
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

func (p *Pool) create(v volume.Volume, build func(dir *os.Root) error) error {
	tmp := tmpDir + "/" + v.ID.Name
	if err := p.buildTmp(tmp, v, build); err != nil {
		return errors.Join(err, removeTree(p.root, tmp, p.dev))
	}
	crashpoint.Here(crashpoint.CreateBuilt)
	if err := p.root.Rename(tmp, volumesDir+"/"+v.ID.Name); err != nil {
		return errors.Join(err, removeTree(p.root, tmp, p.dev))
	}
	crashpoint.Here(crashpoint.CreateCommitted)
	return nil
}

func (p *Pool) buildTmp(tmp string, v volume.Volume, build func(dir *os.Root) error) error {
	err := p.root.Mkdir(tmp, 0o700)
	if errors.Is(err, fs.ErrExist) { // a call that failed could not clean up
		if err = removeTree(p.root, tmp, p.dev); err == nil {
			err = p.root.Mkdir(tmp, 0o700)
		}
	}
	if err != nil {
		return err
	}
	crashpoint.Here(crashpoint.CreateReserved)
	dir, err := p.root.OpenRoot(tmp)
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := build(dir); err != nil {
		return err
	}
	record, err := v.MarshalRecord()
	if err != nil {
		return err
	}
	if err := dir.WriteFile(recordFile, record, 0o600); err != nil {
		return err
	}
	// Made here, where one fsync covers it, for the calls that publish.
	if err := dir.Mkdir(attachedDir, 0o700); err != nil {
		return err
	}
	return syncAll(dir, recordFile, ImageFile, ".")
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

// Lookup reads a volume's record from the disk. ErrNotFound if there is no
// such volume, ErrDamaged if its record is missing or unreadable.
func (p *Pool) Lookup(name string) (volume.Volume, error) {
	b, err := readBeneath(p.volumes, name+"/"+recordFile)
	if isNotExist(err) {
		if st, derr := statBeneath(p.volumes, name); derr != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
			return volume.Volume{}, volume.Errorf(volume.ErrNotFound, "volume %q is not in pool %q", name, p.cfg.Name)
		}
		return volume.Volume{}, volume.Errorf(volume.ErrDamaged, "volume %q in pool %q has no %s: restore it from a backup; its data was not touched", name, p.cfg.Name, recordFile)
	}
	if errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE) || errors.Is(err, syscall.ENOMEM) || errors.Is(err, syscall.EBADF) {
		return volume.Volume{}, err // says nothing of the record
	}
	if err != nil {
		return volume.Volume{}, volume.Errorf(volume.ErrDamaged, "volume %q in pool %q: its record: %w: restore it from a backup; its data was not touched", name, p.cfg.Name, err)
	}
	v, err := volume.ParseRecord(b)
	if err != nil {
		return volume.Volume{}, fmt.Errorf("volume %q in pool %q: %w", name, p.cfg.Name, err)
	}
	if v.ID != p.ID(v.ID.Backend, name) {
		return volume.Volume{}, volume.Errorf(volume.ErrDamaged, "volume %q in pool %q has the record of %s: was a folder copied or renamed?", name, p.cfg.Name, v.ID)
	}
	return v, nil
}

// List returns up to limit volumes of a backend whose names come after `after`,
// by name, and whether there are more. Of a volume whose record cannot be read
// it has the ID alone.
func (p *Pool) List(backend, after string, limit int) (volumes []volume.Volume, more bool, err error) {
	names, err := sortedNames(p.root, volumesDir)
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
			v, err = volume.Volume{ID: p.ID(backend, name)}, nil
		}
		if err != nil {
			return nil, false, err
		}
		volumes = append(volumes, v)
	}
	return volumes, false, nil
}

// Grow promises the volume its new, larger capacity, lets apply make it true,
// and records it. Nothing stays promised if apply fails. The caller holds the
// volume's folder (LockVolume).
func (p *Pool) Grow(v volume.Volume, capacity int64, apply func() error) error {
	if err := p.Check(); err != nil {
		return err
	}
	v.Capacity = capacity
	if err := p.reserve(v); err != nil {
		return err
	}
	err := apply()
	if err == nil {
		err = p.Adopt(v)
	}
	if err != nil {
		p.recount(v.ID.Name)
	}
	return err
}

// Adopt records that a volume has become larger: by a call that grows it, or by
// one that was cut off after the image, or because its record is an old one from
// a backup. The bytes are there, so they count as promised, room or not. The
// caller holds the volume's folder (LockVolume).
func (p *Pool) Adopt(v volume.Volume) error {
	crashpoint.Here(crashpoint.GrowImage)
	record, err := v.MarshalRecord()
	if err != nil {
		return err
	}
	if err := atomicfile.Write(p.root, volumePath(v.ID.Name, recordFile), record); err != nil {
		return err
	}
	p.recount(v.ID.Name)
	crashpoint.Here(crashpoint.GrowRecord)
	return nil
}

// SettleVolume makes durable what a call that failed or was killed may have left
// visible of a volume.
func (p *Pool) SettleVolume(name string) error {
	dir, err := p.root.OpenRoot(volumeDir(name))
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := atomicfile.Sync(dir, attachedFile); err != nil && !isNotExist(err) {
		return err
	}
	return syncAll(dir, recordFile, attachedDir, ".")
}

// LockVolume keeps other processes from growing the volume, or binding it to a
// device of the size it has, until the lock is closed. ErrPending if another has
// it for over a second.
func (p *Pool) LockVolume(ctx context.Context, name string) (io.Closer, error) {
	dir, err := p.root.Open(volumeDir(name))
	if isNotExist(err) {
		return nil, volume.Errorf(volume.ErrNotFound, "volume %q is not in pool %q", name, p.cfg.Name)
	}
	if err != nil {
		return nil, err
	}
	err = flockPatiently(ctx, dir)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		err = volume.Errorf(volume.ErrPending, "volume %q is being grown or staged by another process: try again", name)
	}
	if err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	return dir, nil
}

// OpenImage opens a volume's image. ErrDamaged if it is missing or no regular
// file: a link is not followed.
func (p *Pool) OpenImage(name string, flag int) (*os.File, error) {
	path := volumePath(name, ImageFile)
	info, err := p.root.Lstat(path)
	if isNotExist(err) {
		if _, err := p.Lookup(name); errors.Is(err, volume.ErrNotFound) {
			return nil, err
		}
		return nil, volume.Errorf(volume.ErrDamaged, "volume %q in pool %q: its image %s is missing: restore it from a backup", name, p.cfg.Name, p.ImagePath(name))
	}
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, volume.Errorf(volume.ErrDamaged, "volume %q in pool %q: %s is not a regular file, so it is not the image that this driver made: put the image back", name, p.cfg.Name, p.ImagePath(name))
	}
	return p.root.OpenFile(path, flag, 0)
}

// LockImage opens a volume's image for writing and takes its lock, which lives
// as long as any descriptor made from this one. ErrPrecondition if the image is
// attached, or being formatted or checked.
func (p *Pool) LockImage(name string) (*os.File, error) {
	image, err := p.OpenImage(name, os.O_RDWR)
	if err != nil {
		return nil, err
	}
	err = syscall.Flock(int(image.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	return p.locked(name, image, err)
}

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
	if errors.Is(err, syscall.EWOULDBLOCK) {
		err = volume.Errorf(volume.ErrInUse, "volume %q in pool %q is in use on this node: its image is locked by a loop device or a program (losetup -j %s)", name, p.cfg.Name, p.ImagePath(name))
	}
	if err == nil {
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
	if err == nil || isNotExist(err) {
		return volume.Errorf(volume.ErrPending, "volume %q in pool %q was deleted or replaced meanwhile: try again", name, p.cfg.Name)
	}
	return err
}
