package claim

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// syncSize expands the volume of a bound claim to the requested size. The claim's status is
// updated last, after the volume's capacity and after the expansion on the node.
func (p *pass) syncSize(claim, record *corev1.PersistentVolumeClaim, v *volume) outcome {
	o := outcome{claim: withRequest(record, request(claim)), volume: v.PersistentVolume, phase: string(corev1.ClaimBound), serves: true}
	asked, had, has := request(claim), request(record), capacity(v.PersistentVolume)
	told := record.Status.Capacity[corev1.ResourceStorage]
	var err error
	switch {
	case asked.Cmp(has) > 0:
		o.message, err = p.expand(claim, record, v)
	case v.Annotations[plugins.NodeExpandAnnotation] != "" && !p.c.nodeExpanded(v):
		o.message = fmt.Sprintf("volume %s has %s, and its filesystem grows once a pod has it mounted", v.Name, has.String())
	case v.Annotations[plugins.NodeExpandAnnotation] != "" || told.Cmp(has) != 0 || asked.Cmp(had) > 0:
		err = p.run(claimObject(keyOf(claim)), "volume_bind", p.pluginName(v), func(context.Context) error {
			return p.c.finishExpansion(withRequest(record, larger(asked, had)), record, v)
		})
	case asked.Cmp(had) < 0:
		err = fmt.Errorf("spec.resources.requests.storage %s is less than the %s it was: no volume is made smaller: set it back", asked.String(), had.String())
	}
	if err == nil && o.message == "" {
		if o.message = changed(claim, record); o.message != "" {
			o.warning = true
		}
	}
	if err != nil {
		o.message, o.warning = err.Error(), true
	}
	return o
}

func larger(a, b resource.Quantity) resource.Quantity {
	if a.Cmp(b) > 0 {
		return a
	}
	return b
}

// withRequest returns the claim with a storage request of size.
func withRequest(claim *corev1.PersistentVolumeClaim, size resource.Quantity) *corev1.PersistentVolumeClaim {
	had := request(claim)
	if had.Cmp(size) == 0 {
		return claim
	}
	claim = claim.DeepCopy()
	claim.Spec.Resources.Requests = corev1.ResourceList{corev1.ResourceStorage: size}
	return claim
}

func (p *pass) expand(claim, record *corev1.PersistentVolumeClaim, v *volume) (message string, err error) {
	size, has := request(claim), capacity(v.PersistentVolume)
	more := fmt.Sprintf("spec.resources.requests.storage %s is more than the %s of volume %s", size.String(), has.String(), v.Name)
	class := p.objects.Classes[className(record)]
	if class == nil || class.AllowVolumeExpansion == nil || !*class.AllowVolumeExpansion {
		return "", fmt.Errorf("%s, and StorageClass %q does not allow its expansion: set allowVolumeExpansion there, or ask for what it has", more, className(record))
	}
	found, err := p.pluginOf(v)
	if err != nil {
		return "", err
	}
	expander, ok := found.(plugins.ExpandableVolumePlugin)
	if !ok {
		return "", fmt.Errorf("%s, and %s cannot expand it: ask for what it has", more, found.Name())
	}
	err = p.run(claimObject(keyOf(claim)), "volume_expand", found.Name(), func(ctx context.Context) error {
		return p.c.expand(ctx, expander, v, size)
	})
	if err != nil {
		return "", fmt.Errorf("expanding volume %s: %w", v.Name, err)
	}
	return fmt.Sprintf("volume %s is being expanded to %s", v.Name, size.String()), nil
}

// expand expands a volume. One write records the new size and whether the node must expand the
// volume too.
func (c *Controller) expand(ctx context.Context, expander plugins.ExpandableVolumePlugin, v *volume, size resource.Quantity) error {
	actual, node, err := expander.Expand(ctx, v.PersistentVolume, size)
	if err != nil {
		return err
	}
	if actual.Cmp(size) < 0 {
		return fmt.Errorf("%s says that volume %s is expanded, and that it has %s, less than %s: see the driver's log", expander.Name(), v.Name, actual.String(), size.String())
	}
	defer c.records.lock(v.Name)()
	if now, err := c.store.Volume(v.Name); err != nil || now != v.record {
		return err
	}
	expanded := v.DeepCopy()
	expanded.Spec.Capacity = corev1.ResourceList{corev1.ResourceStorage: actual}
	if node {
		metav1.SetMetaDataAnnotation(&expanded.ObjectMeta, plugins.NodeExpandAnnotation, "true")
	}
	return c.store.PutVolume(v.marked(expanded))
}

// finishExpansion records the completed expansion on the node, then the claim's new capacity.
func (c *Controller) finishExpansion(claim, record *corev1.PersistentVolumeClaim, v *volume) error {
	defer c.records.lock(v.Name)()
	if same, err := c.unchanged(keyOf(claim), record, v); err != nil || !same {
		return err
	}
	if v.Annotations[plugins.NodeExpandAnnotation] != "" {
		all := v.DeepCopy()
		delete(all.Annotations, plugins.NodeExpandAnnotation)
		if err := c.store.PutVolume(v.marked(all)); err != nil {
			return err
		}
	}
	return c.store.PutClaim(boundTo(claim, v.PersistentVolume))
}
