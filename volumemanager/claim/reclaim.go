package claim

import (
	"context"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// unwant takes a claim away that is in no manifest any more. It stays, and its volume is
// the pods', while one of the manifests uses it; while a copy is made of it; and, for pods
// that are going, while the machine has its volume. A claim whose volume may have been
// made gets it first, so that it can be reclaimed.
func (p *pass) unwant(record *corev1.PersistentVolumeClaim) outcome {
	key := keyOf(record)
	v, err := p.volumeOf(record)
	o := outcome{claim: record, phase: terminating, serves: v != nil && v.Annotations[reclaim] == "" && err == nil}
	if v != nil {
		o.volume = v.PersistentVolume
	}
	user, used := p.users[key]
	copied, copying := p.copies[key]
	switch {
	case p.releasing[key]:
		return goes("is being deleted")
	case err != nil:
		return stuck("%v", err)
	case !p.objects.Complete:
		o.message = "it is in no manifest that can be read: nothing is deleted until all of them were"
	case used && p.wanted[key] == nil:
		o.message = fmt.Sprintf("its manifest is gone, and pod %s still uses it: remove the pod, or add the claim again", user)
	case copying:
		o.message = copied + " is being made of it"
	case record.Spec.VolumeName == "":
		o = p.provisioning(record, request(record))
		o.phase, o.message = terminating, "its volume may have been made, which is found out before it is deleted: "+o.message
	case p.c.machine.InUse(record.Spec.VolumeName):
		o.message = "its volume is still in use on this machine"
	default:
		o = p.release(record, v)
	}
	return o
}

// release starts to forget a claim.
func (p *pass) release(record *corev1.PersistentVolumeClaim, v *volume) outcome {
	if v == nil {
		v = &volume{PersistentVolume: &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: record.Spec.VolumeName}}}
	}
	key := keyOf(record)
	if p.c.operations.Pending(claimObject(key)) {
		return goes("waits for an operation with its volume to end")
	}
	p.c.setReleasing(key, true)
	err := p.run(claimObject(key), "volume_release", p.pluginName(v), func(context.Context) error {
		defer p.c.setReleasing(key, false)
		return p.c.release(record, v)
	})
	if err != nil {
		p.c.setReleasing(key, false)
		o := stuck("releasing volume %s: %v", v.Name, err)
		o.phase = terminating
		return o
	}
	return goes("is being deleted")
}

// goes is the outcome of a claim that pods get no more.
func goes(message string) outcome { return outcome{phase: terminating, message: message} }

func (c *Controller) setReleasing(key types.NamespacedName, releasing bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if releasing {
		c.releasing[key] = true
	} else {
		delete(c.releasing, key)
	}
}

// release writes that the volume is nobody's before it removes the claim.
func (c *Controller) release(record *corev1.PersistentVolumeClaim, v *volume) error {
	defer c.records.lock(v.Name)()
	if same, err := c.unchanged(keyOf(record), record, v); err != nil || !same {
		return err
	}
	if ref := v.Spec.ClaimRef; v.record != nil && ref != nil && ref.UID == record.UID {
		if err := c.store.PutVolume(released(v)); err != nil {
			return err
		}
	}
	return c.store.RemoveClaim(keyOf(record))
}

// released is a volume that is nobody's. What is to be done to its data has begun then.
func released(v *volume) *corev1.PersistentVolume {
	r := v.DeepCopy()
	r.Status = corev1.PersistentVolumeStatus{Phase: corev1.VolumeReleased}
	if destroys(v) && r.Annotations[reclaim] == "" {
		metav1.SetMetaDataAnnotation(&r.ObjectMeta, reclaim, reclaimBegun)
	}
	return v.marked(r)
}

// destroys tells whether a volume's data goes with its claim. Of one whose manifest went
// first nothing is known any more: it is left alone, as Kubernetes leaves a volume whose
// PersistentVolume was deleted.
func destroys(v *volume) bool {
	policy := v.Spec.PersistentVolumeReclaimPolicy
	return !v.lost && (policy == corev1.PersistentVolumeReclaimDelete || policy == corev1.PersistentVolumeReclaimRecycle)
}

