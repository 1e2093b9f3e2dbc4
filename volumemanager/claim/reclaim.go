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

// syncRemovedClaim removes the record of a claim that was removed from the manifests. The claim stays,
// and pods may use its volume, while a pod of the manifests uses the claim, while the volume is being
// copied for another claim, while the volume is in use on the machine, and while the manifests are
// incomplete. If it is unknown whether the volume exists, the volume is provisioned first, so that it
// can be reclaimed.
func (p *pass) syncRemovedClaim(record *corev1.PersistentVolumeClaim) outcome {
	key := keyOf(record)
	v, err := p.volumeOf(record)
	o := outcome{condition: condition{phase: terminating}, claim: record, usable: v != nil && v.Annotations[reclaim] == "" && err == nil}
	if v != nil {
		o.volume = v.PersistentVolume
	}
	user, copying := p.users[key], p.copies[key]
	switch {
	case p.releasing[key]:
		return deleting("is being deleted")
	case err != nil:
		return blocked("%v", err)
	case !p.objects.Complete:
		o.message = "its manifest is missing; nothing is deleted until every manifest was read"
	case user != "" && p.desired[key] == nil:
		o.message = fmt.Sprintf("its manifest was removed, but pod %s still uses it: remove the pod, or add the claim again", user)
	case copying != "":
		o.message = "its volume is being copied for " + copying
	case record.Spec.VolumeName == "":
		o = p.continueProvisioning(record, request(record))
		o.phase, o.message = terminating, "its volume may have been created, so the creation is repeated before the deletion: "+o.message
	case p.c.machine.InUse(record.Spec.VolumeName):
		o.message = "its volume is still in use on this machine"
	default:
		o = p.release(record, v)
	}
	return o
}

// release starts the operation that releases a claim's volume and removes the claim.
func (p *pass) release(record *corev1.PersistentVolumeClaim, v *volume) outcome {
	if v == nil { // the volume does not exist any more
		v = &volume{PersistentVolume: &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: record.Spec.VolumeName}}}
	}
	key := keyOf(record)
	if p.c.operations.Pending(claimObject(key)) {
		return deleting("waits until another operation of the claim ends")
	}
	p.c.setReleasing(key, true)
	err := p.run(claimObject(key), "volume_release", p.pluginName(v), func(context.Context) error {
		defer p.c.setReleasing(key, false)
		return p.c.release(record, v)
	})
	if err != nil {
		p.c.setReleasing(key, false)
		o := blocked("releasing volume %s: %v", v.Name, err)
		o.phase = terminating
		return o
	}
	return deleting("is being deleted")
}

// deleting is the outcome of a claim that pods cannot use any more.
func deleting(message string) outcome {
	return outcome{condition: condition{phase: terminating, message: message}}
}

func (c *Controller) setReleasing(key types.NamespacedName, releasing bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if releasing {
		c.releasing[key] = true
	} else {
		delete(c.releasing, key)
	}
}

// release records the volume as released before it removes the claim.
func (c *Controller) release(record *corev1.PersistentVolumeClaim, v *volume) error {
	return c.writeBoth(keyOf(record), record, v, func() error {
		if ref := v.Spec.ClaimRef; v.record != nil && ref != nil && ref.UID == record.UID {
			if err := c.putVolume(v, released(v)); err != nil {
				return err
			}
		}
		return c.store.RemoveClaim(keyOf(record))
	})
}

// released returns the record of a released volume. After this record is written, the volume's data
// may be destroyed.
func released(v *volume) *corev1.PersistentVolume {
	r := v.DeepCopy()
	r.Status = corev1.PersistentVolumeStatus{Phase: corev1.VolumeReleased}
	if destroysData(v) && r.Annotations[reclaim] == "" {
		metav1.SetMetaDataAnnotation(&r.ObjectMeta, reclaim, reclaimBegun)
	}
	return r
}

// destroysData reports whether reclaiming a volume deletes or scrubs its data. The data is kept if
// the volume's manifest was removed, as Kubernetes keeps the data of a deleted PersistentVolume.
func destroysData(v *volume) bool {
	policy := v.Spec.PersistentVolumeReclaimPolicy
	return !v.lost && (policy == corev1.PersistentVolumeReclaimDelete || policy == corev1.PersistentVolumeReclaimRecycle)
}

