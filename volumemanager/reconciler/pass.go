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

// pass looks at everything once and starts what can be done, and tells when there is
// something to do next if nothing changes.
func (r *Reconciler) pass(ctx context.Context) time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !time.Now().Before(r.syncAt) {
		r.sync(ctx)
	}
	r.next = r.syncAt
	r.announce(ctx)
	r.machine = r.node()
	r.takeDownAll()
	r.count()
	for _, v := range r.desired.Volumes {
		if v.Err == nil && r.desired.ByID[v.ID] == v {
			r.bringUp(v)
		}
	}
	for _, d := range r.actual.Devices {
		r.letGo(d)
	}
	r.removeDirectories()
	return r.next
}

// takeDownAll takes down what is not wanted.
func (r *Reconciler) takeDownAll() {
	r.going = map[string]bool{}
	for id, m := range r.actual.Mounts {
		if r.keeps(m) {
			continue
		}
		r.takeDown(m)
		if r.actual.Mounts[id] != nil && !r.namesake(id) {
			r.going[r.paths.PodSubPaths(id.Pod, id.Name)] = true
		}
	}
}

// namesake tells whether the directory of a volume's subPaths is that of another volume of
// the pod, by another plugin: one that is wanted, and mounted or may be. One that is not
// mounted yet waits until the directory is empty.
func (r *Reconciler) namesake(id state.ID) bool {
	pod := r.desired.Pods[id.Pod]
	return pod != nil && slices.ContainsFunc(pod.Volumes, func(v *state.PodVolume) bool {
		m := r.actual.Mounts[v.ID]
		return v.ID != id && v.ID.Name == id.Name && len(v.SubPaths) > 0 && m != nil && m.Mounted != state.No
	})
}

// keeps tells whether a volume of a pod is wanted, or may be.
func (r *Reconciler) keeps(m *state.Mount) bool {
	if !r.desired.Complete || r.desired.ByID[m.ID] != nil {
		return true
	}
	pod := r.desired.Pods[m.ID.Pod]
	return pod != nil && pod.Unknown
}

// outer is a volume as a pod calls it.
type outer struct {
	pod  types.UID
	name string
}

// announce records an event for each volume that has come to have another error.
func (r *Reconciler) announce(ctx context.Context) {
	if r.told == r.desired {
		return
	}
	announced := map[outer]string{}
	for _, v := range r.desired.Volumes {
		if v.Err == nil {
			continue
		}
		key := outer{v.Pod.UID, v.Name}
		announced[key] = v.Err.Error()
		waits := unready(v.Err) == state.Pending && !errors.Is(v.Err, plugins.ErrNotFound) // claims tell of that
		if announced[key] != r.announced[key] && !waits {
			r.warn(ctx, "pod "+podName(v.Pod), "FailedMount", v.Name, v.Err)
		}
	}
	r.told, r.announced = r.desired, announced
}

func (r *Reconciler) warn(ctx context.Context, object, reason, volume string, err error) {
	message := err.Error()
	if volume != "" {
		message = "volume " + volume + ": " + message
	}
	r.events.Record(ctx, event.Event{Warning: true, Object: object, Reason: reason, Message: message})
}

// work is an operation, and who it belongs to.
type work struct {
	key      string
	busy     *bool
	progress *state.Progress
	// during and failed are the phases while it runs, and after it failed.
	during, failed state.Phase
	// object, reason and volume are those of the event of its failure.
	object, reason, volume string
	operation.Operation
}

// start starts an operation if its key is free and its time has come. What the operation
// does needs the lock, which is held here: it finds busy set.
func (r *Reconciler) start(w work) bool {
	w.Object = w.object
	w.After = func(ctx context.Context, err error) {
		if err != nil && ctx.Err() == nil {
			r.warn(ctx, w.object, w.reason, w.volume, err)
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		*w.busy = false
		r.signal()
	}
	err := r.executor.Run(w.key, w.Operation)
	if later, ok := errors.AsType[*operation.BackoffError](err); ok {
		w.progress.Report(w.failed, later.Last.Error(), later.Until)
		r.lookAt(later.Until)
	}
	if err != nil {
		return false
	}
	*w.busy = true
	w.progress.Report(w.during, w.progress.Message, time.Time{})
	return true
}

// lookAt makes the next pass come no later than that.
func (r *Reconciler) lookAt(at time.Time) {
	if at.Before(r.next) {
		r.next = at
	}
}

// outcome is what an operation that brings something up has made of it.
func outcome(before state.Certainty, err error) state.Certainty {
	switch {
	case err == nil:
		return state.Yes
	case plugins.Uncertain(err):
		return max(before, state.Uncertain)
	}
	return before
}

// begun is what counts while such an operation is under way: a panic leaves it so.
func begun(before state.Certainty) state.Certainty { return max(before, state.Uncertain) }
