package move

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/cluster/status"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/volume"
)

const (
	// maxRounds limits the copies that are created while the pods run.
	maxRounds = 5
	// shortRound is the time of a copy after which the next one would not be much shorter.
	shortRound = 5 * time.Second
	// progressInterval is the time between two messages about the progress of a transfer.
	progressInterval = 10 * time.Second
)

// selectedNode is the annotation of a claim with the node on which the provisioner creates its volume. The scheduler sets it for
// the first pod of the claim.
const selectedNode = "volume.kubernetes.io/selected-node"

// errUsed is returned if a pod may use the volume while the last copy is created.
var errUsed = errors.New("a pod uses the volume")

// precopy creates copies while the pods run, so that the last one, for which the pods are stopped, is short.
func (m *Mover) precopy(ctx context.Context) error {
	for {
		begin := time.Now()
		if err := m.copyVolume(ctx, func() error { return nil }); err != nil {
			return err
		}
		crashpoint.Here(crashpoint.MoveCopied)
		if err := m.removeCopies(ctx, m.state.Round-1); err != nil {
			return err
		}
		running, err := m.scheduled(ctx)
		if err != nil {
			return err
		}
		if !running || time.Since(begin) < shortRound || m.state.Round >= maxRounds {
			return m.enter(ctx, stopping)
		}
		if err := m.save(ctx, func(s *state) { s.Round++ }, nil); err != nil {
			return err
		}
	}
}

// catchUp creates the last copy. If a pod uses the volume meanwhile, the copy may lack what the pod has written, so that the
// pods are stopped again.
func (m *Mover) catchUp(ctx context.Context) error {
	err := m.copyVolume(ctx, func() error { return m.checkUnused(ctx) })
	if errors.Is(err, errUsed) {
		m.Progress("A pod has used the volume since it was stopped. It is stopped again.")
		return m.copyAgain(ctx)
	}
	if err != nil {
		return err
	}
	crashpoint.Here(crashpoint.MoveCaughtUp)
	m.times.copied = time.Now()
	copied, err := m.api.Claim(ctx, m.Namespace, m.copyName(m.state.Round))
	if err != nil {
		return err
	}
	object, err := m.api.PersistentVolume(ctx, copied.Spec.VolumeName)
	if err != nil {
		return err
	}
	return m.save(ctx, func(s *state) {
		s.Step, s.Copy, s.New = swapping, copied.Spec.VolumeName, newVolumeManifest(s.Old, object)
	}, nil)
}

// copyAgain enters the step in which the last copy is completed, although it may lack what pods have written. What has been
// received of it is then not sent again. If only one copy fits, it is deleted instead.
func (m *Mover) copyAgain(ctx context.Context) error {
	if m.state.Single {
		return m.enter(ctx, stopping)
	}
	return m.enter(ctx, copying)
}

// checkUnused returns errUsed if a pod may use the volume.
func (m *Mover) checkUnused(ctx context.Context) error {
	scheduled, err := m.scheduled(ctx)
	if scheduled {
		return errUsed
	}
	return err
}

// copyName returns the name of a copy: of its snapshot and of its claim.
func (m *Mover) copyName(round int) string {
	return fmt.Sprintf("trivet-move-%s-%d", m.state.ID, round)
}

// copyVolume creates the newest copy on the node To, and waits until it is complete. It calls check again and again, and ends
// with its error.
func (m *Mover) copyVolume(ctx context.Context, check func() error) error {
	name, begin := m.copyName(m.state.Round), time.Now()
	if err := m.takeSnapshot(ctx, name, check); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.MoveSnapshot)
	m.times.snapshot = time.Now()
	err := m.api.CreateClaim(ctx, m.Namespace, m.copyClaim(name))
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("creating claim %s: %w", name, err)
	}
	if err := m.waitCopied(ctx, name, check); err != nil {
		return err
	}
	m.Progress("Copy %d is complete after %.1f s.", m.state.Round, time.Since(begin).Seconds())
	return nil
}

