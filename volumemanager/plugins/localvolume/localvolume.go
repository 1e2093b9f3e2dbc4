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

// Name is the plugin's, as the kubelet has it.
const Name = "kubernetes.io/local-volume"

// Plugin is the volume plugin for local. A directory is bound for each pod. A block device
// with a filesystem is mounted once for all pods; a raw one needs nothing.
type Plugin struct {
	host      plugins.Host
	formatter *blockdev.Formatter
}

var (
	_ plugins.PersistentVolumePlugin      = (*Plugin)(nil)
	_ plugins.DeviceMountableVolumePlugin = (*Plugin)(nil)
	_ plugins.BlockVolumePlugin           = (*Plugin)(nil)
)

// New makes the plugin.
func New(host plugins.Host) *Plugin { return &Plugin{host, blockdev.NewFormatter()} }

// Name is kubernetes.io/local-volume.
func (p *Plugin) Name() string { return Name }

// CanSupport tells whether a spec is a PersistentVolume with a local source.
func (p *Plugin) CanSupport(spec *plugins.Spec) bool {
	return spec.PersistentVolume != nil && spec.PersistentVolume.Spec.Local != nil
}

// AccessModes are of one machine.
func (p *Plugin) AccessModes() []corev1.PersistentVolumeAccessMode {
	return []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}
}

// Remounts is false: what is there is the volume.
func (p *Plugin) Remounts(*plugins.Spec) bool { return false }

// NewMounter checks the fields.
func (p *Plugin) NewMounter(spec *plugins.Spec, pod *corev1.Pod) (plugins.Mounter, error) {
	if err := check(spec); err != nil {
		return nil, err
	}
	options, err := optionsOf(spec)
	if err != nil {
		return nil, err
	}
	path, err := p.podPath(spec.Name(), pod.UID)
	return &mounter{p, spec, options, path}, err
}

// NewUnmounter needs no manifest.
func (p *Plugin) NewUnmounter(name string, pod types.UID) (plugins.Unmounter, error) {
	path, err := p.podPath(name, pod)
	return &unmounter{path}, err
}

func (p *Plugin) podPath(name string, pod types.UID) (string, error) {
	err := errors.Join(plugins.CheckPart("metadata.uid", string(pod)), plugins.CheckPart("volume", name))
	return p.host.Paths().PodVolume(pod, Name, name), err
}

// check refuses a path that no machine can make a volume of.
func check(spec *plugins.Spec) error {
	path := spec.PersistentVolume.Spec.Local.Path
	if !filepath.IsAbs(path) || slices.Contains(strings.Split(path, "/"), "..") || strings.ContainsRune(path, 0) {
		return plugins.Invalidf("local.path %q: want an absolute path without ..", path)
	}
	return nil
}

// optionsOf are the PersistentVolume's mountOptions. A filesystem that only the kernel knows
// has no closed list.
func optionsOf(spec *plugins.Spec) (mount.Options, error) {
	words := spec.PersistentVolume.Spec.MountOptions
	options, err := mount.ParseFlags(words)
	if err != nil {
		return options, plugins.Invalidf("mountOptions %q: %v: remove it", words, err)
	}
	fsTypes := known
	if t := spec.PersistentVolume.Spec.Local.FSType; t != nil && *t != "" {
		fsTypes = []string{*t}
	}
	if !slices.Contains(known, fsTypes[0]) {
		return options, nil
	}
	if err := volume.CheckMountFlags(words, fsTypes...); err != nil {
		return options, plugins.Invalidf("mountOptions: %v", err)
	}
	return options, nil
}

// look finds out what local.path leads to. Links are followed: the path is the
// administrator's.
func look(spec *plugins.Spec) (path string, mode fs.FileMode, err error) {
	given := spec.PersistentVolume.Spec.Local.Path
	if path, err = filepath.EvalSymlinks(given); err != nil {
		return "", 0, fmt.Errorf("local.path %q: %w: make it, or connect the disk", given, err)
	}
	info, err := os.Lstat(path)
	if err != nil {
		return "", 0, fmt.Errorf("local.path %q: %w", given, err)
	}
	if mode = info.Mode().Type(); mode != fs.ModeDir && mode != fs.ModeDevice {
		return "", 0, fmt.Errorf("local.path %q: it is neither a directory nor a block device: correct it", given)
	}
	return path, mode, nil
}

type mounter struct {
	p       *Plugin
	spec    *plugins.Spec
	options mount.Options
	path    string
}

// Path is where the directory, or the device's filesystem, is bound.
func (m *mounter) Path() string { return m.path }

// SetUp gives what is there to the pod's group, and binds it: what is bound has the group
// already, and stays as it is.
func (m *mounter) SetUp(ctx context.Context, args plugins.MounterArgs) error {
	source, options, err := m.source()
	if err != nil {
		return err
	}
	bound, err := m.bound(source)
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

// source is the directory to be bound, and with what.
func (m *mounter) source() (string, mount.Options, error) {
	path, mode, err := look(m.spec)
	if err != nil {
		return "", mount.Options{}, err
	}
	if mode == fs.ModeDir {
		if data := m.options.Data; len(data) > 0 {
			return "", mount.Options{}, plugins.Invalidf("mountOptions %q: %s is an option of a filesystem, and local.path %s is a directory of one: remove it", m.spec.PersistentVolume.Spec.MountOptions, strings.Join(data, ","), path)
		}
		return path, m.options, nil
	}
	at, err := m.p.DeviceMountPath(m.spec)
	if err != nil {
		return "", mount.Options{}, err
	}
	if mounted, err := isMountOf(at, path); err != nil || !mounted {
		return "", mount.Options{}, errors.Join(err, fmt.Errorf("the device %s is not mounted at %s: it is tried again", path, at))
	}
	return at, mount.Options{Attr: m.options.Attr}, nil
}

// bound tells whether the pod has the source already.
func (m *mounter) bound(source string) (bool, error) {
	have, err := mount.Inspect(m.path)
	if err != nil || !have.IsMount {
		return false, err
	}
	want, err := mount.Inspect(source)
	if err != nil {
		return false, err
	}
	if have.Dev != want.Dev || have.Ino != want.Ino {
		return false, fmt.Errorf("something else than local.path %s is mounted at %s: unmount it", m.spec.PersistentVolume.Spec.Local.Path, m.path)
	}
	return true, nil
}

type unmounter struct{ path string }

// TearDown unmounts, and removes the empty directory.
func (u *unmounter) TearDown(context.Context) error { return mount.Clear(u.path) }
