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

// NeedsDeviceMount is true of block devices that are to have a filesystem.
func (p *Plugin) NeedsDeviceMount(spec *plugins.Spec) (bool, error) {
	if spec.Block() {
		return false, nil
	}
	if err := check(spec); err != nil {
		return false, err
	}
	_, mode, err := look(spec)
	return mode == fs.ModeDevice, err
}

// VolumeName is the PersistentVolume's.
func (p *Plugin) VolumeName(spec *plugins.Spec) (string, error) { return spec.Name(), nil }

func (p *Plugin) mounts() string { return filepath.Join(p.host.Paths().Plugin(Name), "mounts") }

// DeviceMountPath is named by the PersistentVolume.
func (p *Plugin) DeviceMountPath(spec *plugins.Spec) (string, error) {
	return filepath.Join(p.mounts(), spec.Name()), plugins.CheckPart("metadata.name", spec.Name())
}

// DeviceMounts are the directories there are: each may be mounted.
func (p *Plugin) DeviceMounts() ([]plugins.DeviceMount, error) {
	entries, err := os.ReadDir(p.mounts())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var found []plugins.DeviceMount
	for _, e := range entries {
		pv := &corev1.PersistentVolume{}
		pv.Name = e.Name()
		found = append(found, plugins.DeviceMount{VolumeName: pv.Name, Spec: &plugins.Spec{PersistentVolume: pv}})
	}
	return found, err
}

// MountDevice mounts the device's filesystem. A device that is provably blank, and that
// nobody has, is given one before: local.fsType, or ext4.
func (p *Plugin) MountDevice(ctx context.Context, spec *plugins.Spec, _ plugins.Attachment, _ plugins.MounterArgs) error {
	at, err := p.DeviceMountPath(spec)
	if err != nil {
		return err
	}
	options, err := optionsOf(spec)
	if err != nil {
		return err
	}
	device, mode, err := look(spec)
	if err != nil {
		return err
	}
	if mode != fs.ModeDevice {
		return fmt.Errorf("local.path %q is not a block device any more: correct it", spec.PersistentVolume.Spec.Local.Path)
	}
	if mounted, err := isMountOf(at, device); err != nil || mounted {
		return err
	}
	fsType, err := p.prepare(ctx, spec, device)
	if err != nil {
		return err
	}
	return show(device, fsType, at, options)
}

// isMountOf tells whether a device is mounted at a path. Anything else there is an error.
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

func show(device, fsType, at string, options mount.Options) (err error) {
	made, err := mount.Filesystem(device, fsType, options)
	if errors.Is(err, mount.ErrBadOption) {
		return plugins.Invalidf("mountOptions: %v: remove what %s does not know", err, fsType)
	}
	if errors.Is(err, syscall.ENODEV) {
		return fmt.Errorf("local.fsType %q: %w: this kernel has no such filesystem", fsType, err)
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, made.Close()) }()
	if err := os.MkdirAll(at, 0o750); err != nil {
		return err
	}
	return made.MoveTo(at)
}

// UnmountDevice needs the name alone. A raw device has nothing to be undone.
func (p *Plugin) UnmountDevice(_ context.Context, spec *plugins.Spec) error {
	at, err := p.DeviceMountPath(spec)
	if err != nil {
		return err
	}
	return mount.Clear(at)
}
