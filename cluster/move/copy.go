package move

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

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
)

// errUsed is returned if a pod may have used the volume since the pods were stopped.
var errUsed = errors.New("a pod may use the volume")

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
		s.CopyUID, s.CopyRound = claim.Metadata.UID, s.Round
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

// checkCopy checks that a PersistentVolume belongs to the claim of a copy.
func (m *Mover) checkCopy(claim kube.Claim, v kube.PersistentVolume) error {
	_, driver := m.oldHandle()
	return checkCopy(driver, claim, v)
}

// checkCopy checks that a PersistentVolume belongs to the claim of a copy. Users who can create claims can name any
// PersistentVolume in one.
func checkCopy(driver string, claim kube.Claim, v kube.PersistentVolume) error {
	if ref := v.Spec.ClaimRef; ref.UID != claim.Metadata.UID || v.Spec.CSI.Driver != driver {
		return fmt.Errorf("claim %s/%s of a copy names PersistentVolume %s, which has the driver %q and belongs to claim %s/%s with the UID %q, and not to it: nothing is changed: find out who has created the claim, and delete it", claim.Metadata.Namespace, claim.Metadata.Name, v.Metadata.Name, v.Spec.CSI.Driver, ref.Namespace, ref.Name, ref.UID)
	}
	return nil
}

// copyAgain enters the step in which the last copy is completed, although it may lack what pods have written. What has been
// received of it is then not sent again. If there is only one copy, it is deleted instead, unless it is still being sent.
func (m *Mover) copyAgain(ctx context.Context) error {
	if m.state.Single {
		return m.enter(ctx, stopping)
	}
	return m.enter(ctx, copying)
}

// checkUnused returns errUsed if a pod may have used the volume since the pods were stopped. If the node is lost, it returns
// errUsed with the reason if a pod may use the volume there.
func (m *Mover) checkUnused(ctx context.Context) error {
	if m.state.Recovery != nil {
		reason, err := m.notLost(ctx, m.state.From)
		if reason != nil {
			err = fmt.Errorf("%w: %w", errUsed, reason)
		}
		return err
	}
	at, err := m.checkPodsSince(ctx, m.unused)
	if err == nil && at.IsZero() {
		at, err = m.checkSent(ctx)
	}
	if err == nil {
		m.unused = at
	}
	return err
}

// checkPodsSince returns errUsed if a pod uses the volume, or has completed since the pods were stopped, and otherwise the time of
// this check. The time is zero if the last check is so old that another pod may have used the volume since.
func (m *Mover) checkPodsSince(ctx context.Context, last time.Time) (at time.Time, err error) {
	begin := now()
	pods, err := m.pods(ctx)
	switch {
	case err != nil:
		return at, err
	case scheduled(pods, m.state.Ended):
		return at, errUsed
	case now().Sub(last) > maxUnchecked:
		return at, nil
	}
	return begin, nil
}

// checkSent returns errUsed unless the newest copy is being sent from a volume that cannot be used meanwhile, and otherwise the time
// of the last check of the pods. The report can take longer than maxUnchecked, so that the pods are checked until it is complete.
func (m *Mover) checkSent(ctx context.Context) (at time.Time, err error) {
	ctx, cancel := context.WithCancel(ctx)
	var sent bool
	var failure error
	complete := make(chan struct{})
	at = now() // the report is newer
	go func() {
		defer close(complete)
		sent, failure = m.beingSent(ctx)
	}()
	defer func() {
		cancel()
		<-complete
	}()
	for reported := false; !reported; {
		select {
		case <-complete:
			reported = true
		case <-time.After(maxPoll):
		}
		if at, err = m.checkPodsSince(ctx, at); err != nil {
			return at, err
		}
		if at.IsZero() {
			return at, errUsed
		}
	}
	switch {
	case failure != nil:
		return at, fmt.Errorf("%w: %w", errUsed, failure)
	case !sent:
		return at, errUsed
	}
	return at, nil
}

// beingSent reports whether the newest copy is being sent, from a volume that cannot be used meanwhile. Then the copy will contain
// everything that a pod has written: if the transfer is interrupted later, the next one sends the volume again.
func (m *Mover) beingSent(ctx context.Context) (bool, error) {
	if !m.state.Locked {
		return false, nil
	}
	claim, err := m.api.Claim(ctx, m.Namespace, m.copyName(m.state.Round))
	if err != nil || claim.Metadata.DeletionTimestamp != "" {
		return false, absent(err)
	}
	handle, _ := m.oldHandle()
	report, err := m.nodeReport(ctx, m.state.From)
	return slices.ContainsFunc(report.Volumes, func(v status.Volume) bool {
		return v.ID == handle && slices.Contains(v.SentAs, provisioned(claim.Metadata))
	}), err
}

