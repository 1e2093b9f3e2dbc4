package pool

import (
	"context"
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/volume"
)

// Open opens a volume's image. ErrDamaged if it is missing or no regular
// file: a link is not followed.
func (i *Images) Open(name string, flag int) (*os.File, error) {
	image, err := i.files.Open(i.volumes, name+"/"+ImageFile, flag, 0)
	switch {
	case beneath.IsNotExist(err):
		return nil, i.noImage(name)
	case errors.Is(err, beneath.ErrIrregular):
		return nil, i.irregular(name)
	}
	return image, i.medium.Explain(err)
}

// noImage says what it means that an image is not there.
func (i *Images) noImage(name string) error {
	if _, err := i.Lookup(name); errors.Is(err, volume.ErrNotFound) || errors.Is(err, volume.ErrUnavailable) {
		return err
	}
	return volume.Errorf(volume.ErrDamaged, "volume %q in pool %q: its image %s is missing: restore it from a backup", name, i.cfg.Name, i.ImagePath(name))
}

func (i *Images) irregular(name string) error {
	return volume.Errorf(volume.ErrDamaged, "volume %q in pool %q: %s is not a regular file, so it is not the image that this driver made: put the image back", name, i.cfg.Name, i.ImagePath(name))
}

// Lock opens a volume's image for writing and takes its lock, which lives
// as long as any descriptor made from this one. ErrInUse if the image is attached,
// or being formatted or checked, in a shared pool by any node.
func (i *Images) Lock(name string) (*os.File, error) {
	image, err := i.Open(name, os.O_RDWR)
	if err != nil {
		return nil, err
	}
	return i.locked(name, image, flock(image))
}

// LockAt is LockImage through another mount: dir is the volume's folder there.
func (i *Images) LockAt(dir *os.Root, name string) (*os.File, error) {
	folder, err := dir.Open(".")
	if err != nil {
		return nil, i.medium.Explain(err)
	}
	defer folder.Close()
	image, err := i.files.Open(folder, ImageFile, os.O_RDWR, 0)
	switch {
	case errors.Is(err, beneath.ErrIrregular):
		return nil, i.irregular(name)
	case beneath.IsNotExist(err):
		return nil, i.noImage(name)
	case err != nil:
		return nil, i.medium.Explain(err)
	}
	return i.locked(name, image, flock(image))
}

// AwaitLock is LockImage, waiting up to a second for the lock.
func (i *Images) AwaitLock(ctx context.Context, name string) (*os.File, error) {
	image, err := i.Open(name, os.O_RDWR)
	if err != nil {
		return nil, err
	}
	return i.locked(name, image, flockPatiently(ctx, image))
}

// locked hands out an image, or closes it and explains why its lock was refused.
func (i *Images) locked(name string, image *os.File, err error) (*os.File, error) {
	switch {
	case errors.Is(err, unix.EWOULDBLOCK):
		err = volume.Errorf(volume.ErrInUse, "volume %q in pool %q is in use: its image is locked by a loop device or a program, in a shared pool perhaps of another node (here: losetup -j %s)", name, i.cfg.Name, i.ImagePath(name))
	case err == nil:
		err = i.stillThere(name, image)
	}
	if err != nil {
		_ = image.Close()
		return nil, err
	}
	return image, nil
}

// stillThere makes sure that a locked image is the volume's: between open and
// lock another process may have deleted it, and made a new one of that name.
func (i *Images) stillThere(name string, image *os.File) error {
	var locked unix.Stat_t
	if err := unix.Fstat(int(image.Fd()), &locked); err != nil {
		return err
	}
	now, err := beneath.Stat(i.volumes, name+"/"+ImageFile)
	if err == nil && now.Ino == locked.Ino {
		return nil
	}
	if err == nil || beneath.IsGone(err) {
		return volume.Errorf(volume.ErrPending, "volume %q in pool %q was deleted or replaced meanwhile: try again", name, i.cfg.Name)
	}
	return err
}
