package reconciler

import (
	"context"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/trivet-csi/trivet/volumemanager/operation"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/state"
)

// sizeOf returns where the volume's size on this machine is stored.
func sizeOf(m *state.Mount, d *state.DeviceVolume) *resource.Quantity {
	if d != nil {
		return &d.Expanded
	}
	return &m.Expanded
}

// expand starts to expand a mounted volume on the machine if its capacity has grown. The volume
// stays mounted if that fails.
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