// provisioned returns the name that the provisioner gives the volume of a claim.
func provisioned(claim kube.Meta) string { return "pvc-" + claim.UID }

// copyName returns the name of a copy: of its snapshot, if it has one, and of its claim.
func (m *Mover) copyName(round int) string {
	if m.state.Recovery != nil {
		return m.state.Recovery.Claim
	}
	return fmt.Sprintf("trivet-move-%s-%d", m.state.ID, round)
}

// copyVolume creates the newest copy on the node To, and waits until it is complete. It calls check again and again, and ends
// with its error.
func (m *Mover) copyVolume(ctx context.Context, check func() error) error {
	c, name, restoreSize := m.copier(), m.copyName(m.state.Round), ""
	if m.state.SnapshotClass != "" {
		snapshot, err := c.takeSnapshot(ctx, name, check)
		if err != nil {
			return err
		}
		restoreSize = snapshot.Status.RestoreSize
	}
	crashpoint.Here(crashpoint.MoveSnapshot)
	m.times.snapshot = time.Now()
	v, err := c.restore(ctx, name, restoreSize, check)
	if err == nil && v.OnlyNode(translate.TopologyKey) != m.state.To {
		err = fmt.Errorf("%w: undo the move with --abort, and check the StorageClass, and the room on node %s with 'kubectl trivet status'", elsewhere(name, v, m.state.To), m.state.To)
	}
	return err
}

// copier returns what creates the copies of the move.
func (m *Mover) copier() *copier {
	old, _ := kube.AsPersistentVolume(m.state.Old) // cannot fail: it was read in this form
	return &copier{
		api: m.api, claim: m.claim, capacity: old.Spec.Capacity.Storage, to: m.state.To, snapshotClass: m.state.SnapshotClass, used: m.state.Step == copying, retried: true,
		labels: map[string]any{moveLabel: m.state.ID}, status: m.progress, progress: m.Progress,
	}
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
	i := slices.IndexFunc(report.Volumes, func(v status.Volume) bool { return v.Name == provisioned(claim) && v.State == status.StateReceiving })
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
		name, remove := m.copyName(round), m.removeCopy
		if round == m.state.CopyRound {
			remove = m.removeChosen
		}
		if err := remove(ctx, name); err != nil {
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
		err = m.releaseCopy(ctx, claim.Spec.VolumeName, func(v kube.PersistentVolume) error { return m.checkCopy(claim, v) })
	}
	if err != nil {
		return err
	}
	crashpoint.Here(crashpoint.MoveReleased)
	return m.deleteClaim(ctx, name)
}

// removeChosen is removeCopy for the copy that the claim has or was to get. Its PersistentVolume is released also if its claim was
// deleted. Another claim of that name, which a user may have created since, is not changed.
func (m *Mover) removeChosen(ctx context.Context, name string) error {
	if err := m.releaseCopy(ctx, m.state.Copy, m.checkChosen); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.MoveReleased)
	claim, err := m.api.Claim(ctx, m.Namespace, name)
	switch {
	case err != nil:
		return absent(err)
	case !m.chosen(claim):
		m.Progress("Claim %s/%s with the UID %s is not that of the copy: it is not changed.", m.Namespace, name, claim.Metadata.UID)
		return nil
	}
	return m.deleteClaim(ctx, name)
}

// chosen reports whether a claim is that of the copy in the state.
func (m *Mover) chosen(claim kube.Claim) bool {
	return claim.Metadata.UID == m.state.CopyUID && claim.Spec.VolumeName == m.state.Copy
}

// checkChosen checks that a PersistentVolume is that of the copy in the state.
func (m *Mover) checkChosen(v kube.PersistentVolume) error {
	next, err := kube.AsPersistentVolume(m.state.New)
	if err != nil {
		return err
	}
	if v.Spec.ClaimRef.UID != m.state.CopyUID || v.Spec.CSI.VolumeHandle != next.Spec.CSI.VolumeHandle {
		return fmt.Errorf("PersistentVolume %s has the volume %s and belongs to a claim with the UID %q, and not %s and %q as the copy: it is not changed: find out who has replaced it", v.Metadata.Name, v.Spec.CSI.VolumeHandle, v.Spec.ClaimRef.UID, next.Spec.CSI.VolumeHandle, m.state.CopyUID)
	}
	return nil
}

// deleteClaim deletes the claim of a copy, and waits until it is deleted.
func (m *Mover) deleteClaim(ctx context.Context, name string) error {
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

// releaseCopy makes sure that the volume of a copy, whose PersistentVolume check must accept, is deleted together with its claim.
// It removes only the object if the claim that is moved has the volume.
func (m *Mover) releaseCopy(ctx context.Context, name string, check func(kube.PersistentVolume) error) error {
	v, err := m.view(ctx, name)
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
