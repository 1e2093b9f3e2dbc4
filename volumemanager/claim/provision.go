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

// volumeName is external-provisioner's.
func volumeName(claim *corev1.PersistentVolumeClaim) string { return "pvc-" + string(claim.UID) }

// provisioning goes on with a claim whose volume may have been made. It is asked for as it
// was the first time, whatever the manifest says by now: what it asks for in addition it
// gets later. But that there is no room for what it asked for is mended by asking for less,
// which a larger volume that was made is enough for (csi-spec, CreateVolume: a volume that
// is compatible with the capacity_range).
func (p *pass) provisioning(record *corev1.PersistentVolumeClaim, asked resource.Quantity) outcome {
	if v := p.volumes[volumeName(record)]; v != nil && v.Spec.ClaimRef != nil && v.Spec.ClaimRef.UID == record.UID {
		return p.bind(record, v)
	}
	if asked.Cmp(request(record)) < 0 {
		return p.provision(withRequest(record, asked), record)
	}
	return p.provision(record, record)
}

// provision has a volume made. The record is the claim's, if it has one.
func (p *pass) provision(claim, record *corev1.PersistentVolumeClaim) outcome {
	class, made, err := p.provisioner(claim)
	if err != nil {
		return stuck("%v", err)
	}
	if record != nil && record.Annotations[storageProvisioner] != class.Provisioner {
		return stuck("volume %s may have been made by %s, and StorageClass %s has provisioner %s by now: set it back", volumeName(claim), record.Annotations[storageProvisioner], class.Name, class.Provisioner)
	}
	source, err := p.source(claim, class)
	if err != nil {
		return stuck("%v", err)
	}
	o := plugins.ProvisionOptions{PVName: volumeName(claim), Claim: claim, Class: class, Source: source}
	if err := p.vacant(o.PVName); err != nil {
		return stuck("%v", err)
	}
	err = p.run(claimObject(keyOf(claim)), "volume_provision", made.Name(), func(ctx context.Context) error {
		return p.c.provision(ctx, made, o, record)
	})
	if err != nil {
		return stuck("provisioning volume %s: %v", o.PVName, err)
	}
	return waits("volume %s is being provisioned by %s", o.PVName, class.Provisioner)
}

func (p *pass) provisioner(claim *corev1.PersistentVolumeClaim) (*storagev1.StorageClass, plugins.ProvisionableVolumePlugin, error) {
	name := className(claim)
	if name == "" {
		return nil, nil, fmt.Errorf("%s, and there is no StorageClass to provision one: name one in spec.storageClassName, or add a volume", p.nothingFits(claim))
	}
	class := p.objects.Classes[name]
	if class == nil {
		return nil, nil, fmt.Errorf("%s, and StorageClass %q is in no manifest: add it", p.nothingFits(claim), name)
	}
	if claim.Spec.Selector != nil {
		return nil, nil, fmt.Errorf("%s, and one with spec.selector is never provisioned: remove the selector, or add a volume", p.nothingFits(claim))
	}
	made, err := p.c.plugins.ForClass(class)
	if err != nil {
		return nil, nil, fmt.Errorf("%s, and none is provisioned: StorageClass %s: %w", p.nothingFits(claim), name, err)
	}
	return class, made, nil
}

// vacant refuses the name of a volume that there is: of the claim's earlier life.
func (p *pass) vacant(name string) error {
	v := p.volumes[name]
	if v == nil {
		_, err := p.c.store.Volume(name)
		return err
	}
	if v.Annotations[reclaim] == reclaimBegun {
		return fmt.Errorf("waits for volume %s, of the claim that was here before, to be deleted", name)
	}
	return fmt.Errorf("volume %s is there, of the claim that was here before, and does not fit any more: make the claim what it was, or give it another metadata.uid", name)
}

// provision records that a volume may be there from before the call until it is known that
// it is not. An error that is neither uncertain nor a refusal says nothing of earlier calls.
func (c *Controller) provision(ctx context.Context, made plugins.ProvisionableVolumePlugin, o plugins.ProvisionOptions, record *corev1.PersistentVolumeClaim) error {
	key := keyOf(o.Claim)
	if now, err := c.store.Claim(key); err != nil || now != record {
		return err
	}
	if record != o.Claim {
		if err := c.store.PutClaim(pending(o)); err != nil {
			return err
		}
	}
	v, err := made.Provision(ctx, o)
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

func pending(o plugins.ProvisionOptions) *corev1.PersistentVolumeClaim {
	claim := o.Claim.DeepCopy()
	metav1.SetMetaDataAnnotation(&claim.ObjectMeta, storageProvisioner, o.Class.Provisioner)
	claim.Status = corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimPending}
	return claim
}

// provisioned is a plugin's volume with what does not depend on the plugin.
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
