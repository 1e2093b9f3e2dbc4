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

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// want gives a claim of the manifests its volume. A claim whose manifest was gone and is
// back with the same UID is the same claim, as far as its volume has not begun to be
// deleted or scrubbed: it is bound to it again.
func (p *pass) want(claim *corev1.PersistentVolumeClaim) outcome {
	record, err := p.recordOf(claim)
	switch {
	case p.releasing[keyOf(claim)]:
		return waits("waits for the earlier claim of this name to go")
	case err != nil:
		return stuck("%v", err)
	case record == nil:
		return p.unbound(claim)
	case record.UID != claim.UID && !ofPod(record) && !ofPod(claim):
		return stuck("metadata.uid was %s and is %s, which would be another claim with another volume: set it back, or remove the claim first, and its volume with it", record.UID, claim.UID)
	case record.UID != claim.UID:
		before := p.unwant(record)
		return waits("waits for the earlier claim of this name, of UID %s, to go: %s", record.UID, before.message)
	case record.Spec.VolumeName == "":
		return p.provisioning(record, request(claim))
	}
	return p.bound(claim, record)
}

// ofPod tells whether a claim is of a generic ephemeral volume: it goes with its pod, and
// another of that name has another.
func ofPod(claim *corev1.PersistentVolumeClaim) bool {
	owner := metav1.GetControllerOf(claim)
	return owner != nil && owner.Kind == "Pod"
}

func (p *pass) recordOf(claim *corev1.PersistentVolumeClaim) (*corev1.PersistentVolumeClaim, error) {
	if record := p.records[keyOf(claim)]; record != nil {
		return record, nil
	}
	_, err := p.c.store.Claim(keyOf(claim))
	return nil, err
}

// unbound finds a claim's volume as Kubernetes does: one that is the claim's already, the
// one that it names, one that names it, the smallest that fits, a new one.
func (p *pass) unbound(claim *corev1.PersistentVolumeClaim) outcome {
	claim = claim.DeepCopy()
	if claim.Spec.StorageClassName == nil {
		claim.Spec.StorageClassName = &p.defaultClass
	}
	switch v := p.before(claim); {
	case v != nil && v.record != nil:
		return p.bind(claim, v)
	case v != nil:
		return p.prebind(claim, v)
	}
	if claim.Spec.VolumeName != "" {
		return p.named(claim)
	}
	if v := p.prebound[keyOf(claim)]; v != nil {
		return p.prebind(claim, v)
	}
	if p.waitsForPod(claim) {
		return waits("waits for the first pod that uses it: StorageClass %s binds volumes then (volumeBindingMode)", className(claim))
	}
	if v := p.fitting(claim); v != nil {
		return p.bind(claim, v)
	}
	return p.provision(claim, nil)
}

// before is a volume that was being bound to the claim when the manager was killed, or one
// that was its volume before its manifest was gone, if it still fits.
func (p *pass) before(claim *corev1.PersistentVolumeClaim) *volume {
	for _, v := range p.claimed[claim.UID] {
		if v.Status.Phase == corev1.VolumeBound && (!v.lost || !p.objects.Complete) {
			return v
		}
	}
	if claim.Spec.VolumeName != "" {
		return nil
	}
	for _, v := range p.claimed[claim.UID] {
		if unfit(claim, v.PersistentVolume) == "" && !v.lost {
			return v
		}
	}
	return nil
}

// prebind binds a claim to a volume whose manifest says so.
func (p *pass) prebind(claim *corev1.PersistentVolumeClaim, v *volume) outcome {
	if reason := cmp.Or(unsuited(claim, v.PersistentVolume), p.elsewhere(v)); reason != "" {
		return stuck("volume %s names it in spec.claimRef, and does not fit: %s: change one of them", v.Name, reason)
	}
	return p.bind(claim, v)
}

