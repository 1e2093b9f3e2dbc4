package pool

import (
	"context"
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/trace"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/volume"
)

// Open opens a volume's image without following a link. ErrDamaged if it is missing or not a
// regular file.
func (i *Images) Open(name string, flag int) (*os.File, error) {
	return i.openIn(i.volumes, name+"/"+ImageFile, name, flag)
}

// openIn opens the image of the volume name at a path below dir. Reads of it do not change its access time, which a loop device would
// have to make durable before the kernel binds it (LOOP_CONFIGURE calls fsync(2)).
func (i *Images) openIn(dir *os.File, path, name string, flag int) (*os.File, error) {
	image, err := i.files.Open(dir, path, flag|unix.O_NOATIME, 0)
	if errors.Is(err, unix.EPERM) { // the file belongs to another user, and this process lacks CAP_FOWNER
		image, err = i.files.Open(dir, path, flag, 0)
	}
	switch {
	case beneath.IsNotExist(err):
		return nil, i.noImage(name)
	case errors.Is(err, beneath.ErrIrregular):
		return nil, volume.Errorf(volume.ErrDamaged, "volume %q in pool %q: %s is not a regular file, so it is not the image that this driver made: restore the image", name, i.cfg.Name, i.ImagePath(name))
	}
	return image, i.medium.Explain(err)
}

// noImage returns the error for a missing image: ErrNotFound if the volume does not exist,
// ErrUnavailable if that is not known, else ErrDamaged.
func (i *Images) noImage(name string) error {
	if _, err := i.Lookup(name); errors.Is(err, volume.ErrNotFound) || errors.Is(err, volume.ErrUnavailable) {
		return err
	}
	return volume.Errorf(volume.ErrDamaged, "volume %q in pool %q: its image %s is missing: restore it from a backup", name, i.cfg.Name, i.ImagePath(name))
}

// Lock opens a volume's image for writing and takes its lock, which is held until all duplicates
// of the descriptor are closed. ErrInUse if the image is attached, being formatted or being
// checked: on this node or, in a shared pool, on any node.
func (i *Images) Lock(name string) (*os.File, error) {
	image, err := i.Open(name, os.O_RDWR)
	if err != nil {
		return nil, err
	}
	return i.locked(name, image, flock(image))
}

// LockAt is Lock through another mount of the export. dir is the volume's folder on that mount.
func (i *Images) LockAt(dir *os.Root, name string) (*os.File, error) {
	folder, err := dir.Open(".")
	if err != nil {
		return nil, i.medium.Explain(err)
	}
	defer folder.Close()
	image, err := i.openIn(folder, ImageFile, name, os.O_RDWR)
	if err != nil {
		return nil, err
	}
	return i.locked(name, image, flock(image))
}

// AwaitLock is Lock, and waits up to a second for the lock.
func (i *Images) AwaitLock(ctx context.Context, name string) (*os.File, error) {
	image, err := i.Open(name, os.O_RDWR)
	if err != nil {
		return nil, err
	}
	return i.locked(name, image, awaitLock(ctx, image))
}

// awaitLock locks an image. It waits up to a second for the lock.
func awaitLock(ctx context.Context, image *os.File) (err error) {
	ctx, span := trace.Start(ctx, "wait for lock")
	defer span.End(&err)
	return flockPatiently(ctx, image)
}

// locked returns the image of the volume name after an attempt to lock it, which returned err. If the
// lock was refused, or the volume has another image now, locked closes the image and returns an error.
func (i *Images) locked(name string, image *os.File, err error) (*os.File, error) {
	switch {
	case errors.Is(err, unix.EWOULDBLOCK):
		err = volume.Errorf(volume.ErrInUse, "volume %q in pool %q is in use: its image is locked by a loop device or a program, in a shared pool perhaps on another node (check this node with: losetup -j %s)", name, i.cfg.Name, i.ImagePath(name))
	case err == nil:
		err = i.checkCurrent(name, name+"/"+ImageFile, image)
	}
	if err != nil {
		_ = image.Close()
		return nil, err
	}
	return image, nil
}
