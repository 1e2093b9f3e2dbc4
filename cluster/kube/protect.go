package kube

import (
	"context"
	"fmt"
	"maps"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/volume"
)

// The names with which a protection (kubectl trivet protect) marks objects.
const (
	// ProtectKey is the label of all objects of a protection. Its value is the UID of the claim.
	ProtectKey = "csi.trivet.dev/protect"
	// CopiesNodeKey is the annotation of the CronJob with the node of the copies.
	CopiesNodeKey = "csi.trivet.dev/copies-on"
	// ByClassKey is the annotation of the CronJob with the StorageClass by which the claim is protected. It is empty for a protection
	// that a user has created, which a class does not change.
	ByClassKey = "csi.trivet.dev/protected-by-class"
)

// OutOfService is the taint with which an administrator declares that a node is off. Kubernetes then deletes its pods and detaches
// their volumes.
const OutOfService = "node.kubernetes.io/out-of-service"

const (
	// protectInterval is the time between two examinations of the claims in memory. Changes of nodes cause no examination, because
	// Node objects change often.
	protectInterval = 10 * time.Second
	// firstRetry is the time after which a protection that has failed is tried again. It doubles up to lastRetry.
	firstRetry, lastRetry = 10 * time.Second, 5 * time.Minute
	// reportedFailure is the number of the failure of which an event is created. Earlier ones may be due to a volume that no report
	// contains yet.
	reportedFailure = 3
	// maxDue limits the claims that are protected between two examinations. After the controller has started, all are due.
	maxDue = 100
)

// ClassProtectionOptions configure a ClassProtection.
type ClassProtectionOptions struct {
	Driver string
	// Namespace is the namespace of the drivers.
	Namespace string
	// Protect creates or changes the protections of claims, unless they are as they must be, and returns an error for each claim.
	Protect func(ctx context.Context, all []ProtectedClaim) []error
	// End ends the protections with some CronJobs whose claims do not exist any more. It verifies that first.
	End func(ctx context.Context, all []CronJob) error
}

// ProtectedClaim is a claim whose class has the parameter protect.
type ProtectedClaim struct {
	Namespace, Name, UID, Class string
	// Every is the value of the parameter.
	Every string
}

// ClassProtection protects the claims whose StorageClass has the parameter protect. Several replicas may run it, because Protect and
// End read all objects from the API server again.
type ClassProtection struct {
	ClassProtectionOptions
	client  *Client
	changed signal
	classes watched[protectingClass]
	jobs    watched[CronJob]
	// claims and nodes are watched from the first time at which a claim may have to be protected, or may be gone.
	claims   watched[claimView]
	nodes    watched[nodeState]
	watching bool
	// attempts are those of each claim, by its UID. A claim that is being moved has none, so that it is examined afterwards.
	attempts map[string]attempt
}

// attempt is the last attempt to protect a claim.
type attempt struct {
	at       time.Time
	failures int // in succession
	reported report
}

// protectingClass contains the fields in use of a StorageClass. every is empty if the class protects no claims.
type protectingClass struct{ name, every string }

// claimView contains the fields in use of a claim.
type claimView struct {
	Namespace, Name, UID, class   string
	bound, moving, ending, copied bool
}

// nodeState contains the fields in use of a Node.
type nodeState struct {
	name string
	off  bool // an administrator has declared that it is off
}

// NewClassProtection returns a ClassProtection. Run starts it.
func NewClassProtection(o ClassProtectionOptions) *ClassProtection {
	return &ClassProtection{ClassProtectionOptions: o, changed: newSignal(), attempts: map[string]attempt{}}
}

// Run protects claims until ctx ends.
func (p *ClassProtection) Run(ctx context.Context, connect func() (*Client, error)) {
	c := dial(ctx, connect)
	if c == nil {
		return
	}
	p.client = c
	p.classes = watchObjects(ctx, "storageclasses", c.watches.Resource(storageClasses), metav1.ListOptions{}, p.viewClass, p.changed)
	p.jobs = watchObjects(ctx, "cronjobs", c.watches.Resource(cronJobs).Namespace(p.Namespace), metav1.ListOptions{LabelSelector: ProtectKey}, viewObject[CronJob], newSignal()) // not received: each run of a CronJob changes it
	reconcileLoop(ctx, p.changed, backoff, "Protecting the claims of classes failed; retrying", p.reconcile)
}

func (p *ClassProtection) viewClass(o runtime.Object) (protectingClass, error) {
	c, err := viewObject[StorageClass](o)
	if c.Provisioner != p.Driver {
		return protectingClass{}, err
	}
	return protectingClass{c.Metadata.Name, c.Parameters[volume.ParamProtect]}, err
}

func viewClaim(o runtime.Object) (claimView, error) {
	c, err := viewObject[Claim](o)
	m := c.Metadata
	return claimView{
		m.Namespace, m.Name, m.UID, c.Spec.StorageClassName,
		c.Status.Phase == "Bound", moving(c), m.DeletionTimestamp != "", m.Labels[ProtectKey] != "",
	}, err
}

func viewState(o runtime.Object) (nodeState, error) {
	n, err := viewObject[Node](o)
	return nodeState{n.Metadata.Name, n.HasTaint(OutOfService)}, err
}

