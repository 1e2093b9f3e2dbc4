package claim

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/manifest"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// pass is one evaluation of the manifests and the store by Sync.
type pass struct {
	c       *Controller
	objects *manifest.Objects
	node    *corev1.Node
	// records are the claims in the store. desired are the claims of manifests and of generic
	// ephemeral volumes.
	records, desired map[types.NamespacedName]*corev1.PersistentVolumeClaim
	volumes          map[string]*volume
	// sources holds the volumes that have a claim, keyed by sourceOf. It is nil before the first
	// use.
	sources map[string][]*volume
	// claimed holds volumes by the UID in their claimRef.
	claimed map[types.UID][]*volume
	// prebound holds volumes whose claimRef has no UID yet.
	prebound map[types.NamespacedName]*volume
	// free holds volumes without a claimRef by class, sorted by capacity.
	free map[string][]*volume
	// users maps each claim that pods use to one of these pods. copies maps each data source to one
	// unbound claim whose volume is copied from it.
	users, copies map[types.NamespacedName]string
	// releasing is a copy of Controller.releasing.
	releasing    map[types.NamespacedName]bool
	defaultClass string

	view view
	// again is the time at which Sync must be called again; zero if no operation must be retried.
	again time.Time
}

// volume is the current state of a PersistentVolume: the spec from its manifest, if it has one;
// claimRef, status and expanded capacity from the store.
type volume struct {
	*corev1.PersistentVolume
	// record is the volume in the store, or nil.
	record *corev1.PersistentVolume
	// manifest is set if a manifest declares the volume. lost is set if such a manifest was removed.
	manifest, lost bool
	// edited is set if the source in the manifest was changed after the volume was bound.
	edited bool
	// bindingTo is the claim to which this pass binds the volume.
	bindingTo string
	// unreadable is the error of a record that exists but cannot be read.
	unreadable error
}

// newPass reads releasing before the records, and claims before volumes. Operations write them in the
// opposite order, so the volume of each bound claim is found.
func (c *Controller) newPass(objects *manifest.Objects) *pass {
	p := &pass{
		c: c, objects: objects, node: c.machine.Node(),
		view:    view{claims: map[types.NamespacedName]outcome{}, volumes: map[string]outcome{}, conflicts: map[string]string{}},
		records: map[types.NamespacedName]*corev1.PersistentVolumeClaim{},
		desired: map[types.NamespacedName]*corev1.PersistentVolumeClaim{},
		volumes: map[string]*volume{},
		users:   map[types.NamespacedName]string{}, copies: map[types.NamespacedName]string{},
		defaultClass: defaultClass(objects.Classes),
	}
	maps.Copy(p.desired, objects.Claims)
	c.mu.Lock()
	p.releasing = maps.Clone(c.releasing)
	c.mu.Unlock()
	for _, record := range c.store.Claims() {
		p.records[keyOf(record)] = record
		if source, ok := claimSource(record); ok && record.Spec.VolumeName == "" {
			p.copies[source] = claimObject(keyOf(record))
		}
	}
	p.addVolumes()
	p.indexVolumes()
	p.addPods()
	return p
}

// addVolumes adds the volumes of the store and of the manifests.
func (p *pass) addVolumes() {
	for _, record := range p.c.store.Volumes() {
		_, hadManifest := record.Annotations[fromManifest]
		p.volumes[record.Name] = &volume{PersistentVolume: record, record: record, lost: hadManifest}
	}
	for name, declared := range p.objects.Volumes {
		v := &volume{manifest: true}
		if recorded := p.volumes[name]; recorded != nil {
			v.record = recorded.record
		}
		_, v.unreadable = p.c.store.Volume(name)
		v.PersistentVolume = merge(declared, v.record)
		v.edited = !equality.Semantic.DeepEqual(declared.Spec.PersistentVolumeSource, v.Spec.PersistentVolumeSource)
		p.volumes[name] = v
	}
}

