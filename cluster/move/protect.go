package move

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/cluster/kubectl"
	"github.com/trivet-csi/trivet/cluster/status"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/volume"
)

// The names with which a protection marks objects.
const (
	// protectLabel is the label of all objects of a protection. Its value is the UID of the claim.
	protectLabel = kube.ProtectKey
	// claimAnnotation and nodeAnnotation are annotations of the CronJob: the claim as namespace/name, and the node of the copies.
	claimAnnotation = "csi.trivet.dev/protected-claim"
	nodeAnnotation  = kube.CopiesNodeKey
	// everyAnnotation, keepAnnotation and classAnnotation are annotations of the CronJob with the period, the number of copies that
	// are kept, and the class of their snapshots.
	everyAnnotation = "csi.trivet.dev/copies-every"
	keepAnnotation  = "csi.trivet.dev/copies-kept"
	classAnnotation = "csi.trivet.dev/copies-snapshot-class"
	// volumeAnnotation is the annotation of a copy with the handle of the volume that is copied. Users of the namespace can write it: it
	// decides only which copies are deleted.
	volumeAnnotation = "csi.trivet.dev/copied-volume"
	// protectionSelector selects the ServiceAccount of the chart that makes the copies.
	protectionSelector = "app.kubernetes.io/name=trivet,app.kubernetes.io/component=protection"
)

const (
	// defaultKeep is the number of copies that are kept by default, maxKeep the largest number.
	defaultKeep, maxKeep = 2, 32
	// jobDeadline ends a Job that does not end itself. The next one continues the copy.
	jobDeadline = 6 * time.Hour
	// checkInterval is the time between two checks that a copy that is being made is still useful.
	checkInterval = 5 * time.Second
)

// Protection is a claim of which copies are kept on another node.
type Protection struct {
	Claim string // namespace/name
	UID   string
	Node  string
	Every string
	Keep  int
	// LastRun and LastSuccess are the times at which the CronJob has last created a Job, and at which one has last succeeded; empty
	// for never.
	LastRun, LastSuccess string

	// Class is the StorageClass by which the claim is protected. It is empty for a protection that a user has created.
	Class string

	job, snapshotClass, account, image string
}

// ProtectOptions are the arguments of a protection.
type ProtectOptions struct {
	Options
	// Every is the time between two copies.
	Every time.Duration
	// Kept is the number of complete copies that are kept; 0: that of the existing protection, or the default.
	Kept int
	// Class is the StorageClass by which the claim is protected. It is empty for a protection that a user creates.
	Class string
	// Owned is true for copies that Kubernetes deletes after the claim was deleted.
	Owned bool
}

// jobName returns the name of the CronJob of a protection. A CronJob's name has at most 52 characters.
func jobName(uid string) string { return "trivet-protect-" + uid }

// roleName returns the name of the ClusterRole in the chart for a ServiceAccount, which is also that of the RoleBinding in the
// namespace of a claim.
func roleName(namespace, account string) string { return namespace + ":" + account }

// Protections returns the protections of the claims with a name, also of one that was deleted.
func Protections(ctx context.Context, cluster *kubectl.Cluster, namespace, claim string) (own []Protection, err error) {
	all, err := protections(ctx, cluster)
	return slices.DeleteFunc(all, func(p Protection) bool { return p.Claim != namespace+"/"+claim }), err
}

// protections returns all protections.
func protections(ctx context.Context, cluster *kubectl.Cluster) (own []Protection, err error) {
	all, err := cluster.CronJobs(ctx, cluster.Namespace, protectLabel)
	for _, job := range all {
		own = append(own, asProtection(job))
	}
	return own, err
}

// asProtection returns the protection with a CronJob.
func asProtection(job kube.CronJob) Protection {
	a := job.Metadata.Annotations
	keep, _ := strconv.Atoi(a[keepAnnotation])
	pod := job.Spec.JobTemplate.Spec.Template.Spec
	p := Protection{
		Claim: a[claimAnnotation], UID: job.Metadata.Labels[protectLabel], Node: a[nodeAnnotation], Every: a[everyAnnotation], Keep: keep,
		LastRun: job.Status.LastScheduleTime, LastSuccess: job.Status.LastSuccessfulTime, Class: a[kube.ByClassKey], job: job.Metadata.Name,
		snapshotClass: a[classAnnotation], account: pod.ServiceAccountName,
	}
	if len(pod.Containers) > 0 {
		p.image = pod.Containers[0].Image
	}
	return p
}

