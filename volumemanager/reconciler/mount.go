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

// mountVolume starts the next step of mounting a volume for a pod.
func (r *Reconciler) mountVolume(v *state.PodVolume) {
	m := r.actual.Mount(v.ID)
	if m.Pod == "" {
		m.Pod = podName(v.Pod)
	}
	if len(v.SubPaths) > 0 && r.removing[r.paths.PodSubPaths(v.ID.Pod, v.ID.Name)] {
		m.Report(state.Pending, "waits until the pod's earlier volume of this name is unmounted", time.Time{})
		return
	}
	if err := r.checkAffinity(v, m); err != nil {
		m.Report(phaseOf(err), err.Error(), time.Time{})
		return
	}
	if v.CopiedTo != "" && m.Mounted == state.No {
		m.Report(state.Pending, fmt.Sprintf("waits until claim %s, whose volume is a copy of this volume, is bound", v.CopiedTo), time.Time{})
		return
	}
	device, ready := r.prepareDevice(v, m)
	if !ready || m.OperationPending() || r.directory(v.ID.Pod).Busy {
		return
	}
	if m.Mounted != state.Yes || m.Last == nil || !v.SetUpLike(m.Last) {
		if r.start(r.mountTask(v, m, device)) {
			m.Mounted = max(m.Mounted, state.Uncertain)
		}
		return
	}
	markMounted(v, m, device)
	switch {
	case m.Generation == r.generation:
		r.expand(v, m, device)
	case !v.Plugin.Remounts(v.Spec):
		m.Generation = r.generation
		r.expand(v, m, device)
	default: // if the set-up fails, the volume stays mounted
		t := r.mountTask(v, m, device)
		t.Name, t.Routine = "volume_remount", true
		t.running, t.failed = state.Mounted, state.Mounted
		r.start(t)
	}
}

// checkAffinity returns an error if a PersistentVolume cannot be used on this machine. It does not
// check a volume that may be mounted, because its driver may be registered later, or be removed.
func (r *Reconciler) checkAffinity(v *state.PodVolume, m *state.Mount) error {
	if v.Spec.PersistentVolume == nil || m.Mounted != state.No {
		return nil
	}
	err := plugins.CheckAffinity(v.Spec.PersistentVolume, r.machine)
	if plugin, ok := v.Plugin.(plugins.AttachableVolumePlugin); ok && err != nil {
		if _, _, unregistered := state.Needs(plugin, v.Spec); unregistered != nil {
			return unregistered // the topology is unknown until the driver registers
		}
	}
	return err
}

// markMounted records that a volume is mounted as desired. A volume that is mounted as desired uses no
// other device than device.
func markMounted(v *state.PodVolume, m *state.Mount, device *state.DeviceVolume) {
	m.Last = v
	if device != nil {
		m.Link(device)
	}
	m.Report(state.Mounted, m.Warning, time.Time{})
}

// mountTask returns the task that mounts a volume. If the volume is mounted already, the task updates
// it to the desired state.
func (r *Reconciler) mountTask(v *state.PodVolume, m *state.Mount, device *state.DeviceVolume) task {
	before, last, generation := m.Mounted, m.Last, r.generation
	return task{
		key: m.ID.String(), busy: &m.Busy, progress: &m.Progress, running: state.Mounting, failed: state.Failed,
		object: "pod " + m.Owner(), reason: "FailedMount", volume: v.Name,
		Operation: operation.Operation{Name: "volume_mount", Plugin: m.ID.Plugin, Do: func(ctx context.Context) error {
			place, warning, err := r.setUp(ctx, v, last)
			r.mu.Lock()
			defer r.mu.Unlock()
			m.Mounted = setUpResult(before, err)
			if err != nil {
				return err
			}
			m.Generation, m.Place, m.Warning = generation, place, warning
			markMounted(v, m, device)
			// A new mount has the full size, unless the node must expand the volume.
			if size := sizeOf(m, device); size.IsZero() && !v.NeedsNodeExpand {
				*size = v.Size
			}
			return nil
		}},
	}
}

