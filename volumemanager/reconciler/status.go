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

// VolumeStatus is a volume of a pod; or one that is on the machine for no pod, which has
// no pod here.
type VolumeStatus struct {
	// Pod is namespace and name; empty of pods that only the disk knows.
	Pod string    `json:"pod,omitempty"`
	UID types.UID `json:"uid,omitempty"`
	// Volume is the name in the pod, while the pod is wanted.
	Volume           string      `json:"volume"`
	PersistentVolume string      `json:"persistentVolume,omitempty"`
	Plugin           string      `json:"plugin,omitempty"`
	Phase            state.Phase `json:"phase"`
	// Path is of a directory, or of a link to a device.
	Path     string          `json:"path,omitempty"`
	SubPaths []state.SubPath `json:"subPaths,omitempty"`
	// Message is the last error, or what is waited for, and what to do about it.
	Message string    `json:"message,omitempty"`
	Since   time.Time `json:"since,omitzero"`
	// RetryAt is when it is tried again, if that does not wait for something else.
	RetryAt time.Time `json:"retryAt,omitzero"`
}

func (s *VolumeStatus) tell(p state.Progress) {
	s.Phase, s.Message, s.Since, s.RetryAt = cmp.Or(p.Phase, state.Pending), p.Message, p.Since, p.RetryAt
}

// Status has the volumes of all pods that are wanted, and what is still there of others.
func (r *Reconciler) Status() []VolumeStatus {
	r.mu.Lock()
	defer r.mu.Unlock()
	var all []VolumeStatus
	for _, v := range r.desired.Volumes {
		all = append(all, r.status(v))
	}
	return append(all, r.leaving()...)
}

// PodReady tells whether all volumes of a pod are mounted, and what is with each of them;
// and whether the pod is wanted at all.
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

func (r *Reconciler) status(v *state.PodVolume) VolumeStatus {
	s := VolumeStatus{Pod: podName(v.Pod), UID: v.Pod.UID, Volume: v.Name, Plugin: v.ID.Plugin, SubPaths: v.SubPaths, Phase: state.Pending}
	if v.Spec != nil && v.Spec.PersistentVolume != nil {
		s.PersistentVolume = v.Spec.Name()
	}
	m := r.actual.Mounts[v.ID]
	if m != nil {
		s.tell(m.Progress)
		s.Path = m.Place.Path
	}
	switch {
	case v.Err != nil:
		s.Phase, s.Message, s.RetryAt = unready(v.Err), v.Err.Error(), time.Time{}
	case m != nil && s.Phase == state.Mounted && !r.settled(v, m):
		s.Phase, s.Since = state.Mounting, time.Time{}
	}
	return s
}

func unready(err error) state.Phase {
	if _, invalid := errors.AsType[*plugins.InvalidError](err); invalid {
		return state.Failed
	}
	return state.Pending
}

// settled tells whether a volume is mounted as it is wanted.
func (r *Reconciler) settled(v *state.PodVolume, m *state.Mount) bool {
	return m != nil && m.Mounted == state.Yes && m.Last != nil && r.desired.ByID[v.ID].SetUpLike(m.Last)
}

// leaving is what is there and not wanted, by pods and names.
func (r *Reconciler) leaving() []VolumeStatus {
	var all []VolumeStatus
	for id, m := range r.actual.Mounts {
		if r.desired.ByID[id] != nil || m.Mounted == state.No {
			continue
		}
		s := VolumeStatus{Pod: m.Pod, UID: id.Pod, Volume: id.Name, Plugin: id.Plugin, Path: m.Place.Path}
		s.tell(m.Progress)
		all = append(all, s)
	}
	for _, d := range r.actual.Devices {
		if len(r.desired.Devices[d.Name]) > 0 || d.UsedBy(nil) != nil || !d.Exists() {
			continue
		}
		s := VolumeStatus{Volume: d.Spec.Name(), PersistentVolume: d.Spec.Name(), Plugin: d.Plugin.Name(), Path: d.Place.Path}
		s.tell(d.Progress)
		all = append(all, s)
	}
	for uid, p := range r.actual.Pods {
		if p.Phase == state.Failed {
			s := VolumeStatus{UID: uid, Path: r.paths.Pod(uid)}
			s.tell(p.Progress)
			all = append(all, s)
		}
	}
	slices.SortFunc(all, func(a, b VolumeStatus) int {
		return cmp.Or(cmp.Compare(a.UID, b.UID), cmp.Compare(a.Volume, b.Volume), cmp.Compare(a.Plugin, b.Plugin))
	})
	return all
}

// StateDiff counts the volumes of pods that are still to be mounted, and what is still to
// be unmounted.
func (r *Reconciler) StateDiff() (toMount, toUnmount int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, v := range r.desired.ByID {
		if !r.settled(v, r.actual.Mounts[id]) {
			toMount++
		}
	}
	toMount += countUnknown(r.desired)
	for _, m := range r.actual.Mounts {
		if m.Mounted != state.No && !r.keeps(m) {
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

func countUnknown(desired *state.DesiredStateOfWorld) (n int) {
	for _, v := range desired.Volumes {
		if !v.Known() {
			n++
		}
	}
	return n
}

// InUse tells whether a PersistentVolume is wanted by a pod, or is, or may be, on this
// machine. What Claims is just telling a pod of counts: it waits for that.
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
		own := m.Last != nil && m.Last.Spec.PersistentVolume == nil
		if id.Name == volume && (m.Mounted != state.No || m.Busy) && !own {
			return true
		}
	}
	return false
}