// Protect creates or changes the protection of a claim: a CronJob that makes copies on the node To. report is the report of the
// drivers. An error tells why the claim cannot be protected.
func Protect(ctx context.Context, cluster *kubectl.Cluster, report status.Report, o ProtectOptions) error {
	claim, err := cluster.Claim(ctx, o.Namespace, o.ClaimName)
	if err != nil {
		return err
	}
	existing, err := protectionOf(ctx, cluster, claim.Metadata.UID)
	if err != nil {
		return err
	}
	o.Kept, o.SnapshotClass = cmp.Or(o.Kept, existing.Keep, defaultKeep), cmp.Or(o.SnapshotClass, existing.snapshotClass)
	m := &Mover{Options: o.Options, api: cluster, claim: claim}
	if o.Kept < 1 || o.Kept > maxKeep {
		return fmt.Errorf("--keep %d: the number of copies must be between 1 and %d", o.Kept, maxKeep)
	}
	if _, err := schedule(o.Every, claim.Metadata.UID); err != nil {
		return err
	}
	if _, err := protectionAccount(ctx, cluster); err != nil {
		return err
	}
	if o.SnapshotClass, err = m.planProtection(ctx, report, o.Kept); err != nil {
		return err
	}
	image, err := driverImage(ctx, cluster, "")
	if err != nil {
		return err
	}
	return writeProtection(ctx, cluster, o, claim.Metadata.UID, image)
}

// protectionOf returns the protection of the claim with a UID, or an empty one.
func protectionOf(ctx context.Context, cluster *kubectl.Cluster, uid string) (Protection, error) {
	job, err := cluster.CronJob(ctx, cluster.Namespace, jobName(uid))
	if err != nil || job.Metadata.Labels[protectLabel] != uid {
		return Protection{}, absent(err)
	}
	return asProtection(job), nil
}

// writeProtection creates or changes the objects of the protection of the claim with a UID, and ends a Job that runs with the old ones.
func writeProtection(ctx context.Context, cluster *kubectl.Cluster, o ProtectOptions, uid, image string) error {
	when, err := schedule(o.Every, uid)
	if err != nil {
		return err
	}
	account, err := protectionAccount(ctx, cluster)
	if err != nil {
		return err
	}
	labels := map[string]any{protectLabel: uid}
	err = cluster.PutCronJob(ctx, cluster.Namespace, jobName(uid), kube.Object{
		"metadata": map[string]any{"name": jobName(uid), "labels": labels, "annotations": map[string]any{
			claimAnnotation: o.Namespace + "/" + o.ClaimName, nodeAnnotation: o.To, everyAnnotation: Period(o.Every), keepAnnotation: strconv.Itoa(o.Kept), classAnnotation: o.SnapshotClass, kube.ByClassKey: o.Class,
		}},
		"spec": cronJob(when, o, uid, account.Name, image, labels),
	})
	if err != nil {
		return fmt.Errorf("writing CronJob %s/%s: %w", cluster.Namespace, jobName(uid), err)
	}
	// The CronJob is first, because --stop finds the RoleBinding by it.
	if err := bind(ctx, cluster, o.Namespace); err != nil {
		return err
	}
	return deleteJobs(ctx, cluster, uid, o.Options, func(j kube.Job) bool { return !j.Ended() })
}

// bind creates the RoleBinding of the protections in a namespace, unless it exists.
func bind(ctx context.Context, cluster *kubectl.Cluster, namespace string) error {
	account, err := protectionAccount(ctx, cluster)
	if err != nil {
		return err
	}
	role := roleName(account.Namespace, account.Name)
	if err := cluster.Bind(ctx, namespace, role, map[string]any{protectLabel: ""}, role, account); err != nil {
		return fmt.Errorf("creating RoleBinding %s/%s: %w", namespace, role, err)
	}
	return nil
}

// deleteJobs deletes the Jobs of a protection that which selects, and waits until they and their pods are deleted.
func deleteJobs(ctx context.Context, cluster *kubectl.Cluster, uid string, o Options, which func(kube.Job) bool) error {
	return until(ctx, o.Progress, o.Timeout, "the Jobs of CronJob "+jobName(uid)+" are deleted", func() (bool, error) {
		all, err := cluster.Jobs(ctx, cluster.Namespace, protectLabel+"="+uid)
		gone := true
		for _, j := range all {
			if !which(j) {
				continue
			}
			gone = false
			if j.Metadata.DeletionTimestamp == "" {
				err = errors.Join(err, cluster.DeleteJob(ctx, cluster.Namespace, j.Metadata.Name))
			}
		}
		return gone && err == nil, err
	})
}

