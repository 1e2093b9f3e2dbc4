package reconciler

import (
	"context"
	"errors"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/event"
	"github.com/trivet-csi/trivet/volumemanager/operation"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/state"
)

// pass evaluates the whole state and starts the operations that are due. It returns the time of the
// next pass if nothing changes before.
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
// The other volume has the same name and another plugin, is desired, and may be mounted. A desired
// volume that is not mounted does not count: it waits until the directory is empty.
func (r *Reconciler) sharesSubPaths(id state.ID) bool {
	pod := r.desired.Pods[id.Pod]
	return pod != nil && slices.ContainsFunc(pod.Volumes, func(v *state.PodVolume) bool {
		m := r.actual.Mounts[v.ID]
		return v.ID != id && v.ID.Name == id.Name && len(v.SubPaths) > 0 && m != nil && m.Mounted != state.No
	})
}

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
		// Events of package claim report why a claim is not bound.
		unbound := phaseOf(v.Err) == state.Pending && !errors.Is(v.Err, plugins.ErrNotFound)
		if reported[key] != r.reported[key] && !unbound {
			r.warn(ctx, "pod "+podName(v.Pod), "FailedMount", v.Name, v.Err)
		}
	}
	r.reportedState, r.reported = r.desired, reported
}

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
	// running and failed are the phases while the operation runs and after it failed.
	running, failed state.Phase
	// object, reason and volume describe the event of a failure.
	object, reason, volume string
	operation.Operation
}

// start starts an operation if none with its key is running or backing off. The caller holds mu, so
// start sets busy before After can clear it.
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

// setUpResult returns the state after an attempt to set something up.
func setUpResult(before state.Certainty, err error) state.Certainty {
	switch {
	case err == nil:
		return state.Yes
	case plugins.Uncertain(err):
		return max(before, state.Uncertain)
	}
	return before
}
