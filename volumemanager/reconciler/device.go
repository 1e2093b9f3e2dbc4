package reconciler

import (
	"context"
	"fmt"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/trivet-csi/trivet/volumemanager/operation"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/state"
)

// prepareDevice returns the device of a volume; nil if the volume needs none. It reports whether the
// device is ready for the mount of a pod. If not, it starts the next step of attaching and mounting
// the device, or reports what the volume waits for.
func (r *Reconciler) prepareDevice(v *state.PodVolume, m *state.Mount) (d *state.DeviceVolume, ready bool) {
	if v.Device == "" {
		return nil, true
	}
	plugin := v.Plugin.(plugins.DeviceMountableVolumePlugin)
	d = r.actual.Device(v.Device, plugin, v.Spec)
	if m.Mounted == state.No {
		m.Link(d)
	} else { // the mount may use another device, which must not be released as long as this is unknown
		m.AddCandidate(d)
	}
	if m.Mounted == state.Yes && d.Attached != state.Uncertain && d.Mounted != state.Uncertain {
		return d, true
	}
	if err := r.admit(v, m, d); err != nil {
		m.Report(state.Pending, err.Error(), time.Time{})
		return d, false
	}
	attach, mount, err := state.Needs(plugin, v.Spec)
	if err != nil {
		m.Report(state.Pending, err.Error(), time.Time{})
		return d, false
	}
	attach = attach && d.Attached != state.Yes
	if !attach && (d.Mounted == state.Yes || !mount && !v.ID.Block) {
		return d, true
	}
	if !d.OperationPending() {
		d.Spec = v.Spec
		if attach {
			r.attach(d)
		} else {
			r.mountDevice(v, d)
		}
	}
	m.Report(d.Phase, d.Message, d.RetryAt)
	return d, false
}

// admit returns an error if a volume must wait for other pods. Either the claim is ReadWriteOncePod
// and another pod uses it, or the device is set up for another PersistentVolume or volumeMode, or the
// driver's volume limit is reached.
func (r *Reconciler) admit(v *state.PodVolume, m *state.Mount, d *state.DeviceVolume) error {
	if other := d.UsedBy(m); v.Exclusive && other != nil && m.Mounted == state.No {
		return fmt.Errorf("the claim has access mode ReadWriteOncePod, and pod %s uses it: remove that pod", other.Owner())
	}
	if d.Mounted != state.No && !d.Matches(v) {
		return fmt.Errorf("waits until the volume, which is set up as PersistentVolume %s (raw device: %t), is unmounted", d.Spec.Name(), d.Spec.Block())
	}
	limiter, ok := v.Plugin.(plugins.AttachLimiter)
	if !ok || d.Exists() {
		return nil
	}
	limit, driver := limiter.AttachLimit(v.Spec)
	d.Driver = state.DeviceName(v.Plugin, driver)
	if counted := r.drivers[d.Driver]; limit > 0 && !counted[d] && int64(len(counted)) >= limit {
		return fmt.Errorf("driver %s can have %d volumes on this machine, and the limit is reached: remove pods that use its volumes", driver, limit)
	}
	r.countDevice(d)
	return nil
}

// countDevices computes drivers.
func (r *Reconciler) countDevices() {
	r.drivers = map[string]map[*state.DeviceVolume]bool{}
	for _, d := range r.actual.Devices {
		if d.Driver != "" && d.Exists() {
			r.countDevice(d)
		}
	}
}

// countDevice adds a device to drivers.
func (r *Reconciler) countDevice(d *state.DeviceVolume) {
	if r.drivers[d.Driver] == nil {
		r.drivers[d.Driver] = map[*state.DeviceVolume]bool{}
	}
	r.drivers[d.Driver][d] = true
}

// releaseDevice starts the next step of releasing a device that no pod uses. It unmounts the device if
// no desired volume needs it as it is set up, and detaches it if no desired volume needs it at all.
func (r *Reconciler) releaseDevice(d *state.DeviceVolume) {
	if !r.desired.Complete || d.OperationPending() || d.UsedBy(nil) != nil {
		return
	}
	desired := r.desired.Devices[d.Name]
	switch {
	case d.Mounted != state.No && !slices.ContainsFunc(desired, d.Matches):
		r.unmountDevice(d)
	case len(desired) > 0:
	case d.Attached != state.No:
		r.detach(d)
	default:
		delete(r.actual.Devices, d.Name)
	}
}

func (r *Reconciler) attach(d *state.DeviceVolume) {
	spec := d.Spec
	r.startDevice(d, "volume_attach", "FailedAttachVolume", state.Attaching, &d.Attached, func(ctx context.Context) (func(), error) {
		attachment, err := d.Plugin.(plugins.Attacher).Attach(ctx, spec)
		return func() { d.Attachment = attachment }, err
	})
}

func (r *Reconciler) mountDevice(v *state.PodVolume, d *state.DeviceVolume) {
	attachment := d.Attachment
	r.startDevice(d, "device_mount", "FailedMountDevice", state.Mounting, &d.Mounted, func(ctx context.Context) (func(), error) {
		place, err := setUpDevice(ctx, v, attachment)
		return func() { d.Place = place }, err
	})
}

