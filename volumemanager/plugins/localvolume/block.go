package localvolume

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// NewBlockVolumeMapper checks the fields. A link holds nobody to a claim that is read-only:
// what runs the containers has to.
func (p *Plugin) NewBlockVolumeMapper(spec *plugins.Spec, pod *corev1.Pod) (plugins.BlockVolumeMapper, error) {
	if err := check(spec); err != nil {
		return nil, err
	}
	path, err := p.podDevice(spec.Name(), pod.UID)
	return &mapper{spec, path, p.shownDevice(spec.Name(), pod.UID)}, err
}

// NewBlockVolumeUnmapper needs no manifest.
func (p *Plugin) NewBlockVolumeUnmapper(name string, pod types.UID) (plugins.BlockVolumeUnmapper, error) {
	path, err := p.podDevice(name, pod)
	return &unmapper{path, p.shownDevice(name, pod)}, err
}

func (p *Plugin) podDevice(name string, pod types.UID) (string, error) {
	err := errors.Join(plugins.CheckPart("metadata.uid", string(pod)), plugins.CheckPart("volume", name))
	return p.host.Paths().PodDevice(pod, Name, name), err
}

// shownDevice is where the device of a pod is shown to programs of the machine.
func (p *Plugin) shownDevice(name string, pod types.UID) string {
	return filepath.Join(p.host.Paths().Plugin(plugins.Escape(Name)), "volumeDevices", name, string(pod))
}

type mapper struct {
	spec        *plugins.Spec
	path, shown string
}

// Path is a symbolic link to the device.
func (m *mapper) Path() string { return m.path }

// SetUpDevice makes sure that the device is there.
func (m *mapper) SetUpDevice(context.Context, plugins.Attachment) error {
	_, err := m.device()
	return err
}

func (m *mapper) device() (string, error) {
	path, mode, err := look(m.spec)
	if err == nil && mode != fs.ModeDevice {
		err = fmt.Errorf("local.path %q: it is a directory, and volumeMode Block asks for a block device: correct one of them", m.spec.PersistentVolume.Spec.Local.Path)
	}
	return path, err
}

// MapPodDevice links the pod's path to the device, and shows the device. One to another
// device is replaced: the disk was connected anew.
func (m *mapper) MapPodDevice(context.Context) error {
	device, err := m.device()
	if err != nil {
		return err
	}
	if err := m.link(device); err != nil {
		return err
	}
	if err := plugins.BindDevice(device, m.shown); err != nil {
		return &plugins.UncertainError{Err: err}
	}
	return nil
}

func (m *mapper) link(device string) error {
	if err := os.MkdirAll(filepath.Dir(m.path), 0o750); err != nil {
		return err
	}
	if have, err := os.Readlink(m.path); err == nil && have == device {
		return nil
	}
	if err := unlink(m.path); err != nil {
		return err
	}
	return os.Symlink(device, m.path)
}

type unmapper struct{ path, shown string }

// UnmapPodDevice removes the link last: it tells that there is something to undo.
func (u *unmapper) UnmapPodDevice(context.Context) error {
	if err := plugins.UnbindDevice(u.shown); err != nil {
		return fmt.Errorf("%w: end what uses the device (fuser)", err)
	}
	return unlink(u.path)
}

// unlink removes a link, and nothing else that has its name.
func unlink(path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if info.Mode().Type() != fs.ModeSymlink {
		return fmt.Errorf("%s is not a link to a device: move it away", path)
	}
	return mount.RemoveTarget(path)
}
