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

// Claims returns the volumes of bound claims.
type Claims interface {
	state.Claims
	// NodeExpanded reports the size of a volume's filesystem or device on the machine.
	NodeExpanded(volume string, size resource.Quantity)
}

// syncPeriod is the interval at which the actual state is compared with disk and mount table.
const syncPeriod = time.Minute

// After a pass, the loop pauses for pauseFactor times the duration of the pass, at most maxPause, so
// that one pass handles the results of many operations.
const (
	pauseFactor = 4
	maxPause    = 100 * time.Millisecond
)

// Reconciler mounts and unmounts volumes. Its methods are safe for concurrent use.
type Reconciler struct {
	registry plugins.Registry
	paths    plugins.Paths
	executor *operation.Executor
	events   *event.Recorder
	claims   Claims
	// node returns the machine as a Node. It is called with populating or mu held.
	node func() *corev1.Node

	// changed wakes the loop.
	changed chan struct{}
	// stale is set if the volumes of claims may have changed.
	stale atomic.Bool

	// populating is held during calls of Claims, and locked before mu. Claims must not call InUse
	// with a lock held that Claims.Volume needs.
	populating sync.Mutex
	objects    *manifest.Objects

	mu      sync.Mutex
	desired *state.DesiredStateOfWorld
	actual  *state.ActualStateOfWorld
	// round counts the changes after which volumes with VolumePlugin.Remounts are set up again.
	round uint64
	// syncAt is the time of the next sync, next that of the next pass.
	syncAt, next time.Time
	// machine is the result of node in this pass.
	machine *corev1.Node
	// removing has the subPath directories of volumes that are being unmounted.
	removing map[string]bool
	// drivers holds the devices that count for the volume limit of each driver.
	drivers map[string]map[*state.DeviceVolume]bool
	// reported holds the errors of desired volumes for which events were recorded, and
	// reportedState their desired state.
	reported      map[volumeName]string
	reportedState *state.DesiredStateOfWorld
}

// New returns a Reconciler whose actual state is reconstructed from disk. It does nothing before
// Run.
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

// nextSync adds jitter, so that many machines do not remount volumes at the same time.
func nextSync() time.Time {
	return time.Now().Add(syncPeriod*9/10 + rand.N(syncPeriod/5))
}

// Update replaces the manifests. InUse, Status and PodReady reflect them when it returns.
func (r *Reconciler) Update(objects *manifest.Objects) {
	r.populating.Lock()
	defer r.populating.Unlock()
	changed := !reflect.DeepEqual(r.objects, objects)
	r.objects = objects
	if changed {
		r.mu.Lock()
		r.round++ // before populate: otherwise new volumes would be set up twice
		r.mu.Unlock()
	}
	r.populate()
	if changed {
		r.Retry()
	}
	r.signal()
}

// Wake reports that the volumes of claims, or their sizes, may have changed.
func (r *Reconciler) Wake() {
	r.stale.Store(true)
	r.signal()
}

// Retry ends all back-offs, for example after a driver was registered.
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

// populate computes the desired state; populating is held.
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

// Run reconciles until ctx ends. Operations may still be pending when it returns (Executor.Wait).
func (r *Reconciler) Run(ctx context.Context) {
	for ctx.Err() == nil {
		start := time.Now()
		if r.stale.Swap(false) {
			r.populating.Lock()
			r.populate()
			r.populating.Unlock()
		}
		next := r.pass(ctx)
		pause(ctx, nil, min(pauseFactor*time.Since(start), maxPause))
		pause(ctx, r.changed, time.Until(next))
	}
}

// pause waits for a change, at most for a time.
func pause(ctx context.Context, changed <-chan struct{}, atMost time.Duration) {
	timer := time.NewTimer(atMost)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-changed:
	case <-timer.C:
	}
}
