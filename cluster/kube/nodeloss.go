package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/volume"
)

// NodeLostKey is the annotation of a PersistentVolume whose release has begun. Its value is the reclaim policy that
// the PersistentVolume had before.
const NodeLostKey = "csi.trivet.dev/node-lost"

// MoveKey is the annotation of a claim whose volume is being moved, and the label of the objects that exist only
// during a move (kubectl trivet move).
const MoveKey = "csi.trivet.dev/move"

// provisionedByKey is the annotation of a PersistentVolume that the provisioner created. Its value is the driver.
const provisionedByKey = "pv.kubernetes.io/provisioned-by"

// nodeLossInterval is the time between two examinations of the nodes.
const nodeLossInterval = 10 * time.Second

// registrationTime is the time after which a new node without the driver is not expected to get it. A longer delay
// replaces it.
const registrationTime = 10 * time.Minute

// settledTime is the age of a Node object after which no replica still releases its volumes, because none has seen the
// node missing since.
const settledTime = time.Minute

// reportInterval is the time after which an event with the same reason is created again. The API server deletes events
// after one hour.
const reportInterval = 30 * time.Minute

// LostState is the state of a volume whose node does not exist.
type LostState string

// The states of volumes whose node does not exist.
const (
	// LostKept: the claim is not deleted, because neither the volume nor its class has onNodeLoss: release.
	LostKept LostState = "kept"
	// LostWaiting: the delay is not over, another node is first, or finalizers of the PersistentVolume remain.
	LostWaiting LostState = "waiting"
	// LostStopped: the delay is over, and the claim is not deleted because its deletion may be wrong.
	LostStopped LostState = "stopped"
)

// LostStates are all states.
var LostStates = []LostState{LostKept, LostWaiting, LostStopped}

// NodeLossOptions configure a NodeLoss.
type NodeLossOptions struct {
	Driver string
	// Delay is the time between the first observation that a node does not exist and the release of its volumes.
	Delay time.Duration
	// CheckLost returns nil if no node of the cluster can have the pool of a volume. nodes are the names of the nodes that
	// it must know.
	CheckLost func(ctx context.Context, volumeID string, nodes []string) error
}

// NodeLoss releases the claims of volumes whose Node object does not exist any more, if their class has
// onNodeLoss: release. It sets the reclaim policy of the PersistentVolume to Retain, and deletes the claim and the
// PersistentVolume. It removes no finalizers and no data.
//
// Several replicas may run it: each delay counts from the first observation of that process, and each deletion has
// the UID and the version of the object as preconditions. Objects are read from the API server again before the first
// change.
type NodeLoss struct {
	NodeLossOptions
	client  *Client
	nodes   watched[nodeView]
	volumes watched[localVolume]
	missing map[string]time.Time // the first observation of each missing node
	// reported contains the last event about each volume that is not released, by the UID of the PersistentVolume.
	reported map[string]report

	mu       sync.Mutex
	counts   map[LostState]int
	released int
}

// report is an event about a volume that is not released.
type report struct {
	reason string
	at     time.Time
}

// NewNodeLoss returns a NodeLoss. Run starts it.
func NewNodeLoss(o NodeLossOptions) *NodeLoss {
	return &NodeLoss{NodeLossOptions: o, missing: map[string]time.Time{}, reported: map[string]report{}}
}

// Run releases claims until ctx ends.
func (l *NodeLoss) Run(ctx context.Context, connect func() (*Client, error)) {
	c := dial(ctx, connect)
	if c == nil {
		return
	}
	l.client = c
	changed := newSignal() // not received: examinations are periodic, because Node objects change often
	l.nodes = watchObjects(ctx, "nodes", c.metadata.Resource(nodes), metav1.ListOptions{}, viewNode, changed)
	l.volumes = watchObjects(ctx, "persistentvolumes", c.watches.Resource(persistentVolumes), metav1.ListOptions{}, l.viewVolume, changed)
	reconcileLoop(ctx, newSignal(), backoff, "Releasing the claims of lost nodes failed; retrying", l.reconcile)
}

