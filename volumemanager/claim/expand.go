package claim

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// syncSize expands the volume of a bound claim to the requested size. The volume's capacity is updated
// first, and the claim's status last, after the expansion on the node.
func (p *pass) syncSize(claim, record *corev1.PersistentVolumeClaim, v *volume) outcome {
	requested, recorded, actual := request(claim), request(record), capacity(v.PersistentVolume)
	reported := record.Status.Capacity[corev1.ResourceStorage]
	o := outcome{condition: condition{phase: string(corev1.ClaimBound)}, claim: withRequest(record, requested), volume: v.PersistentVolume, usable: true}
	var err error
	switch {
	case requested.Cmp(actual) > 0:
		o.message, err = p.expand(claim, record, v)
	case v.Annotations[plugins.NodeExpandAnnotation] != "" && !p.c.isExpandedOnNode(v):
		o.message = fmt.Sprintf("volume %s has %s; its filesystem or device is expanded when a pod has mounted it", v.Name, actual.String())
	case v.Annotations[plugins.NodeExpandAnnotation] != "" || reported.Cmp(actual) != 0 || requested.Cmp(recorded) > 0:
		err = p.run(claimObject(keyOf(claim)), "volume_bind", p.pluginName(v), func(context.Context) error {
			size := requested
			if recorded.Cmp(requested) > 0 {
				size = recorded
			}
			return p.c.finishExpansion(withRequest(record, size), record, v)
		})
	case requested.Cmp(recorded) < 0:
		err = fmt.Errorf("spec.resources.requests.storage %s is less than the previous %s: volumes cannot shrink: set it back", requested.String(), recorded.String())
	}
	switch {
	case err != nil:
		o.message, o.warning = err.Error(), true
	case o.message == "":
		o.message = immutableChange(claim, record)
		o.warning = o.message != ""
	}
	return o
}

// withRequest returns the claim, or a copy of it, with a storage request of size.
func withRequest(claim *corev1.PersistentVolumeClaim, size resource.Quantity) *corev1.PersistentVolumeClaim {
	old := request(claim)
	if old.Cmp(size) == 0 {
		return claim
	}
	claim = claim.DeepCopy()
	claim.Spec.Resources.Requests = corev1.ResourceList{corev1.ResourceStorage: size}
	return claim
}

// expand starts the expansion of a volume. It returns a message while the operation runs, and an error if
// the volume cannot be expanded or the last attempt failed.
func (p *pass) expand(claim, record *corev1.PersistentVolumeClaim, v *volume) (message string, err error) {
	size, actual := request(claim), capacity(v.PersistentVolume)
	larger := fmt.Sprintf("spec.resources.requests.storage %s is more than the %s of volume %s", size.String(), actual.String(), v.Name)
	class := p.objects.Classes[className(record)]
	if class == nil || class.AllowVolumeExpansion == nil || !*class.AllowVolumeExpansion {
		return "", fmt.Errorf("%s, and StorageClass %q does not allow expansion: set allowVolumeExpansion: true in the class, or reduce the request", larger, className(record))
	}
	plugin, err := p.pluginOf(v)
	if err != nil {
		return "", err
	}
	expander, ok := plugin.(plugins.ExpandableVolumePlugin)
	if !ok {
		return "", fmt.Errorf("%s, and plugin %s cannot expand volumes: reduce the request", larger, plugin.Name())
	}
	err = p.run(claimObject(keyOf(claim)), "volume_expand", plugin.Name(), func(ctx context.Context) error {
		return p.c.expand(ctx, expander, v, size)
	})
	if err != nil {
		return "", fmt.Errorf("expanding volume %s: %w", v.Name, err)
	}
	return fmt.Sprintf("volume %s is being expanded to %s", v.Name, size.String()), nil
}

// expand expands a volume. It records the new size, and whether the node must expand the volume too,
// in one write.
func (c *Controller) expand(ctx context.Context, expander plugins.ExpandableVolumePlugin, v *volume, size resource.Quantity) error {
	actual, nodeToo, err := expander.Expand(ctx, v.PersistentVolume, size)
	if err != nil {
		return err
	}
	if actual.Cmp(size) < 0 {
		return fmt.Errorf("%s reported success for the expansion of volume %s, but its size is %s, less than %s: see the driver's log", expander.Name(), v.Name, actual.String(), size.String())
	}
	return c.writeVolume(v, func() error {
		expanded := v.DeepCopy()
		expanded.Spec.Capacity = corev1.ResourceList{corev1.ResourceStorage: actual}
		if nodeToo {
			metav1.SetMetaDataAnnotation(&expanded.ObjectMeta, plugins.NodeExpandAnnotation, "true")
		}
		return c.putVolume(v, expanded)
	})
}

// finishExpansion records first that the node has expanded the volume, and then the claim's capacity.
func (c *Controller) finishExpansion(claim, record *corev1.PersistentVolumeClaim, v *volume) error {
	return c.writeBoth(keyOf(claim), record, v, func() error {
		if v.Annotations[plugins.NodeExpandAnnotation] != "" {
			expanded := v.DeepCopy()
			delete(expanded.Annotations, plugins.NodeExpandAnnotation)
			if err := c.putVolume(v, expanded); err != nil {
				return err
			}
		}
		return c.store.PutClaim(boundTo(claim, v.PersistentVolume))
	})
}
