package claim

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// syncClaim binds a desired claim, and expands its volume if the claim is already bound. A claim that
// is added again with the same UID is bound to its earlier volume, unless deletion or scrubbing of
// the data has begun.
func (p *pass) syncClaim(claim *corev1.PersistentVolumeClaim) outcome {
	key := keyOf(claim)
	record := p.records[key]
	if p.releasing[key] {
		return waiting("waits until the earlier claim of this name is deleted")
	}
	if record == nil {
		if _, err := p.c.store.Claim(key); err != nil {
			return blocked("%v", err)
		}
		return p.syncUnbound(claim)
	}
	switch {
	case record.UID != claim.UID && !ofPod(record) && !ofPod(claim):
		return blocked("metadata.uid was %s and is %s, which makes it another claim with another volume: set the UID back, or remove the claim first, which releases its volume", record.UID, claim.UID)
	case record.UID != claim.UID:
		return waiting("waits until the earlier claim of this name, UID %s, is deleted: %s", record.UID, p.syncRemovedClaim(record).message)
	case record.Spec.VolumeName == "":
		return p.continueProvisioning(record, request(claim))
	}
	return p.syncBound(claim, record)
}

// ofPod reports whether a claim belongs to a generic ephemeral volume. Such a claim is deleted with
// its pod, and another pod of the same name gets another claim.
func ofPod(claim *corev1.PersistentVolumeClaim) bool {
	owner := metav1.GetControllerOf(claim)
	return owner != nil && owner.Kind == "Pod"
}

// syncUnbound finds a volume for an unbound claim. As in Kubernetes, the order of preference is: a
// volume with the claim's UID, the volume that the claim names, a volume that names the claim, the
// smallest free volume that matches, a new volume.
func (p *pass) syncUnbound(claim *corev1.PersistentVolumeClaim) outcome {
	claim = claim.DeepCopy()
	if claim.Spec.StorageClassName == nil {
		claim.Spec.StorageClassName = &p.defaultClass
	}
	switch v := p.earlierVolume(claim); {
	case v != nil && v.record != nil:
		return p.bind(claim, v)
	case v != nil:
		return p.bindPrebound(claim, v)
	}
	if claim.Spec.VolumeName != "" {
		return p.bindNamed(claim)
	}
	if v := p.prebound[keyOf(claim)]; v != nil {
		return p.bindPrebound(claim, v)
	}
	class := p.objects.Classes[className(claim)]
	if class != nil && ptr.Deref(class.VolumeBindingMode, "") == storagev1.VolumeBindingWaitForFirstConsumer && p.users[keyOf(claim)] == "" {
		return waiting("waits for the first pod that uses the claim: StorageClass %s has volumeBindingMode WaitForFirstConsumer", class.Name)
	}
	for _, v := range p.free[className(claim)] {
		if p.mismatch(claim, v) == "" {
			return p.bind(claim, v)
		}
	}
	return p.provision(claim, nil)
}

// earlierVolume returns a volume that names the claim's UID, or nil: a volume whose binding to the
// claim was interrupted or, if there is none, a matching volume that was bound to the claim before the
// claim was removed and added again.
func (p *pass) earlierVolume(claim *corev1.PersistentVolumeClaim) *volume {
	for _, v := range p.claimed[claim.UID] {
		if v.Status.Phase == corev1.VolumeBound && (!v.lost || !p.objects.Complete) {
			return v
		}
	}
	if claim.Spec.VolumeName != "" {
		return nil
	}
	for _, v := range p.claimed[claim.UID] {
		if claimMismatch(claim, v.PersistentVolume) == "" && !v.lost {
			return v
		}
	}
	return nil
}

// bindPrebound binds a claim to a volume whose manifest names the claim.
func (p *pass) bindPrebound(claim *corev1.PersistentVolumeClaim, v *volume) outcome {
	if reason := cmp.Or(incompatible(claim, v.PersistentVolume), p.affinityMismatch(v)); reason != "" {
		return blocked("volume %s names the claim in spec.claimRef, but does not match: %s: change the claim or the volume", v.Name, reason)
	}
	return p.bind(claim, v)
}

// bindNamed binds a claim to the volume in its spec.volumeName.
func (p *pass) bindNamed(claim *corev1.PersistentVolumeClaim) outcome {
	v := p.volumes[claim.Spec.VolumeName]
	if v == nil || v.lost {
		return blocked("spec.volumeName %q: no such volume: add its manifest", claim.Spec.VolumeName)
	}
	ref := v.Spec.ClaimRef
	switch {
	case v.unreadable != nil:
		return blocked("%v", v.unreadable)
	case v.bindingTo != "":
		return blocked("spec.volumeName %q: the volume is being bound to claim %s: name another volume", v.Name, v.bindingTo)
	case v.Annotations[reclaim] != "":
		return blocked("spec.volumeName %q: the data of the volume is being deleted: name another volume", v.Name)
	case ref != nil && (refKey(ref) != keyOf(claim) || ref.UID != "" && ref.UID != claim.UID):
		return blocked("spec.volumeName %q: the volume belongs to claim %s (UID %q): name another volume", v.Name, refKey(ref), ref.UID)
	}
	if reason := p.mismatch(claim, v); reason != "" {
		return blocked("spec.volumeName %q: the volume does not match: %s: change the claim or the volume", v.Name, reason)
	}
	return p.bind(claim, v)
}