// Counts returns the number of volumes whose node does not exist, by state, and the number of volumes that this process
// has released.
func (l *NodeLoss) Counts() (byState map[LostState]int, released int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.counts, l.released
}

// localVolume contains the fields in use of the PersistentVolume of a node-local volume of the driver. It is empty for
// other PersistentVolumes.
type localVolume struct {
	name    string
	uid     string
	node    string // the topology value of the only node that can reach the volume
	setting string // the value of onNodeLoss in its attributes
	class   string
	created string
	// provisioned is true if the provisioner of the driver created the PersistentVolume.
	provisioned bool
	bound       bool
	// begun is true if the release has begun. deleted is true if the PersistentVolume is being deleted.
	begun, deleted bool
}

// settingWith returns the value of onNodeLoss of a volume whose class is given. If its attributes do not contain it, that
// of the class applies if the volume can have been created with that class.
func (v localVolume) settingWith(class StorageClass) string {
	if v.setting != "" || !v.provisioned || v.created <= class.Metadata.CreationTimestamp {
		return v.setting
	}
	return class.Parameters[volume.ParamOnNodeLoss]
}

func (l *NodeLoss) viewVolume(o runtime.Object) (localVolume, error) {
	v, err := viewObject[PersistentVolume](o)
	if err != nil {
		return localVolume{}, err
	}
	return l.local(v), nil
}

// local returns the fields in use of a PersistentVolume. It returns an empty value unless the PersistentVolume is a
// volume of the driver in a pool of a node, and its node affinity selects exactly that node.
func (l *NodeLoss) local(v PersistentVolume) localVolume {
	id, err := volume.ParseID(v.Spec.CSI.VolumeHandle)
	node := v.OnlyNode(translate.TopologyKey)
	if v.Spec.CSI.Driver != l.Driver || err != nil || id.Shared() || node == "" || len(v.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions) != 1 {
		return localVolume{}
	}
	_, begun := v.Metadata.Annotations[NodeLostKey]
	return localVolume{
		name: v.Metadata.Name, uid: v.Metadata.UID, node: node, setting: v.Spec.CSI.VolumeAttributes[volume.ParamOnNodeLoss],
		class: v.Spec.StorageClassName, created: v.Metadata.CreationTimestamp,
		provisioned: v.Metadata.Annotations[provisionedByKey] == l.Driver, bound: v.Status.Phase == "Bound",
		begun: begun, deleted: v.Metadata.DeletionTimestamp != "",
	}
}

// lostNode is a node that has volumes and does not exist.
type lostNode struct {
	name    string // its topology value
	since   time.Time
	volumes []localVolume // those that are released, sorted by name
}

// reconcile restores the volumes of nodes that exist again, counts those of missing nodes, and releases those of one
// node. It returns the time until the next examination.
func (l *NodeLoss) reconcile(ctx context.Context) (time.Duration, error) {
	if !l.nodes.synced() || !l.volumes.synced() {
		return time.Second, nil
	}
	exists := existing(l.nodes.all())
	restoreErr := l.restore(ctx, exists)
	lost, kept, err := l.lostNodes(ctx, exists)
	if err != nil {
		return 0, errors.Join(restoreErr, err)
	}
	counts := map[LostState]int{LostKept: kept}
	var due []lostNode
	for _, n := range lost {
		if time.Since(n.since) >= l.Delay {
			due = append(due, n)
			continue
		}
		counts[LostWaiting] += len(n.volumes)
	}
	err = l.releaseFirst(ctx, due, counts)
	l.mu.Lock()
	l.counts = counts
	l.mu.Unlock()
	return nodeLossInterval, errors.Join(restoreErr, err)
}

