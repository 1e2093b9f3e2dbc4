package reconciler

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/operation"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/state"
	"github.com/trivet-csi/trivet/volumemanager/subpath"
)

// bringUp does the next step that brings a volume to a pod.
func (r *Reconciler) bringUp(v *state.PodVolume) {
	m := r.actual.Mount(v.ID)
	if m.Pod == "" {
		m.Pod = podName(v.Pod)
	}
	if len(v.SubPaths) > 0 && r.going[r.paths.PodSubPaths(v.ID.Pod, v.ID.Name)] {
		m.Report(state.Pending, "waits until the volume that the pod had by this name is unmounted", time.Time{})
		return
	}
	if err := r.elsewhere(v, m); err != nil {
		m.Report(unready(err), err.Error(), time.Time{})
		return
	}
	if v.Copy != "" && m.Mounted == state.No {
		m.Report(state.Pending, fmt.Sprintf("waits for claim %s, which is to be a copy of it", v.Copy), time.Time{})
		return
	}
	device, ready := r.bringDevice(v, m)
	if !ready || m.OperationPending() || r.directory(v.ID.Pod).Busy {
		return
	}
	if m.Mounted != state.Yes || m.Last == nil || !v.SetUpLike(m.Last) {
		r.setUp(v, m, device)
		return
	}
	mounted(v, m, device)
	if m.Round != r.round && !r.remount(v, m, device) {
		return
	}
	r.expand(v, m, device)
}

// elsewhere is why a PersistentVolume is not for this machine. Of one that may be mounted it
// is not asked: drivers tell where they are later than that, and come and go.
func (r *Reconciler) elsewhere(v *state.PodVolume, m *state.Mount) error {
	if v.Spec.PersistentVolume == nil || m.Mounted != state.No {
		return nil
	}
	err := plugins.CheckAffinity(v.Spec.PersistentVolume, r.machine)
	if kind, ok := v.Plugin.(plugins.AttachableVolumePlugin); ok && err != nil {
		if _, _, absent := state.Needs(kind, v.Spec); absent != nil {
			return absent // which would tell
		}
	}
	return err
}

// setUp mounts a volume, or makes one that is mounted like what is wanted now.
func (r *Reconciler) setUp(v *state.PodVolume, m *state.Mount, device *state.DeviceVolume) {
	if r.start(r.mounting(v, m, device)) {
		m.Mounted = begun(m.Mounted)
	}
}

// mounted is of a volume that is mounted as it is wanted, and so by that device alone.
func mounted(v *state.PodVolume, m *state.Mount, device *state.DeviceVolume) {
	m.Last = v
	if device != nil {
		m.Link(device)
	}
	m.Report(state.Mounted, m.Warning, time.Time{})
}

// remount sets a volume up again, whose content may have changed, and tells whether that
// is not needed. It stays mounted if that fails.
func (r *Reconciler) remount(v *state.PodVolume, m *state.Mount, device *state.DeviceVolume) (done bool) {
	if !v.Plugin.Remounts(v.Spec) {
		m.Round = r.round
		return true
	}
	w := r.mounting(v, m, device)
	w.Name, w.Routine = "volume_remount", true
	w.during, w.failed = state.Mounted, state.Mounted
	r.start(w)
	return false
}

func (r *Reconciler) mounting(v *state.PodVolume, m *state.Mount, device *state.DeviceVolume) work {
	before, last, round := m.Mounted, m.Last, r.round
	return work{
		key: m.ID.String(), busy: &m.Busy, progress: &m.Progress, during: state.Mounting, failed: state.Failed,
		object: "pod " + m.Owner(), reason: "FailedMount", volume: v.Name,
		Operation: operation.Operation{Name: "volume_mount", Plugin: m.ID.Plugin, Do: func(ctx context.Context) error {
			up, err := r.setUpNow(ctx, v, last)
			r.mu.Lock()
			defer r.mu.Unlock()
			m.Mounted = outcome(before, err)
			if err != nil {
				return err
			}
			m.Round, m.Place, m.Warning = round, up.place, up.warning
			mounted(v, m, device)
			sized(v, m, device)
			return nil
		}},
	}
}

// up is a volume that was set up.
type up struct {
	place   state.Place
	warning string
}

func (r *Reconciler) setUpNow(ctx context.Context, v, last *state.PodVolume) (up, error) {
	if v.ID.Block {
		path, err := mapDevice(ctx, v)
		return up{place: state.Place{Path: path}}, err
	}
	mounter, err := v.Plugin.NewMounter(v.Spec, v.Pod)
	if err != nil {
		return up{}, err
	}
	if err := mounter.SetUp(ctx, v.Args); err != nil {
		return up{}, err
	}
	if err := r.bindSubPaths(ctx, v, last, mounter.Path()); err != nil {
		return up{}, &plugins.UncertainError{Err: err}
	}
	place, err := placeOf(mounter.Path(), v.SubPaths)
	if err != nil {
		return up{}, &plugins.UncertainError{Err: err}
	}
	return up{place, warning(mounter)}, nil
}

