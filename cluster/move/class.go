package move

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/cluster/kubectl"
	"github.com/trivet-csi/trivet/cluster/status"
	"github.com/trivet-csi/trivet/volume"
)

// jobsTimeout limits the wait of the controller for the end of a copy that is being made.
const jobsTimeout = 30 * time.Second

// ClassProtector creates and ends the protections of claims by their StorageClasses. The controller's driver uses it.
type ClassProtector struct {
	Cluster *kubectl.Cluster
	// PodUID is the UID of the driver's own pod, whose image the CronJobs run.
	PodUID string
	// Transfers reports whether volumes of a kind can be sent to another node.
	Transfers func(kind string) bool
}

// Protect protects claims, unless they are protected as their class requires, and returns an error for each claim. report returns the
// report of the drivers. It is called only if a node for copies must be chosen.
func (c ClassProtector) Protect(ctx context.Context, report func() status.Report, all []kube.ProtectedClaim) []error {
	errs := make([]error, len(all))
	image, err := driverImage(ctx, c.Cluster, c.PodUID)
	report = sync.OnceValue(report)
	for i, claim := range all {
		if errs[i] = err; err == nil {
			errs[i] = c.protectOne(ctx, report, claim, image)
		}
	}
	return errs
}

// protectOne protects a claim. A protection of a user is not changed. The node of an existing one stays the same unless it is lost, or
// the volume is on it.
func (c ClassProtector) protectOne(ctx context.Context, report func() status.Report, of kube.ProtectedClaim, image string) error {
	every, err := time.ParseDuration(of.Every)
	if err != nil {
		return fmt.Errorf("parameter %s=%q: %w", volume.ParamProtect, of.Every, err)
	}
	o := ProtectOptions{
		Options: Options{Namespace: of.Namespace, ClaimName: of.Name, Timeout: jobsTimeout, Transfers: c.Transfers, Progress: func(string, ...any) {}},
		Every:   every, Kept: defaultKeep, Class: of.Class,
	}
	existing, err := protectionOf(ctx, c.Cluster, of.UID)
	if err != nil || existing.UID != "" && existing.Class == "" {
		return err
	}
	claim, err := c.Cluster.Claim(ctx, of.Namespace, of.Name)
	switch running := claim.Metadata.Annotations[moveLabel]; {
	case apierrors.IsNotFound(err), err == nil && claim.Metadata.UID != of.UID:
		return nil // it was deleted
	case err != nil:
		return err
	case running != "":
		return fmt.Errorf("the claim is being moved or recovered (%s): it is protected after that", running)
	}
	m, p := &Mover{Options: o.Options, api: c.Cluster, claim: claim}, Plan{}
	if err := cmp.Or(m.checkClaim(), m.readVolume(ctx, &p)); err != nil {
		return err
	}
	usable, err := m.keepsNode(ctx, existing, p.From)
	switch {
	case err != nil:
		return err
	case usable && existing.Every == Period(every) && existing.Class == of.Class && existing.image == image:
		return bind(ctx, c.Cluster, of.Namespace) // an earlier attempt may have failed before that
	case usable:
		o.To, o.Kept, o.SnapshotClass = existing.Node, existing.Keep, existing.snapshotClass
	default:
		r := report()
		if o.SnapshotClass, err = m.chooseNode(ctx, r, p.From, o.Kept); err != nil {
			return err
		}
		o.To = m.To
		i := slices.IndexFunc(r.Volumes, func(v status.Volume) bool { return v.ID == p.Volume.Spec.CSI.VolumeHandle }) // planned before
		reserve(r, o.To, int64(o.Kept+1)*r.Volumes[i].SizeBytes)
	}
	return writeProtection(ctx, c.Cluster, o, of.UID, image)
}

// keepsNode reports whether the copies of an existing protection can stay on their node.
func (m *Mover) keepsNode(ctx context.Context, existing Protection, from string) (bool, error) {
	if existing.UID == "" || existing.Node == from {
		return false, nil
	}
	node, err := m.api.Node(ctx, existing.Node)
	return err == nil && !node.HasTaint(kube.OutOfService), absent(err)
}

// chooseNode sets the node with the most room on which the copies can be kept, and returns the class of their snapshots. The error is
// that of the node with the most room.
func (m *Mover) chooseNode(ctx context.Context, report status.Report, from string, keep int) (snapshotClass string, err error) {
	var first error
	for _, m.To = range destinations(report, from, "") {
		if snapshotClass, err = m.planProtection(ctx, report, keep); err == nil {
			return snapshotClass, nil
		}
		first = cmp.Or(first, err)
	}
	return "", cmp.Or(first, errors.New("no other node has a pool that is open"))
}

// End ends the protections with some CronJobs, except those whose claims exist. Kubernetes deletes the copies, whose owner was the
// claim. The order is the same in all replicas: the one that deletes the last CronJob of a namespace finds no other one.
func (c ClassProtector) End(ctx context.Context, jobs []kube.CronJob) (err error) {
	all, err := protections(ctx, c.Cluster)
	if err != nil {
		return err
	}
	slices.SortFunc(all, func(a, b Protection) int { return cmp.Compare(a.job, b.job) })
	present := slices.Clone(all)
	for _, p := range all {
		if p.Class == "" || !slices.ContainsFunc(jobs, func(j kube.CronJob) bool { return j.Metadata.Name == p.job }) {
			continue
		}
		ended, failed := c.endOne(ctx, present, p)
		if failed != nil {
			err = errors.Join(err, fmt.Errorf("ending the protection of claim %s: %w", p.Claim, failed))
		}
		if ended {
			present = slices.DeleteFunc(present, func(other Protection) bool { return other.job == p.job })
		}
	}
	return err
}

// endOne ends a protection unless its claim exists. present are all protections.
func (c ClassProtector) endOne(ctx context.Context, present []Protection, p Protection) (ended bool, err error) {
	exists, _, err := protectingClaim(ctx, c.Cluster, p)
	if err != nil || exists {
		return false, err
	}
	if err := unbind(ctx, c.Cluster, present, p); err != nil {
		return false, err
	}
	err = absent(c.Cluster.DeleteCronJob(ctx, c.Cluster.Namespace, p.job))
	return err == nil, err
}

// protectingClaim reports whether the claim of a protection exists, and returns its StorageClass.
func protectingClaim(ctx context.Context, cluster *kubectl.Cluster, p Protection) (exists bool, class string, err error) {
	namespace, name, _ := strings.Cut(p.Claim, "/")
	claim, err := cluster.Claim(ctx, namespace, name)
	if err != nil || claim.Metadata.UID != p.UID {
		return false, "", absent(err)
	}
	return true, claim.Spec.StorageClassName, nil
}

// checkStop refuses the end of a protection that the controller would create again.
func checkStop(ctx context.Context, cluster *kubectl.Cluster, p Protection) error {
	if p.Class == "" {
		return nil
	}
	exists, name, err := protectingClaim(ctx, cluster, p)
	if err != nil || !exists {
		return err
	}
	class, err := cluster.StorageClass(ctx, name)
	if err != nil || class.Parameters[volume.ParamProtect] == "" {
		return absent(err)
	}
	return fmt.Errorf("claim %s is protected by StorageClass %q (%s: %s), which would protect it again: delete the class and create it without this parameter first, or change this protection with --on and --every", p.Claim, name, volume.ParamProtect, class.Parameters[volume.ParamProtect])
}
