// Package reconciler mounts and unmounts volumes until their actual state matches the desired one.
// Each pass unmounts volumes that are not desired, then mounts desired volumes, then unmounts and
// detaches devices that no pod uses.
//
// A pass evaluates the whole state and starts operations, one at a time for each volume. It does not
// wait for their end. After a restart the actual state is reconstructed from disk. Each volume that
// is found on disk counts as possibly mounted.
package reconciler

import (
	"context"
	"errors"
	"math/rand/v2"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/event"
	"github.com/trivet-csi/trivet/volumemanager/manifest"
	"github.com/trivet-csi/trivet/volumemanager/operation"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/state"
)

// Claims returns the volumes of bound claims.
type Claims interface {
	state.Claims
	// NodeExpanded is called with the size of a volume's filesystem or device after its expansion.
	NodeExpanded(volume string, size resource.Quantity)
}

// syncPeriod is the interval at which the actual state is compared with the disk and the mount table.
const syncPeriod = time.Minute

// Rest pauses for pauseFactor times the duration of a pass, at most maxPause.
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

	// changed wakes Run.
	changed chan struct{}
	// stale is set if the volumes of claims may have changed since the last call of populate.
	stale atomic.Bool

	// populating is held during calls of Claims.Volume. It is locked before mu. The implementation of
	// Claims must not call InUse while it holds a lock that its method Volume needs.
	populating sync.Mutex
	objects    *manifest.Objects

	mu      sync.Mutex
	desired *state.DesiredStateOfWorld
	actual  *state.ActualStateOfWorld
	// generation is incremented when the volumes whose plugin returns true from Remounts must be set
	// up again.
	generation uint64
	// syncAt is the time of the next sync. next is the time of the next pass.
	syncAt, next time.Time
	// machine is the result of node in this pass.
	machine *corev1.Node
	// removing holds the subPath directories that are removed together with volumes that are being
	// unmounted in this pass.
	removing map[string]bool
	// drivers holds the devices that count towards the volume limit of each driver.
	drivers map[string]map[*state.DeviceVolume]bool
	// reportedState is the desired state that reportErrors evaluated last. reported holds the errors
	// of its volumes.
	reported      map[volumeName]string
	reportedState *state.DesiredStateOfWorld
}

// New returns a Reconciler whose actual state is reconstructed from disk. It does nothing before
// Run.
func New(ctx context.Context, registry plugins.Registry, paths plugins.Paths, executor *operation.Executor, events *event.Recorder, claims Claims, node func() *corev1.Node) *Reconciler {
	r := &Reconciler{
		registry: registry, paths: paths, executor: executor, events: events, claims: claims, node: node,
		changed: make(chan struct{}, 1), desired: &state.DesiredStateOfWorld{}, actual: state.NewActual(),
	}
	r.reconstruct(ctx)
	r.syncAt = nextSync()
	return r
}

// nextSync adds jitter, so that many machines do not remount volumes at the same time.
func nextSync() time.Time {
	return time.Now().Add(syncPeriod*9/10 + rand.N(syncPeriod/5))
}

// Update replaces the manifests. When it returns, InUse, Status and PodReady reflect the new manifests.
func (r *Reconciler) Update(objects *manifest.Objects) {
	r.populating.Lock()
	defer r.populating.Unlock()
	changed := !reflect.DeepEqual(r.objects, objects)
	r.objects = objects
	if changed {
		r.mu.Lock()
		r.generation++ // before populate, because otherwise new volumes would be set up twice
		r.mu.Unlock()
	}
	r.populate()
	if changed {
		r.Retry()
	}
	r.signal()
}

// Wake starts a pass. It must be called when the volumes of claims, or their sizes, may have changed.
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

// populate computes the desired state. The caller holds populating.
func (r *Reconciler) populate() {
	if r.objects == nil {
		return
	}
	desired := state.Populator{Registry: r.registry, Paths: r.paths, Claims: r.claims, Node: r.node().Name}.Populate(r.objects)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.desired = desired
}

// signal wakes Run.
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
		Rest(ctx, start)
		pause(ctx, r.changed, time.Until(next))
	}
}

// Rest pauses a loop after a pass that began at start, so that the next pass handles the results of
// many operations.
func Rest(ctx context.Context, start time.Time) {
	pause(ctx, nil, min(pauseFactor*time.Since(start), maxPause))
}

// pause waits until changed receives, atMost has passed, or ctx ends.
func pause(ctx context.Context, changed <-chan struct{}, atMost time.Duration) {
	timer := time.NewTimer(atMost)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-changed:
	case <-timer.C:
	}
}