// planProtection checks the claim, its classes and the node of the copies. It returns the class of the snapshots.
func (m *Mover) planProtection(ctx context.Context, report status.Report, keep int) (string, error) {
	p := Plan{To: m.To}
	if err := m.checkClaim(); err != nil {
		return "", err
	}
	if err := m.planVolume(ctx, &p, report); err != nil {
		return "", err
	}
	class, err := m.checkCopyClass(ctx, report.Driver, p)
	if err != nil {
		return "", err
	}
	if err := m.checkDestination(ctx, report.Driver, p); err != nil {
		return "", err
	}
	if err := m.planSnapshots(ctx, report.Driver, &p); err != nil {
		return "", err
	}
	if p.NoSnapshots != "" {
		return "", fmt.Errorf("claim %s/%s cannot be protected: %s", m.Namespace, m.ClaimName, p.NoSnapshots)
	}
	// One copy more than those that are kept exists until the oldest one is deleted.
	present, _, err := m.copies(ctx, report, p.Volume)
	if err != nil {
		return "", err
	}
	missing := int64(keep + 1)
	for _, c := range present {
		if c.Node == m.To && missing > 1 {
			missing--
		}
	}
	room, _, known := roomOn(report, m.To, class.Parameters[volume.ParamPool])
	switch {
	case !known:
		return "", fmt.Errorf("node %q has no open pool %q for the copies: see 'kubectl trivet status'", m.To, class.Parameters[volume.ParamPool])
	case room < missing*p.SizeBytes:
		return "", fmt.Errorf("node %q has room for %s, and %d copies of the volume need %s: use fewer with --keep, or see docs/operations/capacity.md", m.To, volume.FormatSize(room), missing, volume.FormatSize(missing*p.SizeBytes))
	}
	return p.SnapshotClass, nil
}

// checkCopyClass checks the StorageClass with which the copies are created. Copies must be deleted together with their claims, and the
// claim must still exist when its node is lost.
func (m *Mover) checkCopyClass(ctx context.Context, driver string, p Plan) (kube.StorageClass, error) {
	class, err := m.checkClass(ctx, driver, p)
	if err != nil {
		return class, err
	}
	onLoss := cmp.Or(p.Volume.Spec.CSI.VolumeAttributes[volume.ParamOnNodeLoss], class.Parameters[volume.ParamOnNodeLoss])
	switch {
	case class.ReclaimPolicy == "Retain":
		err = fmt.Errorf("StorageClass %q of the claim has the reclaim policy Retain, so that copies which are no longer needed would never be deleted: such a claim cannot be protected", class.Metadata.Name)
	case onLoss == volume.NodeLossRelease:
		err = fmt.Errorf("the volume or StorageClass %q of the claim has %s: %s, so that the claim is deleted after its node was lost, and cannot be recovered: use a class without this parameter", class.Metadata.Name, volume.ParamOnNodeLoss, onLoss)
	}
	return class, err
}

// protectionAccount returns the ServiceAccount that makes the copies.
func protectionAccount(ctx context.Context, cluster *kubectl.Cluster) (kube.Meta, error) {
	accounts, err := cluster.ServiceAccounts(ctx, cluster.Namespace, protectionSelector)
	if err != nil {
		return kube.Meta{}, err
	}
	if len(accounts) != 1 {
		return kube.Meta{}, fmt.Errorf("namespace %s has %d ServiceAccounts with the labels %s, instead of one: install the chart with protection.enabled=true", cluster.Namespace, len(accounts), protectionSelector)
	}
	return accounts[0].Metadata, nil
}

// driverImage returns the image of the driver in the pod with a UID, or of the controller's driver if it is empty. It also contains
// this program.
func driverImage(ctx context.Context, cluster *kubectl.Cluster, podUID string) (string, error) {
	pods, err := cluster.DriverPods(ctx)
	if err != nil {
		return "", err
	}
	i := slices.IndexFunc(pods, func(p kube.Pod) bool {
		return kubectl.IsController(p) && (podUID == "" || p.Metadata.UID == podUID)
	})
	if i < 0 {
		return "", fmt.Errorf("namespace %s has no pod of the controller: a protection needs the shape cluster of the chart", cluster.Namespace)
	}
	return kubectl.DriverImage(pods[i]), nil
}

