package plugins

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"github.com/trivet-csi/trivet/linux/mount"
)

// BindDevice bind-mounts a block device, or the device that a link points to, at a path, as a
// kubelet does. It replaces another device that is bound at the path.
func BindDevice(device, path string) error {
	device, err := filepath.EvalSymlinks(device)
	if err != nil {
		return err
	}
	want, err := mount.Inspect(device)
	if err != nil {
		return err
	}
	bound, err := mount.Inspect(path)
	if err != nil || bound.IsMount && bound.IsBlock() && bound.Rdev == want.Rdev {
		return err
	}
	if err := UnbindDevice(path); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW, 0o640)
	if err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return mount.Bind(device, path, mount.Options{})
}

// UnbindDevice undoes BindDevice. It also removes the parent directory if no other device is in it.
func UnbindDevice(path string) error {
	bound, err := mount.Inspect(path)
	if err != nil || !bound.Exists {
		return err
	}
	if err := mount.Clear(path); err != nil {
		return err
	}
	_ = os.Remove(filepath.Dir(path))
	return nil
}

// LinkDevice creates a symbolic link to a device, or replaces a link to another device.
func LinkDevice(device, path string) error {
	if to, err := os.Readlink(path); err == nil && to == device {
		return nil
	}
	if err := UnlinkDevice(path); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return err
	}
	return os.Symlink(device, path)
}

// UnlinkDevice undoes LinkDevice. It returns an error if anything but a symbolic link is at the path.
func UnlinkDevice(path string) error {
	if info, err := os.Lstat(path); err == nil && info.Mode().Type() != fs.ModeSymlink {
		return fmt.Errorf("%s is not a symbolic link to a device: move it away", path)
	}
	return mount.RemoveTarget(path)
}
