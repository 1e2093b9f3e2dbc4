package localvolume

import (
	"context"
	"fmt"
	"io/fs"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// NewBlockVolumeMapper validates the spec. The container runtime must enforce a read-only claim, because
// a symbolic link to the device cannot.
func (p *Plugin) NewBlockVolumeMapper(spec *plugins.Spec, pod *corev1.Pod) (plugins.BlockVolumeMapper, error) {
	if err := checkPath(spec); err != nil {
		return nil, err
	}
	path, err := p.host.Paths().CheckedPodDevice(pod.UID, Name, spec.Name())
	return &mapper{spec, path, p.boundDevice(spec.Name(), pod.UID)}, err
}

// NewBlockVolumeUnmapper needs no manifest.
func (p *Plugin) NewBlockVolumeUnmapper(name string, pod types.UID) (plugins.BlockVolumeUnmapper, error) {
	path, err := p.host.Paths().CheckedPodDevice(pod, Name, name)
	return &unmapper{path, p.boundDevice(name, pod)}, err
}

// boundDevice returns the path at which a pod's device is bind-mounted for programs of the node.
func (p *Plugin) boundDevice(name string, pod types.UID) string {
	return filepath.Join(p.host.Paths().Plugin(plugins.Escape(Name)), "volumeDevices", name, string(pod))
}

// mapper publishes a raw device to a pod.
type mapper struct {
	spec *plugins.Spec
	// path is the path of the link, bound that of the bind mount.
	path, bound string
}

// Path returns the path of a symbolic link to the device.
func (m *mapper) Path() string { return m.path }

// SetUpDevice checks that the device exists.
func (m *mapper) SetUpDevice(context.Context, plugins.Attachment) error {
	_, err := m.device()
	return err
}

// device returns the path of the device without symbolic links.
func (m *mapper) device() (string, error) {
	path, mode, err := resolve(m.spec)
	if err == nil && mode != fs.ModeDevice {
		err = fmt.Errorf("local.path %q: it is a directory, and volumeMode Block needs a block device: correct the path or the mode", m.spec.PersistentVolume.Spec.Local.Path)
	}
	return path, err
}

// MapPodDevice links the pod's path to the device, and bind-mounts the device. It replaces a link to
// another device, because a disk that was reconnected may have another name.
func (m *mapper) MapPodDevice(context.Context) error {
	device, err := m.device()
	if err != nil {
		return err
	}
	if err := plugins.LinkDevice(device, m.path); err != nil {
		return err
	}
	if err := plugins.BindDevice(device, m.bound); err != nil {
		return &plugins.UncertainError{Err: err}
	}
	return nil
}

type unmapper struct{ path, bound string }

// UnmapPodDevice removes the link last, since the link shows that the device may be bound.
func (u *unmapper) UnmapPodDevice(context.Context) error {
	if err := plugins.UnbindDevice(u.bound); err != nil {
		return fmt.Errorf("%w: end the processes that use the device (fuser)", err)
	}
	return plugins.UnlinkDevice(u.path)
}