// noMatch says why no free volume matches a claim: for the three smallest volumes, the reason of each.
func (p *pass) noMatch(claim *corev1.PersistentVolumeClaim) string {
	const shown = 3
	free := p.free[className(claim)]
	if len(free) == 0 {
		return fmt.Sprintf("no volume of class %q is free", className(claim))
	}
	var reasons []string
	for _, v := range free[:min(shown, len(free))] {
		reasons = append(reasons, v.Name+": "+p.mismatch(claim, v))
	}
	if len(free) > shown {
		reasons = append(reasons, fmt.Sprintf("and %d more", len(free)-shown))
	}
	return "no volume matches: " + strings.Join(reasons, "; ")
}

// mismatch says why a claim cannot be bound to a volume that does not name the claim; "" if the claim can
// be bound.
func (p *pass) mismatch(claim *corev1.PersistentVolumeClaim, v *volume) string {
	return cmp.Or(claimMismatch(claim, v.PersistentVolume), p.affinityMismatch(v))
}

// claimMismatch is like mismatch, but ignores the volume's nodeAffinity.
func claimMismatch(claim *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) string {
	if v.Spec.StorageClassName != className(claim) {
		return fmt.Sprintf("its storageClassName %q is not %q", v.Spec.StorageClassName, className(claim))
	}
	selector := labels.Everything()
	if claim.Spec.Selector != nil {
		var err error
		if selector, err = metav1.LabelSelectorAsSelector(claim.Spec.Selector); err != nil {
			return fmt.Sprintf("the claim's spec.selector is not valid: %v", err)
		}
	}
	if !selector.Matches(labels.Set(v.Labels)) {
		return fmt.Sprintf("its labels do not match %s", selector)
	}
	return incompatible(claim, v)
}

// incompatible says why a claim cannot be bound even to a volume that names the claim; "" if the claim can
// be bound.
func incompatible(claim *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) string {
	for _, mode := range claim.Spec.AccessModes {
		if !slices.Contains(v.Spec.AccessModes, mode) {
			return fmt.Sprintf("its accessModes %v do not contain %s", v.Spec.AccessModes, mode)
		}
	}
	if actual, requested := modeOf(v.Spec.VolumeMode), modeOf(claim.Spec.VolumeMode); actual != requested {
		return fmt.Sprintf("its volumeMode %s is not %s", actual, requested)
	}
	size, requested := capacity(v), request(claim)
	if size.Cmp(requested) < 0 {
		return fmt.Sprintf("its capacity %s is less than %s", size.String(), requested.String())
	}
	return ""
}

// affinityMismatch says why a volume cannot be used on this machine; "" if the volume can be used.
// affinityMismatch is not called for bound volumes, because drivers may not have reported their topology
// yet.
func (p *pass) affinityMismatch(v *volume) string {
	if err := plugins.CheckAffinity(v.PersistentVolume, p.node); err != nil {
		return err.Error()
	}
	return ""
}

func modeOf(mode *corev1.PersistentVolumeMode) corev1.PersistentVolumeMode {
	return ptr.Deref(mode, corev1.PersistentVolumeFilesystem)
}

func className(claim *corev1.PersistentVolumeClaim) string {
	return ptr.Deref(claim.Spec.StorageClassName, "")
}

// bind starts the operation that binds a claim to a volume. No other claim of this pass gets the
// volume.
func (p *pass) bind(claim *corev1.PersistentVolumeClaim, v *volume) outcome {
	class := v.Spec.StorageClassName
	p.free[class] = slices.DeleteFunc(p.free[class], func(o *volume) bool { return o == v })
	key := keyOf(claim)
	v.bindingTo = key.String()
	record := p.records[key]
	err := p.run(claimObject(key), "volume_bind", p.pluginName(v), func(context.Context) error {
		return p.c.bind(claim, record, v)
	})
	if err != nil {
		return blocked("binding the claim to volume %s: %v", v.Name, err)
	}
	return waiting("is being bound to volume %s", v.Name)
}

// bind records the binding in the volume and then in the claim. In this order, no other claim gets the
// volume if the manager is killed between the two writes.
func (c *Controller) bind(claim, record *corev1.PersistentVolumeClaim, v *volume) error {
	return c.writeBoth(keyOf(claim), record, v, func() error {
		bound := v.DeepCopy()
		bound.Spec.ClaimRef = refTo(claim)
		bound.Status = corev1.PersistentVolumeStatus{Phase: corev1.VolumeBound}
		if err := c.putVolume(v, bound); err != nil {
			return err
		}
		return c.store.PutClaim(boundTo(claim, bound))
	})
}

