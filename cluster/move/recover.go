package move

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/cluster/status"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/internal/translate"
)

const (
	// recoveredAnnotation is the annotation of a claim with the time of the data with which it was recovered. It is never read.
	recoveredAnnotation = "csi.trivet.dev/recovered"
)

// Copy is a complete copy of the claim's volume. A driver has reported that it is unchanged.
type Copy struct {
	// Claim is the name of the copy's claim.
	Claim, Node string
	// Snapshotted is the time of the data, by the clock of the claim's node.
	Snapshotted time.Time

	claim  kube.Claim
	volume kube.PersistentVolume
	object kube.Object
}

// Recovery is what a recovery will do.
type Recovery struct {
	Volume kube.PersistentVolume
	From   string
	Copy   Copy
	// Newer are the copies that are newer than Copy and cannot be used.
	Newer []Refusal

	old kube.Object
}

// Refusal is a copy that cannot be used, with the reason.
type Refusal struct {
	Claim  string
	Reason error

	created string
}

// errReady is the reason why a node is not lost.
var errReady = errors.New("is ready")

// PlanRecovery examines whether the claim's node is lost, and chooses the copy with a name, or the newest one if it is empty.
// report is the report of the drivers. The error tells why the claim cannot be recovered.
func (m *Mover) PlanRecovery(ctx context.Context, report status.Report, name string) (r Recovery, err error) {
	if err := m.checkClaim(); err != nil {
		return r, err
	}
	if err := m.checkRights(ctx, append(m.swapRights(), rights(m.Namespace, "", "persistentvolumeclaims", "list")...)); err != nil {
		return r, err
	}
	var p Plan
	if err := m.planSource(ctx, &p, report.Driver); err != nil {
		return r, err
	}
	reason, err := m.notLost(ctx, p.From)
	if errors.Is(reason, errReady) {
		reason = m.explainReady(report, p, reason)
	}
	if err = errors.Join(reason, err); err != nil {
		return r, err
	}
	r = Recovery{Volume: p.Volume, From: p.From, old: p.old}
	if r.Copy, r.Newer, err = m.chooseCopy(ctx, report, p.Volume, name); err != nil {
		return r, err
	}
	p.To = r.Copy.Node
	if err := m.checkDestination(ctx, report.Driver, p); err != nil {
		return r, err
	}
	return r, m.checkCopyUnused(ctx, r.Copy.Claim)
}

// notLost returns why the volume may be in use on its node, with the command that changes it, or nil. A node is lost if its Node
// object does not exist, or if an administrator has declared by a taint that it is off.
func (m *Mover) notLost(ctx context.Context, from string) (reason, err error) {
	node, err := m.api.Node(ctx, from)
	switch {
	case apierrors.IsNotFound(err):
	case err != nil:
		return nil, err
	case node.Ready():
		return fmt.Errorf("node %s of the volume %w", from, errReady), nil
	case !node.HasTaint(kube.OutOfService):
		return fmt.Errorf("node %s of the volume is not ready, but it may still run pods that write: make sure that the machine is off, and then run 'kubectl taint node %[1]s %s=nodeshutdown:NoExecute'", from, kube.OutOfService), nil
	}
	pods, err := m.pods(ctx)
	if err != nil {
		return nil, err
	}
	if i := slices.IndexFunc(pods, func(p kube.Pod) bool { return p.Spec.NodeName != "" && !p.Completed() }); i >= 0 {
		return fmt.Errorf("pod %s/%s, which uses the claim, is still assigned to node %s: wait until Kubernetes has deleted it, or run 'kubectl delete pod -n %[1]s %[2]s --force'", m.Namespace, pods[i].Metadata.Name, pods[i].Spec.NodeName), nil
	}
	attachments, err := m.api.VolumeAttachments(ctx)
	if err != nil {
		return nil, err
	}
	for _, a := range attachments {
		if a.Spec.Source.PersistentVolumeName == m.claim.Spec.VolumeName {
			return fmt.Errorf("the volume is still attached to node %s: wait until 'kubectl get volumeattachment %s' does not find it, which can take minutes", a.Spec.NodeName, a.Metadata.Name), nil
		}
	}
	return nil, nil
}

