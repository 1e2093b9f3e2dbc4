package flexvolume

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// Expand makes the call expandvolume. If the driver does not support the call, the volume is assumed to
// need no call, and to grow when NodeExpand expands the filesystem.
func (d *driver) Expand(ctx context.Context, pv *corev1.PersistentVolume, size resource.Quantity) (actual resource.Quantity, nodeExpandRequired bool, err error) {
	spec := &plugins.Spec{PersistentVolume: pv}
	path, err := d.DeviceMountPath(spec)
	if err != nil {
		return actual, false, err
	}
	c, err := d.capabilities(ctx)
	if err != nil {
		return actual, false, err
	}
	a, err := d.call(ctx, nil, "expandvolume", options(spec, nil), path, bytesOf(size), bytesOf(capacity(pv)))
	if err != nil && !errors.Is(err, errNotSupported) {
		return actual, false, err
	}
	if larger := resource.NewQuantity(a.NewSize, resource.BinarySI); larger.Cmp(size) > 0 {
		size = *larger
	}
	return size, c.RequiresFSResize, nil
}

// NodeExpand makes the call expandfs. If the driver does not support the call and the volume has a
// device, the plugin expands the device's filesystem itself.
func (d *driver) NodeExpand(ctx context.Context, spec *plugins.Spec, o plugins.NodeExpandOptions) error {
	c, err := d.capabilities(ctx)
	if err != nil || !c.RequiresFSResize || spec.PersistentVolume == nil {
		return err
	}
	device, err := d.device(spec)
	if err != nil {
		return err
	}
	_, err = d.call(ctx, nil, "expandfs", options(spec, nil), device, o.DeviceMountPath, bytesOf(o.Size), bytesOf(capacity(spec.PersistentVolume)))
	if !errors.Is(err, errNotSupported) {
		return err
	}
	if device == "" {
		return nil
	}
	return grow(o.Path, device, sourceOf(spec).FSType)
}

// device returns the device of an attached volume; empty if it has none.
func (d *driver) device(spec *plugins.Spec) (string, error) {
	name, err := d.VolumeName(spec)
	if err != nil {
		return "", err
	}
	r, err := d.record(name)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	return r.Status.AttachmentMetadata[deviceKey], nil
}

// grow expands the filesystem of a device, which is mounted at path, to the size of the device.
func grow(path, device, fsType string) error {
	root, err := os.Open(path)
	if err != nil {
		return err
	}
	defer root.Close()
	f, err := os.Open(device)
	if err != nil {
		return err
	}
	defer f.Close()
	return blockdev.GrowFilesystem(root, f, fsType)
}

func capacity(pv *corev1.PersistentVolume) resource.Quantity {
	return pv.Spec.Capacity[corev1.ResourceStorage]
}

func bytesOf(q resource.Quantity) string { return strconv.FormatInt(q.Value(), 10) }
