package nodeserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"

	mountutils "k8s.io/mount-utils"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/blockdev"
	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/mount"
	"github.com/trivet-csi/trivet/volume"
)

// shows tells whether what stands at path is a mount of a source.
func shows(path string, at mount.Info, source mount.Source) (bool, error) {
	if !at.IsMount {
		return false, nil
	}
	if source.Directory != nil {
		return source.Directory.At(at), nil
	}
	if source.NFS != nil {
		return showsByTable(path, source)
	}
	return showsDevice(path, at, source.Device)
}

// has is shows for a path where the volume may have to be taken away, or is looked at
// only: a directory that was replaced or removed since is still the volume's there.
func has(path string, at mount.Info, source mount.Source) (bool, error) {
	ok, err := shows(path, at, source)
	if ok || err != nil || source.Directory == nil {
		return ok, err
	}
	return showsByTable(path, source)
}

// showsByTable is shows without a look at what is mounted.
func showsByTable(path string, source mount.Source) (bool, error) {
	e, err := mount.OnPath(path)
	if err != nil {
		return false, err
	}
	return source.Shows(e)
}

// showsDevice is shows for the filesystem on a device.
func showsDevice(path string, at mount.Info, device string) (bool, error) {
	node, err := mount.Inspect(device)
	if err != nil || at.Dev == node.Rdev {
		return err == nil, err
	}
	st, err := mount.Statfs(path)
	if err != nil || !mount.IsBtrfs(&st) {
		return false, err
	}
	root, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer root.Close()
	return isOn(root, device)
}

// isOn tells whether an open directory is of the filesystem on a device. A btrfs
// is asked for its device: its st_dev is a number of its own.
func isOn(dir *os.File, device string) (bool, error) {
	var st, node syscall.Stat_t
	if err := errors.Join(syscall.Fstat(int(dir.Fd()), &st), syscall.Stat(device, &node)); err != nil {
		return false, err
	}
	if st.Dev == node.Rdev {
		return true, nil
	}
	on, err := blockdev.BtrfsDevice(dir)
	if errors.Is(err, syscall.ENOTTY) || errors.Is(err, syscall.EINVAL) { // no btrfs
		return false, nil
	}
	if err != nil || on == device {
		return err == nil, err
	}
	// udev may have told it another name of the device.
	err = syscall.Stat(on, &st)
	return err == nil && st.Rdev == node.Rdev, err
}

// showsNode tells whether what stands at path is a bind mount of a device node.
func showsNode(at mount.Info, device string) (bool, error) {
	node, err := mount.Inspect(device)
	return err == nil && at.IsMount && at.IsBlock() && at.Rdev == node.Rdev, err
}

// prepareDir makes sure that a directory can be mounted on: it is made if it is
// not there, and refused if something would be hidden below the mount.
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
	empty, err := isEmpty(path)
	if err == nil && !empty {
		err = volume.Errorf(volume.ErrPrecondition, "%s %q is not empty, and mounting there would hide what it has: empty it", field, path)
	}
	return false, err
}

// prepareFile does the same for a file that a device node is bound to.
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

// unusablePath explains why a path cannot be made.
func unusablePath(field string, err error) error {
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) || errors.Is(err, syscall.EROFS) {
		return volume.Errorf(volume.ErrPrecondition, "%s: %w: its parent has to be a directory that can be written", field, err)
	}
	return fmt.Errorf("%s: %w", field, err)
}

func isEmpty(dir string) (bool, error) {
	f, err := os.Open(dir)
	if err != nil {
		return false, err
	}
	defer f.Close()
	_, err = f.Readdirnames(1)
	if errors.Is(err, io.EOF) {
		return true, nil
	}
	return false, err
}

// inspectMount is mount.Inspect for teardown: a mount whose filesystem is broken
// still is one, and has to go. One of a server is not looked at, it may be silent.
func inspectMount(id volume.ID, path string) (at mount.Info, broken bool, err error) {
	if id.Shared() {
		e, err := mount.OnPath(path)
		if err != nil || (e != nil && mount.IsNFS(e)) {
			return mount.Info{Exists: true, IsMount: true}, true, err
		}
	}
	at, err = mount.Inspect(path)
	var failed *mount.Error
	if errors.As(err, &failed) && mountutils.IsCorruptedMnt(failed.Err) {
		return mount.Info{Exists: true, IsMount: true}, true, nil
	}
	return at, false, err
}

// mountedFrom tells by the mount table alone whether the volume is mounted at a
// path: a broken filesystem does not answer for itself.
func mountedFrom(ctx context.Context, b backend.Backend, v volume.Volume, path string) (bool, error) {
	source, ok, err := b.Present(ctx, v)
	if err != nil || !ok {
		return false, err
	}
	return showsByTable(path, source)
}

// leftAlone refuses to unmount what is not known to be the volume's.
func leftAlone(field, path string) error {
	e, err := mount.OnPath(path)
	if err != nil || e == nil || !mount.IsNFS(e) {
		return volume.Errorf(volume.ErrPrecondition, "%s %q is a mount of something other than this volume: it is left alone", field, path)
	}
	return volume.Errorf(volume.ErrPrecondition, "%s %q is a mount of something other than this volume, of %s: it is left alone; if that is where the volume's pool was, configure it so until its volumes are unstaged", field, path, e.Source)
}

// unmount takes away a mount of a volume's filesystem or device. It refuses to
// take away another's.
func unmount(ctx context.Context, field, path string, mine func() (bool, error)) error {
	ok, err := mine()
	if err != nil {
		return err
	}
	if !ok {
		return leftAlone(field, path)
	}
	// A call for stats, or a driver that was just killed, may still have it open.
	err = retry.For(ctx, 100*time.Millisecond, func() (bool, error) {
		err := mount.Unmount(path)
		return errors.Is(err, syscall.EBUSY), err
	})
	if errors.Is(err, syscall.EBUSY) {
		return volume.Errorf(volume.ErrPrecondition, "%s %q: %w: some process uses it (fuser -m)", field, path, err)
	}
	return err
}
