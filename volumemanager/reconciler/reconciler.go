package reconciler

import (
	"context"
	"math/rand/v2"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/trivet-csi/trivet/volumemanager/event"
	"github.com/trivet-csi/trivet/volumemanager/manifest"
	"github.com/trivet-csi/trivet/volumemanager/operation"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/state"
)

// Claims knows which volumes claims are bound to, and is told when the machine has
// followed the growth of one.
type Claims interface {
	state.Claims
	NodeExpanded(volume string, size resource.Quantity)
}

// syncPeriod is how often what is there is compared with disk and mount table.
const syncPeriod = time.Minute

// rest is how much longer than a pass the pause after it is, up to longestRest: with many
// volumes, passes see what many operations have done. A pass may also be long for a machine
// that is busy, or a slow disk.
const (
	rest        = 4
	longestRest = 100 * time.Millisecond
)

// Reconciler brings volumes up and takes them down. Its methods are safe for concurrent
// use.
type Reconciler struct {
	registry plugins.Registry
	paths    plugins.Paths
	executor *operation.Executor
	events   *event.Recorder
	claims   Claims
	// node is what a cluster would have of the machine. It is asked under populating and
	// under mu.
	node func() *corev1.Node

	// changed wakes the loop.
	changed chan struct{}
	// stale: what claims are bound to may have changed.
	stale atomic.Bool

	// populating is held while claims are asked, and taken before mu. Claims may hold
	// nothing that their Volume needs while they wait for InUse.
	populating sync.Mutex
	objects    *manifest.Objects

	mu      sync.Mutex
	desired *state.DesiredStateOfWorld
	actual  *state.ActualStateOfWorld
	// round counts what may have changed the content of volumes (VolumePlugin.Remounts).
	round uint64
	// syncAt is when the next comparison is due, next when anything is.
	syncAt, next time.Time
	// machine is what node says in this pass.
	machine *corev1.Node
	// going are the directories of subPaths of volumes that are being taken down.
	going map[string]bool
	// drivers has the volumes that count for the limits of drivers.
	drivers map[string]map[*state.DeviceVolume]bool
	// announced are the errors of desired volumes that were told, told in which state.
	announced map[outer]string
	told      *state.DesiredStateOfWorld
}

// New makes a Reconciler that knows what is on the disk. Nothing happens before Run.
func New(ctx context.Context, registry plugins.Registry, paths plugins.Paths, executor *operation.Executor, events *event.Recorder, claims Claims, node func() *corev1.Node) *Reconciler {
	r := &Reconciler{
		registry: registry,
		paths:    paths,
		executor: executor,
		events:   events,
		claims:   claims,
		node:     node,
		changed:  make(chan struct{}, 1),
		desired:  &state.DesiredStateOfWorld{},
		actual:   state.NewActual(),
	}
	r.reconstruct(ctx)
	r.syncAt = nextSync()
	return r
}

// nextSync has some jitter: what remounts is not to come all at once on many machines.
func nextSync() time.Time {
	return time.Now().Add(syncPeriod*9/10 + rand.N(syncPeriod/5))
}

// Update takes new manifests. When it returns, InUse, Status and PodReady know them.
func (r *Reconciler) Update(objects *manifest.Objects) {
	r.populating.Lock()
	defer r.populating.Unlock()
	changed := !reflect.DeepEqual(r.objects, objects)
	r.objects = objects
	if changed {
		r.mu.Lock()
		r.round++ // before anything new is wanted: it would be set up twice
		r.mu.Unlock()
	}
	r.populate()
	if changed {
		r.Retry()
	}
	r.signal()
}

// Wake tells that what claims are bound to may have changed, or how large it is.
func (r *Reconciler) Wake() {
	r.stale.Store(true)
	r.signal()
}

// Retry makes what has failed be tried again at once: a driver has come, say.
func (r *Reconciler) Retry() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id := range r.actual.Mounts {
		r.executor.Forget(id.String())
	}
	for name := range r.actual.Devices {
		r.executor.Forget(name)
	}
	r.signal()
}

// populate needs populating.
func (r *Reconciler) populate() {
	if r.objects == nil {
		return
	}
	desired := state.Populator{Registry: r.registry, Paths: r.paths, Claims: r.claims, Node: r.node().Name}.Populate(r.objects)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.desired = desired
}

func (r *Reconciler) signal() {
	select {
	case r.changed <- struct{}{}:
	default:
	}
}

// Run works until ctx ends. Operations may still be pending then (Executor.Wait).
func (r *Reconciler) Run(ctx context.Context) {
	for ctx.Err() == nil {
		start := time.Now()
		if r.stale.Swap(false) {
			r.populating.Lock()
			r.populate()
			r.populating.Unlock()
		}
		next := r.pass(ctx)
		pause(ctx, nil, min(rest*time.Since(start), longestRest))
		pause(ctx, r.changed, time.Until(next))
	}
}

// pause waits for a change, and no longer than that.
func pause(ctx context.Context, changed <-chan struct{}, atMost time.Duration) {
	timer := time.NewTimer(atMost)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-changed:
	case <-timer.C:
	}
}
