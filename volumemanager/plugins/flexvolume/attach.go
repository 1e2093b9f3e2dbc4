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

// deviceKey is the key of the device's path in an Attachment; empty if the driver returns none.
const deviceKey = "device"

// NeedsAttach reports the driver's capability attach.
func (d *driver) NeedsAttach(spec *plugins.Spec) (bool, error) {
	if err := check(spec); err != nil {
		return false, err
	}
	c, err := d.can(context.Background())
	return c.Attach, err
}

// NeedsDeviceMount returns NeedsAttach: a driver that attaches also has device mounts.
func (d *driver) NeedsDeviceMount(spec *plugins.Spec) (bool, error) { return d.NeedsAttach(spec) }

// Attach makes the calls getvolumename, attach and waitforattach. The driver need not support them.
// The record is written before.
func (d *driver) Attach(ctx context.Context, spec *plugins.Spec) (plugins.Attachment, error) {
	name, err := d.VolumeName(spec)
	if err != nil {
		return nil, err
	}
	r, err := d.record(name)
	fresh := errors.Is(err, fs.ErrNotExist)
	if fresh {
		r = d.newRecord(spec)
		err = d.write(name, r)
	}
	if err != nil {
		return nil, err
	}
	device, err := d.attach(ctx, spec, r)
	if err != nil {
		if fresh && !plugins.Uncertain(err) && d.forget(name) == nil {
			return nil, err
		}
		return nil, &plugins.UncertainError{Err: err}
	}
	r.Status.Attached, r.Status.AttachmentMetadata = true, map[string]string{deviceKey: device}
	if err := d.write(name, r); err != nil {
		return nil, &plugins.UncertainError{Err: err}
	}
	return r.Status.AttachmentMetadata, nil
}

// attach attaches a volume unless it still is, and returns its device.
func (d *driver) attach(ctx context.Context, spec *plugins.Spec, r *storagev1.VolumeAttachment) (string, error) {
	asked := options(spec, nil)
	// A kubelet makes this call too, and ignores the name.
	if _, err := d.call(ctx, nil, "getvolumename", asked); err != nil && !errors.Is(err, errNotSupported) {
		return "", err
	}
	device := r.Status.AttachmentMetadata[deviceKey]
	still, err := d.attached(ctx, r, asked)
	if err != nil {
		return "", err
	}
	if !still {
		a, err := d.call(ctx, nil, "attach", asked, d.host.NodeName())
		if err != nil && !errors.Is(err, errNotSupported) {
			return "", err
		}
		device = a.Device
	}
	a, err := d.call(ctx, nil, "waitforattach", device, asked)
	switch {
	case errors.Is(err, errNotSupported):
		return device, nil
	case err != nil: // attached, but not ready
		return "", &plugins.UncertainError{Err: err}
	case a.Device == "":
		return device, nil
	}
	return a.Device, nil
}

// attached reports whether an attached volume is still attached, by the call isattached.
func (d *driver) attached(ctx context.Context, r *storagev1.VolumeAttachment, asked string) (bool, error) {
	if !r.Status.Attached {
		return false, nil
	}
	a, err := d.call(ctx, nil, "isattached", asked, d.host.NodeName())
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
	return d.forget(name)
}

// DeviceMountPath returns plugins/kubernetes.io/flexvolume/<vendor>/<driver>/mounts/<name>.
func (d *driver) DeviceMountPath(spec *plugins.Spec) (string, error) {
	name, err := d.VolumeName(spec)
	return filepath.Join(d.host.Paths().Plugin(Name), d.name, "mounts", name), err
}

// MountDevice makes the call mountdevice. If the driver does not support it, the plugin mounts the
// device, if there is one.
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
		return failed(err, path)
	}
	return nil
}

