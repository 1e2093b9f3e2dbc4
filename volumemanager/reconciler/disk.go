package reconciler

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/event"
	"github.com/trivet-csi/trivet/volumemanager/operation"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/state"
)

// sync compares the actual state with the disk and the mount table, and increments generation. The caller
// holds mu, so no operation changes the state at the same time.
func (r *Reconciler) sync(ctx context.Context) {
	r.generation++
	r.reconstruct(ctx)
	r.verify(ctx)
	r.syncAt = nextSync()
}

// reconstruct adds volumes that are on disk and not in the actual state. Such volumes exist after a
// restart, or if a plugin failed to remove them. They count as possibly mounted.
func (r *Reconciler) reconstruct(ctx context.Context) {
	entries, err := os.ReadDir(r.paths.Pods())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		r.recordUnknown(ctx, r.paths.Pods(), err)
	}
	for _, e := range entries {
		if !e.IsDir() {
			r.recordUnknown(ctx, filepath.Join(r.paths.Pods(), e.Name()), errors.New("not the directory of a pod"))
			continue
		}
		pod := types.UID(e.Name())
		r.directory(pod)
		r.findVolumes(ctx, pod, "volumes", false)
		r.findVolumes(ctx, pod, "volumeDevices", true)
	}
	r.findDevices(ctx)
}

// findVolumes adds the volumes in a directory of a pod: volumes or, with block, volumeDevices.
func (r *Reconciler) findVolumes(ctx context.Context, pod types.UID, dir string, block bool) {
	found, err := below(filepath.Join(r.paths.Pod(pod), dir), 2)
	if err != nil {
		r.recordUnknown(ctx, r.paths.Pod(pod), err)
	}
	for _, e := range found {
		id := state.ID{Pod: pod, Plugin: plugins.Unescape(filepath.Base(filepath.Dir(e.path))), Name: e.Name(), Block: block}
		if r.actual.Mounts[id] != nil {
			continue
		}
		device, err := r.identify(id, e)
		if err != nil {
			r.recordUnknown(ctx, e.path, err)
			continue
		}
		r.actual.AddFound(id, device)
	}
}

// identify returns the name of a volume's device if the name is recorded on disk; otherwise "". It
// returns an error if e is not a volume of a pod.
func (r *Reconciler) identify(id state.ID, e fs.DirEntry) (device string, err error) {
	p, err := r.registry.ByName(id.Plugin)
	if err != nil {
		return "", err
	}
	_, supportsBlock := p.(plugins.BlockVolumePlugin)
	switch {
	case !id.Block && !e.IsDir():
		return "", errors.New("not the directory of a volume")
	case id.Block && e.Type() != fs.ModeSymlink:
		return "", errors.New("not a link to a device")
	case id.Block && !supportsBlock:
		return "", fmt.Errorf("plugin %s does not support raw devices", id.Plugin)
	}
	if namer, ok := p.(plugins.PodVolumeNamer); ok {
		if name := namer.PodVolumeName(id.Name, id.Pod, id.Block); name != "" {
			device = state.DeviceName(p, name)
		}
	}
	return device, nil
}

// findDevices adds the devices that plugins find on disk.
func (r *Reconciler) findDevices(ctx context.Context) {
	all, err := r.registry.All()
	if err != nil {
		r.recordUnknown(ctx, r.paths.Root, err)
	}
	for _, p := range all {
		plugin, ok := p.(plugins.DeviceMountableVolumePlugin)
		if !ok {
			continue
		}
		added := map[*state.DeviceVolume]bool{}
		mounts, err := plugin.DeviceMounts()
		if err != nil {
			r.recordUnknown(ctx, r.paths.Plugin(p.Name()), err)
		}
		for _, m := range mounts {
			if d := r.addDevice(plugin, m, added); d != nil {
				d.Mounted, d.Spec = state.Uncertain, m.Spec
			}
		}
		attachable, ok := plugin.(plugins.AttachableVolumePlugin)
		if !ok {
			continue
		}
		attachments, err := attachable.Attachments()
		if err != nil {
			r.recordUnknown(ctx, r.paths.Plugin(p.Name()), err)
		}
		for _, a := range attachments {
			if d := r.addDevice(plugin, a, added); d != nil {
				d.Attached = state.Uncertain
			}
		}
	}
}

// addDevice adds a device that was found on disk, and returns it. It returns nil if the device was in
// the actual state before this search. added holds the devices that this search has added.
func (r *Reconciler) addDevice(plugin plugins.DeviceMountableVolumePlugin, m plugins.DeviceMount, added map[*state.DeviceVolume]bool) *state.DeviceVolume {
	name := state.DeviceName(plugin, m.VolumeName)
	d := r.actual.Devices[name]
	if d != nil && !added[d] {
		return nil
	}
	if d == nil {
		d = r.actual.Device(name, plugin, m.Spec)
		added[d] = true
	}
	if limiter, ok := plugin.(plugins.AttachLimiter); ok {
		_, driver := limiter.AttachLimit(m.Spec)
		d.Driver = state.DeviceName(plugin, driver)
	}
	return d
}

// recordUnknown records an event for a path that the volume manager cannot identify and does not
// change.
func (r *Reconciler) recordUnknown(ctx context.Context, path string, err error) {
	r.events.Record(ctx, event.Event{
		Warning: true, Object: "directory " + path, Reason: "Unknown",
		Message: fmt.Sprintf("%v: the volume manager does not change this path: check what it is, and remove it by hand", err),
	})
}

