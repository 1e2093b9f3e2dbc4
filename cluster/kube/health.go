package kube

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// The names with which an event about the health of a volume is marked.
const (
	// healthKey is the label with the reason of the condition.
	healthKey = "csi.trivet.dev/health"
	// volumeKey and nodeKey are the annotations with the ID of the volume, and with the node that has found the condition.
	volumeKey = "csi.trivet.dev/volume"
	nodeKey   = "csi.trivet.dev/node"
)

// reasonGone is the reason of the event that a condition is gone.
const reasonGone = "ConditionGone"

const (
	// occurrenceInterval is longer than the time between the rounds of two replicas, and shorter than two rounds of one process. So
	// replicas create an event once, and a condition that occurs again is reported again.
	occurrenceInterval = 45 * time.Second
	// searchInterval is the time after which the claim of a volume is searched for again.
	searchInterval = 10 * time.Minute
	// maxHealthEvents limits the events of a round. The others follow in the next rounds.
	maxHealthEvents = 500
	// maxEventPods limits the pods of a claim that get an event.
	maxEventPods = 20
)

// VolumeCondition is an adverse condition of a volume that a node has found.
type VolumeCondition struct {
	Volume, Node, Reason, Message string
	// Inaccessible means that the node could not examine all of the volume.
	Inaccessible bool
}

// HealthRound contains the results of the last examinations of the nodes.
type HealthRound struct {
	Conditions []VolumeCondition
	// Examined reports whether a node has examined a volume, or would have if the volume was still in use there.
	Examined func(node, volume string) bool
	// Exists reports whether a node belongs to the installation.
	Exists func(node string) bool
}

// HealthEvents creates the events about adverse conditions of volumes on their claims and the pods of these. It repeats an event
// while the condition lasts, and creates another when the condition is gone. The API server has the state of the events, so that
// a restart and several replicas repeat nothing.
type HealthEvents struct {
	driver   string
	client   atomic.Pointer[Client] // nil until Run has connected
	errs     rareErrors
	restored bool
	open     map[conditionKey]*openCondition
}

type conditionKey struct{ volume, reason string }

// openCondition is a condition that was found and is not known to be gone.
type openCondition struct {
	// found is the last report of the condition. current means that it is one of this round.
	found   VolumeCondition
	current bool
	// nodes are those that have found the condition, and have not examined the volume without it since.
	nodes map[string]bool
	// goneOn is the last node that has examined the volume without the condition, after all of nodes have.
	goneOn   string
	claim    Meta      // zero until it is found
	searched time.Time // the time of the last search for the claim
	warned   time.Time // the time of the last event; zero if there is none
}

// NewHealthEvents returns a HealthEvents that creates no events before Run has connected.
func NewHealthEvents(driver string) *HealthEvents {
	return &HealthEvents{driver: driver, open: map[conditionKey]*openCondition{}}
}

// Run connects to the API server.
func (e *HealthEvents) Run(ctx context.Context, connect func() (*Client, error)) {
	if c := dial(ctx, connect); c != nil {
		e.client.Store(c)
	}
}

// Update creates the events that the results of a round require. One goroutine may call it at a time. An error is only logged, and the
// next call tries again.
func (e *HealthEvents) Update(ctx context.Context, r HealthRound) {
	c := e.client.Load()
	if c == nil {
		return
	}
	err := e.restore(ctx, c)
	if err == nil {
		e.observe(r)
		err = e.write(ctx, c)
	}
	if err != nil && ctx.Err() == nil {
		e.errs.log(ctx, err, "Recording events about the health of volumes failed; retrying")
	}
}