// indexVolumes fills claimed, prebound and free with the volumes that can be bound to a claim.
func (p *pass) indexVolumes() {
	p.claimed, p.prebound, p.free = map[types.UID][]*volume{}, map[types.NamespacedName]*volume{}, map[string][]*volume{}
	for _, name := range slices.Sorted(maps.Keys(p.volumes)) {
		v := p.volumes[name]
		if v.unreadable != nil || v.Annotations[reclaim] != "" {
			continue
		}
		switch ref := v.Spec.ClaimRef; {
		case ref != nil && ref.UID != "":
			p.claimed[ref.UID] = append(p.claimed[ref.UID], v)
		case v.lost: // no other claim is bound to a lost volume
		case ref == nil:
			p.free[v.Spec.StorageClassName] = append(p.free[v.Spec.StorageClassName], v)
		default:
			p.prebound[refKey(ref)] = v
		}
	}
	for _, free := range p.free {
		slices.SortStableFunc(free, func(a, b *volume) int {
			size := capacity(a.PersistentVolume)
			return size.Cmp(capacity(b.PersistentVolume))
		})
	}
}

// merge combines the manifest and the record of a volume. As in Kubernetes, the source of a volume
// with a claim does not change, because otherwise other data would be mounted or deleted. A manifest
// can assign a released volume to another claim.
func merge(declared, record *corev1.PersistentVolume) *corev1.PersistentVolume {
	v := new(*declared)
	v.Annotations = maps.Clone(declared.Annotations)
	delete(v.Annotations, fromManifest)
	for _, recorded := range []string{plugins.NodeExpandAnnotation, reclaim} {
		delete(v.Annotations, recorded)
		if record != nil && record.Annotations[recorded] != "" {
			metav1.SetMetaDataAnnotation(&v.ObjectMeta, recorded, record.Annotations[recorded])
		}
	}
	v.Status = corev1.PersistentVolumeStatus{Phase: corev1.VolumeAvailable}
	if record == nil {
		return v
	}
	size := capacity(record)
	if size.Cmp(capacity(v)) > 0 {
		v.Spec.Capacity = record.Spec.Capacity
	}
	if record.Spec.ClaimRef != nil && !reassigned(declared, record) {
		v.Spec.ClaimRef, v.Status = record.Spec.ClaimRef, record.Status
		v.Spec.PersistentVolumeSource = record.Spec.PersistentVolumeSource
	}
	return v
}

// reassigned reports whether the manifest of a released volume names another claim.
func reassigned(declared, record *corev1.PersistentVolume) bool {
	to, from := declared.Spec.ClaimRef, record.Spec.ClaimRef
	return to != nil && record.Status.Phase == corev1.VolumeReleased && record.Annotations[reclaim] == "" &&
		(refKey(to) != refKey(from) || to.UID != "" && to.UID != from.UID)
}

// addPods records which claims pods use, and adds the claims of generic ephemeral volumes.
func (p *pass) addPods() {
	for _, pod := range p.objects.Pods {
		if pod.DeletionTimestamp != nil {
			continue
		}
		name := pod.Namespace + "/" + pod.Name
		for i := range pod.Spec.Volumes {
			v := &pod.Spec.Volumes[i]
			key := Of(pod, v)
			switch {
			case v.PersistentVolumeClaim != nil:
			case v.Ephemeral == nil || v.Ephemeral.VolumeClaimTemplate == nil:
				continue
			case p.desired[key] == nil:
				p.desired[key] = ephemeralClaim(pod, v)
			case !metav1.IsControlledBy(p.desired[key], pod):
				p.view.conflicts["pod "+name] = fmt.Sprintf("volume %s: a manifest declares claim %s, but the claim of this generic ephemeral volume has the same name: rename the volume or the claim", v.Name, key)
				continue
			}
			if user := p.users[key]; user == "" || name < user { // choose the same pod in each pass
				p.users[key] = name
			}
		}
	}
}