// cronJob returns the specification of the CronJob of a protection.
func cronJob(when string, o ProtectOptions, uid, account, image string, labels map[string]any) map[string]any {
	command := []any{
		"/usr/local/bin/kubectl-trivet", "protect", "--namespace", o.Namespace, o.ClaimName, "--once", uid,
		"--on", o.To, "--keep", strconv.Itoa(o.Kept), "--snapshot-class", o.SnapshotClass,
	}
	if o.Class != "" {
		command = append(command, "--owned")
	}
	return map[string]any{
		"schedule": when, "concurrencyPolicy": "Forbid", "suspend": false, "startingDeadlineSeconds": int64(o.Every.Seconds()),
		"successfulJobsHistoryLimit": int64(1), "failedJobsHistoryLimit": int64(1),
		"jobTemplate": map[string]any{
			"metadata": map[string]any{"labels": labels},
			"spec": map[string]any{
				"backoffLimit":          int64(0), // the next Job continues
				"activeDeadlineSeconds": int64(jobDeadline.Seconds()),
				"template": map[string]any{
					"metadata": map[string]any{"labels": labels},
					"spec": map[string]any{
						"serviceAccountName": account, "automountServiceAccountToken": true, "restartPolicy": "Never",
						"securityContext": map[string]any{"runAsNonRoot": true, "runAsUser": int64(65532), "runAsGroup": int64(65532), "seccompProfile": map[string]any{"type": "RuntimeDefault"}},
						"containers": []any{map[string]any{
							"name": "protect", "image": image, "command": command,
							"securityContext": map[string]any{"allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": map[string]any{"drop": []any{"ALL"}}},
							"resources":       map[string]any{"requests": map[string]any{"cpu": "10m", "memory": "32Mi"}, "limits": map[string]any{"memory": "256Mi"}},
						}},
					},
				},
			},
		},
	}
}

// Copies returns the copies of the claim, the newest first, and those that cannot be used.
func Copies(ctx context.Context, cluster *kubectl.Cluster, report status.Report, o Options) ([]Copy, []Refusal, error) {
	claim, err := cluster.Claim(ctx, o.Namespace, o.ClaimName)
	if err != nil {
		return nil, nil, err
	}
	m, p := &Mover{Options: o, api: cluster, claim: claim}, Plan{}
	if err := m.readVolume(ctx, &p); err != nil {
		return nil, nil, err
	}
	return m.copies(ctx, report, p.Volume)
}

// OnlyData returns why the copies of a protection may be the only data of its claim, or nil.
func OnlyData(ctx context.Context, cluster *kubectl.Cluster, p Protection, o Options) (reason, err error) {
	claim, err := cluster.Claim(ctx, o.Namespace, o.ClaimName)
	if apierrors.IsNotFound(err) || err == nil && claim.Metadata.UID != p.UID {
		return nil, nil // the claim was deleted with its volume
	}
	if err != nil {
		return nil, err
	}
	m, plan := &Mover{Options: o, api: cluster, claim: claim}, Plan{}
	if claim.Spec.VolumeName == "" {
		return nil, nil
	}
	if reason := m.readVolume(ctx, &plan); reason != nil {
		return fmt.Errorf("the volume of claim %s may be lost: %w", p.Claim, reason), nil
	}
	return m.notReady(ctx, plan.From)
}

// notReady returns that the node of the volume does not exist or is not ready, or nil.
func (m *Mover) notReady(ctx context.Context, from string) (reason, err error) {
	node, err := m.api.Node(ctx, from)
	switch {
	case apierrors.IsNotFound(err):
		return fmt.Errorf("node %s of the volume does not exist", from), nil
	case err == nil && !node.Ready():
		return fmt.Errorf("node %s of the volume is not ready", from), nil
	}
	return nil, err
}