// explainReady returns what to do if the node of the volume is ready.
func (m *Mover) explainReady(report status.Report, p Plan, reason error) error {
	handle := p.Volume.Spec.CSI.VolumeHandle
	if slices.ContainsFunc(report.Volumes, func(v status.Volume) bool { return v.ID == handle }) {
		return fmt.Errorf("%w: nothing is lost; 'kubectl trivet move -n %s %s --to NODE' moves the volume without loss", reason, m.Namespace, m.ClaimName)
	}
	return fmt.Errorf("%w, but no driver reports its volume %s: see 'kubectl trivet status'. If the disk is lost, and the node is not, follow docs/operations/protection.md#a-disk-is-lost-and-its-node-is-not", reason, handle)
}

// chooseCopy returns the copy with a name, or the newest one if the name is empty, and those that are newer and cannot be used. If
// there are such copies, the name must be given.
func (m *Mover) chooseCopy(ctx context.Context, report status.Report, of kube.PersistentVolume, name string) (chosen Copy, newer []Refusal, err error) {
	all, refused, err := m.copies(ctx, report, of)
	if err != nil {
		return chosen, nil, err
	}
	i := slices.IndexFunc(all, func(c Copy) bool { return name == "" || c.Claim == name })
	if i < 0 {
		what := "copy"
		if name != "" {
			what = fmt.Sprintf("copy %q", name)
		}
		return chosen, nil, errors.Join(append(reasons(refused), fmt.Errorf("claim %s/%s has no %s with which it can be recovered", m.Namespace, m.ClaimName, what))...)
	}
	chosen = all[i]
	for _, r := range refused {
		if r.created >= chosen.claim.Metadata.CreationTimestamp { // both are in UTC
			newer = append(newer, r)
		}
	}
	if len(newer) > 0 && name == "" {
		err = errors.Join(append(reasons(newer), fmt.Errorf("%d copies which cannot be used are newer than %s: remove the reasons, or accept the loss of what only they contain with --copy %[2]s", len(newer), chosen.Claim))...)
	}
	return chosen, newer, err
}

func reasons(refused []Refusal) (all []error) {
	for _, r := range refused {
		all = append(all, r.Reason)
	}
	return all
}

// copies returns the copies of the claim's volume that are unchanged, the newest first, and why others cannot be used. The labels
// and names of claims are not trusted, because users of the namespace can write them: the PersistentVolume must belong to the
// copy's claim, and the driver that has its volume must report of which volume it is an unchanged copy.
func (m *Mover) copies(ctx context.Context, report status.Report, of kube.PersistentVolume) (all []Copy, refused []Refusal, err error) {
	claims, err := m.api.Claims(ctx, m.Namespace, protectLabel+"="+m.claim.Metadata.UID)
	if err != nil {
		return nil, nil, err
	}
	for _, claim := range claims {
		if claim.Status.Phase != "Bound" || claim.Metadata.DeletionTimestamp != "" {
			continue
		}
		c, refusal, err := m.verifyCopy(ctx, report, of, claim)
		switch {
		case err != nil:
			return nil, nil, err
		case refusal != nil:
			refused = append(refused, Refusal{claim.Metadata.Name, refusal, claim.Metadata.CreationTimestamp})
		default:
			all = append(all, c)
		}
	}
	slices.SortFunc(all, func(a, b Copy) int { return b.Snapshotted.Compare(a.Snapshotted) })
	return all, refused, nil
}

// verifyCopy returns the copy of a claim, or why it is not an unchanged copy of a volume.
func (m *Mover) verifyCopy(ctx context.Context, report status.Report, of kube.PersistentVolume, claim kube.Claim) (c Copy, refusal, err error) {
	c = Copy{Claim: claim.Metadata.Name, claim: claim}
	c.object, err = m.api.PersistentVolume(ctx, claim.Spec.VolumeName)
	if apierrors.IsNotFound(err) {
		return c, fmt.Errorf("copy %s has no PersistentVolume", c.Claim), nil
	}
	if err == nil {
		c.volume, err = kube.AsPersistentVolume(c.object)
	}
	if err != nil {
		return c, nil, err
	}
	if err := checkCopy(report.Driver, claim, c.volume); err != nil {
		return c, err, nil
	}
	handle := c.volume.Spec.CSI.VolumeHandle
	i := slices.IndexFunc(report.Volumes, func(v status.Volume) bool { return v.ID == handle })
	if i < 0 {
		return c, fmt.Errorf("copy %s: no driver reports its volume %s: see 'kubectl trivet status' for node %s", c.Claim, handle, c.volume.OnlyNode(translate.TopologyKey)), nil
	}
	v := report.Volumes[i]
	switch {
	case v.CopyOf == "":
		return c, fmt.Errorf("copy %s was used by a pod or changed: the driver no longer reports that it is a copy", c.Claim), nil
	case v.CopyOf != of.Spec.CSI.VolumeHandle:
		return c, fmt.Errorf("copy %s is a copy of the volume %s, and not of %s, which the claim has now", c.Claim, v.CopyOf, of.Spec.CSI.VolumeHandle), nil
	case v.Snapshotted.IsZero() || v.Node == "" || v.Node != c.volume.OnlyNode(translate.TopologyKey):
		return c, fmt.Errorf("copy %s: the driver of node %q reports it without a time, or its PersistentVolume is on another node", c.Claim, v.Node), nil
	}
	c.Node, c.Snapshotted = v.Node, v.Snapshotted
	return c, nil, nil
}

