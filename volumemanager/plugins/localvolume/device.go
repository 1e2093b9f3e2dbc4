package localvolume

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	corev1 "k8s.io/api/core/v1"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// NeedsDeviceMount returns true for a block device with a filesystem.
func (p *Plugin) NeedsDeviceMount(spec *plugins.Spec) (bool, error) {
	if spec.Block() {
		return false, nil
	}
	if err := checkPath(spec); err != nil {
		return false, err
	}
	_, mode, err := resolve(spec)
	return mode == fs.ModeDevice, err
}

// VolumeName returns the name of the PersistentVolume.
func (p *Plugin) VolumeName(spec *plugins.Spec) (string, error) { return spec.Name(), nil }

// mountsDir returns the directory of the device mounts.
func (p *Plugin) mountsDir() string { return filepath.Join(p.host.Paths().Plugin(Name), "mounts") }

// DeviceMountPath returns a path with the name of the PersistentVolume.
func (p *Plugin) DeviceMountPath(spec *plugins.Spec) (string, error) {
	return filepath.Join(p.mountsDir(), spec.Name()), plugins.CheckPart("metadata.name", spec.Name())
}

// DeviceMounts returns the volumes that have a directory for the device mount.
func (p *Plugin) DeviceMounts() ([]plugins.DeviceMount, error) {
	entries, err := plugins.Entries(p.mountsDir())
	var found []plugins.DeviceMount
	for _, e := range entries {
		pv := &corev1.PersistentVolume{}
		pv.Name = e.Name()
		found = append(found, plugins.DeviceMount{VolumeName: pv.Name, Spec: &plugins.Spec{PersistentVolume: pv}})
	}
	return found, err
}

// MountDevice mounts the device's filesystem. If the device is provably blank and not in use, it first
// creates a filesystem of the type local.fsType, by default ext4.
func (p *Plugin) MountDevice(ctx context.Context, spec *plugins.Spec, _ plugins.Attachment, _ plugins.MounterArgs) error {
	at, err := p.DeviceMountPath(spec)
	if err != nil {
		return err
	}
	options, err := optionsOf(spec)
	if err != nil {
		return err
	}
	device, mode, err := resolve(spec)
	if err != nil {
		return err
	}
	if mode != fs.ModeDevice {
		return fmt.Errorf("local.path %q is no longer a block device: correct the path", spec.PersistentVolume.Spec.Local.Path)
	}
	if mounted, err := isMountOf(at, device); err != nil || mounted {
		return err
	}
	fsType, err := p.prepare(ctx, spec, device)
	if err != nil {
		return err
	}
	return mountDevice(device, fsType, at, options)
}

// isMountOf reports whether a device is mounted at a path. It returns an error if anything else is
// mounted at the path.
func isMountOf(path, device string) (bool, error) {
	at, err := mount.OnPath(path)
	if err != nil || at == nil {
		return false, err
	}
	mounts, err := mount.OfDevice(device)
	if err != nil {
		return false, err
	}
	if !slices.ContainsFunc(mounts, func(e *mount.Entry) bool { return e.ID == at.ID }) {
		return false, fmt.Errorf("%s is mounted at %s, not %s: unmount it", at.Source, path, device)
	}
	return true, nil
}

// mountDevice mounts the filesystem of a device at a path.
func mountDevice(device, fsType, at string, options mount.Options) error {
	filesystem, err := mount.Filesystem(device, fsType, options)
	if errors.Is(err, mount.ErrBadOption) {
		return plugins.Invalidf("mountOptions: %v: remove the option that %s does not support", err, fsType)
	}
	if errors.Is(err, syscall.ENODEV) {
		return fmt.Errorf("local.fsType %q: %w: this kernel has no such filesystem", fsType, err)
	}
	if err != nil {
		return err
	}
	if err = os.MkdirAll(at, 0o750); err == nil {
		err = filesystem.MoveTo(at)
	}
	return errors.Join(err, filesystem.Close())
}

// UnmountDevice needs only the name. A raw device has no device mount.
func (p *Plugin) UnmountDevice(_ context.Context, spec *plugins.Spec) error {
	at, err := p.DeviceMountPath(spec)
	if err != nil {
		return err
	}
	return mount.Clear(at)
}
