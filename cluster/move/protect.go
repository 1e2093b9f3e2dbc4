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
	protectLabel = "csi.trivet.dev/protect"
	// claimAnnotation and nodeAnnotation are annotations of the CronJob: the claim as namespace/name, and the node of the copies.
	claimAnnotation = "csi.trivet.dev/protected-claim"
	nodeAnnotation  = "csi.trivet.dev/copies-on"
	// everyAnnotation and keepAnnotation are annotations of the CronJob with the period, and the number of copies that are kept.
	everyAnnotation = "csi.trivet.dev/copies-every"
	keepAnnotation  = "csi.trivet.dev/copies-kept"
	// volumeAnnotation is the annotation of a copy with the handle of the volume that is copied. Users of the namespace can write it: it
	// decides only which copies are deleted.
	volumeAnnotation = "csi.trivet.dev/copied-volume"
	// bindingName is the name of the RoleBinding in the namespace of a claim.
	bindingName = "trivet-protection"
	// protectionSelector selects the ServiceAccount of the chart that makes the copies.
	protectionSelector = "app.kubernetes.io/name=trivet,app.kubernetes.io/component=protection"
)

const (
	// defaultKeep is the number of copies that are kept by default, maxKeep the largest number.
	defaultKeep, maxKeep = 2, 32
	// jobDeadline ends a Job that does not end itself. The next one continues the copy.
	jobDeadline = 6 * time.Hour
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

	job string
}

// ProtectOptions are the arguments of a protection.
type ProtectOptions struct {
	Options
	// Every is the time between two copies.
	Every time.Duration
	// Kept is the number of complete copies that are kept; 0: the default.
	Kept int
}

// jobName returns the name of the CronJob of a protection. A CronJob's name has at most 52 characters.
func jobName(uid string) string { return "trivet-protect-" + uid }

// Protections returns the protections of the claims with a name, also of one that was deleted.
func Protections(ctx context.Context, cluster *kubectl.Cluster, namespace, claim string) (own []Protection, err error) {
	all, err := cluster.CronJobs(ctx, cluster.Namespace, protectLabel)
	for _, job := range all {
		a := job.Metadata.Annotations
		if a[claimAnnotation] != namespace+"/"+claim {
			continue
		}
		keep, _ := strconv.Atoi(a[keepAnnotation])
		own = append(own, Protection{
			Claim: a[claimAnnotation], UID: job.Metadata.Labels[protectLabel], Node: a[nodeAnnotation], Every: a[everyAnnotation], Keep: keep,
			LastRun: job.Status.LastScheduleTime, LastSuccess: job.Status.LastSuccessfulTime, job: job.Metadata.Name,
		})
	}
	return own, err
}

// Protect creates or changes the protection of a claim: a CronJob that makes copies on the node To. report is the report of the
// drivers. An error tells why the claim cannot be protected.
func Protect(ctx context.Context, cluster *kubectl.Cluster, report status.Report, o ProtectOptions) error {
	claim, err := cluster.Claim(ctx, o.Namespace, o.ClaimName)
	if err != nil {
		return err
	}
	m := &Mover{Options: o.Options, api: cluster, claim: claim}
	o.Kept = cmp.Or(o.Kept, defaultKeep)
	if o.Kept < 1 || o.Kept > maxKeep {
		return fmt.Errorf("--keep %d: the number of copies must be between 1 and %d", o.Kept, maxKeep)
	}
	when, err := schedule(o.Every, claim.Metadata.UID)
	if err != nil {
		return err
	}
	account, err := protectionAccount(ctx, cluster)
	if err != nil {
		return err
	}
	if o.SnapshotClass, err = m.planProtection(ctx, report, o.Kept); err != nil {
		return err
	}
	image, err := driverImage(ctx, cluster)
	if err != nil {
		return err
	}
	labels := map[string]any{protectLabel: claim.Metadata.UID}
	// The name of the ClusterRole in the chart contains the namespace of the release.
	if err := cluster.Bind(ctx, o.Namespace, bindingName, map[string]any{protectLabel: ""}, account.Namespace+":"+account.Name, account); err != nil {
		return fmt.Errorf("creating RoleBinding %s/%s: %w", o.Namespace, bindingName, err)
	}
	err = cluster.PutCronJob(ctx, cluster.Namespace, jobName(claim.Metadata.UID), kube.Object{
		"metadata": map[string]any{"name": jobName(claim.Metadata.UID), "labels": labels, "annotations": map[string]any{
			claimAnnotation: o.Namespace + "/" + o.ClaimName, nodeAnnotation: o.To, everyAnnotation: Period(o.Every), keepAnnotation: strconv.Itoa(o.Kept),
		}},
		"spec": cronJob(when, o, claim.Metadata.UID, account.Name, image, labels),
	})
	if err != nil {
		return fmt.Errorf("writing CronJob %s/%s: %w", cluster.Namespace, jobName(claim.Metadata.UID), err)
	}
	return nil
}