// lostNodes updates l.missing, and returns the missing nodes with volumes that are released, in the order in which they
// were first missing. kept is the number of bound volumes of missing nodes that are not released.
func (l *NodeLoss) lostNodes(ctx context.Context, exists map[string]bool) (lost []lostNode, kept int, err error) {
	byNode, unset := map[string][]localVolume{}, false
	for _, v := range l.volumes.all() {
		if v.node != "" && !exists[v.node] {
			byNode[v.node] = append(byNode[v.node], v)
			unset = unset || v.setting == ""
		}
	}
	maps.DeleteFunc(l.missing, func(node string, _ time.Time) bool { return byNode[node] == nil })
	classes := map[string]StorageClass{}
	if unset {
		if classes, err = l.classes(ctx); err != nil {
			return nil, 0, err
		}
	}
	for node, all := range byNode {
		if _, known := l.missing[node]; !known {
			l.missing[node] = time.Now()
			klog.FromContext(ctx).Info("The Node object of volumes does not exist", "node", node, "volumes", len(all))
		}
		var released []localVolume
		for _, v := range all {
			switch {
			case v.settingWith(classes[v.class]) == volume.NodeLossRelease:
				released = append(released, v)
			case v.bound:
				kept++
			}
		}
		if len(released) > 0 {
			slices.SortFunc(released, func(a, b localVolume) int { return cmp.Compare(a.name, b.name) })
			lost = append(lost, lostNode{node, l.missing[node], released})
		}
	}
	slices.SortFunc(lost, func(a, b lostNode) int { return cmp.Or(a.since.Compare(b.since), cmp.Compare(a.name, b.name)) })
	return lost, kept, nil
}

// existing returns the topology values of existing nodes: those of their names and those of their labels.
func existing(all []nodeView) map[string]bool {
	values := map[string]bool{}
	for _, n := range all {
		values[volume.TopologyValue(n.name)] = true
		if n.registered {
			values[n.value] = true
		}
	}
	return values
}

// classes returns the driver's StorageClasses, by name.
func (l *NodeLoss) classes(ctx context.Context) (map[string]StorageClass, error) {
	all, err := l.client.StorageClasses(ctx, l.Driver)
	if err != nil {
		return nil, fmt.Errorf("listing storageclasses: %w", err)
	}
	byName := map[string]StorageClass{}
	for _, c := range all {
		byName[c.Metadata.Name] = c
	}
	return byName, nil
}

// restore undoes the change of PersistentVolumes that were not deleted before their node existed again.
func (l *NodeLoss) restore(ctx context.Context, exists map[string]bool) error {
	var begun []localVolume
	for _, v := range l.volumes.all() {
		if v.begun && !v.deleted && exists[v.node] {
			begun = append(begun, v)
		}
	}
	if len(begun) == 0 {
		return nil
	}
	all, err := l.listNodes(ctx)
	if err != nil {
		return err
	}
	settled := existing(slices.DeleteFunc(all, func(n nodeView) bool { return time.Since(n.created) < settledTime }))
	var problems []error
	for _, v := range begun {
		if !settled[v.node] {
			continue
		}
		if err := l.restorePolicy(ctx, v.name); err != nil && !lostRace(err) {
			problems = append(problems, fmt.Errorf("persistentvolumes/%s: %w", v.name, err))
		}
	}
	return errors.Join(problems...)
}

// restorePolicy removes the annotation of a PersistentVolume, and gives it its policy again. If its claim is deleted, the
// PersistentVolume keeps the policy Retain, because with Delete, the provisioner would delete the data.
func (l *NodeLoss) restorePolicy(ctx context.Context, name string) error {
	v, err := get[PersistentVolume](ctx, l.client.api.Resource(persistentVolumes), name)
	if err != nil {
		return absent(err)
	}
	policy, begun := v.Metadata.Annotations[NodeLostKey]
	if !begun || v.Metadata.DeletionTimestamp != "" {
		return nil
	}
	fields := map[string]any{"metadata": map[string]any{"annotations": map[string]any{NodeLostKey: nil}}}
	if policy == "Delete" {
		claim, bound, err := l.claimOf(ctx, v)
		if err != nil || !bound || claim.Metadata.DeletionTimestamp != "" || moving(claim) {
			return err
		}
		fields["spec"] = map[string]any{"persistentVolumeReclaimPolicy": policy}
	}
	_, err = patch[PersistentVolume](ctx, l.client.api.Resource(persistentVolumes), v.Metadata, fields)
	return absent(err)
}