// mountDevice mounts the existing filesystem of a device.
func mountDevice(spec *plugins.Spec, device, path string) error {
	fsType := sourceOf(spec).FSType
	if fsType == "" {
		return plugins.Invalidf("flexVolume.fsType is missing: the driver attaches %s but does not mount it: set the type of its filesystem", device)
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
	if at, err := mount.OnPath(path); at == nil && err == nil { // as in a kubelet, no call is made
		return mount.RemoveTarget(path)
	}
	return d.takeDown(ctx, "unmountdevice", path)
}

// DeviceMounts returns the Attachments whose device mount has a directory.
func (d *driver) DeviceMounts() ([]plugins.DeviceMount, error) {
	all, err := d.Attachments()
	var mounted []plugins.DeviceMount
	for _, m := range all {
		path, e := d.DeviceMountPath(m.Spec)
		if e == nil {
			_, e = os.Lstat(path)
		}
		if !errors.Is(e, fs.ErrNotExist) { // after another error it may be mounted
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
		r, damaged := d.record(name)
		if damaged != nil {
			err = errors.Join(err, damaged)
			continue
		}
		all = append(all, plugins.DeviceMount{VolumeName: name, Spec: specOf(r)})
	}
	return all, err
}

// Members returns the drivers with records.
func (p *Plugin) Members() (all []plugins.VolumePlugin, err error) {
	entries, err := plugins.Entries(p.allRecords())
	for _, e := range entries {
		if member := p.Named(plugins.Unescape(e.Name())); member != nil {
			all = append(all, member)
		}
	}
	return all, err
}

func (d *drivers) allRecords() string {
	return filepath.Join(d.host.Paths().Root, "volume-manager", "flexvolume")
}

func (d *driver) recordsDir() string { return filepath.Join(d.allRecords(), plugins.Escape(d.name)) }

const recordSuffix = ".json"

func (d *driver) recordFile(name string) string {
	return filepath.Join(d.recordsDir(), name+recordSuffix)
}

// newRecord returns a record with the name of the PersistentVolume or the inline volume.
func (d *driver) newRecord(spec *plugins.Spec) *storagev1.VolumeAttachment {
	r := plugins.NewAttachment(d.host, spec.Name(), d.name, corev1.PersistentVolumeSource{FlexVolume: sourceOf(spec)})
	if spec.PersistentVolume != nil {
		r.Spec.Source.PersistentVolumeName = &r.Name
	}
	return r
}

// specOf returns the part of a spec that a record contains.
func specOf(r *storagev1.VolumeAttachment) *plugins.Spec {
	s := r.Spec.Source.InlineVolumeSpec.FlexVolume
	if r.Spec.Source.PersistentVolumeName != nil {
		pv := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: r.Name}}
		pv.Spec.FlexVolume = s
		return &plugins.Spec{PersistentVolume: pv}
	}
	own := &corev1.FlexVolumeSource{Driver: s.Driver, FSType: s.FSType, ReadOnly: s.ReadOnly, Options: s.Options}
	if s.SecretRef != nil {
		own.SecretRef = &corev1.LocalObjectReference{Name: s.SecretRef.Name}
	}
	return &plugins.Spec{Volume: &corev1.Volume{Name: r.Name, VolumeSource: corev1.VolumeSource{FlexVolume: own}}}
}

// record reads the record of a volume (fs.ErrNotExist).
func (d *driver) record(name string) (*storagev1.VolumeAttachment, error) {
	file := d.recordFile(name)
	r := new(storagev1.VolumeAttachment)
	err := plugins.ReadJSON(file, r)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if in := r.Spec.Source.InlineVolumeSpec; err == nil && (in == nil || in.FlexVolume == nil || r.Name == "") {
		err = fmt.Errorf("%s: the name of the volume is missing", file)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: detach the volume by hand, and remove the file", err)
	}
	return r, nil
}

func (d *driver) write(name string, r *storagev1.VolumeAttachment) error {
	if err := os.MkdirAll(d.recordsDir(), 0o700); err != nil {
		return err
	}
	return atomicfile.WriteJSON(d.recordsDir(), name+recordSuffix, r)
}

func (d *driver) forget(name string) error { return mount.RemoveTarget(d.recordFile(name)) }