// planProtection checks the claim, its classes and the node of the copies. It returns the class of the snapshots.
func (m *Mover) planProtection(ctx context.Context, report status.Report, keep int) (snapshotClass string, err error) {
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
	if snapshotClass, err = m.chooseSnapshotClass(ctx, report.Driver); err != nil {
		return "", err
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
	room, known := roomOn(report, m.To, class.Parameters[volume.ParamPool])
	switch {
	case !known:
		return "", fmt.Errorf("node %q has no open pool %q for the copies: see 'kubectl trivet status'", m.To, class.Parameters[volume.ParamPool])
	case room < missing*p.SizeBytes:
		return "", fmt.Errorf("node %q has room for %s, and %d copies of the volume need %s: use fewer with --keep, or see docs/operations/capacity.md", m.To, volume.FormatSize(room), missing, volume.FormatSize(missing*p.SizeBytes))
	}
	return snapshotClass, nil
}

// checkCopyClass checks the StorageClass with which the copies are created. Copies must be deleted together with their claims.
func (m *Mover) checkCopyClass(ctx context.Context, driver string, p Plan) (kube.StorageClass, error) {
	class, err := m.checkClass(ctx, driver, p)
	if err == nil && class.ReclaimPolicy == "Retain" {
		err = fmt.Errorf("StorageClass %q of the claim has the reclaim policy Retain, so that copies which are no longer needed would never be deleted: such a claim cannot be protected", class.Metadata.Name)
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

// driverImage returns the image of the controller's driver, which also contains this program.
func driverImage(ctx context.Context, cluster *kubectl.Cluster) (string, error) {
	pods, err := cluster.DriverPods(ctx)
	if err != nil {
		return "", err
	}
	i := slices.IndexFunc(pods, kubectl.IsController)
	if i < 0 {
		return "", fmt.Errorf("namespace %s has no pod of the controller: a protection needs the shape cluster of the chart", cluster.Namespace)
	}
	return kubectl.DriverImage(pods[i]), nil
}

// cronJob returns the specification of the CronJob of a protection.
func cronJob(when string, o ProtectOptions, uid, account, image string, labels map[string]any) map[string]any {
	return map[string]any{
		"schedule": when, "concurrencyPolicy": "Forbid", "startingDeadlineSeconds": int64(o.Every.Seconds()),
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
							"name": "protect", "image": image,
							"command": []any{
								"/usr/local/bin/kubectl-trivet", "protect", "--namespace", o.Namespace, o.ClaimName, "--once", uid,
								"--on", o.To, "--keep", strconv.Itoa(o.Kept), "--snapshot-class", o.SnapshotClass,
							},
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

// StopProtection ends a protection, and deletes its copies.
func StopProtection(ctx context.Context, cluster *kubectl.Cluster, p Protection, o Options) error {
	namespace, _, _ := strings.Cut(p.Claim, "/")
	if err := cluster.DeleteCronJob(ctx, cluster.Namespace, p.job); err != nil {
		return fmt.Errorf("deleting CronJob %s/%s: %w", cluster.Namespace, p.job, err)
	}
	last := true
	err := until(ctx, o.Progress, o.Timeout, "CronJob "+p.job+" and its pods are deleted", func() (bool, error) {
		all, err := cluster.CronJobs(ctx, cluster.Namespace, protectLabel)
		last = !slices.ContainsFunc(all, func(j kube.CronJob) bool {
			return strings.HasPrefix(j.Metadata.Annotations[claimAnnotation], namespace+"/")
		})
		return !slices.ContainsFunc(all, func(j kube.CronJob) bool { return j.Metadata.Name == p.job }), err
	})
	if err != nil {
		return err
	}
	all, err := listCopies(ctx, cluster, namespace, p.UID)
	if err != nil {
		return err
	}
	for _, c := range all {
		if err := deleteCopy(ctx, cluster, namespace, copyOf(p.UID, c.number)); err != nil {
			return err
		}
	}
	if !last {
		return nil
	}
	return cluster.Unbind(ctx, namespace, bindingName)
}

// CopyOnce makes one copy of the claim with a UID, or continues one that is not complete, and deletes those that are not kept.
func CopyOnce(ctx context.Context, cluster *kubectl.Cluster, o ProtectOptions, uid string) error {
	claim, err := cluster.Claim(ctx, o.Namespace, o.ClaimName)
	if apierrors.IsNotFound(err) || err == nil && claim.Metadata.UID != uid {
		return fmt.Errorf("claim %s/%s with the UID %s was deleted: end its protection with 'kubectl trivet protect -n %[1]s %[2]s --stop'", o.Namespace, o.ClaimName, uid)
	}
	if err != nil {
		return err
	}
	if running := claim.Metadata.Annotations[moveLabel]; running != "" {
		return fmt.Errorf("claim %s/%s is being moved or recovered (%s): the copy is made after that", o.Namespace, o.ClaimName, running)
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
	if _, err := m.checkCopyClass(ctx, p.Volume.Spec.CSI.Driver, p); err != nil {
		return err
	}
	return m.makeCopy(ctx, p, cmp.Or(o.Kept, defaultKeep))
}

// makeCopy makes a copy, and deletes those that are not kept.
func (m *Mover) makeCopy(ctx context.Context, p Plan, keep int) error {
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
	name, unchecked := copyOf(uid, number), func() error { return nil }
	snapshot, err := c.takeSnapshot(ctx, name, unchecked)
	if err != nil {
		return err
	}
	v, err := c.restore(ctx, name, snapshot, unchecked)
	if err == nil && v.OnlyNode(translate.TopologyKey) != m.To {
		err = fmt.Errorf("%w: check StorageClass %s", elsewhere(name, v, m.To), m.claim.Spec.StorageClassName)
	}
	if err != nil {
		return err
	}
	if all, err = listCopies(ctx, m.api, m.Namespace, uid); err != nil {
		return err
	}
	return m.deleteCopies(ctx, oldCopies(all, handle, keep))
}

// copyOf returns the name of a copy: of its snapshot and of its claim.
func copyOf(uid string, number int) string { return fmt.Sprintf("trivet-copy-%s-%d", uid, number) }

// protectedCopy is a copy of a protection, which may not be complete.
type protectedCopy struct {
	number int
	// complete is true if the copy has a volume, ending if it is being deleted.
	complete, ending bool
	// handle is that of the volume that is copied, and node that of the copy; both may be empty.
	handle, node string
}

// listCopies returns the copies of the claim with a UID by their numbers, also those without a snapshot or without a claim.
func listCopies(ctx context.Context, cluster *kubectl.Cluster, namespace, uid string) ([]protectedCopy, error) {
	byNumber := map[int]protectedCopy{}
	prefix := strings.TrimSuffix(copyOf(uid, 0), "0")
	add := func(m kube.Meta, complete bool, node string) {
		text, own := strings.CutPrefix(m.Name, prefix)
		number, err := strconv.Atoi(text)
		if !own || err != nil {
			return
		}
		c := byNumber[number]
		byNumber[number] = protectedCopy{number, complete, c.ending || m.DeletionTimestamp != "", m.Annotations[volumeAnnotation], node}
	}
	snapshots, err := cluster.Snapshots(ctx, namespace, protectLabel+"="+uid)
	if err != nil {
		return nil, err
	}
	for _, s := range snapshots {
		add(s.Metadata, false, "")
	}
	claims, err := cluster.Claims(ctx, namespace, protectLabel+"="+uid)
	if err != nil {
		return nil, err
	}
	for _, c := range claims {
		add(c.Metadata, c.Status.Phase == "Bound", c.Metadata.Annotations[selectedNode])
	}
	var all []protectedCopy
	for _, c := range byNumber {
		all = append(all, c)
	}
	slices.SortFunc(all, func(a, b protectedCopy) int { return cmp.Compare(a.number, b.number) })
	return all, nil
}

// nextCopy returns the number of the copy to make, and those that are deleted before. The newest copy is continued if it is not
// complete and still that of the claim's volume on the node.
func nextCopy(all []protectedCopy, handle, node string) (number int, superfluous []int) {
	number = 1
	for i, c := range all {
		switch {
		case c.complete && !c.ending:
			number = c.number + 1
		case i == len(all)-1 && !c.ending && c.handle == handle && (c.node == node || c.node == ""):
			return c.number, superfluous
		default:
			number = c.number + 1
			superfluous = append(superfluous, c.number)
		}
	}
	return number, superfluous
}

// oldCopies returns the numbers of the complete copies that are not among the newest ones of the claim's volume. A copy of another
// volume, which the claim had before, is not kept.
func oldCopies(all []protectedCopy, handle string, keep int) (numbers []int) {
	kept := 0
	for _, c := range slices.Backward(all) {
		if c.complete && !c.ending && c.handle == handle && kept < keep {
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
