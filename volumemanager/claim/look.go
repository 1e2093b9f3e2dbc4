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

// pass is one look at manifests and store.
type pass struct {
	c       *Controller
	objects *manifest.Objects
	node    *corev1.Node
	// records are the claims of the store, wanted those that there are to be.
	records, wanted map[types.NamespacedName]*corev1.PersistentVolumeClaim
	volumes         map[string]*volume
	// sources maps sourceOf to the volumes that claims hold; nil before the first use.
	sources map[string][]*volume
	// claimed are volumes by the UID in their claimRef.
	claimed map[types.UID][]*volume
	// prebound are volumes whose claimRef has no UID yet.
	prebound map[types.NamespacedName]*volume
	// free are volumes without a claimRef by class, the smallest first.
	free map[string][]*volume
	// users has a pod for each claim that pods use, copies a claim that is being made of it.
	users, copies map[types.NamespacedName]string
	releasing     map[types.NamespacedName]bool
	defaultClass  string

	view  view
	again time.Time
}

// volume is a PersistentVolume as it is: spec from its manifest, if it has one, and
// claimRef, status and what it has grown to from the store.
type volume struct {
	*corev1.PersistentVolume
	// record is what the store has, or nil.
	record *corev1.PersistentVolume
	// manifest says that a manifest has it; lost that one had it, and none has.
	manifest, lost bool
	// edited says that the manifest has another source than the claim was given.
	edited bool
	// taken is the claim that it is being bound to.
	taken string
	// unreadable is why its record, which is there, is not known.
	unreadable error
}

// look reads what is being released before the records that this changes, and claims
// before volumes, as both are written in the other order when they are bound: a claim that
// is bound has a volume.
func (c *Controller) look(objects *manifest.Objects) *pass {
	p := &pass{
		c: c, objects: objects, node: c.machine.Node(), view: newView(),
		records: map[types.NamespacedName]*corev1.PersistentVolumeClaim{},
		wanted:  maps.Clone(objects.Claims),
		volumes: map[string]*volume{},
		users:   map[types.NamespacedName]string{}, copies: map[types.NamespacedName]string{},
		defaultClass: defaultClass(objects.Classes),
	}
	if p.wanted == nil {
		p.wanted = map[types.NamespacedName]*corev1.PersistentVolumeClaim{}
	}
	c.mu.Lock()
	p.releasing = maps.Clone(c.releasing)
	c.mu.Unlock()
	for _, record := range c.store.Claims() {
		p.records[keyOf(record)] = record
		if source, ok := claimSource(record); ok && record.Spec.VolumeName == "" {
			p.copies[source] = claimObject(keyOf(record))
		}
	}
	p.lookAtVolumes()
	p.lookAtPods()
	return p
}

func (p *pass) lookAtVolumes() {
	for _, record := range p.c.store.Volumes() {
		_, marked := record.Annotations[fromManifest]
		p.volumes[record.Name] = &volume{PersistentVolume: record, record: record, lost: marked}
	}
	for name, made := range p.objects.Volumes {
		v := &volume{PersistentVolume: made, manifest: true}
		if known := p.volumes[name]; known != nil {
			v.record = known.record
		}
		_, v.unreadable = p.c.store.Volume(name)
		v.PersistentVolume = merge(made, v.record)
		v.edited = !equality.Semantic.DeepEqual(made.Spec.PersistentVolumeSource, v.Spec.PersistentVolumeSource)
		p.volumes[name] = v
	}
	p.index()
}

func (p *pass) index() {
	p.claimed, p.prebound, p.free = map[types.UID][]*volume{}, map[types.NamespacedName]*volume{}, map[string][]*volume{}
	for _, name := range slices.Sorted(maps.Keys(p.volumes)) {
		v := p.volumes[name]
		if v.unreadable != nil || v.Annotations[reclaim] != "" {
			continue
		}
		switch ref := v.Spec.ClaimRef; {
		case ref != nil && ref.UID != "":
			p.claimed[ref.UID] = append(p.claimed[ref.UID], v)
		case v.lost:
		case ref == nil:
			p.free[v.Spec.StorageClassName] = append(p.free[v.Spec.StorageClassName], v)
		default:
			p.prebound[refKey(ref)] = v
		}
	}
	for _, free := range p.free {
		slices.SortStableFunc(free, func(a, b *volume) int {
			has := capacity(a.PersistentVolume)
			return has.Cmp(capacity(b.PersistentVolume))
		})
	}
}