// syncVolume reclaims a volume that has no claim any more.
func (p *pass) syncVolume(v *volume) condition {
	current := condition{phase: string(v.Status.Phase)}
	if v.edited {
		current.message, current.warning = "the source in its manifest was changed, which has no effect while a claim is bound to the volume: change the source back", true
	}
	ref := v.Spec.ClaimRef
	switch {
	case v.unreadable != nil:
		return failed(v.unreadable)
	case v.record == nil && ref != nil && ref.UID != "" && p.records[refKey(ref)] == nil && !p.isDesired(ref):
		current.message = fmt.Sprintf("spec.claimRef.uid %q belongs to no claim: remove the uid, or the claimRef", ref.UID)
		current.warning = true
	case !p.objects.Complete:
	case ref == nil || ref.UID == "":
		if v.lost {
			return p.forget(v)
		}
	case v.record != nil && !p.hasClaim(v):
		return p.reclaim(v)
	}
	return current
}

// hasClaim reports whether a volume is bound to a claim, or may soon be bound to the claim that it
// names.
func (p *pass) hasClaim(v *volume) bool {
	ref := v.Spec.ClaimRef
	if record := p.records[refKey(ref)]; record != nil && record.UID == ref.UID {
		return mayBeBound(record, v)
	}
	return p.isDesired(ref) && v.Annotations[reclaim] == "" && !v.lost
}

// mayBeBound reports whether a recorded claim is bound to a volume, or may soon be bound to it.
func mayBeBound(record *corev1.PersistentVolumeClaim, v *volume) bool {
	name := record.Spec.VolumeName
	return record.UID == v.Spec.ClaimRef.UID && (name == "" || name == v.Name)
}

// isDesired reports whether a claimRef has the name and the UID of a desired claim.
func (p *pass) isDesired(ref *corev1.ObjectReference) bool {
	claim := p.desired[refKey(ref)]
	return claim != nil && claim.UID == ref.UID
}

// reclaim applies the reclaim policy to a volume without a claim.
func (p *pass) reclaim(v *volume) condition {
	current := condition{phase: string(v.Status.Phase)}
	if _, err := p.c.store.Claim(refKey(v.Spec.ClaimRef)); err != nil {
		current.message, current.warning = fmt.Sprintf("the volume is not reclaimed: %v", err), true
		return current
	}
	policy, progress := v.Spec.PersistentVolumeReclaimPolicy, v.Annotations[reclaim]
	switch {
	case p.c.machine.InUse(v.Name):
		current.message = "the volume is still in use on this machine"
	case v.lost && (progress != reclaimBegun || policy == corev1.PersistentVolumeReclaimRetain):
		return p.forget(v)
	case progress == reclaimDone:
		current.message = "its data was deleted, but its manifest still exists: remove its manifest"
	case progress == reclaimBegun:
		return p.destroyData(v)
	case v.Status.Phase == corev1.VolumeBound || destroysData(v):
		return p.runVolume(v, "volume_release", func(context.Context) error { return p.c.releaseWithoutClaim(v) })
	default:
		current.message = "the volume is retained: add its claim again, or add a manifest of the volume whose spec.claimRef names another claim, and name the volume in that claim's spec.volumeName"
	}
	return current
}

// releaseWithoutClaim releases a volume to which no recorded claim is bound. Either the manager was
// killed between the writes of bind, or the volume's policy was changed from Retain after the release.
// If the claim was bound to another volume after that kill, the claim has never used this volume. As in
// Kubernetes, such a volume becomes available again, unless it was provisioned for the claim.
func (c *Controller) releaseWithoutClaim(v *volume) error {
	return c.writeVolume(v, func() error {
		record, err := c.store.Claim(refKey(v.Spec.ClaimRef))
		switch {
		case err != nil || record != nil && mayBeBound(record, v):
			return err
		case record != nil && record.UID == v.Spec.ClaimRef.UID && v.Status.Phase == corev1.VolumeBound && v.Annotations[provisionedBy] == "":
			return c.putVolume(v, available(v))
		}
		return c.putVolume(v, released(v))
	})
}

// available returns the record of a volume that any claim can be bound to.
func available(v *volume) *corev1.PersistentVolume {
	r := v.DeepCopy()
	delete(r.Annotations, reclaim)
	r.Spec.ClaimRef = nil
	r.Status = corev1.PersistentVolumeStatus{Phase: corev1.VolumeAvailable}
	return r
}

// forget removes the record of a volume that has no manifest and no claim.
func (p *pass) forget(v *volume) condition {
	return p.runVolume(v, "volume_release", func(context.Context) error {
		return p.c.writeVolume(v, func() error { return p.c.store.RemoveVolume(v.Name) })
	})
}

