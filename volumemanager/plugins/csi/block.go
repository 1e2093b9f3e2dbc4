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

// mapper publishes a raw device to a pod.
type mapper struct {
	*Plugin
	spec *plugins.Spec
	v    *volume
	pod  *corev1.Pod
}

// NewBlockVolumeMapper validates the fields that are used in paths and in calls.
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

// Path returns the path of a link to the target path of NodePublishVolume.
func (m *mapper) Path() string { return m.host.Paths().PodDevice(m.pod.UID, Name, m.v.name) }

// SetUpDevice calls NodeStageVolume.
func (m *mapper) SetUpDevice(ctx context.Context, attachment plugins.Attachment) error {
	return m.MountDevice(ctx, m.spec, attachment, plugins.MounterArgs{})
}

// MapPodDevice calls NodePublishVolume. It returns an error if SetUpDevice has not written the volume's
// record.
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
		return fmt.Errorf("volume %s is not set up on this node: %w", m.v.name, err)
	}
	// The link is made first. After a crash it shows that the device may be published to the pod, and that the
	// directory of the target path may exist.
	_, err = os.Lstat(m.Path())
	fresh := errors.Is(err, fs.ErrNotExist)
	if err := plugins.LinkDevice(target, m.Path()); err != nil {
		return err
	}
	err = makeDirs(filepath.Dir(target))
	if err == nil {
		_, err = call(ctx, d, d.node.NodePublishVolume, request)
	}
	if err != nil {
		return m.undoOrUncertain(err, fresh, target, func() error { return removePodDevice(target, m.Path()) })
	}
	if err := m.checkPublished(d.name, target, true); err != nil {
		return err
	}
	if err := plugins.BindDevice(target, m.boundDevice(m.v.name, m.pod.UID)); err != nil {
		return &plugins.UncertainError{Err: err}
	}
	return nil
}

// NewBlockVolumeUnmapper validates the parts of paths.
func (p *Plugin) NewBlockVolumeUnmapper(name string, pod types.UID) (plugins.BlockVolumeUnmapper, error) {
	return p.newUnpublisher(name, pod)
}

// UnmapPodDevice calls NodeUnpublishVolume. It removes the link last, since the link shows that
// the device may be published.
func (u *unpublisher) UnmapPodDevice(ctx context.Context) error {
	target, path := u.publishedDevice(u.name, u.pod), u.host.Paths().PodDevice(u.pod, Name, u.name)
	_, atTarget := os.Lstat(target)
	_, atPath := os.Lstat(path)
	if errors.Is(atTarget, fs.ErrNotExist) && errors.Is(atPath, fs.ErrNotExist) {
		return nil
	}
	if err := plugins.UnbindDevice(u.boundDevice(u.name, u.pod)); err != nil {
		return fmt.Errorf("%w: end the processes that use the device (fuser)", err)
	}
	if err := u.unpublish(ctx, u.deviceData(u.name), target, u.name); err != nil {
		return err
	}
	return removePodDevice(target, path)
}

// removePodDevice removes the target path and the link of a pod's device.
func removePodDevice(target, path string) error {
	if err := removeLeftover(target); err != nil {
		return err
	}
	_ = os.Remove(filepath.Dir(target)) // fails while other pods have the device
	return plugins.UnlinkDevice(path)
}