// pass evaluates the whole state and starts the operations that are due. It returns the time at which
// the next pass is due even if nothing changes.
func (r *Reconciler) pass(ctx context.Context) time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !time.Now().Before(r.syncAt) {
		r.sync(ctx)
	}
	r.next = r.syncAt
	r.reportErrors(ctx)
	r.machine = r.node()
	r.unmountVolumes()
	r.countDevices()
	for _, v := range r.desired.Volumes {
		if v.Err == nil && r.desired.ByID[v.ID] == v {
			r.mountVolume(v)
		}
	}
	for _, d := range r.actual.Devices {
		r.releaseDevice(d)
	}
	r.removeDirectories()
	return r.next
}

// unmountVolumes unmounts the volumes that are not desired.
func (r *Reconciler) unmountVolumes() {
	r.removing = map[string]bool{}
	for id, m := range r.actual.Mounts {
		if r.mayBeDesired(m) {
			continue
		}
		r.unmountVolume(m)
		if r.actual.Mounts[id] != nil && !r.sharesSubPaths(id) {
			r.removing[r.paths.PodSubPaths(id.Pod, id.Name)] = true
		}
	}
}

// sharesSubPaths reports whether another volume of the pod uses the subPath directory of a volume.
// Such a volume has the same name and another plugin, is desired, and may be mounted. A desired volume
// that is not mounted does not count, because it waits until the directory is removed.
func (r *Reconciler) sharesSubPaths(id state.ID) bool {
	pod := r.desired.Pods[id.Pod]
	return pod != nil && slices.ContainsFunc(pod.Volumes, func(v *state.PodVolume) bool {
		m := r.actual.Mounts[v.ID]
		return v.ID != id && v.ID.Name == id.Name && len(v.SubPaths) > 0 && m != nil && m.Mounted != state.No
	})
}

// mayBeDesired reports whether a volume is desired or may be desired. A volume may be desired while the
// manifests are incomplete, and while a volume of its pod is not resolved.
func (r *Reconciler) mayBeDesired(m *state.Mount) bool {
	if !r.desired.Complete || r.desired.ByID[m.ID] != nil {
		return true
	}
	pod := r.desired.Pods[m.ID.Pod]
	return pod != nil && pod.Unknown
}

// volumeName is a volume's name in its pod.
type volumeName struct {
	pod  types.UID
	name string
}

// reportErrors records an event for each desired volume whose error has changed.
func (r *Reconciler) reportErrors(ctx context.Context) {
	if r.reportedState == r.desired {
		return
	}
	reported := map[volumeName]string{}
	for _, v := range r.desired.Volumes {
		if v.Err == nil {
			continue
		}
		key := volumeName{v.Pod.UID, v.Name}
		reported[key] = v.Err.Error()
		// If the claim is not bound, package claim has recorded an event.
		unbound := phaseOf(v.Err) == state.Pending && !errors.Is(v.Err, plugins.ErrNotFound)
		if reported[key] != r.reported[key] && !unbound {
			r.warn(ctx, "pod "+podName(v.Pod), "FailedMount", v.Name, v.Err)
		}
	}
	r.reportedState, r.reported = r.desired, reported
}

// warn records an event for an error. volume is the name of the volume, or empty.
func (r *Reconciler) warn(ctx context.Context, object, reason, volume string, err error) {
	message := err.Error()
	if volume != "" {
		message = "volume " + volume + ": " + message
	}
	r.events.Record(ctx, event.Event{Warning: true, Object: object, Reason: reason, Message: message})
}

// task is an operation and the state that it changes.
type task struct {
	key      string
	busy     *bool
	progress *state.Progress
	// running is the phase while the operation runs, failed the phase after it failed.
	running, failed state.Phase
	// object, reason and volume describe the event of a failure.
	object, reason, volume string
	operation.Operation
}

// start starts an operation, unless one with the same key is running or it must back off. It reports
// whether the operation was started. The caller holds mu, so busy is set before After can clear it.
func (r *Reconciler) start(t task) bool {
	t.Object = t.object
	t.After = func(ctx context.Context, err error) {
		if err != nil && ctx.Err() == nil {
			r.warn(ctx, t.object, t.reason, t.volume, err)
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		*t.busy = false
		r.signal()
	}
	err := r.executor.Run(t.key, t.Operation)
	if backoff, ok := errors.AsType[*operation.BackoffError](err); ok {
		t.progress.Report(t.failed, backoff.Last.Error(), backoff.Until)
		if backoff.Until.Before(r.next) {
			r.next = backoff.Until
		}
	}
	if err != nil {
		return false
	}
	*t.busy = true
	t.progress.Report(t.running, t.progress.Message, time.Time{})
	return true
}

// setUpResult returns the certainty that a mount or an attachment exists after an attempt to set it
// up. before is the certainty before the attempt.
func setUpResult(before state.Certainty, err error) state.Certainty {
	switch {
	case err == nil:
		return state.Yes
	case plugins.Uncertain(err):
		return max(before, state.Uncertain)
	}
	return before
}
