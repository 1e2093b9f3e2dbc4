package csi

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

type mapper struct {
	*Plugin
	spec *plugins.Spec
	v    *volume
	pod  *corev1.Pod
}

// NewBlockVolumeMapper checks the fields that paths and calls are made of.
func (p *Plugin) NewBlockVolumeMapper(spec *plugins.Spec, pod *corev1.Pod) (plugins.BlockVolumeMapper, error) {
	v, err := newVolume(spec, pod)
	if err != nil {
		return nil, err
	}
	if !v.block {
		return nil, plugins.Invalidf("volume %s: only a PersistentVolume with volumeMode Block is a device: use volumeMounts in the container", v.name)
	}
	return &mapper{p, spec, v, pod}, nil
}

// Path is a link to the target path of NodePublishVolume.
func (m *mapper) Path() string { return m.host.Paths().PodDevice(m.pod.UID, Name, m.v.name) }

// SetUpDevice is NodeStageVolume.
func (m *mapper) SetUpDevice(ctx context.Context, attachment plugins.Attachment) error {
	return m.MountDevice(ctx, m.spec, attachment, plugins.MounterArgs{})
}

// MapPodDevice is NodePublishVolume. The volume's record is SetUpDevice's.
func (m *mapper) MapPodDevice(ctx context.Context) error {
	d, err := m.driver(m.v.driver)
	if err != nil {
		return err
	}
	target := m.publishedDevice(m.v.name, m.pod.UID)
	request, err := m.publishRequest(d, m.v, m.pod, target, plugins.MounterArgs{})
	if err != nil {
		return err
	}
	if _, err := readRecord(m.deviceData(m.v.name)); err != nil {
		return fmt.Errorf("volume %s: it is not set up on this machine: %w", m.v.name, err)
	}
	if err := makeDirs(filepath.Dir(target)); err != nil {
		return err
	}
	// The link tells whoever starts after a crash that the device may be the pod's.
	_, err = os.Lstat(m.Path())
	fresh := errors.Is(err, fs.ErrNotExist)
	if err := link(target, m.Path()); err != nil {
		return err
	}
	if _, err := call(ctx, d, d.node.NodePublishVolume, request); err != nil {
		return m.settle(err, fresh, target, func() error { return unmapped(target, m.Path()) })
	}
	if err := m.checkThere(d.name, target, true); err != nil {
		return err
	}
	if err := plugins.ShowDevice(target, m.shownDevice(m.v.name, m.pod.UID)); err != nil {
		return &plugins.UncertainError{Err: err}
	}
	return nil
}

// link makes a symbolic link, or makes one say what it is to say.
func link(to, path string) error {
	if at, err := os.Readlink(path); err == nil && at == to {
		return nil
	}
	if err := makeDirs(filepath.Dir(path)); err != nil {
		return err
	}
	if err := removeThere(path); err != nil {
		return err
	}
	return os.Symlink(to, path)
}

type unmapper struct {
	*Plugin
	name string
	pod  types.UID
}

// NewBlockVolumeUnmapper checks what paths are made of.
func (p *Plugin) NewBlockVolumeUnmapper(name string, pod types.UID) (plugins.BlockVolumeUnmapper, error) {
	if err := errors.Join(plugins.CheckPart("volume name", name), plugins.CheckPart("pod UID", string(pod))); err != nil {
		return nil, err
	}
	return &unmapper{p, name, pod}, nil
}

// UnmapPodDevice is NodeUnpublishVolume. The link goes last: it tells that there is
// something to undo.
func (u *unmapper) UnmapPodDevice(ctx context.Context) error {
	target, path := u.publishedDevice(u.name, u.pod), u.host.Paths().PodDevice(u.pod, Name, u.name)
	_, atTarget := os.Lstat(target)
	_, atPath := os.Lstat(path)
	if errors.Is(atTarget, fs.ErrNotExist) && errors.Is(atPath, fs.ErrNotExist) {
		return nil
	}
	if err := plugins.HideDevice(u.shownDevice(u.name, u.pod)); err != nil {
		return fmt.Errorf("%w: end what uses the device (fuser)", err)
	}
	if err := u.unpublish(ctx, u.deviceData(u.name), target, u.name); err != nil {
		return err
	}
	return unmapped(target, path)
}

// unmapped removes what was made for a pod's device.
func unmapped(target, path string) error {
	if err := removeLeft(target); err != nil {
		return err
	}
	// Other pods' are in it too.
	_ = os.Remove(filepath.Dir(target))
	return removeThere(path)
}

// published resolves a pod's path to the one that the driver knows.
func (v *volume) published(path string) (string, error) {
	if !v.block {
		return path, nil
	}
	return os.Readlink(path)
}
