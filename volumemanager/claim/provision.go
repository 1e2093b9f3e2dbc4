package claim

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// volumeName is the name that external-provisioner gives to a claim's volume.
func volumeName(claim *corev1.PersistentVolumeClaim) string { return "pvc-" + string(claim.UID) }

// continueProvisioning continues with a claim whose volume may exist. It repeats CreateVolume with the
// recorded size. If the claim now requests more, the volume is expanded after it is bound. If the
// claim now requests less, the smaller size is used at once: the pool may lack space for the recorded
// size, and an existing larger volume satisfies the smaller request (CSI specification, CreateVolume,
// capacity_range).
func (p *pass) continueProvisioning(record *corev1.PersistentVolumeClaim, requested resource.Quantity) outcome {
	if v := p.volumes[volumeName(record)]; v != nil && v.Spec.ClaimRef != nil && v.Spec.ClaimRef.UID == record.UID {
		return p.bind(record, v)
	}
	if requested.Cmp(request(record)) < 0 {
		return p.provision(withRequest(record, requested), record)
	}
	return p.provision(record, record)
}

// provision starts to provision a claim's volume. record is nil if the claim is not recorded.
func (p *pass) provision(claim, record *corev1.PersistentVolumeClaim) outcome {
	class, provisioner, err := p.provisioner(claim)
	if err != nil {
		return blocked("%v", err)
	}
	if record != nil && record.Annotations[storageProvisioner] != class.Provisioner {
		return blocked("volume %s may have been created by %s, but the provisioner of StorageClass %s was changed to %s: set it back", volumeName(claim), record.Annotations[storageProvisioner], class.Name, class.Provisioner)
	}
	source, err := p.source(claim, class)
	if err != nil {
		return blocked("%v", err)
	}
	o := plugins.ProvisionOptions{PVName: volumeName(claim), Claim: claim, Class: class, Source: source}
	if err := p.checkNameFree(o.PVName); err != nil {
		return blocked("%v", err)
	}
	err = p.run(claimObject(keyOf(claim)), "volume_provision", provisioner.Name(), func(ctx context.Context) error {
		return p.c.provision(ctx, provisioner, o, record)
	})
	if err != nil {
		return blocked("provisioning volume %s: %v", o.PVName, err)
	}
	return waiting("volume %s is being provisioned by %s", o.PVName, class.Provisioner)
}

// provisioner returns a claim's class and the plugin that provisions its volumes.
func (p *pass) provisioner(claim *corev1.PersistentVolumeClaim) (*storagev1.StorageClass, plugins.ProvisionableVolumePlugin, error) {
	name := className(claim)
	class := p.objects.Classes[name]
	switch {
	case name == "":
		return nil, nil, fmt.Errorf("%s, and the claim has no StorageClass, so no volume is provisioned: set spec.storageClassName, or add a volume", p.noMatch(claim))
	case class == nil:
		return nil, nil, fmt.Errorf("%s, and StorageClass %q is in no manifest: add it", p.noMatch(claim), name)
	case claim.Spec.Selector != nil:
		return nil, nil, fmt.Errorf("%s, and no volume is provisioned for a claim with spec.selector: remove the selector, or add a volume", p.noMatch(claim))
	}
	provisioner, err := p.c.plugins.ForClass(class)
	if err != nil {
		return nil, nil, fmt.Errorf("%s, and no volume is provisioned: StorageClass %s: %w", p.noMatch(claim), name, err)
	}
	return class, provisioner, nil
}

// checkNameFree returns an error if a volume of this name exists. Such a volume belongs to an earlier
// claim with the same UID.
func (p *pass) checkNameFree(name string) error {
	v := p.volumes[name]
	if v == nil {
		_, err := p.c.store.Volume(name)
		return err
	}
	if v.Annotations[reclaim] == reclaimBegun {
		return fmt.Errorf("waits until volume %s of an earlier claim with this UID is deleted", name)
	}
	return fmt.Errorf("volume %s of an earlier claim with this UID exists, but does not match: change the claim back, or set another metadata.uid", name)
}

// provision records the claim as Pending before the call, because the volume may exist from then
// on. It removes the record in two cases: the plugin refused the request, or this is the first call
// and its failure is certain. In all other cases an earlier call may have created the volume. It does
// nothing if the claim was recorded differently since the pass began: the next pass decides again.
func (c *Controller) provision(ctx context.Context, provisioner plugins.ProvisionableVolumePlugin, o plugins.ProvisionOptions, record *corev1.PersistentVolumeClaim) error {
	key := keyOf(o.Claim)
	if current, err := c.store.Claim(key); err != nil || current != record {
		return err
	}
	if record != o.Claim {
		pending := o.Claim.DeepCopy()
		metav1.SetMetaDataAnnotation(&pending.ObjectMeta, storageProvisioner, o.Class.Provisioner)
		pending.Status = corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimPending}
		if err := c.store.PutClaim(pending); err != nil {
			return err
		}
	}
	v, err := provisioner.Provision(ctx, o)
	if err != nil {
		if plugins.Refused(err) || record == nil && !plugins.Uncertain(err) {
			return errors.Join(err, c.store.RemoveClaim(key))
		}
		return err
	}
	v = provisioned(v, o)
	if err := c.store.PutVolume(v); err != nil {
		return err
	}
	return c.store.PutClaim(boundTo(o.Claim, v))
}

// provisioned completes a plugin's volume with the fields that are the same for all plugins.
func provisioned(v *corev1.PersistentVolume, o plugins.ProvisionOptions) *corev1.PersistentVolume {
	v = v.DeepCopy()
	v.Name, v.Namespace = o.PVName, ""
	v.UID = uidOf(o.PVName)
	metav1.SetMetaDataAnnotation(&v.ObjectMeta, provisionedBy, o.Class.Provisioner)
	v.Spec.ClaimRef = refTo(o.Claim)
	v.Spec.StorageClassName = o.Class.Name
	if v.Spec.PersistentVolumeReclaimPolicy = corev1.PersistentVolumeReclaimDelete; o.Class.ReclaimPolicy != nil {
		v.Spec.PersistentVolumeReclaimPolicy = *o.Class.ReclaimPolicy
	}
	v.Status = corev1.PersistentVolumeStatus{Phase: corev1.VolumeBound}
	return v
}
