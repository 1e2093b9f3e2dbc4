package nodeserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// prepareDir creates a directory to mount on, unless it exists. A directory that is not
// empty is refused: the mount would hide its content.
func prepareDir(field, path string, at mount.Info) (made bool, err error) {
	if !at.Exists {
		if err := os.Mkdir(path, 0o750); err != nil {
			return false, unusablePath(field, err)
		}
		return true, nil
	}
	if !at.IsDir() {
		return false, volume.Errorf(volume.ErrPrecondition, "%s %q is not a directory: remove it", field, path)
	}
	dir, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer dir.Close()
	_, err = dir.Readdirnames(1)
	switch {
	case errors.Is(err, io.EOF):
		return false, nil
	case err == nil:
		err = volume.Errorf(volume.ErrPrecondition, "%s %q is not empty, and mounting there would hide what it has: empty it", field, path)
	}
	return false, err
}

// prepareFile does the same for the file that a device node is bound to.
func prepareFile(field, path string, at mount.Info) (made bool, err error) {
	if at.Exists {
		info, err := os.Lstat(path)
		if err == nil && (!info.Mode().IsRegular() || info.Size() > 0) {
			err = volume.Errorf(volume.ErrPrecondition, "%s %q is not an empty file, and a device there would hide it: remove it", field, path)
		}
		return false, err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o640)
	if err != nil {
		return false, unusablePath(field, err)
	}
	return true, f.Close()
}

// unusablePath explains why a path cannot be created.
func unusablePath(field string, err error) error {
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) || errors.Is(err, syscall.EROFS) {
		return volume.Errorf(volume.ErrPrecondition, "%s: %w: its parent must be a writable directory", field, err)
	}
	return fmt.Errorf("%s: %w", field, err)
}

// verifyOwnership returns nil if no other node has had a volume since it was staged here.
func verifyOwnership(ctx context.Context, b backend.Backend, v volume.Volume) error {
	verifier, ok := b.(backend.OwnershipVerifier)
	if !ok {
		return nil
	}
	return verifier.VerifyOwnership(ctx, v)
}

// mountedSource returns the source of a volume that is mounted at path; nil if nothing is
// mounted there. Another mount is an error: it is not unmounted.
func mountedSource(ctx context.Context, b backend.Backend, v volume.Volume, field, path string) (mount.Source, error) {
	mounted, err := mount.IsMountPoint(path)
	if err != nil || !mounted {
		return nil, err
	}
	source, err := owner(ctx, b, v, path)
	if err == nil && source == nil {
		err = errForeignMount(field, path)
	}
	return source, err
}

// owner returns the source of the volume whose mount is at path; nil if the mount is not
// the volume's.
func owner(ctx context.Context, b backend.Backend, v volume.Volume, path string) (mount.Source, error) {
	source, ok, err := b.Present(ctx, v)
	if err != nil || !ok {
		return nil, err
	}
	if ok, err := source.Owns(path); ok || err != nil {
		return source, err
	}
	provider, ok := b.(backend.BlockProvider)
	if !ok {
		return nil, nil
	}
	device, ok, err := provider.PresentReadOnly(ctx, v)
	if err == nil && ok {
		ok, err = device.Owns(path)
	}
	if err != nil || !ok {
		return nil, err
	}
	return device, nil
}

// errForeignMount says that a mount is not known to be the volume's.
func errForeignMount(field, path string) error {
	e, err := mount.OnPath(path)
	if err != nil || e == nil {
		return volume.Errorf(volume.ErrPrecondition, "%s %q is a mount of something other than this volume: it is left alone", field, path)
	}
	return volume.Errorf(volume.ErrPrecondition, "%s %q is a mount of something other than this volume: it is left alone; %s is mounted there: if that is where the pool of the volume was, configure the pool so until its volumes are unstaged", field, path, e.Source)
}

// explainUnmount adds the error of package volume to an error of unmounting.
func explainUnmount(field, path string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, syscall.EBUSY):
		return volume.Errorf(volume.ErrPrecondition, "%s %q: %w: some process uses it (fuser -m)", field, path, err)
	case errors.Is(err, mount.ErrMountedElsewhere):
		return volume.Errorf(volume.ErrPrecondition, "%s %q: the volume is still published: %w: unpublish it there first", field, path, err)
	case errors.Is(err, mount.ErrNotWritten), errors.Is(err, mount.ErrUnmounting):
		return volume.Errorf(volume.ErrUnavailable, "%s %q: %w", field, path, err)
	}
	return err
}