// Of returns the key of the claim of a pod's volume; zero if the volume has no claim. As in
// Kubernetes, the claim of a generic ephemeral volume is named after the pod and the volume.
func Of(pod *corev1.Pod, v *corev1.Volume) types.NamespacedName {
	switch {
	case v.PersistentVolumeClaim != nil:
		return types.NamespacedName{Namespace: pod.Namespace, Name: v.PersistentVolumeClaim.ClaimName}
	case v.Ephemeral != nil:
		return types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name + "-" + v.Name}
	default:
		return types.NamespacedName{}
	}
}

// CopyOf returns the key of the claim from whose volume a pod's volume is copied, according to the
// manifests; zero if the volume is not a copy.
func CopyOf(pod *corev1.Pod, v *corev1.Volume, objects *manifest.Objects) (source types.NamespacedName) {
	claim := objects.Claims[Of(pod, v)]
	if v.Ephemeral != nil && v.Ephemeral.VolumeClaimTemplate != nil {
		claim = ephemeralClaim(pod, v)
	}
	if claim != nil {
		source, _ = claimSource(claim)
	}
	return source
}

// ephemeralClaim returns the claim that Kubernetes creates from a volumeClaimTemplate. The UID of the
// claim depends on the pod's UID, so another pod gets another claim.
func ephemeralClaim(pod *corev1.Pod, v *corev1.Volume) *corev1.PersistentVolumeClaim {
	template := v.Ephemeral.VolumeClaimTemplate.DeepCopy()
	claim := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: pod.Namespace, Name: Of(pod, v).Name,
			Labels: template.Labels, Annotations: template.Annotations,
			UID:             uidOf(string(pod.UID) + "/" + v.Name),
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(pod, corev1.SchemeGroupVersion.WithKind("Pod"))},
		},
		Spec: template.Spec,
	}
	if claim.Spec.VolumeMode == nil {
		claim.Spec.VolumeMode = new(corev1.PersistentVolumeFilesystem)
	}
	return claim
}

// uidOf derives a UID, in the format of a UUID, from the identity of an object.
func uidOf(identity string) types.UID {
	sum := sha256.Sum256([]byte(identity))
	return types.UID(fmt.Sprintf("%x-%x-%x-%x-%x", sum[:4], sum[4:6], sum[6:8], sum[8:10], sum[10:16]))
}

// sortedClaims returns the desired claims in the order in which they are bound: first those with
// spec.volumeName, then the oldest.
func (p *pass) sortedClaims() []*corev1.PersistentVolumeClaim {
	rank := func(claim *corev1.PersistentVolumeClaim) int {
		if claim.Spec.VolumeName != "" {
			return 0
		}
		return 1
	}
	return slices.SortedFunc(maps.Values(p.desired), func(a, b *corev1.PersistentVolumeClaim) int {
		return cmp.Or(
			cmp.Compare(rank(a), rank(b)),
			a.CreationTimestamp.Compare(b.CreationTimestamp.Time),
			cmp.Compare(a.Namespace, b.Namespace),
			cmp.Compare(a.Name, b.Name),
		)
	})
}

// defaultClass returns the name of the newest class that is annotated as default; "" if there is none.
// If several are equally new, it returns the first by name.
func defaultClass(classes map[string]*storagev1.StorageClass) string {
	var found *storagev1.StorageClass
	for _, name := range slices.Sorted(maps.Keys(classes)) {
		class := classes[name]
		if class.Annotations["storageclass.kubernetes.io/is-default-class"] == "true" &&
			(found == nil || class.CreationTimestamp.After(found.CreationTimestamp.Time)) {
			found = class
		}
	}
	if found == nil {
		return ""
	}
	return found.Name
}

func keyOf(claim *corev1.PersistentVolumeClaim) types.NamespacedName {
	return types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}
}

func refKey(ref *corev1.ObjectReference) types.NamespacedName {
	return types.NamespacedName{Namespace: ref.Namespace, Name: ref.Name}
}

// capacity returns the size of a volume.
func capacity(v *corev1.PersistentVolume) resource.Quantity {
	return v.Spec.Capacity[corev1.ResourceStorage]
}

// request returns the size that a claim requests.
func request(claim *corev1.PersistentVolumeClaim) resource.Quantity {
	return claim.Spec.Resources.Requests[corev1.ResourceStorage]
}
