package flexvolume

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// deviceKey is the key of the device's path in an Attachment. The path is empty if the driver returns
// none.
const deviceKey = "device"

// NeedsAttach reports whether the driver has the capability attach.
func (d *driver) NeedsAttach(spec *plugins.Spec) (bool, error) {
	if err := check(spec); err != nil {
		return false, err
	}
	c, err := d.capabilities(context.Background())
	return c.Attach, err
}

// NeedsDeviceMount returns the same as NeedsAttach, because only a driver that attaches has device mounts.
func (d *driver) NeedsDeviceMount(spec *plugins.Spec) (bool, error) { return d.NeedsAttach(spec) }

// Attach writes the record, makes the calls getvolumename and isattached, attaches the volume unless it is
// still attached, and then makes the call waitforattach. The driver need not support these calls.
func (d *driver) Attach(ctx context.Context, spec *plugins.Spec) (plugins.Attachment, error) {
	name, err := d.VolumeName(spec)
	if err != nil {
		return nil, err
	}
	r, err := d.record(name)
	fresh := errors.Is(err, fs.ErrNotExist)
	if fresh {
		r = d.newRecord(spec)
		err = d.writeRecord(name, r)
	}
	if err != nil {
		return nil, err
	}
	device, err := d.attach(ctx, spec, r)
	if err != nil {
		if fresh && !plugins.Uncertain(err) && d.removeRecord(name) == nil {
			return nil, err
		}
		return nil, &plugins.UncertainError{Err: err}
	}
	r.Status.Attached, r.Status.AttachmentMetadata = true, map[string]string{deviceKey: device}
	if err := d.writeRecord(name, r); err != nil {
		return nil, &plugins.UncertainError{Err: err}
	}
	return r.Status.AttachmentMetadata, nil
}

// attach attaches a volume unless it is still attached, and returns its device.
func (d *driver) attach(ctx context.Context, spec *plugins.Spec, r *storagev1.VolumeAttachment) (string, error) {
	callOptions := options(spec, nil)
	// As in a kubelet, the returned name is ignored.
	if _, err := d.call(ctx, nil, "getvolumename", callOptions); err != nil && !errors.Is(err, errNotSupported) {
		return "", err
	}
	device := r.Status.AttachmentMetadata[deviceKey]
	isAttached, err := d.attached(ctx, r, callOptions)
	if err != nil {
		return "", err
	}
	if !isAttached {
		a, err := d.call(ctx, nil, "attach", callOptions, d.host.NodeName())
		if err != nil && !errors.Is(err, errNotSupported) {
			return "", err
		}
		device = a.Device
	}
	a, err := d.call(ctx, nil, "waitforattach", device, callOptions)
	switch {
	case errors.Is(err, errNotSupported):
		return device, nil
	case err != nil: // the volume is attached, but its device is not ready
		return "", &plugins.UncertainError{Err: err}
	case a.Device == "":
		return device, nil
	}
	return a.Device, nil
}

// attached makes the call isattached for a volume whose record says that it is attached, and reports
// whether it still is.
func (d *driver) attached(ctx context.Context, r *storagev1.VolumeAttachment, callOptions string) (bool, error) {
	if !r.Status.Attached {
		return false, nil
	}
	a, err := d.call(ctx, nil, "isattached", callOptions, d.host.NodeName())
	if errors.Is(err, errNotSupported) {
		return false, nil
	}
	return a.Attached, err
}

// Detach makes the call detach, and then removes the record.
func (d *driver) Detach(ctx context.Context, spec *plugins.Spec) error {
	name, err := d.VolumeName(spec)
	if err != nil {
		return err
	}
	if _, err := d.record(name); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	_, err = d.call(ctx, nil, "detach", spec.Name(), d.host.NodeName())
	if err != nil && !errors.Is(err, errNotSupported) {
		return err
	}
	return d.removeRecord(name)
}

// DeviceMountPath returns plugins/kubernetes.io/flexvolume/<vendor>/<driver>/mounts/<name>.
func (d *driver) DeviceMountPath(spec *plugins.Spec) (string, error) {
	name, err := d.VolumeName(spec)
	return filepath.Join(d.host.Paths().Plugin(Name), d.name, "mounts", name), err
}

// MountDevice makes the call mountdevice. If the driver does not support the call and Attach returned a
// device, the plugin mounts the device itself.
func (d *driver) MountDevice(ctx context.Context, spec *plugins.Spec, attachment plugins.Attachment, _ plugins.MounterArgs) error {
	path, err := d.DeviceMountPath(spec)
	if err != nil {
		return err
	}
	if at, err := mount.OnPath(path); at != nil || err != nil {
		return err
	}
	if err := os.MkdirAll(path, 0o750); err != nil {
		return err
	}
	device := attachment[deviceKey]
	_, err = d.call(ctx, nil, "mountdevice", path, device, options(spec, nil))
	if errors.Is(err, errNotSupported) {
		err = nil
		if device != "" {
			err = mountDevice(spec, device, path)
		}
	}
	if err != nil {
		return cleanUp(err, path)
	}
	return nil
}