// reconcile protects the claims that are not protected as their class requires, and ends protections of claims that do not exist. It
// calls the API server only for these. It returns the time until the next examination.
func (p *ClassProtection) reconcile(ctx context.Context) (time.Duration, error) {
	if !p.classes.synced() || !p.jobs.synced() {
		return time.Second, nil
	}
	periods := map[string]string{}
	for _, c := range p.classes.all() {
		if c.every != "" {
			periods[c.name] = c.every
		}
	}
	jobs, byClass := map[string]CronJob{}, false
	for _, j := range p.jobs.all() {
		jobs[j.Metadata.Labels[ProtectKey]] = j
		byClass = byClass || j.Metadata.Annotations[ByClassKey] != ""
	}
	if len(periods) == 0 && !byClass {
		return protectInterval, nil
	}
	if !p.watch(ctx) {
		return time.Second, nil
	}
	usable := map[string]bool{}
	for _, n := range p.nodes.all() {
		usable[n.name] = !n.off
	}
	exist := map[string]bool{}
	var unprotected, due []ProtectedClaim
	for _, c := range p.claims.all() {
		exist[c.UID] = true
		job, found := jobs[c.UID]
		if periods[c.class] == "" || !p.due(c, job, found, usable) {
			continue
		}
		claim := ProtectedClaim{c.Namespace, c.Name, c.UID, c.class, periods[c.class]}
		if _, tried := p.attempts[c.UID]; found || tried {
			due = append(due, claim)
		} else {
			unprotected = append(unprotected, claim)
		}
	}
	maps.DeleteFunc(p.attempts, func(uid string, _ attempt) bool { return !exist[uid] })
	due = append(unprotected, due...)
	p.protect(ctx, due[:min(len(due), maxDue)])
	if err := p.end(ctx, jobs, exist); err != nil {
		return 0, err
	}
	if len(due) > maxDue {
		return 0, nil
	}
	return protectInterval, nil
}

// end ends the protections by classes of claims that do not exist.
func (p *ClassProtection) end(ctx context.Context, jobs map[string]CronJob, exist map[string]bool) error {
	var ended []CronJob
	for uid, job := range jobs {
		if !exist[uid] && job.Metadata.Annotations[ByClassKey] != "" && job.Metadata.DeletionTimestamp == "" {
			ended = append(ended, job)
		}
	}
	if len(ended) == 0 {
		return nil
	}
	return p.End(ctx, ended)
}

// watch watches the claims and the nodes. It returns false until all are read.
func (p *ClassProtection) watch(ctx context.Context) bool {
	if !p.watching {
		p.claims = watchObjects(ctx, "persistentvolumeclaims", p.client.watches.Resource(claims), metav1.ListOptions{}, viewClaim, p.changed)
		p.nodes = watchObjects(ctx, "nodes", p.client.watches.Resource(nodes), metav1.ListOptions{}, viewState, newSignal())
		p.watching = true
	}
	return p.claims.synced() && p.nodes.synced()
}

// due reports whether a claim of a class with the parameter must be examined by Protect: it has no protection, the node of its copies
// is not usable, because it does not exist or is declared to be off, or this process has not examined it since it started or since the claim was moved.
func (p *ClassProtection) due(c claimView, job CronJob, found bool, usable map[string]bool) bool {
	if c.copied || c.ending || !c.bound || found && job.Metadata.Annotations[ByClassKey] == "" {
		return false
	}
	if c.moving {
		delete(p.attempts, c.UID)
		return false
	}
	last, examined := p.attempts[c.UID]
	if !examined {
		return true
	}
	if last.failures > 0 {
		return time.Since(last.at) >= min(firstRetry<<min(last.failures-1, 16), lastRetry)
	}
	// The watch may not have reported the CronJob of a recent attempt yet.
	return time.Since(last.at) >= protectInterval && (!found || !usable[job.Metadata.Annotations[CopiesNodeKey]])
}

// protect protects claims, and creates an event for one that cannot be protected.
func (p *ClassProtection) protect(ctx context.Context, due []ProtectedClaim) {
	if len(due) == 0 {
		return
	}
	for i, err := range p.Protect(ctx, due) {
		last := p.attempts[due[i].UID]
		last.at = time.Now()
		if err == nil {
			last.failures, last.reported = 0, report{}
		} else {
			last.failures++
			p.reportFailure(ctx, due[i], &last, err.Error())
		}
		p.attempts[due[i].UID] = last
	}
}

// reportFailure logs why a claim cannot be protected and creates an event, once for each reason, and at most once in a reportInterval.
func (p *ClassProtection) reportFailure(ctx context.Context, c ProtectedClaim, last *attempt, reason string) {
	if last.failures < reportedFailure || reason == last.reported.reason || time.Since(last.reported.at) < reportInterval {
		return
	}
	last.reported = report{reason, time.Now()}
	message := fmt.Sprintf("StorageClass %s has %s: %s, but the claim cannot be protected: %s", c.Class, volume.ParamProtect, c.Every, reason)
	klog.FromContext(ctx).Info("A claim cannot be protected", "claim", c.Namespace+"/"+c.Name, "class", c.Class, "reason", reason)
	p.client.warn(ctx, p.Driver, "trivet-protection", "PersistentVolumeClaim", Meta{Namespace: c.Namespace, Name: c.Name, UID: c.UID}, "ProtectionFailed", message)
}