// merge is a manifest's volume with what the store knows of it. The source of one that is
// a claim's does not change, as in Kubernetes: another would be mounted, or deleted. A volume that was released
// and retained is another claim's once the manifest says so.
func merge(made, record *corev1.PersistentVolume) *corev1.PersistentVolume {
	v := new(*made)
	v.Annotations = maps.Clone(made.Annotations)
	for _, ours := range []string{plugins.NodeExpandAnnotation, fromManifest, reclaim} {
		delete(v.Annotations, ours)
	}
	v.Status = corev1.PersistentVolumeStatus{Phase: corev1.VolumeAvailable}
	if record == nil {
		return v
	}
	for _, ours := range []string{plugins.NodeExpandAnnotation, reclaim} {
		if value, ok := record.Annotations[ours]; ok {
			metav1.SetMetaDataAnnotation(&v.ObjectMeta, ours, value)
		}
	}
	has := capacity(record)
	if has.Cmp(capacity(v)) > 0 {
		v.Spec.Capacity = record.Spec.Capacity
	}
	if record.Spec.ClaimRef != nil && !givenAway(made, record) {
		v.Spec.ClaimRef, v.Status = record.Spec.ClaimRef, record.Status
		v.Spec.PersistentVolumeSource = record.Spec.PersistentVolumeSource
	}
	return v
}

func givenAway(made, record *corev1.PersistentVolume) bool {
	to, from := made.Spec.ClaimRef, record.Spec.ClaimRef
	return to != nil && record.Status.Phase == corev1.VolumeReleased && record.Annotations[reclaim] == "" &&
		(refKey(to) != refKey(from) || to.UID != "" && to.UID != from.UID)
}

// lookAtPods finds who uses claims, and makes those of generic ephemeral volumes.
func (p *pass) lookAtPods() {
	for _, pod := range p.objects.Pods {
		if pod.DeletionTimestamp != nil {
			continue
		}
		for i := range pod.Spec.Volumes {
			v := &pod.Spec.Volumes[i]
			switch {
			case v.PersistentVolumeClaim != nil:
				p.used(types.NamespacedName{Namespace: pod.Namespace, Name: v.PersistentVolumeClaim.ClaimName}, pod)
			case v.Ephemeral != nil && v.Ephemeral.VolumeClaimTemplate != nil:
				p.wantEphemeral(pod, v)
			}
		}
	}
}

// used keeps one name, and always the same, since messages have it.
func (p *pass) used(key types.NamespacedName, pod *corev1.Pod) {
	name := pod.Namespace + "/" + pod.Name
	if before, ok := p.users[key]; !ok || name < before {
		p.users[key] = name
	}
}

func (p *pass) wantEphemeral(pod *corev1.Pod, v *corev1.Volume) {
	claim := ephemeralClaim(pod, v)
	key := keyOf(claim)
	if other := p.wanted[key]; other == nil {
		p.wanted[key] = claim
	} else if !metav1.IsControlledBy(other, pod) {
		p.view.conflicts[podObject(pod)] = fmt.Sprintf("volume %s: its claim is to be %s, and a manifest has another of that name: rename the volume or the claim", v.Name, key)
		return
	}
	p.used(key, pod)
}

func podObject(pod *corev1.Pod) string { return "pod " + pod.Namespace + "/" + pod.Name }

// Of returns the claim of a pod's volume; zero if it has none. The claim of a generic
// ephemeral volume is named after the pod and the volume, as in Kubernetes.
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

// CopyOf returns the claim whose volume is the source of a pod's volume, according to the
// manifests; zero if it has no such source.
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

// ephemeralClaim is named and owned as those that Kubernetes makes of a
// volumeClaimTemplate. Its UID depends on the pod's: another pod gets another claim.
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

// uidOf makes a UUID of what tells an object from all others.
func uidOf(identity string) types.UID {
	sum := sha256.Sum256([]byte(identity))
	return types.UID(fmt.Sprintf("%x-%x-%x-%x-%x", sum[:4], sum[4:6], sum[6:8], sum[8:10], sum[10:16]))
}

// ordered is in what order claims choose: those that name their volume, then the oldest.
func (p *pass) ordered() []*corev1.PersistentVolumeClaim {
	return slices.SortedFunc(maps.Values(p.wanted), func(a, b *corev1.PersistentVolumeClaim) int {
		return cmp.Or(
			cmp.Compare(turn(a), turn(b)),
			a.CreationTimestamp.Compare(b.CreationTimestamp.Time),
			cmp.Compare(a.Namespace, b.Namespace),
			cmp.Compare(a.Name, b.Name),
		)
	})
}

func turn(claim *corev1.PersistentVolumeClaim) int {
	if claim.Spec.VolumeName != "" {
		return 0
	}
	return 1
}

// defaultClass is the newest that is marked so, or the first by name.
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

func capacity(v *corev1.PersistentVolume) resource.Quantity {
	return v.Spec.Capacity[corev1.ResourceStorage]
}

func request(claim *corev1.PersistentVolumeClaim) resource.Quantity {
	return claim.Spec.Resources.Requests[corev1.ResourceStorage]
}
