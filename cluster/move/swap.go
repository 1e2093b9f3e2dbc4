package move

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/internal/crashpoint"
)

// manifestOf returns what is necessary to create a PersistentVolume again.
func manifestOf(object kube.Object) kube.Object {
	object = runtime.DeepCopyJSON(object)
	metadata, _ := object["metadata"].(map[string]any)
	spec, _ := object["spec"].(map[string]any)
	if ref, ok := spec["claimRef"].(map[string]any); ok {
		delete(ref, "resourceVersion")
	}
	if annotations, ok := metadata["annotations"].(map[string]any); ok {
		delete(annotations, kube.NodeLostKey) // it is about the old node
	}
	kept := map[string]any{"name": metadata["name"]}
	for _, key := range []string{"labels", "annotations"} {
		if value, ok := metadata[key]; ok {
			kept[key] = value
		}
	}
	return kube.Object{"metadata": kept, "spec": spec}
}

// newVolumeManifest returns the PersistentVolume of the claim after the move: the old one, with the volume of the copy.
func newVolumeManifest(old, copied kube.Object) kube.Object {
	object, from := runtime.DeepCopyJSON(old), runtime.DeepCopyJSON(copied)["spec"].(map[string]any)
	spec := object["spec"].(map[string]any)
	replace(spec, from, "capacity", "nodeAffinity", "volumeAttributesClassName")
	replace(spec["csi"].(map[string]any), from["csi"].(map[string]any), "volumeHandle", "volumeAttributes")
	return object
}

// replace replaces values of a map by those of another map. It removes those that the other one does not have.
func replace(in, from map[string]any, keys ...string) {
	for _, key := range keys {
		delete(in, key)
		if value, ok := from[key]; ok {
			in[key] = value
		}
	}
}

// keptName returns the name of the PersistentVolume that keeps the old volume.
func (m *Mover) keptName() string { return m.claim.Spec.VolumeName + "-moved-" + m.state.ID }

// keptManifest returns the PersistentVolume that keeps the old volume. A claim with its UID has never existed, so that the
// PersistentVolume is released, and no claim can be bound to it.
func (m *Mover) keptManifest() kube.Object {
	object := runtime.DeepCopyJSON(m.state.Old)
	old, _ := kube.AsPersistentVolume(object)
	metadata, spec := object["metadata"].(map[string]any), object["spec"].(map[string]any)
	metadata["name"] = m.keptName()
	labels, annotations := entries(metadata, "labels"), entries(metadata, "annotations")
	labels[movedFromLabel] = labelValue(m.ClaimName)
	annotations["pv.kubernetes.io/provisioned-by"] = old.Spec.CSI.Driver // the provisioner deletes only volumes with it
	spec["persistentVolumeReclaimPolicy"] = "Retain"
	spec["claimRef"] = map[string]any{"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": m.Namespace, "name": "trivet-moved-" + m.state.ID, "uid": uuid.NewString()}
	return object
}

// entries returns a map in a map, which it creates if there is none.
func entries(in map[string]any, key string) map[string]any {
	all, ok := in[key].(map[string]any)
	if !ok {
		all = map[string]any{}
		in[key] = all
	}
	return all
}

// labelValue returns the part of a name that can be the value of a label.
func labelValue(name string) string { return strings.TrimRight(name[:min(len(name), 63)], "-.") }

// The volumes that the claim can have during the swap.
type which int

const (
	noVolume which = iota
	oldVolume
	newVolume
)

// current returns which volume the PersistentVolume of the claim has.
func (m *Mover) current(ctx context.Context) (which, error) {
	v, err := m.view(ctx, m.claim.Spec.VolumeName)
	if apierrors.IsNotFound(err) {
		return noVolume, nil
	}
	if err != nil {
		return noVolume, err
	}
	old, err := kube.AsPersistentVolume(m.state.Old)
	if err == nil && v.Spec.CSI.VolumeHandle == old.Spec.CSI.VolumeHandle {
		return oldVolume, nil
	}
	next, err := kube.AsPersistentVolume(m.state.New)
	if err == nil && v.Spec.CSI.VolumeHandle != next.Spec.CSI.VolumeHandle {
		err = fmt.Errorf("PersistentVolume %s has the volume %s, which is neither the one before nor the one after the move", v.Metadata.Name, v.Spec.CSI.VolumeHandle)
	}
	return newVolume, err
}