// takeSnapshot takes a snapshot of the claim, and waits until it can be used.
func (m *Mover) takeSnapshot(ctx context.Context, name string, check func() error) error {
	err := m.api.CreateSnapshot(ctx, m.Namespace, kube.Object{
		"metadata": map[string]any{"name": name, "labels": m.labels()},
		"spec": map[string]any{
			"volumeSnapshotClassName": m.state.SnapshotClass,
			"source":                  map[string]any{"persistentVolumeClaimName": m.ClaimName},
		},
	})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("creating snapshot %s: %w", name, err)
	}
	shown := ""
	return m.until(ctx, 0, "", func() (bool, error) {
		s, err := m.api.Snapshot(ctx, m.Namespace, name)
		if err != nil || s.Status.ReadyToUse {
			return s.Status.ReadyToUse, err
		}
		message := s.Status.Error.Message
		if m.state.Step == copying && strings.Contains(message, "FailedPrecondition") {
			return false, fmt.Errorf("snapshot %s: %s: stop the pods, for example scale their controller to 0, and run this command again", name, message)
		}
		m.show(&shown, message)
		return false, check()
	})
}

// show prints a message unless it is empty or the one that was shown last.
func (m *Mover) show(shown *string, message string) {
	if message != "" && message != *shown {
		*shown = message
		m.Progress("Copy %d: %s", m.state.Round, message)
	}
}

// labels are the labels of the objects that exist only during the move.
func (m *Mover) labels() map[string]any { return map[string]any{stateAnnotation: m.state.ID} }

// copyClaim returns the claim of a copy. Its volume is created from the snapshot of the same name, on the node To.
func (m *Mover) copyClaim(name string) kube.Object {
	spec := map[string]any{
		"storageClassName": m.claim.Spec.StorageClassName,
		"volumeMode":       cmp.Or(m.claim.Spec.VolumeMode, "Filesystem"),
		"accessModes":      toAny(m.claim.Spec.AccessModes),
		"resources":        map[string]any{"requests": map[string]any{"storage": m.size()}},
		"dataSource":       map[string]any{"apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": name},
	}
	if class := m.claim.Spec.VolumeAttributesClassName; class != "" {
		spec["volumeAttributesClassName"] = class
	}
	return kube.Object{
		"metadata": map[string]any{"name": name, "labels": m.labels(), "annotations": map[string]any{selectedNode: m.state.To}},
		"spec":     spec,
	}
}

func toAny(texts []string) (all []any) {
	for _, t := range texts {
		all = append(all, t)
	}
	return all
}

// size returns the size of the copy: what the claim requests, or the size of the volume if that is larger.
func (m *Mover) size() string {
	requested := m.claim.Spec.Resources.Requests.Storage
	old, err := kube.AsPersistentVolume(m.state.Old)
	if err != nil {
		return requested
	}
	want, err1 := resource.ParseQuantity(requested)
	have, err2 := resource.ParseQuantity(old.Spec.Capacity.Storage)
	if err := errors.Join(err1, err2); err == nil && have.Cmp(want) > 0 {
		return old.Spec.Capacity.Storage
	}
	return requested
}

// waitCopied waits until the claim of a copy is bound to a volume on the node To.
func (m *Mover) waitCopied(ctx context.Context, name string, check func() error) error {
	shown, next := "", time.Now().Add(progressInterval)
	var claim kube.Claim
	err := m.until(ctx, 0, "", func() (_ bool, err error) {
		if claim, err = m.api.Claim(ctx, m.Namespace, name); err != nil || claim.Status.Phase == "Bound" {
			return err == nil, errors.Join(err, check())
		}
		if time.Now().After(next) {
			next = time.Now().Add(progressInterval)
			message, err := m.progress(ctx, claim.Metadata)
			if err != nil {
				return false, err
			}
			m.show(&shown, message)
		}
		return false, check()
	})
	if err != nil {
		return err
	}
	v, err := m.view(ctx, claim.Spec.VolumeName)
	if err == nil && v.OnlyNode(translate.TopologyKey) != m.state.To {
		err = fmt.Errorf("claim %s: volume %s was created on node %q, not on node %s: undo the move with --abort, and check the StorageClass", name, v.Spec.CSI.VolumeHandle, v.OnlyNode(translate.TopologyKey), m.state.To)
	}
	return err
}