// mapDevice gives a raw device to a pod. SetUpDevice has been called if it comes by a
// device that all pods have.
func mapDevice(ctx context.Context, v *state.PodVolume) (path string, err error) {
	mapper, err := v.Plugin.(plugins.BlockVolumePlugin).NewBlockVolumeMapper(v.Spec, v.Pod)
	if err != nil {
		return "", err
	}
	if v.Device == "" {
		if err := mapper.SetUpDevice(ctx, nil); err != nil {
			return "", err
		}
	}
	return mapper.Path(), mapper.MapPodDevice(ctx)
}

func warning(m plugins.Mounter) string {
	if w, ok := m.(plugins.Warner); ok {
		return strings.Join(w.Warnings(), "; ")
	}
	return ""
}

// bindSubPaths gives containers their parts, and takes those away that they do not ask
// for any more, as far as it is known what they had last.
func (r *Reconciler) bindSubPaths(ctx context.Context, v, last *state.PodVolume, volume string) error {
	keep := map[string]bool{}
	for _, s := range v.SubPaths {
		keep[s.Path] = last == nil || slices.Contains(last.SubPaths, s)
	}
	if err := unbindSubPaths(r.paths.PodSubPaths(v.ID.Pod, v.ID.Name), keep); err != nil {
		return err
	}
	for _, s := range v.SubPaths {
		if err := subpath.Bind(ctx, volume, s.SubPath, s.Path, s.ReadOnly); err != nil {
			return fmt.Errorf("container %q, volumeMount at %s: %w", s.Container, s.MountPath, err)
		}
	}
	return nil
}

// unbindSubPaths takes the parts of one volume away, but for those that are kept, and
// their directories if they are empty.
func unbindSubPaths(dir string, keep map[string]bool) error {
	targets, err := below(dir, 2)
	if err != nil {
		return err
	}
	for _, t := range targets {
		if keep[t.path] {
			continue
		}
		if err := subpath.Unbind(t.path); err != nil {
			return err
		}
	}
	if len(keep) == 0 {
		return removeEmpty(dir, 1)
	}
	return nil
}

// placeOf looks at what was set up: what of it are mounts.
func placeOf(path string, subPaths []state.SubPath) (state.Place, error) {
	place := state.Place{Path: path}
	paths := []string{path}
	for _, s := range subPaths {
		paths = append(paths, s.Path)
	}
	for _, p := range paths {
		info, err := mount.Inspect(p)
		if err != nil {
			return place, err
		}
		if !info.IsMount {
			continue
		}
		dir, err := filepath.EvalSymlinks(filepath.Dir(p))
		if err != nil {
			return place, err
		}
		place.Mountpoints = append(place.Mountpoints, filepath.Join(dir, filepath.Base(p)))
	}
	return place, nil
}

// takeDown does the next step that takes a volume from a pod that does not want it.
func (r *Reconciler) takeDown(m *state.Mount) {
	if m.OperationPending() {
		return
	}
	if m.Mounted == state.No {
		r.actual.Forget(m)
		return
	}
	parts := !r.namesake(m.ID)
	started := r.start(work{
		key: m.ID.String(), busy: &m.Busy, progress: &m.Progress, during: state.Unmounting, failed: state.Failed,
		object: "pod " + m.Owner(), reason: "FailedUnmount", volume: m.ID.Name,
		Operation: operation.Operation{Name: "volume_unmount", Plugin: m.ID.Plugin, Do: func(ctx context.Context) error {
			if err := r.tearDownNow(ctx, m.ID, parts); err != nil {
				return err
			}
			r.mu.Lock()
			defer r.mu.Unlock()
			m.Mounted = state.No
			return nil
		}},
	})
	if started {
		m.Mounted, m.Last = state.Uncertain, nil
	}
}

// tearDownNow takes a volume from a pod, and before it, if the parts that containers have by
// its name are of it, those.
func (r *Reconciler) tearDownNow(ctx context.Context, id state.ID, parts bool) error {
	kind, err := r.registry.ByName(id.Plugin)
	if err != nil {
		return err
	}
	if id.Block {
		unmapper, err := kind.(plugins.BlockVolumePlugin).NewBlockVolumeUnmapper(id.Name, id.Pod)
		if err != nil {
			return err
		}
		return unmapper.UnmapPodDevice(ctx)
	}
	if parts {
		if err := unbindSubPaths(r.paths.PodSubPaths(id.Pod, id.Name), nil); err != nil {
			return err
		}
	}
	unmounter, err := kind.NewUnmounter(id.Name, id.Pod)
	if err != nil {
		return err
	}
	return unmounter.TearDown(ctx)
}

func podName(pod *corev1.Pod) string { return pod.Namespace + "/" + pod.Name }