// StopProtection ends a protection, and deletes its copies. The CronJob, by which the protection is found, is deleted last, so that
// the command can be repeated.
func StopProtection(ctx context.Context, cluster *kubectl.Cluster, p Protection, o Options) error {
	namespace, _, _ := strings.Cut(p.Claim, "/")
	if err := checkStop(ctx, cluster, p); err != nil {
		return err
	}
	_, err := cluster.ConfigMap(ctx, cluster.Namespace, recordName(p.UID))
	if err == nil {
		return fmt.Errorf("claim %s has a move or a recovery that is not complete (ConfigMap %s/%s): complete or undo it first, because it may use a copy", p.Claim, cluster.Namespace, recordName(p.UID))
	}
	if !apierrors.IsNotFound(err) {
		return err
	}
	if err := cluster.SuspendCronJob(ctx, cluster.Namespace, p.job); err != nil {
		return fmt.Errorf("suspending CronJob %s/%s: %w", cluster.Namespace, p.job, err)
	}
	if err := deleteJobs(ctx, cluster, p.UID, o, func(kube.Job) bool { return true }); err != nil {
		return err
	}
	copies, err := listCopies(ctx, cluster, namespace, p.UID)
	if err != nil {
		return err
	}
	for _, c := range copies {
		if err := deleteCopy(ctx, cluster, namespace, copyOf(p.UID, c.number)); err != nil {
			return err
		}
	}
	all, err := protections(ctx, cluster)
	if err != nil {
		return err
	}
	if err := unbind(ctx, cluster, all, p); err != nil {
		return err
	}
	if err := cluster.DeleteCronJob(ctx, cluster.Namespace, p.job); err != nil {
		return fmt.Errorf("deleting CronJob %s/%s: %w", cluster.Namespace, p.job, err)
	}
	return until(ctx, o.Progress, o.Timeout, "CronJob "+p.job+" is deleted", func() (bool, error) {
		all, err := protections(ctx, cluster)
		return err == nil && !slices.ContainsFunc(all, func(other Protection) bool { return other.job == p.job && other.Class == p.Class }), err
	})
}

// unbind deletes the RoleBinding of a protection, unless another claim of the namespace has one of the protections that are present. If
// one was created meanwhile, it creates the RoleBinding again.
func unbind(ctx context.Context, cluster *kubectl.Cluster, present []Protection, p Protection) error {
	namespace, _, _ := strings.Cut(p.Claim, "/")
	other := func(q Protection) bool { return q.job != p.job && strings.HasPrefix(q.Claim, namespace+"/") }
	if slices.ContainsFunc(present, other) || p.account == "" {
		return nil
	}
	if err := cluster.Unbind(ctx, namespace, roleName(cluster.Namespace, p.account)); err != nil {
		return fmt.Errorf("deleting RoleBinding %s/%s: %w", namespace, roleName(cluster.Namespace, p.account), err)
	}
	all, err := protections(ctx, cluster)
	created := func(q Protection) bool {
		return other(q) && !slices.ContainsFunc(present, func(known Protection) bool { return known.job == q.job })
	}
	if err != nil || !slices.ContainsFunc(all, created) {
		return err
	}
	return bind(ctx, cluster, namespace)
}

// CopyOnce makes one copy of the claim with a UID, or continues one that is not complete, and deletes those that are not kept.
func CopyOnce(ctx context.Context, cluster *kubectl.Cluster, o ProtectOptions, uid string) error {
	claim, err := protectedClaim(ctx, cluster, o.Options, uid)
	if err != nil {
		return err
	}
	m, p := &Mover{Options: o.Options, api: cluster, claim: claim}, Plan{To: o.To}
	if err := m.checkClaim(); err != nil {
		return err
	}
	if err := m.readVolume(ctx, &p); err != nil {
		return err
	}
	if p.From == p.To {
		return fmt.Errorf("the volume is on node %s now, so that a copy there protects nothing: run 'kubectl trivet protect -n %s %s --on NODE --every PERIOD' with another node", p.To, o.Namespace, o.ClaimName)
	}
	if _, err := m.checkNode(ctx, p); err != nil {
		return err
	}
	reason, err := m.notReady(ctx, p.From)
	if err = errors.Join(reason, err); err != nil {
		return fmt.Errorf("%w: no copy can be made", err)
	}
	if _, err := m.checkCopyClass(ctx, p.Volume.Spec.CSI.Driver, p); err != nil {
		return err
	}
	return m.makeCopy(ctx, p, cmp.Or(o.Kept, defaultKeep), o.Owned)
}