func (p *pass) named(claim *corev1.PersistentVolumeClaim) outcome {
	v := p.volumes[claim.Spec.VolumeName]
	if v == nil || v.lost {
		return stuck("spec.volumeName %q: no such volume: add its manifest", claim.Spec.VolumeName)
	}
	ref := v.Spec.ClaimRef
	switch {
	case v.unreadable != nil:
		return stuck("%v", v.unreadable)
	case v.taken != "":
		return stuck("spec.volumeName %q: it is being bound to claim %s: name another", v.Name, v.taken)
	case v.Annotations[reclaim] != "":
		return stuck("spec.volumeName %q: its data is being deleted: name another", v.Name)
	case ref != nil && (refKey(ref) != keyOf(claim) || ref.UID != "" && ref.UID != claim.UID):
		return stuck("spec.volumeName %q: it is claim %s's (UID %q): name another", v.Name, refKey(ref), ref.UID)
	}
	if reason := cmp.Or(unfit(claim, v.PersistentVolume), p.elsewhere(v)); reason != "" {
		return stuck("spec.volumeName %q: it does not fit: %s", v.Name, reason)
	}
	return p.bind(claim, v)
}

func (p *pass) waitsForPod(claim *corev1.PersistentVolumeClaim) bool {
	class := p.objects.Classes[className(claim)]
	_, used := p.users[keyOf(claim)]
	return !used && class != nil && class.VolumeBindingMode != nil &&
		*class.VolumeBindingMode == storagev1.VolumeBindingWaitForFirstConsumer
}

func (p *pass) fitting(claim *corev1.PersistentVolumeClaim) *volume {
	for _, v := range p.free[className(claim)] {
		if unfit(claim, v.PersistentVolume) == "" && p.elsewhere(v) == "" {
			return v
		}
	}
	return nil
}

// nothingFits tells of some volumes why they do not.
func (p *pass) nothingFits(claim *corev1.PersistentVolumeClaim) string {
	const shown = 3
	free := p.free[className(claim)]
	if len(free) == 0 {
		return fmt.Sprintf("no volume of class %q is free", className(claim))
	}
	var reasons []string
	for _, v := range free[:min(shown, len(free))] {
		reasons = append(reasons, v.Name+": "+cmp.Or(unfit(claim, v.PersistentVolume), p.elsewhere(v)))
	}
	if len(free) > shown {
		reasons = append(reasons, fmt.Sprintf("and %d more", len(free)-shown))
	}
	return "no volume fits: " + strings.Join(reasons, "; ")
}

// unfit is why a claim does not get a volume that it has not named, or "".
func unfit(claim *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) string {
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
	return unsuited(claim, v)
}

// unsuited is why a volume cannot be the claim's at all, or "".
func unsuited(claim *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) string {
	for _, asked := range claim.Spec.AccessModes {
		if !slices.Contains(v.Spec.AccessModes, asked) {
			return fmt.Sprintf("its accessModes %v have no %s", v.Spec.AccessModes, asked)
		}
	}
	if has, asked := modeOf(v.Spec.VolumeMode), modeOf(claim.Spec.VolumeMode); has != asked {
		return fmt.Sprintf("its volumeMode %s is not %s", has, asked)
	}
	has, asked := capacity(v), request(claim)
	if has.Cmp(asked) < 0 {
		return fmt.Sprintf("its capacity %s is less than %s", has.String(), asked.String())
	}
	return ""
}

// elsewhere is why a volume is not for this machine, or "". Of one that was a claim's here
// it is not asked: drivers may not have told yet where they are.
func (p *pass) elsewhere(v *volume) string {
	if err := plugins.CheckAffinity(v.PersistentVolume, p.node); err != nil {
		return err.Error()
	}
	return ""
}

func modeOf(mode *corev1.PersistentVolumeMode) corev1.PersistentVolumeMode {
	if mode == nil {
		return corev1.PersistentVolumeFilesystem
	}
	return *mode
}

func className(claim *corev1.PersistentVolumeClaim) string {
	if claim.Spec.StorageClassName == nil {
		return ""
	}
	return *claim.Spec.StorageClassName
}

// bind starts to bind a claim to a volume, which no other claim gets from then on.
func (p *pass) bind(claim *corev1.PersistentVolumeClaim, v *volume) outcome {
	class := v.Spec.StorageClassName
	p.free[class] = slices.DeleteFunc(p.free[class], func(o *volume) bool { return o == v })
	key := keyOf(claim)
	v.taken = key.String()
	record := p.records[key]
	err := p.run(claimObject(key), "volume_bind", p.pluginName(v), func(context.Context) error {
		return p.c.bind(claim, record, v)
	})
	if err != nil {
		return stuck("binding it to volume %s: %v", v.Name, err)
	}
	return waits("is being bound to volume %s", v.Name)
}