// lossRound is the state of one examination.
type lossRound struct {
	nodes []nodeView // read from the API server before the first pool is checked
	// checked contains the error of CheckLost for each pool, or "".
	checked map[lossPool]string
}

// lossPool identifies a pool.
type lossPool struct{ name, uuid string }

// releaseFirst releases the volumes of the first node of which any can be released now. The others follow in the next
// examinations, which repeat all checks.
func (l *NodeLoss) releaseFirst(ctx context.Context, due []lostNode, counts map[LostState]int) error {
	l.forgetReports(due)
	round := &lossRound{checked: map[lossPool]string{}}
	var problems []error
	changed := false
	for _, n := range due {
		if changed {
			counts[LostWaiting] += len(n.volumes)
			continue
		}
		for _, v := range n.volumes {
			released, err := l.release(ctx, round, v)
			changed = changed || released && err == nil
			if err == nil || lostRace(err) {
				counts[LostWaiting]++
				continue
			}
			problems = append(problems, fmt.Errorf("persistentvolumes/%s: %w", v.name, err))
			if v.bound {
				counts[LostStopped]++
			} else {
				counts[LostWaiting]++ // no pod waits for it
			}
		}
	}
	return errors.Join(problems...)
}

// forgetReports removes the reports about volumes that are not due any more.
func (l *NodeLoss) forgetReports(due []lostNode) {
	uids := map[string]bool{}
	for _, n := range due {
		for _, v := range n.volumes {
			uids[v.uid] = true
		}
	}
	maps.DeleteFunc(l.reported, func(uid string, _ report) bool { return !uids[uid] })
}

// release releases a volume. released is true if it has begun to change objects. All objects are read from the API server
// before.
func (l *NodeLoss) release(ctx context.Context, round *lossRound, known localVolume) (released bool, err error) {
	if known.deleted { // the controllers that have added its finalizers remove them
		return false, nil
	}
	v, err := get[PersistentVolume](ctx, l.client.api.Resource(persistentVolumes), known.name)
	if err != nil {
		return false, absent(err)
	}
	claim, bound, err := l.claimOf(ctx, v)
	if err != nil || l.local(v).node != known.node || !unreleased(v, bound) {
		return false, err
	}
	if setting, err := l.setting(ctx, v); err != nil || setting != volume.NodeLossRelease {
		return false, err
	}
	reason, err := l.reasonToStop(ctx, round, known.node, v, claim)
	if err != nil {
		return false, err
	}
	if reason != "" {
		l.reportStop(ctx, v, claim, bound, reason)
		return false, errors.New(reason)
	}
	return true, l.remove(ctx, known.node, v, claim, bound)
}

// claimOf returns the claim to which a PersistentVolume is bound. bound is false if it does not exist any more.
func (l *NodeLoss) claimOf(ctx context.Context, v PersistentVolume) (claim Claim, bound bool, err error) {
	ref := v.Spec.ClaimRef
	if ref.UID == "" {
		return Claim{}, false, nil
	}
	claim, err = l.client.Claim(ctx, ref.Namespace, ref.Name)
	if err != nil || claim.Metadata.UID != ref.UID {
		return Claim{}, false, absent(err)
	}
	return claim, true, nil
}

// unreleased reports whether a PersistentVolume still binds a claim to its node, or would be deleted by a driver that
// cannot do this. A PersistentVolume that an administrator retains after its claim was deleted does neither.
func unreleased(v PersistentVolume, bound bool) bool {
	begun := v.Metadata.Annotations[NodeLostKey] == "Delete"
	return v.Metadata.DeletionTimestamp == "" && v.Spec.ClaimRef.UID != "" && (bound || begun || v.Spec.ReclaimPolicy == "Delete")
}