// protectedClaim reads the claim with a UID. It is an error if the claim was deleted, or is being moved or recovered.
func protectedClaim(ctx context.Context, cluster *kubectl.Cluster, o Options, uid string) (kube.Claim, error) {
	claim, err := cluster.Claim(ctx, o.Namespace, o.ClaimName)
	if apierrors.IsNotFound(err) || err == nil && claim.Metadata.UID != uid {
		return claim, fmt.Errorf("claim %s/%s with the UID %s was deleted: end its protection with 'kubectl trivet protect -n %[1]s %[2]s --stop'", o.Namespace, o.ClaimName, uid)
	}
	if running := claim.Metadata.Annotations[moveLabel]; running != "" {
		return claim, fmt.Errorf("claim %s/%s is being moved or recovered (%s): the copy is made after that", o.Namespace, o.ClaimName, running)
	}
	return claim, err
}

// checkUnchanged checks that the claim still has the volume that is copied.
func (m *Mover) checkUnchanged(ctx context.Context, p Plan) error {
	claim, err := protectedClaim(ctx, m.api, m.Options, m.claim.Metadata.UID)
	if err != nil {
		return err
	}
	v, err := m.view(ctx, claim.Spec.VolumeName)
	if err != nil {
		return err
	}
	if of := p.Volume.Spec.CSI.VolumeHandle; v.Spec.CSI.VolumeHandle != of {
		return fmt.Errorf("claim %s/%s has the volume %s now, and not %s, which is copied: the next run copies that", m.Namespace, m.ClaimName, v.Spec.CSI.VolumeHandle, of)
	}
	return nil
}

// stillUseful returns the check of a copy that is being made. It reads the objects only in intervals.
func (m *Mover) stillUseful(ctx context.Context, p Plan, name string) func() error {
	next := time.Now()
	return func() error {
		if time.Now().Before(next) {
			return nil
		}
		next = time.Now().Add(checkInterval)
		if err := m.checkUnchanged(ctx, p); err != nil {
			return err
		}
		claim, err := m.api.Claim(ctx, m.Namespace, name)
		if err == nil && stray(claim) {
			err = fmt.Errorf("claim %s/%s has no node any more, because the provisioner could not create its volume on node %s: see 'kubectl trivet status' for the room there; the next run begins another copy", m.Namespace, name, p.To)
		}
		return absent(err)
	}
}

// makeCopy makes a copy, and deletes those that are not kept.
func (m *Mover) makeCopy(ctx context.Context, p Plan, keep int, owned bool) error {
	uid, handle := m.claim.Metadata.UID, p.Volume.Spec.CSI.VolumeHandle
	all, err := listCopies(ctx, m.api, m.Namespace, uid)
	if err != nil {
		return err
	}
	number, superfluous := nextCopy(all, handle, m.To)
	if err := m.deleteCopies(ctx, superfluous); err != nil {
		return err
	}
	c := &copier{
		api: m.api, claim: m.claim, capacity: p.Volume.Spec.Capacity.Storage, to: m.To, snapshotClass: m.SnapshotClass, used: true,
		labels: map[string]any{protectLabel: uid}, annotations: map[string]any{volumeAnnotation: handle}, status: m.api.LastWarning, progress: m.Progress,
	}
	if owned {
		c.owners = []any{map[string]any{"apiVersion": "v1", "kind": "PersistentVolumeClaim", "name": m.ClaimName, "uid": uid}}
	}
	name := copyOf(uid, number)
	check := m.stillUseful(ctx, p, name)
	snapshot, err := c.takeSnapshot(ctx, name, check)
	if err != nil {
		return err
	}
	v, err := c.restore(ctx, name, snapshot.Status.RestoreSize, check)
	if err != nil {
		return err
	}
	if v.OnlyNode(translate.TopologyKey) != m.To {
		err := fmt.Errorf("%w: check StorageClass %s", elsewhere(name, v, m.To), m.claim.Spec.StorageClassName)
		return errors.Join(err, deleteCopy(ctx, m.api, m.Namespace, name))
	}
	if all, err = listCopies(ctx, m.api, m.Namespace, uid); err != nil {
		return err
	}
	if err := m.checkUnchanged(ctx, p); err != nil {
		return err
	}
	return m.deleteCopies(ctx, oldCopies(all, number, handle, p.From, keep))
}