// restore reads the conditions of which an earlier process has created events.
func (e *HealthEvents) restore(ctx context.Context, c *Client) error {
	if e.restored {
		return nil
	}
	all, err := list[event](ctx, c.api.Resource(events), healthKey)
	if err != nil {
		return fmt.Errorf("listing the events: %w", err)
	}
	ended := map[conditionKey]time.Time{}
	for _, ev := range all {
		m, key := ev.Metadata, conditionKey{ev.Metadata.Annotations[volumeKey], ev.Metadata.Labels[healthKey]}
		switch {
		case ev.Source.Component != e.driver || ev.Involved.Kind != "PersistentVolumeClaim":
		case ev.Type == "Normal":
			ended[key] = ev.last()
		default:
			node := m.Annotations[nodeKey]
			e.open[key] = &openCondition{
				found: VolumeCondition{Volume: key.volume, Reason: key.reason, Node: node}, nodes: map[string]bool{node: true},
				claim: Meta{Namespace: ev.Involved.Namespace, Name: ev.Involved.Name, UID: ev.Involved.UID}, warned: ev.last(),
			}
		}
	}
	maps.DeleteFunc(e.open, func(key conditionKey, o *openCondition) bool { return !ended[key].Before(o.warned) })
	e.restored = true
	return nil
}

// observe updates the open conditions.
func (e *HealthEvents) observe(r HealthRound) {
	now := map[conditionKey][]VolumeCondition{}
	inaccessible := map[[2]string]bool{} // by node and volume
	for _, found := range r.Conditions {
		key := conditionKey{found.Volume, found.Reason}
		now[key] = append(now[key], found)
		inaccessible[[2]string{found.Node, found.Volume}] = inaccessible[[2]string{found.Node, found.Volume}] || found.Inaccessible
		if e.open[key] == nil {
			e.open[key] = &openCondition{nodes: map[string]bool{}}
		}
	}
	for key, o := range e.open {
		o.current = false
		for node := range o.nodes {
			switch {
			case !r.Exists(node):
				delete(o.nodes, node)
			case r.Examined(node, key.volume) && !inaccessible[[2]string{node, key.volume}]:
				delete(o.nodes, node)
				o.goneOn = node
			}
		}
		for _, found := range now[key] {
			o.nodes[found.Node], o.found, o.current, o.goneOn = true, found, true, ""
		}
		if len(o.nodes) == 0 && o.goneOn == "" || !o.current && o.warned.IsZero() {
			delete(e.open, key) // it is not known whether it is gone, or no event was created
		}
	}
}

// write creates and repeats events.
func (e *HealthEvents) write(ctx context.Context, c *Client) error {
	w := healthWriter{
		client: c, driver: e.driver, left: maxHealthEvents,
		claims: sync.OnceValues(func() (map[string]Meta, error) { return c.boundClaims(ctx, e.driver) }), pods: map[string][]Pod{},
	}
	var errs error
	for _, key := range e.oldestFirst() {
		o := e.open[key]
		gone := len(o.nodes) == 0
		if w.left <= 0 || !gone && (!o.current || time.Since(o.warned) < reportInterval) {
			continue
		}
		found, err := w.findClaim(ctx, o, gone)
		if err == nil && found {
			err = w.record(ctx, o, gone)
		}
		switch {
		case Unanswered(err):
			return err
		case err != nil:
			errs = cmp.Or(errs, err)
		case gone:
			delete(e.open, key)
		case found:
			o.warned = time.Now()
		}
	}
	return errs
}

// oldestFirst returns the open conditions, those first whose last event is the oldest, so that each gets its turn.
func (e *HealthEvents) oldestFirst() []conditionKey {
	return slices.SortedFunc(maps.Keys(e.open), func(a, b conditionKey) int {
		return cmp.Or(e.open[a].warned.Compare(e.open[b].warned), strings.Compare(a.volume, b.volume), strings.Compare(a.reason, b.reason))
	})
}

// healthWriter creates the events of a round.
type healthWriter struct {
	client *Client
	driver string
	left   int // the events that may still be created
	// claims returns the claims of all volumes, by the ID of the volume.
	claims func() (map[string]Meta, error)
	pods   map[string][]Pod // by namespace
}

