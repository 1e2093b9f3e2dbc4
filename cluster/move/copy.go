package move

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
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
	// shortRound is the time of a copy that is short enough. A shorter one would not make the stop of the pods much shorter.
	shortRound = 5 * time.Second
	// progressInterval is the time between two messages about the progress of a transfer.
	progressInterval = 10 * time.Second
)

// selectedNode is the annotation of a claim with the node on which the provisioner creates its volume. The scheduler sets it for
// the first pod of the claim.
const selectedNode = "volume.kubernetes.io/selected-node"

// errUsed is returned if a pod may have used the volume since the pods were stopped.
var errUsed = errors.New("a pod uses the volume")

// maxUnchecked is the longest time without a check that no pod uses the volume. A pod that starts and ends in a longer time
// would not be noticed.
const maxUnchecked = 5 * time.Second

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
		pods, err := m.users(ctx)
		if err != nil {
			return err
		}
		if !scheduled(pods, nil) || time.Since(begin) < shortRound || m.state.Round >= maxRounds {
			return m.enter(ctx, stopping)
		}
		if err := m.save(ctx, func(s *state) { s.Round++ }); err != nil {
			return err
		}
	}
}

// catchUp creates the last copy. If a pod uses the volume meanwhile, the copy may lack what the pod has written, so that the
// pods are stopped again.
func (m *Mover) catchUp(ctx context.Context) error {
	err := m.copyVolume(ctx, func() error { return m.checkUnused(ctx) })
	if errors.Is(err, errUsed) {
		m.Progress("A pod may have used the volume since the pods were stopped. They are stopped again.")
		return m.copyAgain(ctx)
	}
	if err != nil {
		return err
	}
	crashpoint.Here(crashpoint.MoveCaughtUp)
	m.times.copied = time.Now()
	claim, object, err := m.newestCopy(ctx)
	if err != nil {
		return err
	}
	return m.save(ctx, func(s *state) {
		s.Step, s.Copy, s.New = swapping, claim.Spec.VolumeName, newVolumeManifest(s.Old, object)
	})
}

// newestCopy returns the claim and the PersistentVolume of the newest copy.
func (m *Mover) newestCopy(ctx context.Context) (claim kube.Claim, object kube.Object, err error) {
	if claim, err = m.api.Claim(ctx, m.Namespace, m.copyName(m.state.Round)); err != nil {
		return claim, nil, err
	}
	if object, err = m.api.PersistentVolume(ctx, claim.Spec.VolumeName); err != nil {
		return claim, nil, err
	}
	v, err := kube.AsPersistentVolume(object)
	if err == nil {
		err = m.checkCopy(claim, v)
	}
	return claim, object, err
}

// checkCopy checks that a PersistentVolume belongs to the claim of a copy. Users who can create claims can name any
// PersistentVolume in one.
func (m *Mover) checkCopy(claim kube.Claim, v kube.PersistentVolume) error {
	_, driver := m.oldHandle()
	if ref := v.Spec.ClaimRef; ref.UID != claim.Metadata.UID || v.Spec.CSI.Driver != driver {
		return fmt.Errorf("claim %s/%s of a copy names PersistentVolume %s, which has the driver %q and belongs to claim %s/%s with the UID %q, and not to it: nothing is changed: find out who has created the claim, and delete it", m.Namespace, claim.Metadata.Name, v.Metadata.Name, v.Spec.CSI.Driver, ref.Namespace, ref.Name, ref.UID)
	}
	return nil
}

// copyAgain enters the step in which the last copy is completed, although it may lack what pods have written. What has been
// received of it is then not sent again. If only one copy fits, it is deleted instead.
func (m *Mover) copyAgain(ctx context.Context) error {
	if m.state.Single {
		return m.enter(ctx, stopping)
	}
	return m.enter(ctx, copying)
}

// checkUnused returns errUsed if a pod may have used the volume since the pods were stopped.
func (m *Mover) checkUnused(ctx context.Context) error {
	begin := now()
	pods, err := m.pods(ctx)
	if err != nil {
		return err
	}
	if scheduled(pods, m.state.Ended) || now().Sub(m.unused) > maxUnchecked {
		return errUsed
	}
	m.unused = begin
	return nil
}