// keep looks after a volume whose claim is gone.
func (p *pass) keep(v *volume) kept {
	k := kept{phase: v.Status.Phase}
	if v.edited {
		k.message, k.warning = "its source was changed in its manifest, and does not count while it is a claim's: change it back", true
	}
	ref := v.Spec.ClaimRef
	switch {
	case v.unreadable != nil:
		return kept{phase: corev1.VolumeFailed, message: v.unreadable.Error(), warning: true}
	case v.record == nil && ref != nil && ref.UID != "" && p.records[refKey(ref)] == nil && p.wantedUID(ref) == nil:
		k.message = fmt.Sprintf("spec.claimRef.uid %q is of no claim: remove the uid, or the claimRef", ref.UID)
		k.warning = true
	case !p.objects.Complete:
	case ref == nil || ref.UID == "":
		if v.lost {
			return p.drop(v)
		}
	case v.record != nil && !p.held(v):
		return p.reclaim(v)
	}
	return k
}

// held tells whether a claim has a volume, or is about to.
func (p *pass) held(v *volume) bool {
	ref := v.Spec.ClaimRef
	if record := p.records[refKey(ref)]; record != nil && record.UID == ref.UID {
		return owns(record, v) || v.Status.Phase == corev1.VolumeBound
	}
	return p.wantedUID(ref) != nil && v.Annotations[reclaim] == "" && !v.lost
}

// owns tells whether a recorded claim has a volume, or may be about to.
func owns(record *corev1.PersistentVolumeClaim, v *volume) bool {
	name := record.Spec.VolumeName
	return record.UID == v.Spec.ClaimRef.UID && (name == "" || name == v.Name)
}

func (p *pass) wantedUID(ref *corev1.ObjectReference) *corev1.PersistentVolumeClaim {
	if claim := p.wanted[refKey(ref)]; claim != nil && claim.UID == ref.UID {
		return claim
	}
	return nil
}

// reclaim does with a volume what its policy says.
func (p *pass) reclaim(v *volume) kept {
	k := kept{phase: v.Status.Phase}
	if _, err := p.c.store.Claim(refKey(v.Spec.ClaimRef)); err != nil {
		k.message, k.warning = fmt.Sprintf("nothing is done with it: %v", err), true
		return k
	}
	if p.c.machine.InUse(v.Name) {
		k.message = "it is still in use on this machine"
		return k
	}
	switch {
	case v.lost && (v.Annotations[reclaim] != reclaimBegun || v.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimRetain):
		return p.drop(v)
	case v.Annotations[reclaim] == reclaimDone:
		k.message = "its data is deleted: remove its manifest"
	case v.Annotations[reclaim] == reclaimBegun:
		return p.destroy(v)
	case v.Status.Phase == corev1.VolumeBound || destroys(v):
		return p.runFor(v, "volume_release", p.pluginName(v), func(context.Context) error { return p.c.orphan(v) })
	default:
		k.message = "it is retained: add its claim again, or a claim with spec.volumeName and a manifest of the volume whose claimRef names that"
	}
	return k
}

// orphan releases a volume whose claim is not recorded: the manager was killed before it
// was, or the volume's policy was changed since.
func (c *Controller) orphan(v *volume) error {
	defer c.records.lock(v.Name)()
	key := refKey(v.Spec.ClaimRef)
	record, err := c.store.Claim(key)
	if err != nil || record != nil && owns(record, v) {
		return err
	}
	if same, err := c.unchanged(key, record, v); err != nil || !same {
		return err
	}
	return c.store.PutVolume(released(v))
}

// drop forgets a volume that was a manifest's and is nobody's.
func (p *pass) drop(v *volume) kept {
	return p.runFor(v, "volume_release", p.pluginName(v), func(context.Context) error {
		defer p.c.records.lock(v.Name)()
		if now, err := p.c.store.Volume(v.Name); err != nil || now != v.record {
			return err
		}
		return p.c.store.RemoveVolume(v.Name)
	})
}

func (p *pass) destroy(v *volume) kept {
	found, err := p.pluginOf(v)
	if err != nil {
		return failed(err)
	}
	if other := p.twin(v); other != nil {
		return failed(fmt.Errorf("PersistentVolume %s is the same volume, and claim %s's: remove that claim first, or set persistentVolumeReclaimPolicy Retain in a manifest of this one", other.Name, refKey(other.Spec.ClaimRef)))
	}
	switch v.Spec.PersistentVolumeReclaimPolicy {
	case corev1.PersistentVolumeReclaimDelete:
		deleter, ok := found.(plugins.DeletableVolumePlugin)
		if !ok {
			return failed(fmt.Errorf("persistentVolumeReclaimPolicy Delete: %s deletes no volumes: set Retain", found.Name()))
		}
		return p.runFor(v, "volume_delete", found.Name(), func(ctx context.Context) error { return p.c.delete(ctx, deleter, v) })
	case corev1.PersistentVolumeReclaimRecycle:
		recycler, ok := found.(plugins.RecyclableVolumePlugin)
		if !ok {
			return failed(fmt.Errorf("persistentVolumeReclaimPolicy Recycle: %s scrubs no volumes: set Retain", found.Name()))
		}
		return p.runFor(v, "volume_recycle", found.Name(), func(ctx context.Context) error { return p.c.recycle(ctx, recycler, v) })
	default:
		return p.spare(v)
	}
}