// copyOf returns the name of a copy: of its snapshot and of its claim.
func copyOf(uid string, number int) string { return fmt.Sprintf("trivet-copy-%s-%d", uid, number) }

// protectedCopy is a copy of a protection, which may not be complete.
type protectedCopy struct {
	number int
	// complete is true if the copy has a volume, ending if it is being deleted, stray if the provisioner does not create its volume on
	// the node any more.
	complete, ending, stray bool
	// handle is that of the volume that is copied, and node that of the copy; both may be empty.
	handle, node string
}

// listCopies returns the copies of the claim with a UID by their numbers, also those without a snapshot or without a claim.
func listCopies(ctx context.Context, cluster *kubectl.Cluster, namespace, uid string) ([]protectedCopy, error) {
	byNumber := map[int]protectedCopy{}
	prefix := strings.TrimSuffix(copyOf(uid, 0), "0")
	add := func(m kube.Meta, complete, stray bool, node string) {
		text, own := strings.CutPrefix(m.Name, prefix)
		number, err := strconv.Atoi(text)
		if !own || err != nil {
			return
		}
		c := byNumber[number]
		byNumber[number] = protectedCopy{number, complete, c.ending || m.DeletionTimestamp != "", stray, m.Annotations[volumeAnnotation], node}
	}
	snapshots, err := cluster.Snapshots(ctx, namespace, protectLabel+"="+uid)
	if err != nil {
		return nil, err
	}
	for _, s := range snapshots {
		add(s.Metadata, false, false, "")
	}
	claims, err := cluster.Claims(ctx, namespace, protectLabel+"="+uid)
	if err != nil {
		return nil, err
	}
	for _, c := range claims {
		add(c.Metadata, c.Status.Phase == "Bound", stray(c), c.Metadata.Annotations[selectedNode])
	}
	var all []protectedCopy
	for _, c := range byNumber {
		all = append(all, c)
	}
	slices.SortFunc(all, func(a, b protectedCopy) int { return cmp.Compare(a.number, b.number) })
	return all, nil
}

// stray reports whether the claim of a copy has no volume and no node. The provisioner removes the node if it could not create the
// volume there, for example for lack of room, and may create it on any node.
func stray(claim kube.Claim) bool {
	return claim.Status.Phase != "Bound" && claim.Metadata.Annotations[selectedNode] == ""
}

// nextCopy returns the number of the copy to make, and those that are deleted before. The newest copy is continued if it is not
// complete and still that of the claim's volume on the node.
func nextCopy(all []protectedCopy, handle, node string) (number int, superfluous []int) {
	number = 1
	for i, c := range all {
		switch {
		case c.complete && !c.ending:
			number = c.number + 1
		case i == len(all)-1 && !c.ending && !c.stray && c.handle == handle && (c.node == node || c.node == ""):
			return c.number, superfluous
		default:
			number = c.number + 1
			superfluous = append(superfluous, c.number)
		}
	}
	return number, superfluous
}

// oldCopies returns the numbers up to newest of the copies that are not among the newest complete ones of the claim's volume. A copy
// of another volume, which the claim had before, is not kept, nor is one on the claim's own node, from.
func oldCopies(all []protectedCopy, newest int, handle, from string, keep int) (numbers []int) {
	kept := 0
	for _, c := range slices.Backward(all) {
		if c.number > newest {
			continue
		}
		if c.complete && !c.ending && c.handle == handle && c.node != from && kept < keep {
			kept++
			continue
		}
		numbers = append(numbers, c.number)
	}
	slices.Sort(numbers)
	return numbers
}

// deleteCopies deletes copies by their numbers.
func (m *Mover) deleteCopies(ctx context.Context, numbers []int) (err error) {
	for _, number := range numbers {
		err = errors.Join(err, deleteCopy(ctx, m.api, m.Namespace, copyOf(m.claim.Metadata.UID, number)))
	}
	return err
}

// deleteCopy deletes the claim and the snapshot of a copy.
func deleteCopy(ctx context.Context, cluster *kubectl.Cluster, namespace, name string) error {
	if err := cluster.DeleteClaim(ctx, namespace, name); err != nil {
		return fmt.Errorf("deleting claim %s/%s: %w", namespace, name, err)
	}
	if err := cluster.DeleteSnapshot(ctx, namespace, name); err != nil {
		return fmt.Errorf("deleting snapshot %s/%s: %w", namespace, name, err)
	}
	return nil
}