// swap replaces the PersistentVolume of the claim. Each volume has an object with the policy Retain at all times.
func (m *Mover) swap(ctx context.Context) error {
	current, err := m.current(ctx)
	if err != nil {
		return err
	}
	if current == oldVolume {
		err = m.detachOld(ctx)
	}
	if err == nil && current != newVolume {
		err = m.attachNew(ctx)
	}
	if errors.Is(err, errUsed) && m.state.Recovery == nil {
		m.Progress("A pod may have used the volume since the pods were stopped. They are stopped again.")
		return m.enter(ctx, stopping)
	}
	if err != nil {
		return err
	}
	if err := m.waitPhase(ctx); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.MoveReplaced)
	if err := m.enter(ctx, starting); err != nil {
		return err
	}
	m.Progress("The claim has the volume on node %s.", m.state.To)
	return nil
}

// detachOld removes the PersistentVolume of the claim when it is not attached. The old volume and the copy are kept by other
// objects.
func (m *Mover) detachOld(ctx context.Context) error {
	err := m.until(ctx, m.Timeout, "no VolumeAttachment names PersistentVolume "+m.claim.Spec.VolumeName, func() (bool, error) {
		attached, err := m.attached(ctx)
		if err == nil {
			err = m.checkUnused(ctx)
		}
		return err == nil && !attached, err
	})
	if err != nil {
		return err
	}
	if m.state.Recovery != nil {
		if err := m.verifyAgain(ctx); err != nil {
			return err
		}
	}
	copied, err := m.keepCopy(ctx)
	if err != nil {
		return err
	}
	err = m.api.CreatePersistentVolume(ctx, m.keptManifest())
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("creating PersistentVolume %s: %w", m.keptName(), err)
	}
	crashpoint.Here(crashpoint.MoveKept)
	if err := m.recordOld(ctx, copied); err != nil {
		return err
	}
	if err := m.checkUnused(ctx); err != nil {
		return err
	}
	err = m.removeObject(ctx, m.claim.Spec.VolumeName, m.checkOld)
	crashpoint.Here(crashpoint.MoveLost)
	return err
}

// keepCopy makes sure that the copy is kept also if its claim is deleted from now on, and returns its PersistentVolume. The claim may
// have been deleted before, with the volume.
func (m *Mover) keepCopy(ctx context.Context) (kube.Object, error) {
	claim, _, err := m.newestCopy(ctx)
	if err != nil {
		return nil, err
	}
	if !m.chosen(claim) {
		return nil, fmt.Errorf("claim %s/%s of the copy has the UID %s and PersistentVolume %s, and had %s and %s: nothing is changed: undo the %s with --abort", m.Namespace, claim.Metadata.Name, claim.Metadata.UID, claim.Spec.VolumeName, m.state.CopyUID, m.state.Copy, m.kind())
	}
	if _, err := m.setPolicy(ctx, m.state.Copy, "Retain", m.checkChosen); err != nil {
		return nil, err
	}
	claim, object, err := m.newestCopy(ctx)
	if err != nil {
		return nil, err
	}
	v, err := kube.AsPersistentVolume(object)
	if err == nil && (!m.chosen(claim) || claim.Metadata.DeletionTimestamp != "" || v.Metadata.DeletionTimestamp != "" || v.Status.Phase != "Bound") {
		err = fmt.Errorf("the copy %s/%s is being deleted, or its PersistentVolume %s is not Bound: nothing is changed: undo the %s with --abort", m.Namespace, claim.Metadata.Name, m.state.Copy, m.kind())
	}
	return object, err
}

// recordOld writes the manifests of the claim's PersistentVolume as it is now, and of the new one. It may have changed since the
// move began.
func (m *Mover) recordOld(ctx context.Context, copied kube.Object) error {
	object, err := m.api.PersistentVolume(ctx, m.claim.Spec.VolumeName)
	if err != nil {
		return err
	}
	v, err := kube.AsPersistentVolume(object)
	if err == nil {
		err = m.checkOld(v)
	}
	if err != nil {
		return err
	}
	old := manifestOf(object)
	return m.save(ctx, func(s *state) { s.Old, s.New, s.Detaching = old, newVolumeManifest(old, copied), true })
}

// checkOld returns errChanged unless a PersistentVolume has the old volume.
func (m *Mover) checkOld(v kube.PersistentVolume) error {
	if handle, _ := m.oldHandle(); v.Spec.CSI.VolumeHandle != handle {
		return errChanged
	}
	return nil
}

// attachNew creates the new PersistentVolume of the claim. If a pod may have used the volume after the last copy, it creates the
// old one again, without which the volume cannot be detached.
func (m *Mover) attachNew(ctx context.Context) error {
	attached, err := m.attached(ctx)
	if err != nil {
		return err
	}
	err = m.checkUnused(ctx)
	if attached && !errors.Is(err, errUsed) {
		err = errUsed
	}
	if errors.Is(err, errUsed) {
		return cmp.Or(m.restore(ctx), err)
	}
	if err != nil {
		return err
	}
	if err := m.createClaimed(ctx, m.state.New); err != nil {
		return err
	}
	if current, err := m.current(ctx); err != nil || current != newVolume {
		return cmp.Or(err, errChanged)
	}
	return nil
}

