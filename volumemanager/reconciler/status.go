package reconciler

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/state"
)

// VolumeStatus is the state of a volume of a pod, or of a device that no pod uses. A device has no
// Pod.
type VolumeStatus struct {
	// Pod is the pod's namespace and name; empty for a pod that was only found on disk.
	Pod    string    `json:"pod,omitempty"`
	PodUID types.UID `json:"podUID,omitempty"`
	// Volume is the volume's name in the pod; if the volume is not desired, the name of its Spec.
	Volume           string      `json:"volume"`
	PersistentVolume string      `json:"persistentVolume,omitempty"`
	Plugin           string      `json:"plugin,omitempty"`
	Phase            state.Phase `json:"phase"`
	// Path is a directory or a link to a device.
	Path     string          `json:"path,omitempty"`
	SubPaths []state.SubPath `json:"subPaths,omitempty"`
	// Message is the last error, or what the volume waits for, and what to do.
	Message string    `json:"message,omitempty"`
	Since   time.Time `json:"since,omitzero"`
	// RetryAt is as in state.Progress.
	RetryAt time.Time `json:"retryAt,omitzero"`
}

// with returns the status with the phase, message and times of p.
func (s VolumeStatus) with(p state.Progress) VolumeStatus {
	s.Phase, s.Message, s.Since, s.RetryAt = cmp.Or(p.Phase, state.Pending), p.Message, p.Since, p.RetryAt
	return s
}

// Status returns the desired volumes, and after them those that are not desired and not yet removed.
func (r *Reconciler) Status() []VolumeStatus {
	r.mu.Lock()
	defer r.mu.Unlock()
	var all []VolumeStatus
	for _, v := range r.desired.Volumes {
		all = append(all, r.status(v))
	}
	return append(all, r.undesired()...)
}

// PodReady returns the states of a pod's volumes. known is set if the pod is in the manifests. ready is
// set if also all volumes of the pod are mounted.
func (r *Reconciler) PodReady(pod types.NamespacedName) (ready bool, volumes []VolumeStatus, known bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, p := range r.desired.Pods {
		if p.Namespace != pod.Namespace || p.Name != pod.Name {
			continue
		}
		ready = true
		for _, v := range p.Volumes {
			s := r.status(v)
			volumes = append(volumes, s)
			ready = ready && s.Phase == state.Mounted
		}
		return ready, volumes, true
	}
	return false, nil, false
}

// status returns the status of a desired volume.
func (r *Reconciler) status(v *state.PodVolume) VolumeStatus {
	s := VolumeStatus{Pod: podName(v.Pod), PodUID: v.Pod.UID, Volume: v.Name, Plugin: v.ID.Plugin, SubPaths: v.SubPaths, Phase: state.Pending}
	if v.Spec != nil && v.Spec.PersistentVolume != nil {
		s.PersistentVolume = v.Spec.Name()
	}
	m := r.actual.Mounts[v.ID]
	if m != nil {
		s = s.with(m.Progress)
		s.Path = m.Place.Path
	}
	switch {
	case v.Err != nil:
		s.Phase, s.Message, s.RetryAt = phaseOf(v.Err), v.Err.Error(), time.Time{}
	case m != nil && s.Phase == state.Mounted && !r.asDesired(v, m):
		s.Phase, s.Since = state.Mounting, time.Time{}
	}
	return s
}

// phaseOf returns the phase of a volume with an error: Failed if the manifest is invalid, else Pending.
func phaseOf(err error) state.Phase {
	if _, invalid := errors.AsType[*plugins.InvalidError](err); invalid {
		return state.Failed
	}
	return state.Pending
}

// asDesired reports whether a volume is mounted as the pod requests it now.
func (r *Reconciler) asDesired(v *state.PodVolume, m *state.Mount) bool {
	return m != nil && m.Mounted == state.Yes && m.Last != nil && r.desired.ByID[v.ID].SetUpLike(m.Last)
}

// undesired returns the volumes, devices and pod directories that are not desired and still exist,
// sorted by pod and name.
func (r *Reconciler) undesired() []VolumeStatus {
	var all []VolumeStatus
	for id, m := range r.actual.Mounts {
		if r.desired.ByID[id] != nil || m.Mounted == state.No {
			continue
		}
		s := VolumeStatus{Pod: m.Pod, PodUID: id.Pod, Volume: id.Name, Plugin: id.Plugin, Path: m.Place.Path}
		all = append(all, s.with(m.Progress))
	}
	for _, d := range r.actual.Devices {
		if len(r.desired.Devices[d.Name]) > 0 || d.UsedBy(nil) != nil || !d.Exists() {
			continue
		}
		s := VolumeStatus{Volume: d.Spec.Name(), PersistentVolume: d.Spec.Name(), Plugin: d.Plugin.Name(), Path: d.Place.Path}
		all = append(all, s.with(d.Progress))
	}
	for uid, p := range r.actual.Pods {
		if p.Phase == state.Failed {
			all = append(all, VolumeStatus{PodUID: uid, Path: r.paths.Pod(uid)}.with(*p))
		}
	}
	slices.SortFunc(all, func(a, b VolumeStatus) int {
		return cmp.Or(cmp.Compare(a.PodUID, b.PodUID), cmp.Compare(a.Volume, b.Volume), cmp.Compare(a.Plugin, b.Plugin))
	})
	return all
}

// StateDiff returns the number of volumes that must still be mounted, and the number of volumes and
// devices that must still be unmounted.
func (r *Reconciler) StateDiff() (toMount, toUnmount int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, v := range r.desired.ByID {
		if !r.asDesired(v, r.actual.Mounts[id]) {
			toMount++
		}
	}
	for _, v := range r.desired.Volumes {
		if !v.Known() {
			toMount++
		}
	}
	for _, m := range r.actual.Mounts {
		if m.Mounted != state.No && !r.mayBeDesired(m) {
			toUnmount++
		}
	}
	for _, d := range r.actual.Devices {
		if d.Exists() && len(r.desired.Devices[d.Name]) == 0 {
			toUnmount++
		}
	}
	return toMount, toUnmount
}

// InUse reports whether a pod requests a PersistentVolume, or the volume may be set up on this machine.
// It waits for running calls of Claims.Volume, because they may return the volume for a pod.
func (r *Reconciler) InUse(volume string) bool {
	r.populating.Lock()
	defer r.populating.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.desired.Persistent[volume] {
		return true
	}
	for _, d := range r.actual.Devices {
		if d.Spec.Name() == volume && d.Exists() {
			return true
		}
	}
	for id, m := range r.actual.Mounts {
		inline := m.Last != nil && m.Last.Spec.PersistentVolume == nil // may have the name of a PersistentVolume
		if id.Name == volume && (m.Mounted != state.No || m.Busy) && !inline {
			return true
		}
	}
	return false
}