// destroyData deletes or scrubs the data of a volume, and then records the deletion or scrubbing.
func (p *pass) destroyData(v *volume) condition {
	plugin, err := p.pluginOf(v)
	if err != nil {
		return failed(err)
	}
	if other := p.duplicate(v); other != nil {
		return failed(fmt.Errorf("PersistentVolume %s has the same source and belongs to claim %s: remove that claim first, or set persistentVolumeReclaimPolicy: Retain in a manifest of this volume", other.Name, refKey(other.Spec.ClaimRef)))
	}
	var operation string
	var destroy func(context.Context, *corev1.PersistentVolume) error
	var recordResult func(*volume) error
	switch v.Spec.PersistentVolumeReclaimPolicy {
	case corev1.PersistentVolumeReclaimDelete:
		deleter, ok := plugin.(plugins.DeletableVolumePlugin)
		if !ok {
			return failed(fmt.Errorf("persistentVolumeReclaimPolicy Delete: %s cannot delete volumes: set Retain", plugin.Name()))
		}
		operation, destroy, recordResult = "volume_delete", deleter.Delete, p.c.recordDeleted
	case corev1.PersistentVolumeReclaimRecycle:
		recycler, ok := plugin.(plugins.RecyclableVolumePlugin)
		if !ok {
			return failed(fmt.Errorf("persistentVolumeReclaimPolicy Recycle: %s cannot scrub volumes: set Retain", plugin.Name()))
		}
		operation, destroy, recordResult = "volume_recycle", recycler.Recycle, p.c.recordScrubbed
	default:
		return p.retainRemainder(v)
	}
	return p.runVolume(v, operation, func(ctx context.Context) error {
		if current, err := p.c.store.Volume(v.Name); err != nil || current != v.record {
			return err
		}
		if err := destroy(ctx, v.PersistentVolume); err != nil {
			return err
		}
		return recordResult(v)
	})
}

// recordDeleted removes a deleted volume from the store. If a manifest still declares the volume, the
// record stays: without it, a claim could be bound to the deleted volume.
func (c *Controller) recordDeleted(v *volume) error {
	if !v.manifest {
		return c.store.RemoveVolume(v.Name)
	}
	deleted := v.DeepCopy()
	metav1.SetMetaDataAnnotation(&deleted.ObjectMeta, reclaim, reclaimDone)
	return c.putVolume(v, deleted)
}

// recordScrubbed makes a scrubbed volume available to the next claim.
func (c *Controller) recordScrubbed(v *volume) error {
	return c.putVolume(v, available(v))
}

// duplicate returns another PersistentVolume that has a claim and the same source, or nil.
func (p *pass) duplicate(v *volume) *volume {
	if p.sources == nil {
		p.sources = map[string][]*volume{}
		for _, name := range slices.Sorted(maps.Keys(p.volumes)) {
			other := p.volumes[name]
			if ref := other.Spec.ClaimRef; ref != nil && ref.UID != "" && p.hasClaim(other) {
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

// sourceOf returns a string that is equal for all PersistentVolumes with the same source. Driver and
// handle identify a CSI volume (csi-spec, Volume.volume_id).
func sourceOf(v *volume) string {
	source := v.Spec.PersistentVolumeSource
	if csi := source.CSI; csi != nil {
		source.CSI = &corev1.CSIPersistentVolumeSource{Driver: csi.Driver, VolumeHandle: csi.VolumeHandle}
	}
	return source.String()
}

// retainRemainder keeps the remaining data of a volume whose policy was changed to Retain after
// deletion had begun. It records the policy, so that the policy still applies after the manifest is
// removed.
func (p *pass) retainRemainder(v *volume) condition {
	policy := v.Spec.PersistentVolumeReclaimPolicy
	if v.record.Spec.PersistentVolumeReclaimPolicy != policy {
		return p.runVolume(v, "volume_release", func(context.Context) error {
			return p.c.writeVolume(v, func() error { return p.c.putVolume(v, v.DeepCopy()) })
		})
	}
	return failed(fmt.Errorf("persistentVolumeReclaimPolicy was changed to %s after deletion of its data had begun: the remaining data is kept; the volume is available to claims after its manifest is removed and added again", policy))
}

// failed is the condition of a volume that cannot be reclaimed or whose record cannot be read.
func failed(err error) condition {
	return condition{phase: string(corev1.VolumeFailed), message: err.Error(), warning: true}
}

// runVolume starts an operation on a volume that has no claim.
func (p *pass) runVolume(v *volume, name string, do func(ctx context.Context) error) condition {
	if err := p.run(volumeObject(v.Name), name, p.pluginName(v), do); err != nil {
		return failed(err)
	}
	return condition{phase: string(corev1.VolumeReleased), message: "is being reclaimed"}
}