// setting returns the value of onNodeLoss: that in the attributes of the volume, or otherwise that of the class, which may
// be deleted.
func (l *NodeLoss) setting(ctx context.Context, v PersistentVolume) (string, error) {
	known := l.local(v)
	if known.setting != "" || known.class == "" {
		return known.setting, nil
	}
	class, err := l.client.StorageClass(ctx, known.class)
	if err != nil || class.Provisioner != l.Driver {
		return "", absent(err)
	}
	return known.settingWith(class), nil
}

// moving reports whether the volume of a claim is being moved.
func moving(claim Claim) bool {
	_, annotated := claim.Metadata.Annotations[MoveKey]
	return annotated || claim.Metadata.Labels[MoveKey] != ""
}

// reasonToStop returns why a volume may not be released now, or "" if it may be released. The nodes are read last.
func (l *NodeLoss) reasonToStop(ctx context.Context, round *lossRound, node string, v PersistentVolume, claim Claim) (string, error) {
	if moving(claim) {
		return "its volume is being moved: complete or abort the move (kubectl trivet move)", nil
	}
	if name := claim.Spec.VolumeName; name != "" && name != v.Metadata.Name {
		return fmt.Sprintf("its claim is bound to PersistentVolume %s", name), nil
	}
	if round.nodes == nil {
		all, err := l.listNodes(ctx)
		if err != nil {
			return "", err
		}
		round.nodes = all
	}
	if reason := l.nodesStop(node, round.nodes); reason != "" {
		return reason, nil
	}
	if reason := l.checkPool(ctx, round, v.Spec.CSI.VolumeHandle); reason != "" {
		return reason, nil
	}
	now, err := l.listNodes(ctx)
	if err != nil {
		return "", err
	}
	if reason := l.nodesStop(node, now); reason != "" {
		return reason, nil
	}
	known := registeredNames(round.nodes)
	for _, name := range registeredNames(now) {
		if !slices.Contains(known, name) {
			return fmt.Sprintf("node %q is new, so its pools are not known yet", name), nil
		}
	}
	return "", nil
}

// checkPool returns the error of CheckLost for the pool of a volume, or "". It calls CheckLost once in an examination.
func (l *NodeLoss) checkPool(ctx context.Context, round *lossRound, volumeID string) string {
	id, _ := volume.ParseID(volumeID) // local has checked it
	key := lossPool{id.Pool, id.PoolUUID}
	reason, known := round.checked[key]
	if known {
		return reason
	}
	limited, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if err := l.CheckLost(limited, volumeID, registeredNames(round.nodes)); err != nil {
		reason = err.Error()
	}
	round.checked[key] = reason
	return reason
}

// listNodes reads the nodes from the API server.
func (l *NodeLoss) listNodes(ctx context.Context) (all []nodeView, err error) {
	limited, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	list, err := l.client.metadata.Resource(nodes).List(limited, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("listing nodes: %w", err)
	}
	for i := range list.Items {
		n, _ := viewNode(&list.Items[i]) // never fails
		all = append(all, n)
	}
	return all, nil
}

// registeredNames returns the names of the nodes with the driver.
func registeredNames(all []nodeView) (names []string) {
	for _, n := range all {
		if n.registered {
			names = append(names, n.name)
		}
	}
	return names
}