// copyName returns the name of a copy: of its snapshot and of its claim.
func (m *Mover) copyName(round int) string {
	return fmt.Sprintf("trivet-move-%s-%d", m.state.ID, round)
}

// copyVolume creates the newest copy on the node To, and waits until it is complete. It calls check again and again, and ends
// with its error.
func (m *Mover) copyVolume(ctx context.Context, check func() error) error {
	name, begin := m.copyName(m.state.Round), time.Now()
	snapshot, err := m.takeSnapshot(ctx, name, check)
	if err != nil {
		return err
	}
	crashpoint.Here(crashpoint.MoveSnapshot)
	m.times.snapshot = time.Now()
	err = m.api.CreateClaim(ctx, m.Namespace, m.copyClaim(name, snapshot.Status.RestoreSize))
	if apierrors.IsAlreadyExists(err) {
		err = m.checkExisting(ctx, name)
	}
	if err != nil {
		return fmt.Errorf("creating claim %s: %w", name, err)
	}
	if err := m.waitCopied(ctx, name, check); err != nil {
		return err
	}
	m.Progress("Copy %d is complete after %.1f s.", m.state.Round, time.Since(begin).Seconds())
	return nil
}

// checkExisting checks that an existing claim was created by this move.
func (m *Mover) checkExisting(ctx context.Context, name string) error {
	claim, err := m.api.Claim(ctx, m.Namespace, name)
	if source := claim.Spec.DataSource; err == nil && (claim.Metadata.Labels[moveLabel] != m.state.ID || source.Kind != "VolumeSnapshot" || source.Name != name) {
		err = fmt.Errorf("it exists with the source %s %q, and was not created by this move: delete it", source.Kind, source.Name)
	}
	return err
}

// takeSnapshot takes a snapshot of the claim, and waits until it can be used.
func (m *Mover) takeSnapshot(ctx context.Context, name string, check func() error) (taken kube.Snapshot, err error) {
	err = m.api.CreateSnapshot(ctx, m.Namespace, kube.Object{
		"metadata": map[string]any{"name": name, "labels": m.labels()},
		"spec": map[string]any{
			"volumeSnapshotClassName": m.state.SnapshotClass,
			"source":                  map[string]any{"persistentVolumeClaimName": m.ClaimName},
		},
	})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return taken, fmt.Errorf("creating snapshot %s: %w", name, err)
	}
	shown := ""
	err = m.until(ctx, 0, "", func() (_ bool, err error) {
		if taken, err = m.api.Snapshot(ctx, m.Namespace, name); err != nil {
			return false, err
		}
		if taken.Status.ReadyToUse {
			err = check()
			return err == nil, err
		}
		message := taken.Status.Error.Message
		if m.state.Step == copying && strings.Contains(message, "FailedPrecondition") {
			return false, fmt.Errorf("snapshot %s: %s: stop the pods, for example scale their controller to 0, and run this command again", name, message)
		}
		m.show(&shown, message)
		return false, check()
	})
	return taken, err
}

// show prints a message unless it is empty or the one that was shown last.
func (m *Mover) show(shown *string, message string) {
	if message != "" && message != *shown {
		*shown = message
		m.Progress("Copy %d: %s", m.state.Round, message)
	}
}

// labels are the labels of the objects that exist only during the move.
func (m *Mover) labels() map[string]any { return map[string]any{moveLabel: m.state.ID} }