// boundClaims returns the claims of the bound volumes of a driver, by the ID of the volume.
func (c *Client) boundClaims(ctx context.Context, driver string) (map[string]Meta, error) {
	all, err := c.PersistentVolumes(ctx, driver)
	claims := map[string]Meta{}
	for _, v := range all {
		if ref := v.Spec.ClaimRef; v.Status.Phase == "Bound" {
			claims[v.Spec.CSI.VolumeHandle] = Meta{Namespace: ref.Namespace, Name: ref.Name, UID: ref.UID}
		}
	}
	return claims, err
}

// findClaim sets the claim of a condition, and reports whether there is one. If the condition is gone, that is the claim which got
// the event about it.
func (w *healthWriter) findClaim(ctx context.Context, o *openCondition, gone bool) (bool, error) {
	if o.claim.UID != "" {
		claim, err := w.client.Claim(ctx, o.claim.Namespace, o.claim.Name)
		if absent(err) != nil || err == nil && claim.Metadata.UID == o.claim.UID {
			return err == nil, err
		}
		o.claim = Meta{} // the volume may have another claim
	}
	if gone || time.Since(o.searched) < searchInterval {
		return false, nil
	}
	claims, err := w.claims()
	if err != nil {
		return false, err
	}
	claim, found := claims[o.found.Volume]
	o.claim, o.searched = claim, time.Now()
	return found, nil
}

// record creates or repeats the event about a condition, or the event that it is gone, on the claim and its pods.
func (w *healthWriter) record(ctx context.Context, o *openCondition, gone bool) error {
	interval := occurrenceInterval
	if !gone && !o.warned.IsZero() {
		interval = reportInterval
	}
	if err := w.notify(ctx, "PersistentVolumeClaim", o.claim, o, gone, interval); err != nil {
		return err
	}
	for _, p := range w.users(ctx, o, gone) {
		if err := w.notify(ctx, "Pod", p.Metadata, o, gone, interval); err != nil {
			return err
		}
	}
	return nil
}

// notify creates or repeats an event on one object.
func (w *healthWriter) notify(ctx context.Context, kind string, of Meta, o *openCondition, gone bool, interval time.Duration) error {
	w.left--
	f := o.found
	n := notice{
		name: eventName("trivet-health", of.UID, f.Volume, f.Reason), kind: kind, of: of,
		warning: true, reason: f.Reason, message: fmt.Sprintf("node %q: %s", f.Node, f.Message),
		labels: map[string]any{healthKey: f.Reason}, annotations: map[string]any{volumeKey: f.Volume, nodeKey: f.Node},
	}
	if gone {
		n.name, n.warning, n.reason = eventName("trivet-health", of.UID, f.Volume, f.Reason, reasonGone), false, reasonGone
		n.message = fmt.Sprintf("%s is gone: node %q has examined volume %s and does not find it any more", f.Reason, o.goneOn, f.Volume)
	}
	err := w.client.recordEvent(ctx, w.driver, n, interval)
	if apierrors.HasStatusCause(err, namespaceTerminating) || apierrors.IsNotFound(err) { // the claim is being deleted with its namespace
		return nil
	}
	return err
}

// namespaceTerminating is the cause with which the API server refuses new objects in a namespace that is being deleted.
const namespaceTerminating = "NamespaceTerminating"

// users returns the pods that use the claim on the nodes with the condition. It returns none if the driver must not list pods.
func (w *healthWriter) users(ctx context.Context, o *openCondition, gone bool) (users []Pod) {
	pods, read := w.pods[o.claim.Namespace]
	if !read {
		pods, _ = w.client.Pods(ctx, o.claim.Namespace, "")
		w.pods[o.claim.Namespace] = pods
	}
	for _, p := range pods {
		if !p.Completed() && (o.nodes[p.Spec.NodeName] || gone && p.Spec.NodeName == o.goneOn) && slices.Contains(p.Claims(), o.claim.Name) && len(users) < maxEventPods {
			users = append(users, p)
		}
	}
	return users
}