// writeVolume locks a volume and calls write. If the volume's record has changed since the pass read
// it, write is not called, and the next pass decides again.
func (c *Controller) writeVolume(v *volume, write func() error) error {
	c.records.LockKey(v.Name)
	defer func() { _ = c.records.UnlockKey(v.Name) }()
	if record, err := c.store.Volume(v.Name); err != nil || record != v.record {
		return err
	}
	return write()
}

// writeBoth is like writeVolume, but also does not call write if the claim's record has changed.
func (c *Controller) writeBoth(key types.NamespacedName, record *corev1.PersistentVolumeClaim, v *volume, write func() error) error {
	return c.writeVolume(v, func() error {
		if claim, err := c.store.Claim(key); err != nil || claim != record {
			return err
		}
		return write()
	})
}

// putVolume writes a new record of v. If a manifest declares the volume, the record gets the annotation
// fromManifest.
func (c *Controller) putVolume(v *volume, record *corev1.PersistentVolume) error {
	if v.manifest {
		metav1.SetMetaDataAnnotation(&record.ObjectMeta, fromManifest, "true")
	}
	return c.store.PutVolume(record)
}

func refTo(claim *corev1.PersistentVolumeClaim) *corev1.ObjectReference {
	return &corev1.ObjectReference{
		APIVersion: "v1", Kind: "PersistentVolumeClaim",
		Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID,
	}
}

// boundTo returns the record of a claim that is bound to v.
func boundTo(claim *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) *corev1.PersistentVolumeClaim {
	bound := claim.DeepCopy()
	bound.Spec.VolumeName = v.Name
	bound.Status = corev1.PersistentVolumeClaimStatus{
		Phase: corev1.ClaimBound, AccessModes: v.Spec.AccessModes,
		Capacity: corev1.ResourceList{corev1.ResourceStorage: capacity(v)},
	}
	return bound
}

// syncBound checks the binding of a bound claim, and expands its volume.
func (p *pass) syncBound(claim, record *corev1.PersistentVolumeClaim) outcome {
	v, err := p.volumeOf(record)
	if err != nil {
		return blocked("%v", err)
	}
	if v == nil {
		return lost(record, nil, "its volume %s does not exist any more: delete the claim and create it again", record.Spec.VolumeName)
	}
	ref := v.Spec.ClaimRef
	switch {
	case v.lost && p.objects.Complete:
		return lost(record, v, "its volume %s is in no manifest any more: add its manifest again", v.Name)
	case ref == nil, ref.UID == "" && refKey(ref) == keyOf(claim): // the volume's record was removed by hand
		return p.bind(record, v)
	case ref.UID != claim.UID:
		return lost(record, v, "its volume %s belongs to claim %s (UID %q): delete one of the claims", v.Name, refKey(ref), ref.UID)
	case v.Annotations[reclaim] != "": // the release of the claim was interrupted
		return p.release(record, v)
	case v.Status.Phase != corev1.VolumeBound:
		return p.bind(record, v)
	}
	return p.syncSize(claim, record, v)
}

// volumeOf returns the volume that a recorded claim names; nil if the volume does not exist.
func (p *pass) volumeOf(record *corev1.PersistentVolumeClaim) (*volume, error) {
	if v := p.volumes[record.Spec.VolumeName]; v != nil {
		return v, v.unreadable
	}
	_, err := p.c.store.Volume(record.Spec.VolumeName)
	return nil, err
}

// lost is the outcome of a claim that has lost its volume. The volume stays mounted in pods. v is nil if
// the volume does not exist.
func lost(record *corev1.PersistentVolumeClaim, v *volume, format string, args ...any) outcome {
	o := blocked(format, args...)
	o.claim, o.phase = record, string(corev1.ClaimLost)
	if v != nil {
		o.volume = v.PersistentVolume
	}
	return o
}

// immutableChange returns a message if an immutable field of a bound claim was changed; otherwise "".
func immutableChange(claim, record *corev1.PersistentVolumeClaim) string {
	name, class := claim.Spec.VolumeName, claim.Spec.StorageClassName
	var field string
	switch {
	case name != "" && name != record.Spec.VolumeName:
		field = "volumeName"
	case class != nil && *class != className(record):
		field = "storageClassName"
	case modeOf(claim.Spec.VolumeMode) != modeOf(record.Spec.VolumeMode):
		field = "volumeMode"
	case !equality.Semantic.DeepEqual(claim.Spec.AccessModes, record.Spec.AccessModes):
		field = "accessModes"
	default:
		return ""
	}
	return fmt.Sprintf("spec.%s was changed after the claim was bound, which has no effect: change it back, or create a new claim", field)
}
