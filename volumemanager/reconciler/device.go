package reconciler

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/trivet-csi/trivet/volumemanager/operation"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/state"
)

// bringDevice does the next step that brings a volume to the machine, and tells whether
// it is there, for a pod to have. There is no device if it comes by none.
func (r *Reconciler) bringDevice(v *state.PodVolume, m *state.Mount) (d *state.DeviceVolume, ready bool) {
	if v.Device == "" {
		return nil, true
	}
	kind := v.Plugin.(plugins.DeviceMountableVolumePlugin)
	d = r.actual.Device(v.Device, kind, v.Spec)
	if m.Mounted == state.No {
		m.Link(d)
	} else { // what is mounted may come by another, which stays until it is known not to
		m.AddCandidate(d)
	}
	if m.Mounted == state.Yes && d.Attached != state.Uncertain && d.Mounted != state.Uncertain {
		return d, true
	}
	if err := r.admit(v, m, d); err != nil {
		m.Report(state.Pending, err.Error(), time.Time{})
		return d, false
	}
	attach, mount, err := state.Needs(kind, v.Spec)
	switch {
	case err != nil:
		m.Report(state.Pending, err.Error(), time.Time{})
		return d, false
	case attach && d.Attached != state.Yes:
		r.attach(v, d)
	case (mount || v.ID.Block) && d.Mounted != state.Yes:
		r.mountDevice(v, d)
	default:
		return d, true
	}
	m.Report(d.Phase, d.Message, d.RetryAt)
	return d, false
}

// admit refuses what has to wait for other pods: a volume that only one may have, one
// that is mounted in the other mode, and one that is too many for its driver.
func (r *Reconciler) admit(v *state.PodVolume, m *state.Mount, d *state.DeviceVolume) error {
	if other := d.UsedBy(m); v.Alone && other != nil && m.Mounted == state.No {
		return fmt.Errorf("its claim is ReadWriteOncePod, and pod %s has it: remove that pod", other.Owner())
	}
	if d.Mounted != state.No && !d.Matches(v) {
		return fmt.Errorf("it is on this machine as PersistentVolume %s, and with its volumeMode; it waits until no pod has it so", d.Spec.Name())
	}
	limiter, ok := v.Plugin.(plugins.AttachLimiter)
	if !ok || d.Exists() {
		return nil
	}
	limit, driver := limiter.AttachLimit(v.Spec)
	d.Driver = state.DeviceName(v.Plugin, driver)
	if have := r.drivers[d.Driver]; limit > 0 && !have[d] && int64(len(have)) >= limit {
		return fmt.Errorf("driver %s can have %d volumes on this machine, and has as many: remove pods", driver, limit)
	}
	r.counts(d)
	return nil
}

// count finds the volumes of drivers that count for their limits.
func (r *Reconciler) count() {
	r.drivers = map[string]map[*state.DeviceVolume]bool{}
	for _, d := range r.actual.Devices {
		if d.Driver != "" && d.Exists() {
			r.counts(d)
		}
	}
}

func (r *Reconciler) counts(d *state.DeviceVolume) {
	if r.drivers[d.Driver] == nil {
		r.drivers[d.Driver] = map[*state.DeviceVolume]bool{}
	}
	r.drivers[d.Driver][d] = true
}

func (r *Reconciler) attach(v *state.PodVolume, d *state.DeviceVolume) {
	if d.OperationPending() {
		return
	}
	d.Spec = v.Spec
	before := d.Attached
	w := r.onDevice(d, "volume_attach", state.Attaching, "FailedAttachVolume", func(ctx context.Context) error {
		attachment, err := d.Plugin.(plugins.Attacher).Attach(ctx, v.Spec)
		r.mu.Lock()
		defer r.mu.Unlock()
		d.Attached = outcome(before, err)
		if err == nil {
			d.Attachment = attachment
		}
		return err
	})
	if r.start(w) {
		d.Attached = begun(before)
	}
}

func (r *Reconciler) mountDevice(v *state.PodVolume, d *state.DeviceVolume) {
	if d.OperationPending() {
		return
	}
	d.Spec = v.Spec
	before, attachment := d.Mounted, d.Attachment
	w := r.onDevice(d, "device_mount", state.Mounting, "FailedMountDevice", func(ctx context.Context) error {
		place, err := mountDeviceNow(ctx, v, attachment)
		r.mu.Lock()
		defer r.mu.Unlock()
		d.Mounted = outcome(before, err)
		if err == nil {
			d.Place = place
		}
		return err
	})
	if r.start(w) {
		d.Mounted = begun(before)
	}
}

func mountDeviceNow(ctx context.Context, v *state.PodVolume, attachment plugins.Attachment) (place state.Place, err error) {
	if v.ID.Block {
		mapper, err := v.Plugin.(plugins.BlockVolumePlugin).NewBlockVolumeMapper(v.Spec, v.Pod)
		if err != nil {
			return place, err
		}
		return place, mapper.SetUpDevice(ctx, attachment)
	}
	kind := v.Plugin.(plugins.DeviceMounter)
	path, err := kind.DeviceMountPath(v.Spec)
	if err != nil {
		return place, err
	}
	if err := kind.MountDevice(ctx, v.Spec, attachment, v.Args); err != nil {
		return place, err
	}
	if place, err = placeOf(path, nil); err != nil {
		return place, &plugins.UncertainError{Err: err}
	}
	return place, nil
}

// letGo does the next step that takes a volume from the machine that no pod has, and
// none wants.
func (r *Reconciler) letGo(d *state.DeviceVolume) {
	if !r.desired.Complete || d.OperationPending() || d.UsedBy(nil) != nil {
		return
	}
	wanted := r.desired.Devices[d.Name]
	switch {
	case d.Mounted != state.No && !slices.ContainsFunc(wanted, d.Matches):
		r.unmountDevice(d)
	case len(wanted) > 0:
	case d.Attached != state.No:
		r.detach(d)
	default:
		delete(r.actual.Devices, d.Name)
	}
}

func (r *Reconciler) unmountDevice(d *state.DeviceVolume) {
	w := r.onDevice(d, "device_unmount", state.Unmounting, "FailedUnmountDevice", func(ctx context.Context) error {
		if err := d.Plugin.UnmountDevice(ctx, d.Spec); err != nil {
			return err
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		d.Mounted, d.Expanded = state.No, none
		return nil
	})
	if r.start(w) {
		d.Mounted = state.Uncertain
	}
}

func (r *Reconciler) detach(d *state.DeviceVolume) {
	w := r.onDevice(d, "volume_detach", state.Unmounting, "FailedDetachVolume", func(ctx context.Context) error {
		if err := d.Plugin.(plugins.Attacher).Detach(ctx, d.Spec); err != nil {
			return err
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		d.Attached, d.Attachment = state.No, nil
		return nil
	})
	if r.start(w) {
		d.Attached = state.Uncertain
	}
}

func (r *Reconciler) onDevice(d *state.DeviceVolume, name string, during state.Phase, reason string, do func(context.Context) error) work {
	return work{
		key: d.Name, busy: &d.Busy, progress: &d.Progress, during: during, failed: state.Failed,
		object: "volume " + d.Spec.Name(), reason: reason, volume: d.Spec.Name(),
		Operation: operation.Operation{Name: name, Plugin: d.Plugin.Name(), Do: func(ctx context.Context) error {
			if err := do(ctx); err != nil {
				return err
			}
			r.mu.Lock()
			defer r.mu.Unlock()
			d.Report(d.Phase, "", time.Time{})
			return nil
		}},
	}
}