// verify finds volumes and devices that another program has unmounted, and raw devices whose link was
// removed. They become Uncertain, so that desired ones are set up again.
func (r *Reconciler) verify(ctx context.Context) {
	table, err := mount.Table(func(*mount.Entry) bool { return true })
	if err != nil {
		r.recordUnknown(ctx, "/proc/self/mountinfo", err)
		return
	}
	mountpoints := make(map[string]bool, len(table))
	for _, e := range table {
		mountpoints[e.Mountpoint] = true
	}
	for _, m := range r.actual.Mounts {
		if m.Mounted == state.Yes && !m.Busy && (unmounted(m.Place, mountpoints) || m.ID.Block && !isDevice(m.Place.Path)) {
			m.Mounted = state.Uncertain
			r.warnUnmounted(ctx, "pod "+m.Owner(), m.ID.Name, m.Place.Path)
		}
	}
	for _, d := range r.actual.Devices {
		if d.Mounted == state.Yes && !d.Busy && unmounted(d.Place, mountpoints) {
			d.Mounted = state.Uncertain
			r.warnUnmounted(ctx, "volume "+d.Spec.Name(), d.Spec.Name(), d.Place.Path)
		}
	}
}

// unmounted reports whether a mount point of a place is not in the mount table.
func unmounted(p state.Place, mountpoints map[string]bool) bool {
	return slices.ContainsFunc(p.Mountpoints, func(m string) bool { return !mountpoints[m] })
}

func isDevice(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode()&fs.ModeDevice != 0
}

func (r *Reconciler) warnUnmounted(ctx context.Context, object, volume, path string) {
	r.warn(ctx, object, "Unmounted", volume, fmt.Errorf("%s is not mounted any more, and is mounted again if a pod uses it: find the program that unmounts it", path))
}

// directory returns the state of a pod's directory. A missing state is added.
func (r *Reconciler) directory(pod types.UID) *state.Progress {
	if r.actual.Pods[pod] == nil {
		r.actual.Pods[pod] = &state.Progress{}
	}
	return r.actual.Pods[pod]
}

// removeDirectories removes the directories of pods that are not desired and have no volumes.
func (r *Reconciler) removeDirectories() {
	if !r.desired.Complete {
		return
	}
	unused := map[types.UID]*state.Progress{}
	for uid, d := range r.actual.Pods {
		if r.desired.Pods[uid] == nil && !d.Busy {
			unused[uid] = d
		}
	}
	for id := range r.actual.Mounts {
		delete(unused, id.Pod)
	}
	for pod, d := range unused {
		r.start(task{
			key: "pod " + string(pod), busy: &d.Busy, progress: d, running: state.Unmounting, failed: state.Failed,
			object: "pod " + string(pod), reason: "FailedRemoveDirectory",
			Operation: operation.Operation{Name: "pod_clean", Routine: true, Do: func(context.Context) error {
				if err := r.removeDirectory(pod); err != nil {
					return err
				}
				r.mu.Lock()
				defer r.mu.Unlock()
				delete(r.actual.Pods, pod)
				return nil
			}},
		})
	}
}

// removeDirectory removes the directory of a pod that has no volumes any more.
func (r *Reconciler) removeDirectory(pod types.UID) error {
	dir := r.paths.Pod(pod)
	// The remaining subPaths, VOLUME/CONTAINER/INDEX, are of volumes that have no directory in the pod's
	// directory (hostPath).
	if err := unbindBelow(filepath.Join(dir, "volume-subpaths"), 3, nil); err != nil {
		return err
	}
	for _, part := range []struct {
		name  string
		depth int
	}{{"volumes", 1}, {"volumeDevices", 1}, {"volume-subpaths", 2}, {"plugins", 2}, {"", 0}} {
		if err := removeEmpty(filepath.Join(dir, part.name), part.depth); err != nil {
			return err
		}
	}
	return nil
}

// entry is a directory entry. Its type comes from readdir(3), because stat(2) may block on a mount
// whose server does not respond.
type entry struct {
	path string
	fs.DirEntry
}

// below returns the entries at a depth below dir; at depth 1 these are the entries of dir. dir may be
// missing. Links are not followed.
func below(dir string, depth int) (found []entry, err error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		switch {
		case depth == 1:
			found = append(found, entry{path, e})
		case e.IsDir():
			deeper, err := below(path, depth-1)
			if err != nil {
				return nil, err
			}
			found = append(found, deeper...)
		}
	}
	return found, err
}

// removeEmpty removes a directory and the directories in it, down to a depth. It removes no files, no
// mounts and no deeper directories; if one exists, it returns an error.
func removeEmpty(dir string, depth int) error {
	for ; depth > 0; depth-- {
		found, err := below(dir, depth)
		if err != nil {
			return err
		}
		for _, p := range found {
			if err := removeDir(p.path); err != nil {
				return err
			}
		}
	}
	return removeDir(dir)
}

// removeDir removes an empty directory with rmdir(2). A missing directory is not an error.
func removeDir(dir string) error {
	info, err := os.Lstat(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil && info.IsDir() {
		err = os.Remove(dir)
	} else if err == nil {
		err = errors.New("not a directory")
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remains of a removed pod: %s: %w: check what it is, and remove it by hand", dir, err)
	}
	return nil
}