// progress returns what the drivers have received of a copy, or the last error of the provisioner if they report no transfer.
func (m *Mover) progress(ctx context.Context, claim kube.Meta) (string, error) {
	if report, err := m.api.Report(ctx); err == nil { // otherwise the events suffice
		for _, v := range report.Volumes {
			if v.Name == "pvc-"+claim.UID && v.State == status.StateReceiving {
				return volume.FormatSize(v.UsedBytes) + " received", nil
			}
		}
	}
	return m.api.LastWarning(ctx, claim)
}

// view reads the fields in use of a PersistentVolume.
func (m *Mover) view(ctx context.Context, name string) (kube.PersistentVolume, error) {
	object, err := m.api.PersistentVolume(ctx, name)
	if err != nil {
		return kube.PersistentVolume{}, err
	}
	return kube.AsPersistentVolume(object)
}

// removeCopies removes the copies up to a number, and their snapshots.
func (m *Mover) removeCopies(ctx context.Context, last int) error {
	for round := 1; round <= last; round++ {
		name := m.copyName(round)
		if err := m.removeCopy(ctx, name); err != nil {
			return err
		}
		crashpoint.Here(crashpoint.MoveCopyGone)
		if err := m.api.DeleteSnapshot(ctx, m.Namespace, name); err != nil {
			return fmt.Errorf("deleting snapshot %s: %w", name, err)
		}
	}
	return nil
}

// removeCopy deletes a copy and its claim. If the claim that is moved has the copy's volume, only objects are removed.
func (m *Mover) removeCopy(ctx context.Context, name string) error {
	claim, err := m.api.Claim(ctx, m.Namespace, name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err == nil && claim.Spec.VolumeName == "" {
		claim, err = m.waitProvisioned(ctx, claim)
	}
	if err == nil && claim.Spec.VolumeName != "" {
		err = m.releaseCopy(ctx, claim.Spec.VolumeName)
	}
	if err != nil {
		return err
	}
	crashpoint.Here(crashpoint.MoveReleased)
	if err := m.api.DeleteClaim(ctx, m.Namespace, name); err != nil {
		return fmt.Errorf("deleting claim %s: %w", name, err)
	}
	return m.until(ctx, m.Timeout, "claim "+name+" is deleted", func() (bool, error) {
		_, err := m.api.Claim(ctx, m.Namespace, name)
		return apierrors.IsNotFound(err), absent(err)
	})
}

// waitProvisioned waits until a claim has a volume, if the reclaim policy of its class is not Delete. The provisioner completes
// a transfer that has begun also if the claim is deleted, and the volume would then be kept.
func (m *Mover) waitProvisioned(ctx context.Context, claim kube.Claim) (kube.Claim, error) {
	class, err := m.api.StorageClass(ctx, claim.Spec.StorageClassName)
	if err != nil || class.ReclaimPolicy != "Retain" {
		return claim, absent(err)
	}
	m.Progress("Waiting until copy %s is complete, because StorageClass %s has the reclaim policy Retain.", claim.Metadata.Name, class.Metadata.Name)
	err = m.until(ctx, 0, "", func() (_ bool, err error) {
		claim, err = m.api.Claim(ctx, m.Namespace, claim.Metadata.Name)
		return claim.Spec.VolumeName != "", err
	})
	return claim, err
}

// releaseCopy makes sure that the volume of a copy is deleted together with its claim. It removes only the object if the claim
// that is moved has the volume.
func (m *Mover) releaseCopy(ctx context.Context, name string) error {
	v, err := m.view(ctx, name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	own, err := m.view(ctx, m.claim.Spec.VolumeName)
	switch {
	case err != nil:
		return err
	case own.Spec.CSI.VolumeHandle == v.Spec.CSI.VolumeHandle:
		return m.removeObject(ctx, v)
	}
	_, err = m.api.SetReclaimPolicy(ctx, v, "Delete")
	return err
}

// absent returns nil for the error that an object does not exist.
func absent(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}