// setUpDevice mounts the device of a volume, or stages a raw device, which has no Place.
func setUpDevice(ctx context.Context, v *state.PodVolume, attachment plugins.Attachment) (place state.Place, err error) {
	if v.ID.Block {
		mapper, err := v.Plugin.(plugins.BlockVolumePlugin).NewBlockVolumeMapper(v.Spec, v.Pod)
		if err != nil {
			return place, err
		}
		return place, mapper.SetUpDevice(ctx, attachment)
	}
	plugin := v.Plugin.(plugins.DeviceMounter)
	path, err := plugin.DeviceMountPath(v.Spec)
	if err != nil {
		return place, err
	}
	if err := plugin.MountDevice(ctx, v.Spec, attachment, v.Args); err != nil {
		return place, err
	}
	if place, err = placeOf(path, nil); err != nil {
		return place, &plugins.UncertainError{Err: err}
	}
	return place, nil
}

func (r *Reconciler) unmountDevice(d *state.DeviceVolume) {
	r.startDevice(d, "device_unmount", "FailedUnmountDevice", state.Unmounting, &d.Mounted, func(ctx context.Context) (func(), error) {
		return func() { d.NodeSize = resource.Quantity{} }, d.Plugin.UnmountDevice(ctx, d.Spec)
	})
}

func (r *Reconciler) detach(d *state.DeviceVolume) {
	r.startDevice(d, "volume_detach", "FailedDetachVolume", state.Unmounting, &d.Attached, func(ctx context.Context) (func(), error) {
		return func() { d.Attachment = nil }, d.Plugin.(plugins.Attacher).Detach(ctx, d.Spec)
	})
}

// startDevice starts an operation that changes part, which is d.Attached or d.Mounted. During the
// operation, and after a panic, part is Uncertain. If do succeeds, the function that it returns is
// called with mu held.
func (r *Reconciler) startDevice(d *state.DeviceVolume, name, reason string, running state.Phase, part *state.Certainty, do func(context.Context) (func(), error)) {
	before := *part
	started := r.start(task{
		key: d.Name, busy: &d.Busy, progress: &d.Progress, running: running, failed: state.Failed,
		object: "volume " + d.Spec.Name(), reason: reason, volume: d.Spec.Name(),
		Operation: operation.Operation{Name: name, Plugin: d.Plugin.Name(), Do: func(ctx context.Context) error {
			record, err := do(ctx)
			r.mu.Lock()
			defer r.mu.Unlock()
			switch {
			case running != state.Unmounting:
				*part = setUpResult(before, err)
			case err == nil:
				*part = state.No
			}
			if err != nil {
				return err
			}
			record()
			d.Report(d.Phase, "", time.Time{})
			return nil
		}},
	})
	if started {
		*part = state.Uncertain
	}
}

// sizeOf returns a pointer to the volume's size on this machine, in d or, if d is nil, in m.
func sizeOf(m *state.Mount, d *state.DeviceVolume) *resource.Quantity {
	if d != nil {
		return &d.NodeSize
	}
	return &m.NodeSize
}

// expand starts the expansion of a mounted volume on the machine if the volume's capacity has grown.
// If the expansion fails, the volume stays mounted.
func (r *Reconciler) expand(v *state.PodVolume, m *state.Mount, d *state.DeviceVolume) {
	size := sizeOf(m, d)
	expander, ok := v.Plugin.(plugins.NodeExpandableVolumePlugin)
	if !ok || v.Spec.ReadOnly || v.Size.Cmp(*size) <= 0 {
		return
	}
	t := task{
		key: m.ID.String(), busy: &m.Busy, progress: &m.Progress, running: state.Mounted, failed: state.Mounted,
		object: "pod " + m.Owner(), reason: "VolumeResizeFailed", volume: v.Name,
		Operation: operation.Operation{Name: "volume_expand", Plugin: m.ID.Plugin},
	}
	if d != nil {
		if d.OperationPending() {
			return
		}
		t.key, t.busy = d.Name, &d.Busy
	}
	path := m.Place.Path
	t.Do = func(ctx context.Context) error {
		if err := nodeExpand(ctx, expander, v, path); err != nil {
			return err
		}
		r.mu.Lock()
		*size = v.Size
		r.mu.Unlock()
		r.claims.NodeExpanded(v.Spec.Name(), v.Size)
		return nil
	}
	r.start(t)
}

// nodeExpand expands the volume that is mounted at path.
func nodeExpand(ctx context.Context, expander plugins.NodeExpandableVolumePlugin, v *state.PodVolume, path string) error {
	o := plugins.NodeExpandOptions{Path: path, Size: v.Size}
	if device, ok := v.Plugin.(plugins.DeviceMounter); ok && v.Device != "" {
		var err error
		if o.DeviceMountPath, err = device.DeviceMountPath(v.Spec); err != nil {
			return err
		}
	}
	return expander.NodeExpand(ctx, v.Spec, o)
}