// bind writes both directions, the volume's first: of what is written by half the volume
// is the claim's, and no other's. What is no more as it was when it was decided on is
// left to the next pass.
func (c *Controller) bind(claim, record *corev1.PersistentVolumeClaim, v *volume) error {
	defer c.records.lock(v.Name)()
	if same, err := c.unchanged(keyOf(claim), record, v); err != nil || !same {
		return err
	}
	bound := v.DeepCopy()
	bound.Spec.ClaimRef = refTo(claim)
	bound.Status = corev1.PersistentVolumeStatus{Phase: corev1.VolumeBound}
	if err := c.store.PutVolume(v.marked(bound)); err != nil {
		return err
	}
	return c.store.PutClaim(boundTo(claim, bound))
}

// unchanged tells whether records are still what a pass saw.
func (c *Controller) unchanged(key types.NamespacedName, record *corev1.PersistentVolumeClaim, v *volume) (bool, error) {
	claim, err := c.store.Claim(key)
	if err != nil {
		return false, err
	}
	volume, err := c.store.Volume(v.Name)
	return claim == record && volume == v.record, err
}

// marked makes a record say whether its volume is a manifest's.
func (v *volume) marked(record *corev1.PersistentVolume) *corev1.PersistentVolume {
	if v.manifest {
		metav1.SetMetaDataAnnotation(&record.ObjectMeta, fromManifest, "true")
	}
	return record
}

func refTo(claim *corev1.PersistentVolumeClaim) *corev1.ObjectReference {
	return &corev1.ObjectReference{
		APIVersion: "v1", Kind: "PersistentVolumeClaim",
		Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID,
	}
}

// boundTo is a claim as it is recorded when it has a volume.
func boundTo(claim *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) *corev1.PersistentVolumeClaim {
	bound := claim.DeepCopy()
	bound.Spec.VolumeName = v.Name
	bound.Status = corev1.PersistentVolumeClaimStatus{
		Phase: corev1.ClaimBound, AccessModes: v.Spec.AccessModes,
		Capacity: corev1.ResourceList{corev1.ResourceStorage: capacity(v)},
	}
	return bound
}

// bound looks after a claim that has its volume.
func (p *pass) bound(claim, record *corev1.PersistentVolumeClaim) outcome {
	v, err := p.volumeOf(record)
	if err != nil {
		return stuck("%v", err)
	}
	if v == nil {
		return lost(record, nil, "its volume %s is gone: delete the claim, and make it anew", record.Spec.VolumeName)
	}
	ref := v.Spec.ClaimRef
	switch {
	case v.lost && p.objects.Complete:
		return lost(record, v, "its volume %s is in no manifest any more: add it again", v.Name)
	case ref == nil, ref.UID == "" && refKey(ref) == keyOf(claim): // its record was removed by hand
		return p.bind(record, v)
	case ref.UID != claim.UID:
		return lost(record, v, "its volume %s is claim %s's (UID %q): delete one of the claims", v.Name, refKey(ref), ref.UID)
	case v.Annotations[reclaim] != "": // and the claim was to be forgotten
		return p.release(record, v)
	case v.Status.Phase != corev1.VolumeBound:
		return p.bind(record, v)
	}
	return p.syncSize(claim, record, v)
}

func (p *pass) volumeOf(record *corev1.PersistentVolumeClaim) (*volume, error) {
	if v := p.volumes[record.Spec.VolumeName]; v != nil {
		return v, v.unreadable
	}
	_, err := p.c.store.Volume(record.Spec.VolumeName)
	return nil, err
}

// lost is the outcome of a claim whose volume is not what it was. Pods that have it keep
// it.
func lost(record *corev1.PersistentVolumeClaim, v *volume, format string, args ...any) outcome {
	o := stuck(format, args...)
	o.claim, o.phase = record, string(corev1.ClaimLost)
	if v != nil {
		o.volume = v.PersistentVolume
	}
	return o
}

// changed is what of a claim was changed since it was bound, in vain, or "".
func changed(claim, record *corev1.PersistentVolumeClaim) string {
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
	return fmt.Sprintf("spec.%s was changed since it was bound, and does not count: change it back, or make a new claim", field)
}
