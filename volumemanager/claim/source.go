package claim

import (
	"fmt"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

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

// claimSource returns the claim whose volume is copied.
func claimSource(claim *corev1.PersistentVolumeClaim) (types.NamespacedName, bool) {
	ref := dataSource(claim)
	if ref == nil || groupOf(ref) != "" || ref.Kind != "PersistentVolumeClaim" {
		return types.NamespacedName{}, false
	}
	return types.NamespacedName{Namespace: claim.Namespace, Name: ref.Name}, true
}

func groupOf(ref *corev1.TypedObjectReference) string {
	if ref.APIGroup == nil {
		return ""
	}
	return *ref.APIGroup
}

// source resolves a claim's data source.
func (p *pass) source(claim *corev1.PersistentVolumeClaim, class *storagev1.StorageClass) (plugins.ProvisionSource, error) {
	ref := dataSource(claim)
	if ref == nil {
		return plugins.ProvisionSource{}, nil
	}
	if ref.Namespace != nil && *ref.Namespace != claim.Namespace {
		return plugins.ProvisionSource{}, fmt.Errorf("spec.dataSourceRef.namespace %q: it must be the claim's", *ref.Namespace)
	}
	if key, ok := claimSource(claim); ok {
		v, err := p.sourceVolume(key)
		return plugins.ProvisionSource{Volume: v}, err
	}
	if groupOf(ref) == snapshotv1.GroupName && ref.Kind == "VolumeSnapshot" {
		handle, err := p.snapshotHandle(types.NamespacedName{Namespace: claim.Namespace, Name: ref.Name}, class)
		return plugins.ProvisionSource{SnapshotHandle: handle}, err
	}
	return plugins.ProvisionSource{}, fmt.Errorf("spec.dataSource %s %s/%s: volumes are copied from a PersistentVolumeClaim or a VolumeSnapshot only", ref.Name, groupOf(ref), ref.Kind)
}

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
		return nil, fmt.Errorf("spec.dataSource %s: the volume of that claim does not exist any more: name another", key.Name)
	}
	return v.PersistentVolume, nil
}

// snapshotHandle returns the handle of a pre-provisioned snapshot: a VolumeSnapshot and its
// VolumeSnapshotContent, which must name each other.
func (p *pass) snapshotHandle(key types.NamespacedName, class *storagev1.StorageClass) (string, error) {
	snapshot := p.objects.Snapshots[key]
	if snapshot == nil {
		return "", fmt.Errorf("spec.dataSource: VolumeSnapshot %s is in no manifest: add it", key)
	}
	name := contentName(snapshot)
	if name == "" {
		return "", fmt.Errorf("VolumeSnapshot %s: the volume manager takes no snapshots: set spec.source.volumeSnapshotContentName", key)
	}
	content := p.objects.SnapshotContents[name]
	if content == nil {
		return "", fmt.Errorf("VolumeSnapshotContent %s of VolumeSnapshot %s is in no manifest: add it", name, key)
	}
	if ref := content.Spec.VolumeSnapshotRef; ref.Namespace != key.Namespace || ref.Name != key.Name {
		return "", fmt.Errorf("VolumeSnapshotContent %s: spec.volumeSnapshotRef is %s/%s, not %s: make them the same", name, ref.Namespace, ref.Name, key)
	}
	if content.Spec.Driver != class.Provisioner {
		return "", fmt.Errorf("VolumeSnapshotContent %s: spec.driver %q is not the provisioner %q of StorageClass %s: use a class with that provisioner", name, content.Spec.Driver, class.Provisioner, class.Name)
	}
	return handleOf(content)
}

func contentName(snapshot *snapshotv1.VolumeSnapshot) string {
	if snapshot.Spec.Source.VolumeSnapshotContentName != nil {
		return *snapshot.Spec.Source.VolumeSnapshotContentName
	}
	if snapshot.Status != nil && snapshot.Status.BoundVolumeSnapshotContentName != nil {
		return *snapshot.Status.BoundVolumeSnapshotContentName
	}
	return ""
}

func handleOf(content *snapshotv1.VolumeSnapshotContent) (string, error) {
	if content.Status != nil && content.Status.SnapshotHandle != nil && *content.Status.SnapshotHandle != "" {
		return *content.Status.SnapshotHandle, nil
	}
	if handle := content.Spec.Source.SnapshotHandle; handle != nil && *handle != "" {
		return *handle, nil
	}
	return "", fmt.Errorf("VolumeSnapshotContent %s: it has no snapshotHandle: set spec.source.snapshotHandle", content.Name)
}