// nodesStop returns why the existing nodes forbid the release of the volumes of a node, or "". If many nodes are lost, an
// error of the cluster is more likely, such as Node objects that were deleted by mistake, or a restored backup of etcd.
func (l *NodeLoss) nodesStop(node string, all []nodeView) string {
	exists, registered, lost := existing(all), len(registeredNames(all)), 0
	for name := range l.missing {
		if !exists[name] {
			lost++
		}
	}
	most := max(1, registered/5)
	switch {
	case exists[node]:
		delete(l.missing, node) // the delay begins again
		return fmt.Sprintf("node %q exists again", node)
	case registered == 0:
		return fmt.Sprintf("no Node object has the label %s, so the Node objects may have been deleted by mistake", translate.TopologyKey)
	case lost > most:
		return fmt.Sprintf("%d nodes that have volumes do not exist. At most %d may be lost while %d nodes have the label %s, because Node objects may have been deleted by mistake: if the nodes are lost, delete their PersistentVolumes (docs/operations/nodes.md, \"A node is gone\")", lost, most, registered, translate.TopologyKey)
	}
	for _, n := range all {
		if !n.registered && time.Since(n.created) < max(l.Delay, registrationTime) {
			return fmt.Sprintf("node %q is new and has no driver yet, so the disk may be in that node", n.name)
		}
	}
	return ""
}

// remove deletes the claim and the PersistentVolume. Each step can be repeated.
func (l *NodeLoss) remove(ctx context.Context, node string, v PersistentVolume, claim Claim, bound bool) error {
	message := fmt.Sprintf("Node %q does not exist, and the class has onNodeLoss: release. The claim and PersistentVolume %s are deleted. If the node returns, its disk still has volume %s (kubectl trivet orphans).", node, v.Metadata.Name, v.Spec.CSI.VolumeHandle)
	if _, begun := v.Metadata.Annotations[NodeLostKey]; !begun || v.Spec.ReclaimPolicy != "Retain" {
		var err error
		v, err = patch[PersistentVolume](ctx, l.client.api.Resource(persistentVolumes), v.Metadata, map[string]any{
			"metadata": map[string]any{"annotations": map[string]any{NodeLostKey: v.Spec.ReclaimPolicy}},
			"spec":     map[string]any{"persistentVolumeReclaimPolicy": "Retain"},
		})
		if err != nil {
			return err
		}
		l.client.warn(ctx, l.Driver, "trivet-node-loss", "PersistentVolume", v.Metadata, "NodeLost", message)
	}
	if bound && claim.Metadata.DeletionTimestamp == "" {
		err := l.client.api.Resource(claims).Namespace(claim.Metadata.Namespace).Delete(ctx, claim.Metadata.Name, unchanged(claim.Metadata))
		if err := absent(err); err != nil {
			return fmt.Errorf("deleting claim %s/%s: %w", claim.Metadata.Namespace, claim.Metadata.Name, err)
		}
		l.client.warn(ctx, l.Driver, "trivet-node-loss", "PersistentVolumeClaim", claim.Metadata, "NodeLost", message)
	}
	err := l.client.api.Resource(persistentVolumes).Delete(ctx, v.Metadata.Name, unchanged(v.Metadata))
	if err != nil {
		return absent(err)
	}
	klog.FromContext(ctx).Info("Released a volume of a lost node", "node", node, "volume", v.Spec.CSI.VolumeHandle, "persistentVolume", v.Metadata.Name, "claim", v.Spec.ClaimRef.Namespace+"/"+v.Spec.ClaimRef.Name)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.released++
	return nil
}

// unchanged are the options that delete only an object that has not changed since it was read.
func unchanged(m Meta) metav1.DeleteOptions {
	uid := types.UID(m.UID)
	return metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid, ResourceVersion: &m.ResourceVersion}}
}

// reportStop creates an event that says why a volume is not released, unless one with the same reason was created recently.
func (l *NodeLoss) reportStop(ctx context.Context, v PersistentVolume, claim Claim, bound bool, reason string) {
	if last := l.reported[v.Metadata.UID]; last.reason == reason && time.Since(last.at) < reportInterval {
		return
	}
	l.reported[v.Metadata.UID] = report{reason, time.Now()}
	kind, of := "PersistentVolume", v.Metadata
	if bound {
		kind, of = "PersistentVolumeClaim", claim.Metadata
	}
	l.client.warn(ctx, l.Driver, "trivet-node-loss", kind, of, "NodeLossStopped", "The node of the volume does not exist, but the claim is not deleted: "+reason)
}
