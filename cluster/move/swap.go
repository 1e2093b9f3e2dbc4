package move

import (
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
	if errors.Is(err, errUsed) {
		m.Progress("A pod has used the volume since it was stopped. It is stopped again.")
		return m.enter(ctx, stopping)
	}
	if err != nil {
		return err
	}
	if err := m.waitPhase(ctx); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.MoveReplaced)
	// The controller of PersistentVolumes examines a lost claim when the claim changes, otherwise after 15 seconds.
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
		return !attached, errors.Join(err, m.checkUnused(ctx))
	})
	if err != nil {
		return err
	}
	copied, err := m.view(ctx, m.state.Copy)
	if err != nil {
		return err
	}
	if _, err := m.api.SetReclaimPolicy(ctx, copied, "Retain"); err != nil {
		return err
	}
	err = m.api.CreatePersistentVolume(ctx, m.keptManifest())
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("creating PersistentVolume %s: %w", m.keptName(), err)
	}
	crashpoint.Here(crashpoint.MoveKept)
	old, err := m.view(ctx, m.claim.Spec.VolumeName)
	if err != nil {
		return err
	}
	if handle, _ := m.oldHandle(); old.Spec.CSI.VolumeHandle != handle {
		return errChanged
	}
	err = m.removeObject(ctx, old)
	crashpoint.Here(crashpoint.MoveLost)
	return err
}

// attachNew creates the new PersistentVolume of the claim. If a pod has used the volume after the last copy, it creates the old
// one again, without which the volume cannot be detached.
func (m *Mover) attachNew(ctx context.Context) error {
	scheduled, err := m.scheduled(ctx)
	if err != nil {
		return err
	}
	attached, err := m.attached(ctx)
	if err != nil {
		return err
	}
	if scheduled || attached {
		if err := m.restore(ctx); err != nil {
			return err
		}
		return errUsed
	}
	if err := m.api.CreatePersistentVolume(ctx, runtime.DeepCopyJSON(m.state.New)); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("creating PersistentVolume %s: %w", m.claim.Spec.VolumeName, err)
	}
	return nil
}

// removeObject removes the object of a PersistentVolume, but not the volume.
func (m *Mover) removeObject(ctx context.Context, v kube.PersistentVolume) error {
	v, err := m.api.SetReclaimPolicy(ctx, v, "Retain")
	if err == nil {
		err = m.api.RemovePersistentVolume(ctx, v)
	}
	if err != nil {
		return fmt.Errorf("deleting the object of PersistentVolume %s: %w", v.Metadata.Name, err)
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
	old, err := kube.AsPersistentVolume(m.state.Old)
	if err != nil {
		return err
	}
	if current == oldVolume {
		v, err := m.view(ctx, m.claim.Spec.VolumeName)
		if err != nil {
			return err
		}
		if v.Metadata.DeletionTimestamp == "" {
			_, err = m.api.SetReclaimPolicy(ctx, v, old.Spec.ReclaimPolicy)
			return err
		}
		if err := m.removeObject(ctx, v); err != nil {
			return err
		}
	}
	if err := m.api.CreatePersistentVolume(ctx, runtime.DeepCopyJSON(m.state.Old)); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("creating PersistentVolume %s: %w", old.Metadata.Name, err)
	}
	return m.waitPhase(ctx)
}

// waitBound waits until the claim is bound.
func (m *Mover) waitBound(ctx context.Context) error {
	return m.until(ctx, m.Timeout, "claim "+m.ClaimName+" is Bound", func() (bool, error) {
		c, err := m.api.Claim(ctx, m.Namespace, m.ClaimName)
		return c.Status.Phase == "Bound", err
	})
}

// removeKept removes the PersistentVolume that keeps the old volume, and the old volume too if the claim has the new one.
func (m *Mover) removeKept(ctx context.Context, deletes bool) error {
	kept, err := m.view(ctx, m.keptName())
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if !deletes {
		return m.removeObject(ctx, kept)
	}
	if _, err := m.api.SetReclaimPolicy(ctx, kept, "Delete"); err != nil {
		return err
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