// createClaimed creates a PersistentVolume of the claim, unless there is one.
func (m *Mover) createClaimed(ctx context.Context, manifest kube.Object) error {
	if err := m.verify(ctx); err != nil {
		return err
	}
	if err := m.api.CreatePersistentVolume(ctx, runtime.DeepCopyJSON(manifest)); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("creating PersistentVolume %s: %w", m.claim.Spec.VolumeName, err)
	}
	return nil
}

// setPolicy sets the reclaim policy of a PersistentVolume that check accepts. If the object changes meanwhile, it is read again.
func (m *Mover) setPolicy(ctx context.Context, name, policy string, check func(kube.PersistentVolume) error) (v kube.PersistentVolume, err error) {
	for {
		v, err = m.view(ctx, name)
		if err == nil {
			err = check(v)
		}
		if err != nil {
			return v, err
		}
		if v, err = m.api.SetReclaimPolicy(ctx, v, policy); !apierrors.IsConflict(err) {
			return v, err
		}
	}
}

// removeObject removes the object of a PersistentVolume that check accepts, but not the volume.
func (m *Mover) removeObject(ctx context.Context, name string, check func(kube.PersistentVolume) error) error {
	if err := m.verify(ctx); err != nil {
		return err
	}
	v, err := m.setPolicy(ctx, name, "Retain", check)
	if err == nil {
		err = m.api.RemovePersistentVolume(ctx, v)
	}
	if err != nil {
		return fmt.Errorf("deleting the object of PersistentVolume %s: %w", name, err)
	}
	return nil
}

// waitPhase waits until the controller of PersistentVolumes has processed the new PersistentVolume of the claim.
func (m *Mover) waitPhase(ctx context.Context) error {
	name := m.claim.Spec.VolumeName
	return m.until(ctx, m.Timeout, "PersistentVolume "+name+" is Bound", func() (bool, error) {
		v, err := m.view(ctx, name)
		return v.Status.Phase == "Bound", err
	})
}

// restore gives the claim its old volume again.
func (m *Mover) restore(ctx context.Context) error {
	current, err := m.current(ctx)
	if err != nil || current == newVolume {
		return err
	}
	if current == oldVolume {
		if !m.state.Detaching {
			return nil
		}
		v, err := m.view(ctx, m.claim.Spec.VolumeName)
		if err != nil {
			return err
		}
		if v.Metadata.DeletionTimestamp == "" {
			return m.restorePolicy(ctx)
		}
		if err := m.removeObject(ctx, v.Metadata.Name, m.checkOld); err != nil {
			return err
		}
	}
	if err := m.createClaimed(ctx, m.state.Old); err != nil {
		return err
	}
	return m.waitPhase(ctx)
}

// restorePolicy sets the reclaim policy of the claim's PersistentVolume to what it was before the move changed it.
func (m *Mover) restorePolicy(ctx context.Context) error {
	old, err := kube.AsPersistentVolume(m.state.Old)
	if err == nil {
		_, err = m.setPolicy(ctx, old.Metadata.Name, old.Spec.ReclaimPolicy, m.checkOld)
	}
	return err
}

// waitBound waits until the claim is bound.
func (m *Mover) waitBound(ctx context.Context) error {
	return m.until(ctx, m.Timeout, "claim "+m.ClaimName+" is Bound", func() (bool, error) {
		c, err := m.api.Claim(ctx, m.Namespace, m.ClaimName)
		return c.Status.Phase == "Bound", err
	})
}

// removeKept removes the PersistentVolume that keeps the old volume, and the old volume too if the claim has the new one.
func (m *Mover) removeKept(ctx context.Context, deletes bool) (err error) {
	if deletes {
		if err := m.verify(ctx); err != nil {
			return err
		}
		_, err = m.setPolicy(ctx, m.keptName(), "Delete", m.checkOld)
	} else {
		err = m.removeObject(ctx, m.keptName(), m.checkOld)
	}
	if err != nil || !deletes {
		return absent(err)
	}
	begin := time.Now()
	err = m.until(ctx, m.Timeout, "the old volume is deleted: see 'kubectl describe persistentvolume "+m.keptName()+"'", func() (bool, error) {
		_, err := m.view(ctx, m.keptName())
		return apierrors.IsNotFound(err), absent(err)
	})
	if err == nil {
		m.Progress("The old volume on node %s is deleted after %.1f s.", m.state.From, time.Since(begin).Seconds())
	}
	return err
}