// copyClaim returns the claim of a copy. Its volume is created from the snapshot of the same name, on the node To.
func (m *Mover) copyClaim(name, restoreSize string) kube.Object {
	spec := map[string]any{
		"storageClassName": m.claim.Spec.StorageClassName,
		"volumeMode":       cmp.Or(m.claim.Spec.VolumeMode, "Filesystem"),
		"accessModes":      toAny(m.claim.Spec.AccessModes),
		"resources":        map[string]any{"requests": map[string]any{"storage": m.size(restoreSize)}},
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

// size returns the size of the copy: the largest of what the claim requests, the size of the volume and that of the snapshot.
func (m *Mover) size(restoreSize string) string {
	largest := m.claim.Spec.Resources.Requests.Storage
	old, _ := kube.AsPersistentVolume(m.state.Old) // cannot fail: it was read in this form
	for _, size := range []string{old.Spec.Capacity.Storage, restoreSize} {
		known, err1 := resource.ParseQuantity(largest)
		other, err2 := resource.ParseQuantity(size)
		if errors.Join(err1, err2) == nil && other.Cmp(known) > 0 {
			largest = size
		}
	}
	return largest
}

// waitCopied waits until the claim of a copy is bound to a volume on the node To.
func (m *Mover) waitCopied(ctx context.Context, name string, check func() error) error {
	shown, next := "", time.Now().Add(progressInterval)
	var claim kube.Claim
	err := m.until(ctx, 0, "", func() (_ bool, err error) {
		if claim, err = m.api.Claim(ctx, m.Namespace, name); err != nil {
			return false, err
		}
		if claim.Status.Phase == "Bound" {
			err = check()
			return err == nil, err
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

// progress returns what the drivers have received of a copy, or the last error of the provisioner if they report no transfer. A
// report takes seconds if a node does not answer, so that there is none while each check that no pod uses the volume counts.
func (m *Mover) progress(ctx context.Context, claim kube.Meta) (string, error) {
	if m.state.Step == copying {
		if size, receives := m.received(ctx, claim); receives {
			return volume.FormatSize(size) + " received", nil
		}
	}
	return m.api.LastWarning(ctx, claim)
}

// received returns how much of the volume of a claim was received, if the drivers report a transfer.
func (m *Mover) received(ctx context.Context, claim kube.Meta) (size int64, receives bool) {
	report, err := m.api.Report(ctx)
	i := slices.IndexFunc(report.Volumes, func(v status.Volume) bool { return v.Name == "pvc-"+claim.UID && v.State == status.StateReceiving })
	if err != nil || i < 0 {
		return 0, false
	}
	return report.Volumes[i].UsedBytes, true
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
	if err == nil && claim.Spec.VolumeName == "" {
		claim, err = m.waitProvisioned(ctx, claim)
	}
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err == nil && claim.Spec.VolumeName != "" {
		err = m.releaseCopy(ctx, claim)
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
// a transfer that has begun also if the claim is deleted, and the volume would then be kept. If no transfer is reported, it
// waits only for the timeout.
func (m *Mover) waitProvisioned(ctx context.Context, claim kube.Claim) (kube.Claim, error) {
	class, err := m.api.StorageClass(ctx, claim.Spec.StorageClassName)
	if err != nil || class.ReclaimPolicy != "Retain" {
		return claim, absent(err)
	}
	name, end := claim.Metadata.Name, time.Now().Add(m.Timeout)
	m.Progress("Waiting until copy %s is complete, because StorageClass %s has the reclaim policy Retain.", name, class.Metadata.Name)
	err = m.until(ctx, 0, "", func() (bool, error) {
		current, err := m.api.Claim(ctx, m.Namespace, name)
		if err != nil {
			return false, err
		}
		claim = current
		if _, receives := m.received(ctx, claim.Metadata); receives {
			end = time.Now().Add(m.Timeout)
		}
		return claim.Spec.VolumeName != "" || time.Now().After(end), nil
	})
	return claim, err
}

// releaseCopy makes sure that the volume of a copy is deleted together with its claim. It removes only the object if the claim
// that is moved has the volume.
func (m *Mover) releaseCopy(ctx context.Context, claim kube.Claim) error {
	check := func(v kube.PersistentVolume) error { return m.checkCopy(claim, v) }
	v, err := m.view(ctx, claim.Spec.VolumeName)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err == nil {
		err = check(v)
	}
	if err != nil {
		return err
	}
	own, err := m.view(ctx, m.claim.Spec.VolumeName)
	switch {
	case err != nil:
		return err
	case own.Spec.CSI.VolumeHandle == v.Spec.CSI.VolumeHandle:
		return m.removeObject(ctx, v.Metadata.Name, check)
	}
	_, err = m.setPolicy(ctx, v.Metadata.Name, "Delete", check)
	return err
}

// absent returns nil for the error that an object does not exist.
func absent(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}