// verifyAgain checks that the copy has not changed since the recovery was planned, because pods may have used it. It needs
// a new report: a pod that uses the copy may have started, and its object may have been deleted, since an older one.
func (m *Mover) verifyAgain(ctx context.Context) error {
	old, err := kube.AsPersistentVolume(m.state.Old)
	if err != nil {
		return err
	}
	report, err := m.nodeReport(ctx, m.state.To)
	if err != nil {
		return err
	}
	claim, err := m.api.Claim(ctx, m.Namespace, m.state.Recovery.Claim)
	if err != nil {
		return err
	}
	c, refusal, err := m.verifyCopy(ctx, report, old, claim)
	if err != nil {
		return err
	}
	if refusal == nil && !c.Snapshotted.Equal(m.state.Recovery.Snapshotted) {
		refusal = fmt.Errorf("copy %s has the data of %v, and had that of %v", c.Claim, c.Snapshotted, m.state.Recovery.Snapshotted)
	}
	if refusal != nil {
		return fmt.Errorf("%w: nothing is changed: undo the recovery with --abort", refusal)
	}
	return m.checkCopyUnused(ctx, c.Claim)
}

// checkCopyUnused checks that no pod uses the claim of a copy, which is deleted at the end.
func (m *Mover) checkCopyUnused(ctx context.Context, name string) error {
	pods, err := m.api.Pods(ctx, m.Namespace, "")
	if err != nil {
		return err
	}
	for _, p := range pods {
		if !p.Completed() && slices.Contains(p.Claims(), name) {
			return fmt.Errorf("pod %s/%s uses the copy %s: run 'kubectl delete pod -n %[1]s %[2]s', or choose another copy with --copy", m.Namespace, p.Metadata.Name, name)
		}
	}
	return nil
}

// StartRecovery gives the claim the copy, as planned. The steps are those of a move after its last copy.
func (m *Mover) StartRecovery(ctx context.Context, r Recovery) error {
	old := manifestOf(r.old)
	err := m.save(ctx, func(s *state) {
		*s = state{
			ID: uuid.NewString()[:8], Namespace: m.Namespace, Claim: m.ClaimName, UID: m.claim.Metadata.UID, From: r.From, To: r.Copy.Node, Step: swapping, Round: 1, Keep: true,
			Recovery: &recovery{Claim: r.Copy.Claim, Policy: r.Copy.volume.Spec.ReclaimPolicy, Snapshotted: r.Copy.Snapshotted},
			Old:      old, New: newVolumeManifest(old, r.Copy.object), Copy: r.Copy.volume.Metadata.Name, CopyUID: r.Copy.claim.Metadata.UID, CopyRound: 1,
		}
		m.hold(s)
	})
	if err != nil {
		return err
	}
	crashpoint.Here(crashpoint.MoveBegun)
	return m.run(ctx)
}

// CheckCopy checks that the recovery that has begun is one with the copy that the user has named, if any.
func (m *Mover) CheckCopy(name string) error {
	if r := m.state.Recovery; r != nil && name != "" && name != r.Claim {
		return fmt.Errorf("--copy %q: the claim is already being recovered with %s: continue without --copy, or undo that with --abort", name, r.Claim)
	}
	return nil
}

// Age returns how old data is.
func Age(of time.Time) string {
	age := max(0, time.Since(of))
	switch {
	case age >= 48*time.Hour:
		return fmt.Sprintf("%d days", int(age.Hours()/24))
	case age >= time.Hour:
		return fmt.Sprintf("%d h %d min", int(age.Hours()), int(age.Minutes())%60)
	}
	return age.Round(time.Second).String()
}