// mountDevice mounts the existing filesystem of a device.
func mountDevice(spec *plugins.Spec, device, path string) error {
	fsType := sourceOf(spec).FSType
	if fsType == "" {
		return plugins.Invalidf("flexVolume.fsType is missing: the driver attaches the device %s but does not mount it: set the type of the device's filesystem", device)
	}
	filesystem, err := mount.Filesystem(device, fsType, mountOptions(spec))
	if err != nil {
		return err
	}
	return errors.Join(filesystem.MoveTo(path), filesystem.Close())
}

// UnmountDevice makes the call unmountdevice.
func (d *driver) UnmountDevice(ctx context.Context, spec *plugins.Spec) error {
	path, err := d.DeviceMountPath(spec)
	if err != nil {
		return err
	}
	if at, err := mount.OnPath(path); at == nil && err == nil { // as in a kubelet, the driver is not called
		return mount.RemoveTarget(path)
	}
	return d.takeDown(ctx, "unmountdevice", path)
}

// DeviceMounts returns the volumes that have a record and a directory for the device mount.
func (d *driver) DeviceMounts() ([]plugins.DeviceMount, error) {
	all, err := d.Attachments()
	var mounted []plugins.DeviceMount
	for _, m := range all {
		path, statErr := d.DeviceMountPath(m.Spec)
		if statErr == nil {
			_, statErr = os.Lstat(path)
		}
		if !errors.Is(statErr, fs.ErrNotExist) { // after another error the volume may be mounted
			mounted = append(mounted, m)
		}
	}
	return mounted, err
}

// Attachments returns the volumes with a record.
func (d *driver) Attachments() (all []plugins.DeviceMount, err error) {
	entries, err := plugins.Entries(d.recordsDir())
	for _, e := range entries {
		name, ok := strings.CutSuffix(e.Name(), recordSuffix)
		if !ok {
			continue
		}
		r, readErr := d.record(name)
		if readErr != nil {
			err = errors.Join(err, readErr)
			continue
		}
		all = append(all, plugins.DeviceMount{VolumeName: name, Spec: specOf(r)})
	}
	return all, err
}

// Members returns the drivers with records.
func (p *Plugin) Members() (all []plugins.VolumePlugin, err error) {
	entries, err := plugins.Entries(p.recordsRoot())
	for _, e := range entries {
		if member := p.Named(plugins.Unescape(e.Name())); member != nil {
			all = append(all, member)
		}
	}
	return all, err
}

// recordsRoot returns the directory of the records of all drivers.
func (d *drivers) recordsRoot() string {
	return filepath.Join(d.host.Paths().Root, "volume-manager", "flexvolume")
}

func (d *driver) recordsDir() string { return filepath.Join(d.recordsRoot(), plugins.Escape(d.name)) }

const recordSuffix = ".json"

// recordFile returns the path of a volume's record. name is the VolumeName.
func (d *driver) recordFile(name string) string {
	return filepath.Join(d.recordsDir(), name+recordSuffix)
}

// newRecord returns a record with the name of the PersistentVolume or of the inline volume.
func (d *driver) newRecord(spec *plugins.Spec) *storagev1.VolumeAttachment {
	r := plugins.NewAttachment(d.host, spec.Name(), d.name, corev1.PersistentVolumeSource{FlexVolume: sourceOf(spec)})
	if spec.PersistentVolume != nil {
		r.Spec.Source.PersistentVolumeName = &r.Name
	}
	return r
}

// specOf returns a spec with the fields that a record contains.
func specOf(r *storagev1.VolumeAttachment) *plugins.Spec {
	s := r.Spec.Source.InlineVolumeSpec.FlexVolume
	if r.Spec.Source.PersistentVolumeName != nil {
		pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: r.Name}}
		pv.Spec.FlexVolume = s
		return &plugins.Spec{PersistentVolume: pv}
	}
	inline := &corev1.FlexVolumeSource{Driver: s.Driver, FSType: s.FSType, ReadOnly: s.ReadOnly, Options: s.Options}
	if s.SecretRef != nil {
		inline.SecretRef = &corev1.LocalObjectReference{Name: s.SecretRef.Name}
	}
	return &plugins.Spec{Volume: &corev1.Volume{Name: r.Name, VolumeSource: corev1.VolumeSource{FlexVolume: inline}}}
}

// record reads the record of a volume. It returns fs.ErrNotExist if there is none.
func (d *driver) record(name string) (*storagev1.VolumeAttachment, error) {
	file := d.recordFile(name)
	r := new(storagev1.VolumeAttachment)
	err := plugins.ReadJSON(file, r)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if inline := r.Spec.Source.InlineVolumeSpec; err == nil && (inline == nil || inline.FlexVolume == nil || r.Name == "") {
		err = fmt.Errorf("%s: the name of the volume is missing", file)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: detach the volume by hand, and remove the file", err)
	}
	return r, nil
}

// writeRecord writes the record of a volume durably.
func (d *driver) writeRecord(name string, r *storagev1.VolumeAttachment) error {
	if err := os.MkdirAll(d.recordsDir(), 0o700); err != nil {
		return err
	}
	return atomicfile.WriteJSON(d.recordsDir(), name+recordSuffix, r)
}

func (d *driver) removeRecord(name string) error { return mount.RemoveTarget(d.recordFile(name)) }
