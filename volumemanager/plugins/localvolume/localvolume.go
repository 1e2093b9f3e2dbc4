package localvolume

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
	"github.com/trivet-csi/trivet/volumemanager/ownership"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// Name is the kubelet's name of the plugin.
const Name = "kubernetes.io/local-volume"

// Plugin is the volume plugin for local volumes. A directory is bind-mounted for each pod. A block
// device with a filesystem is mounted once for all pods. A raw device needs no mount.
type Plugin struct {
	host      plugins.Host
	formatter *blockdev.Formatter
}

var (
	_ plugins.PersistentVolumePlugin      = (*Plugin)(nil)
	_ plugins.DeviceMountableVolumePlugin = (*Plugin)(nil)
	_ plugins.BlockVolumePlugin           = (*Plugin)(nil)
)

// New creates the plugin.
func New(host plugins.Host) *Plugin { return &Plugin{host, blockdev.NewFormatter()} }

// Name returns kubernetes.io/local-volume.
func (p *Plugin) Name() string { return Name }

// CanSupport reports whether a spec is a PersistentVolume with a local source.
func (p *Plugin) CanSupport(spec *plugins.Spec) bool {
	return spec.PersistentVolume != nil && spec.PersistentVolume.Spec.Local != nil
}

// AccessModes returns ReadWriteOnce, because the path is on one node.
func (p *Plugin) AccessModes() []corev1.PersistentVolumeAccessMode {
	return []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
}

// Remounts returns false, because the pod uses the directory or filesystem directly.
func (p *Plugin) Remounts(*plugins.Spec) bool { return false }

// NewMounter validates the spec.
func (p *Plugin) NewMounter(spec *plugins.Spec, pod *corev1.Pod) (plugins.Mounter, error) {
	if err := checkPath(spec); err != nil {
		return nil, err
	}
	options, err := optionsOf(spec)
	if err != nil {
		return nil, err
	}
	path, err := p.host.Paths().CheckedPodVolume(pod.UID, Name, spec.Name())
	return &mounter{p, spec, options, path}, err
}

// NewUnmounter needs no manifest.
func (p *Plugin) NewUnmounter(name string, pod types.UID) (plugins.Unmounter, error) {
	path, err := p.host.Paths().CheckedPodVolume(pod, Name, name)
	return &unmounter{path}, err
}

// checkPath checks local.path.
func checkPath(spec *plugins.Spec) error {
	return plugins.CheckAbsolute("local.path", spec.PersistentVolume.Spec.Local.Path)
}

// optionsOf parses the PersistentVolume's mountOptions. If local.fsType is in known, only the options
// that volume.CheckMountFlags lists for that filesystem are valid. If local.fsType is not set, the options
// of all filesystems in known are valid.
func optionsOf(spec *plugins.Spec) (mount.Options, error) {
	flags := spec.PersistentVolume.Spec.MountOptions
	options, err := mount.ParseFlags(flags)
	if err != nil {
		return options, plugins.Invalidf("mountOptions %q: %v: remove this option", flags, err)
	}
	fsTypes := known
	if t := spec.PersistentVolume.Spec.Local.FSType; t != nil && *t != "" {
		fsTypes = []string{*t}
	}
	if !slices.Contains(known, fsTypes[0]) {
		return options, nil
	}
	if err := volume.CheckMountFlags(flags, fsTypes...); err != nil {
		return options, plugins.Invalidf("mountOptions: %v", err)
	}
	return options, nil
}

// resolve returns the directory or block device of local.path, and its type. It follows symbolic
// links, because the administrator chose the path.
func resolve(spec *plugins.Spec) (path string, mode fs.FileMode, err error) {
	given := spec.PersistentVolume.Spec.Local.Path
	if path, err = filepath.EvalSymlinks(given); err != nil {
		return "", 0, fmt.Errorf("local.path %q: %w: create the path, or connect the disk", given, err)
	}
	info, err := os.Lstat(path)
	if err != nil {
		return "", 0, fmt.Errorf("local.path %q: %w", given, err)
	}
	if mode = info.Mode().Type(); mode != fs.ModeDir && mode != fs.ModeDevice {
		return "", 0, fmt.Errorf("local.path %q: it is neither a directory nor a block device: correct the path", given)
	}
	return path, mode, nil
}

// mounter sets a directory or filesystem up for a pod.
type mounter struct {
	p       *Plugin
	spec    *plugins.Spec
	options mount.Options
	path    string
}

// Path returns the path of the bind mount.
func (m *mounter) Path() string { return m.path }

// SetUp applies the pod's fsGroup and bind-mounts the source. It does not change an existing bind
// mount, because the source already has the group.
func (m *mounter) SetUp(ctx context.Context, args plugins.MounterArgs) error {
	source, options, err := m.source()
	if err != nil {
		return err
	}
	bound, err := m.isBound(source)
	if err != nil || bound {
		return err
	}
	if m.spec.ReadOnly {
		options = options.ReadOnly()
	} else if err := ownership.Set(ctx, source, args); err != nil {
		return err
	}
	if err := os.MkdirAll(m.path, 0o750); err != nil {
		return err
	}
	if err := mount.Bind(source, m.path, options); err != nil {
		return errors.Join(err, mount.RemoveTarget(m.path))
	}
	return nil
}

// source returns the directory to bind-mount, and the options of the bind mount.
func (m *mounter) source() (string, mount.Options, error) {
	path, mode, err := resolve(m.spec)
	if err != nil {
		return "", mount.Options{}, err
	}
	if mode == fs.ModeDir {
		if flags := m.options.FilesystemFlags(); len(flags) > 0 {
			return "", mount.Options{}, plugins.Invalidf("mountOptions %q: %s is an option of a filesystem, and the directory local.path %s is only bind-mounted: remove the option", m.spec.PersistentVolume.Spec.MountOptions, strings.Join(flags, ","), path)
		}
		return path, m.options, nil
	}
	deviceMount, err := m.p.DeviceMountPath(m.spec)
	if err != nil {
		return "", mount.Options{}, err
	}
	mounted, err := isMountOf(deviceMount, path)
	if err == nil && !mounted {
		err = fmt.Errorf("the device %s is not mounted at %s: the manager retries", path, deviceMount)
	}
	if err != nil {
		return "", mount.Options{}, err
	}
	return deviceMount, mount.Options{Attr: m.options.Attr}, nil
}

// isBound reports whether the source is mounted at the pod's path. It returns an error if anything else
// is mounted at the path.
func (m *mounter) isBound(source string) (bool, error) {
	bound, err := mount.Inspect(m.path)
	if err != nil || !bound.IsMount {
		return false, err
	}
	want, err := mount.Inspect(source)
	if err != nil {
		return false, err
	}
	if bound.Dev != want.Dev || bound.Ino != want.Ino {
		return false, fmt.Errorf("the mount at %s is not a mount of local.path %s: unmount it", m.path, m.spec.PersistentVolume.Spec.Local.Path)
	}
	return true, nil
}

type unmounter struct{ path string }

// TearDown unmounts the volume and removes the empty directory.
func (u *unmounter) TearDown(context.Context) error { return mount.Clear(u.path) }
