package flexvolume

import (
	"context"
	"errors"
	"fmt"
	"os"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/ownership"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// NewMounter validates the spec.
func (d *driver) NewMounter(spec *plugins.Spec, pod *corev1.Pod) (plugins.Mounter, error) {
	if err := check(spec); err != nil {
		return nil, err
	}
	return &mounter{driver: d, spec: spec, pod: pod}, nil
}

// mounter is a volume of a pod with its manifest.
type mounter struct {
	*driver
	spec *plugins.Spec
	pod  *corev1.Pod
}

// Path returns Paths.PodVolume with the driver's name as the plugin's name.
func (m *mounter) Path() string {
	return m.host.Paths().PodVolume(m.pod.UID, m.name, m.spec.Name())
}

// SetUp makes the call mount unless the path is mounted, and then applies the pod's fsGroup if the driver has
// the capability fsGroup. If the driver does not support the call, SetUp bind-mounts the device mount.
func (m *mounter) SetUp(ctx context.Context, args plugins.MounterArgs) error {
	c, err := m.capabilities(ctx)
	if err != nil {
		return err
	}
	at, err := mount.OnPath(m.Path())
	switch {
	case err != nil:
	case at == nil:
		err = m.mount(ctx, c, args)
	default:
		err = m.checkUnchanged()
	}
	if err != nil || readOnly(m.spec) || !c.FSGroup || args.FSGroup == nil {
		return err
	}
	if err := m.giveToGroup(ctx, args); err != nil {
		return &plugins.UncertainError{Err: err}
	}
	return nil
}

// giveToGroup applies the fsGroup to the whole volume once, and writes a marker. Later calls check
// only the root directory, because the pod may have changed other files.
func (m *mounter) giveToGroup(ctx context.Context, args plugins.MounterArgs) error {
	applied, err := m.keepGroupMarker(*args.FSGroup)
	if err != nil {
		return err
	}
	if applied {
		args.FSGroupChangePolicy = corev1.FSGroupChangeOnRootMismatch
	}
	if err := ownership.Set(ctx, m.Path(), args); err != nil || applied {
		return err
	}
	return os.MkdirAll(m.groupMarker(*args.FSGroup), 0o750)
}

// mount makes the call mount, and checks that the path is mounted afterwards.
func (m *mounter) mount(ctx context.Context, c capabilities, args plugins.MounterArgs) error {
	extra, hidden, err := m.podOptions(m.spec, m.pod, args)
	if err != nil {
		return err
	}
	if err := errors.Join(m.writeVolumeMarker(), os.MkdirAll(m.Path(), 0o750)); err != nil {
		return err
	}
	_, err = m.call(ctx, hidden, "mount", m.Path(), options(m.spec, extra))
	if errors.Is(err, errNotSupported) {
		err = m.bind(c)
	}
	if err != nil {
		return cleanUp(err, m.Path())
	}
	at, err := mount.OnPath(m.Path())
	if err == nil && at == nil {
		err = fmt.Errorf("driver %s reported success but nothing is mounted at %s: see the driver's log", m.name, m.Path())
	}
	if err != nil {
		return &plugins.UncertainError{Err: err}
	}
	return nil
}

// bind bind-mounts the device mount at the pod's path.
func (m *mounter) bind(c capabilities) error {
	if !c.Attach {
		return fmt.Errorf("driver %s supports neither mount nor attach: use another driver", m.name)
	}
	from, err := m.DeviceMountPath(m.spec)
	if err != nil {
		return err
	}
	at, err := mount.OnPath(from)
	if err != nil {
		return err
	}
	if at == nil {
		return fmt.Errorf("driver %s does not support mount, and nothing is mounted at %s: see the driver's log", m.name, from)
	}
	return mount.Bind(from, m.Path(), mountOptions(m.spec))
}

// cleanUp handles the error of a call that mounts. It returns the error, as a *plugins.UncertainError if
// the path may be mounted. Otherwise it removes the directory that was created for the call.
func cleanUp(err error, path string) error {
	at, tableErr := mount.OnPath(path)
	switch {
	case plugins.Uncertain(err):
		return err
	case at != nil || tableErr != nil:
		return &plugins.UncertainError{Err: errors.Join(err, tableErr)}
	}
	_ = mount.RemoveTarget(path) // fails if the driver left files, which only the driver may remove
	return err
}

// NewUnmounter needs only the names of the volume and the pod, because the manifest may be gone.
func (d *driver) NewUnmounter(name string, pod types.UID) (plugins.Unmounter, error) {
	if err := plugins.CheckPart("the volume's name", name); err != nil {
		return nil, err
	}
	return &unmounter{d, pod, name}, nil
}

// unmounter is a volume of a pod, whose manifest may have been removed.
type unmounter struct {
	*driver
	pod  types.UID
	name string
}

// TearDown makes the call unmount if the directory exists, even if nothing is mounted at it, because the
// driver may have executed a part of the call mount.
func (u *unmounter) TearDown(ctx context.Context) error {
	if err := u.takeDown(ctx, "unmount", u.host.Paths().PodVolume(u.pod, u.driver.name, u.name)); err != nil {
		return err
	}
	return u.removeMarkers(u.pod, u.name)
}

// takeDown makes a call that unmounts a path, and removes the path. If the driver does not support the
// call, takeDown unmounts the path itself. It makes no call if the path does not exist, or if the path
// is not mounted and the driver is no longer installed.
func (d *driver) takeDown(ctx context.Context, call, path string) error {
	at, err := mount.OnPath(path)
	if err != nil {
		return err
	}
	if at == nil {
		if _, err := os.Lstat(path); errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if _, err := os.Stat(d.executable()); errors.Is(err, os.ErrNotExist) {
			return mount.RemoveTarget(path)
		}
	}
	_, err = d.call(ctx, nil, call, path)
	if errors.Is(err, errNotSupported) {
		err = d.unmount(ctx, path)
	}
	if err != nil {
		return err
	}
	if at, err = mount.OnPath(path); err != nil {
		return err
	}
	if at != nil {
		return fmt.Errorf("driver %s reported success but %s is still mounted: see the driver's log", d.name, path)
	}
	return mount.RemoveTarget(path)
}

// unmount removes all mounts at a path.
func (d *driver) unmount(ctx context.Context, path string) error {
	for {
		at, err := d.nfsUnmounter.Unmount(ctx, path)
		if at == nil || err != nil {
			return err
		}
		if err := mount.Unmount(path); err != nil {
			return fmt.Errorf("%w: end the processes that use it (fuser -m)", err)
		}
	}
}