// twin is another PersistentVolume of the same volume that is a claim's, or nil.
func (p *pass) twin(v *volume) *volume {
	if p.sources == nil {
		p.sources = map[string][]*volume{}
		for _, name := range slices.Sorted(maps.Keys(p.volumes)) {
			other := p.volumes[name]
			if ref := other.Spec.ClaimRef; ref != nil && ref.UID != "" && p.held(other) {
				p.sources[sourceOf(other)] = append(p.sources[sourceOf(other)], other)
			}
		}
	}
	for _, other := range p.sources[sourceOf(v)] {
		if other.Name != v.Name {
			return other
		}
	}
	return nil
}

// sourceOf is the same for all PersistentVolumes of one volume. Driver and handle tell
// volumes of CSI apart (csi-spec, Volume.volume_id).
func sourceOf(v *volume) string {
	source := v.Spec.PersistentVolumeSource
	if of := source.CSI; of != nil {
		source.CSI = &corev1.CSIPersistentVolumeSource{Driver: of.Driver, VolumeHandle: of.VolumeHandle}
	}
	return source.String()
}

// spare leaves what is left of a volume whose manifest says so by now, and writes that
// down: it is to be so when the manifest is gone, too.
func (p *pass) spare(v *volume) kept {
	policy := v.Spec.PersistentVolumeReclaimPolicy
	if v.record.Spec.PersistentVolumeReclaimPolicy != policy {
		return p.runFor(v, "volume_release", p.pluginName(v), func(context.Context) error {
			defer p.c.records.lock(v.Name)()
			if now, err := p.c.store.Volume(v.Name); err != nil || now != v.record {
				return err
			}
			return p.c.store.PutVolume(v.marked(v.DeepCopy()))
		})
	}
	return failed(fmt.Errorf("persistentVolumeReclaimPolicy became %s when its data had begun to be deleted: what is left of it is left; no claim gets it before its manifest is removed and added again", policy))
}

func failed(err error) kept {
	return kept{phase: corev1.VolumeFailed, message: err.Error(), warning: true}
}

// runFor starts an operation with a volume that has no claim.
func (p *pass) runFor(v *volume, name, pluginName string, do func(ctx context.Context) error) kept {
	if err := p.run(volumeObject(v.Name), name, pluginName, do); err != nil {
		return failed(err)
	}
	return kept{phase: corev1.VolumeReleased, message: "is being reclaimed"}
}

// delete forgets a volume once its data is deleted. One that a manifest still has is not
// forgotten: it would be free for a claim.
func (c *Controller) delete(ctx context.Context, deleter plugins.DeletableVolumePlugin, v *volume) error {
	if now, err := c.store.Volume(v.Name); err != nil || now != v.record {
		return err
	}
	if err := deleter.Delete(ctx, v.PersistentVolume); err != nil {
		return err
	}
	if !v.manifest {
		return c.store.RemoveVolume(v.Name)
	}
	done := v.DeepCopy()
	metav1.SetMetaDataAnnotation(&done.ObjectMeta, reclaim, reclaimDone)
	return c.store.PutVolume(v.marked(done))
}

// recycle makes a volume free for the next claim once its data is scrubbed.
func (c *Controller) recycle(ctx context.Context, recycler plugins.RecyclableVolumePlugin, v *volume) error {
	if now, err := c.store.Volume(v.Name); err != nil || now != v.record {
		return err
	}
	if err := recycler.Recycle(ctx, v.PersistentVolume); err != nil {
		return err
	}
	scrubbed := v.DeepCopy()
	delete(scrubbed.Annotations, reclaim)
	scrubbed.Spec.ClaimRef = nil
	scrubbed.Status = corev1.PersistentVolumeStatus{Phase: corev1.VolumeAvailable}
	return c.store.PutVolume(v.marked(scrubbed))
}