// setUp mounts a volume and its subPaths for a pod. last is the volume of the last set-up, or nil.
func (r *Reconciler) setUp(ctx context.Context, v, last *state.PodVolume) (place state.Place, warning string, err error) {
	if v.ID.Block {
		place.Path, err = mapDevice(ctx, v)
		return place, "", err
	}
	mounter, err := v.Plugin.NewMounter(v.Spec, v.Pod)
	if err != nil {
		return place, "", err
	}
	if err := mounter.SetUp(ctx, v.Args); err != nil {
		return place, "", err
	}
	if err := r.bindSubPaths(ctx, v, last, mounter.Path()); err != nil {
		return place, "", &plugins.UncertainError{Err: err}
	}
	if place, err = placeOf(mounter.Path(), v.SubPaths); err != nil {
		return place, "", &plugins.UncertainError{Err: err}
	}
	if w, ok := mounter.(plugins.Warner); ok {
		warning = strings.Join(w.Warnings(), "; ")
	}
	return place, warning, nil
}

// mapDevice maps a raw device into a pod. If the volume has a DeviceVolume, mountDevice has called
// SetUpDevice; otherwise mapDevice calls it.
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

// bindSubPaths binds the subPaths of the containers. Before that, it unbinds subPaths that are not
// desired any more, and subPaths that differ from the last set-up.
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

// unbindSubPaths unbinds the subPaths of a volume except those in keep. If keep is empty, it also
// removes the directories.
func unbindSubPaths(dir string, keep map[string]bool) error {
	if err := unbindBelow(dir, 2, keep); err != nil || len(keep) > 0 { // the subPaths are at CONTAINER/INDEX
		return err
	}
	return removeEmpty(dir, 1)
}

// unbindBelow unbinds the subPaths at a depth below dir except those in keep.
func unbindBelow(dir string, depth int, keep map[string]bool) error {
	targets, err := below(dir, depth)
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
	return nil
}

// placeOf returns the Place of a volume: its path, and the mount points among path and subPaths.
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

// unmountVolume starts the next step of unmounting a volume that is not desired.
func (r *Reconciler) unmountVolume(m *state.Mount) {
	if m.OperationPending() {
		return
	}
	if m.Mounted == state.No {
		r.actual.Forget(m)
		return
	}
	subPaths := !r.sharesSubPaths(m.ID)
	started := r.start(task{
		key: m.ID.String(), busy: &m.Busy, progress: &m.Progress, running: state.Unmounting, failed: state.Failed,
		object: "pod " + m.Owner(), reason: "FailedUnmount", volume: m.ID.Name,
		Operation: operation.Operation{Name: "volume_unmount", Plugin: m.ID.Plugin, Do: func(ctx context.Context) error {
			if err := r.tearDown(ctx, m.ID, subPaths); err != nil {
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

// tearDown unmounts a volume of a pod. If subPaths is set, it first unbinds the subPaths.
func (r *Reconciler) tearDown(ctx context.Context, id state.ID, subPaths bool) error {
	plugin, err := r.registry.ByName(id.Plugin)
	if err != nil {
		return err
	}
	if id.Block {
		unmapper, err := plugin.(plugins.BlockVolumePlugin).NewBlockVolumeUnmapper(id.Name, id.Pod)
		if err != nil {
			return err
		}
		return unmapper.UnmapPodDevice(ctx)
	}
	if subPaths {
		if err := unbindSubPaths(r.paths.PodSubPaths(id.Pod, id.Name), nil); err != nil {
			return err
		}
	}
	unmounter, err := plugin.NewUnmounter(id.Name, id.Pod)
	if err != nil {
		return err
	}
	return unmounter.TearDown(ctx)
}

func podName(pod *corev1.Pod) string { return pod.Namespace + "/" + pod.Name }
