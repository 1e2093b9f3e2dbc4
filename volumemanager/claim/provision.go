package claim

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// volumeName is the name that external-provisioner gives to a claim's volume.
func volumeName(claim *corev1.PersistentVolumeClaim) string { return "pvc-" + string(claim.UID) }

// continueProvisioning binds a recorded claim to its volume, or repeats CreateVolume with the recorded
// size if the volume may exist. If the claim now requests more, the volume is expanded after it is
// bound. If the claim now requests less, CreateVolume is repeated with the smaller size, because the
// pool may lack space for the recorded size. An existing larger volume satisfies the smaller request
// (csi-spec, CreateVolume, capacity_range).
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

// provisioner returns a claim's class and the plugin that provisions volumes of that class.
func (p *pass) provisioner(claim *corev1.PersistentVolumeClaim) (*storagev1.StorageClass, plugins.ProvisionableVolumePlugin, error) {
	name := className(claim)
	class := p.objects.Classes[name]
	switch {
	case name == "":
		return nil, nil, fmt.Errorf("%s, and the claim has no StorageClass, so no volume is provisioned: set spec.storageClassName, or add a volume", p.noMatch(claim))
	case class == nil:
		return nil, nil, fmt.Errorf("%s, and StorageClass %q is in no manifest: add the class", p.noMatch(claim), name)
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

// provision records the claim as Pending before it calls the plugin, because the volume may exist
// after the call. It removes the record in two cases: the plugin refused the request, or the first
// call certainly failed. In all other cases a call may have created the volume. If the claim's record
// has changed since the pass began, provision does nothing, because the next pass decides again.
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

// provisioned returns a copy of a new volume with the fields set that do not depend on the plugin.
func provisioned(v *corev1.PersistentVolume, o plugins.ProvisionOptions) *corev1.PersistentVolume {
	v = v.DeepCopy()
	v.Name, v.Namespace = o.PVName, ""
	v.UID = uidOf(o.PVName)
	metav1.SetMetaDataAnnotation(&v.ObjectMeta, provisionedBy, o.Class.Provisioner)
	v.Spec.ClaimRef = refTo(o.Claim)
	v.Spec.StorageClassName = o.Class.Name
	v.Spec.PersistentVolumeReclaimPolicy = ptr.Deref(o.Class.ReclaimPolicy, corev1.PersistentVolumeReclaimDelete)
	v.Status = corev1.PersistentVolumeStatus{Phase: corev1.VolumeBound}
	return v
}

// dataSource returns the object from which a claim's volume is copied, or nil.
func dataSource(claim *corev1.PersistentVolumeClaim) *corev1.TypedObjectReference {
	if ref := claim.Spec.DataSourceRef; ref != nil {
		return ref
	}
	if ref := claim.Spec.DataSource; ref != nil {
		return &corev1.TypedObjectReference{APIGroup: ref.APIGroup, Kind: ref.Kind, Name: ref.Name}
	}
	return nil
}

// claimSource returns the claim from whose volume a claim's volume is copied; false if the data source
// is not a claim.
func claimSource(claim *corev1.PersistentVolumeClaim) (types.NamespacedName, bool) {
	ref := dataSource(claim)
	if ref == nil || groupOf(ref) != "" || ref.Kind != "PersistentVolumeClaim" {
		return types.NamespacedName{}, false
	}
	return types.NamespacedName{Namespace: claim.Namespace, Name: ref.Name}, true
}

func groupOf(ref *corev1.TypedObjectReference) string { return ptr.Deref(ref.APIGroup, "") }

// source resolves a claim's data source.
func (p *pass) source(claim *corev1.PersistentVolumeClaim, class *storagev1.StorageClass) (plugins.ProvisionSource, error) {
	ref := dataSource(claim)
	if ref == nil {
		return plugins.ProvisionSource{}, nil
	}
	if ptr.Deref(ref.Namespace, claim.Namespace) != claim.Namespace {
		return plugins.ProvisionSource{}, fmt.Errorf("spec.dataSourceRef.namespace %q: it must be the claim's namespace %q", *ref.Namespace, claim.Namespace)
	}
	if key, ok := claimSource(claim); ok {
		v, err := p.sourceVolume(key)
		return plugins.ProvisionSource{Volume: v}, err
	}
	if groupOf(ref) == snapshotv1.GroupName && ref.Kind == "VolumeSnapshot" {
		handle, err := p.snapshotHandle(types.NamespacedName{Namespace: claim.Namespace, Name: ref.Name}, class)
		return plugins.ProvisionSource{SnapshotHandle: handle}, err
	}
	return plugins.ProvisionSource{}, fmt.Errorf("spec.dataSource: kind %s of API group %q cannot be copied: use a PersistentVolumeClaim or a VolumeSnapshot", ref.Kind, groupOf(ref))
}

// sourceVolume returns the volume of the claim from which a volume is copied.
func (p *pass) sourceVolume(key types.NamespacedName) (*corev1.PersistentVolume, error) {
	record := p.records[key]
	if record == nil || record.Spec.VolumeName == "" {
		return nil, fmt.Errorf("waits until claim %s, its data source, is bound", key)
	}
	v, err := p.volumeOf(record)
	if err != nil {
		return nil, err
	}
	if v == nil || v.lost || v.Annotations[reclaim] != "" {
		return nil, fmt.Errorf("spec.dataSource %s: the volume of that claim does not exist any more: use another claim", key.Name)
	}
	return v.PersistentVolume, nil
}

// snapshotHandle returns the handle of a pre-provisioned snapshot: a VolumeSnapshot and its
// VolumeSnapshotContent, which must name each other.
func (p *pass) snapshotHandle(key types.NamespacedName, class *storagev1.StorageClass) (string, error) {
	snapshot := p.objects.Snapshots[key]
	if snapshot == nil {
		return "", fmt.Errorf("spec.dataSource: VolumeSnapshot %s is in no manifest: add its manifest", key)
	}
	name := ptr.Deref(snapshot.Spec.Source.VolumeSnapshotContentName, "")
	if name == "" && snapshot.Status != nil {
		name = ptr.Deref(snapshot.Status.BoundVolumeSnapshotContentName, "")
	}
	if name == "" {
		return "", fmt.Errorf("VolumeSnapshot %s: the volume manager takes no snapshots: set spec.source.volumeSnapshotContentName", key)
	}
	content := p.objects.SnapshotContents[name]
	if content == nil {
		return "", fmt.Errorf("VolumeSnapshotContent %s of VolumeSnapshot %s is in no manifest: add its manifest", name, key)
	}
	if ref := content.Spec.VolumeSnapshotRef; ref.Namespace != key.Namespace || ref.Name != key.Name {
		return "", fmt.Errorf("VolumeSnapshotContent %s: spec.volumeSnapshotRef is %s/%s: set it to VolumeSnapshot %s, or use the content of that VolumeSnapshot", name, ref.Namespace, ref.Name, key)
	}
	if content.Spec.Driver != class.Provisioner {
		return "", fmt.Errorf("VolumeSnapshotContent %s: spec.driver %q is not the provisioner %q of StorageClass %s: use a class with that provisioner", name, content.Spec.Driver, class.Provisioner, class.Name)
	}
	handle := ptr.Deref(content.Spec.Source.SnapshotHandle, "")
	if content.Status != nil {
		handle = cmp.Or(ptr.Deref(content.Status.SnapshotHandle, ""), handle)
	}
	if handle == "" {
		return "", fmt.Errorf("VolumeSnapshotContent %s has no snapshot handle: set spec.source.snapshotHandle", name)
	}
	return handle, nil
}
