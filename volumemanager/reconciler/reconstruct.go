package reconciler

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/event"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/state"
)

// sync compares what is known with disk and mount table. It needs the lock, so that no
// operation says meanwhile what it has done.
func (r *Reconciler) sync(ctx context.Context) {
	r.round++
	r.reconstruct(ctx)
	r.verify(ctx)
	r.syncAt = nextSync()
}

// reconstruct adds what the disk has, and nothing else knows of: after a restart, and what
// was left by mistake. All of it is possibly mounted.
func (r *Reconciler) reconstruct(ctx context.Context) {
	entries, err := os.ReadDir(r.paths.Pods())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		r.strange(ctx, r.paths.Pods(), err)
	}
	for _, e := range entries {
		if !e.IsDir() {
			r.strange(ctx, filepath.Join(r.paths.Pods(), e.Name()), errors.New("it is no directory of a pod"))
			continue
		}
		pod := types.UID(e.Name())
		r.directory(pod)
		r.findVolumes(ctx, pod, "volumes", false)
		r.findVolumes(ctx, pod, "volumeDevices", true)
	}
	r.findDevices(ctx)
}

func (r *Reconciler) findVolumes(ctx context.Context, pod types.UID, kind string, block bool) {
	found, err := below(filepath.Join(r.paths.Pod(pod), kind), 2)
	if err != nil {
		r.strange(ctx, r.paths.Pod(pod), err)
	}
	for _, e := range found {
		id := state.ID{Pod: pod, Plugin: plugins.Unescape(filepath.Base(filepath.Dir(e.path))), Name: e.Name(), Block: block}
		if r.actual.Mounts[id] != nil {
			continue
		}
		device, err := r.recognise(id, e)
		if err != nil {
			r.strange(ctx, e.path, err)
			continue
		}
		r.actual.AddFound(id, device)
	}
}

// recognise finds the name of the device that a volume of a pod comes by, if the disk says
// that. The error tells why something cannot be a volume of a pod.
func (r *Reconciler) recognise(id state.ID, e fs.DirEntry) (device string, err error) {
	p, err := r.registry.ByName(id.Plugin)
	if err != nil {
		return "", err
	}
	_, can := p.(plugins.BlockVolumePlugin)
	switch {
	case !id.Block && !e.IsDir():
		return "", errors.New("it is no directory of a volume")
	case id.Block && e.Type() != fs.ModeSymlink:
		return "", errors.New("it is no link to a device")
	case id.Block && !can:
		return "", errors.New("its plugin has no raw devices")
	}
	if namer, ok := p.(plugins.PodVolumeNamer); ok {
		if name := namer.PodVolumeName(id.Name, id.Pod, id.Block); name != "" {
			device = state.DeviceName(p, name)
		}
	}
	return device, nil
}

func (r *Reconciler) findDevices(ctx context.Context) {
	all, err := r.registry.All()
	if err != nil {
		r.strange(ctx, r.paths.Root, err)
	}
	for _, p := range all {
		kind, ok := p.(plugins.DeviceMountableVolumePlugin)
		if !ok {
			continue
		}
		fresh := map[*state.DeviceVolume]bool{}
		mounts, err := kind.DeviceMounts()
		if err != nil {
			r.strange(ctx, r.paths.Plugin(p.Name()), err)
		}
		for _, m := range mounts {
			if d := r.found(kind, m, fresh); d != nil {
				d.Mounted, d.Spec = state.Uncertain, m.Spec
			}
		}
		r.findAttachments(ctx, kind, fresh)
	}
}

func (r *Reconciler) findAttachments(ctx context.Context, kind plugins.DeviceMountableVolumePlugin, fresh map[*state.DeviceVolume]bool) {
	attachable, ok := kind.(plugins.AttachableVolumePlugin)
	if !ok {
		return
	}
	attachments, err := attachable.Attachments()
	if err != nil {
		r.strange(ctx, r.paths.Plugin(kind.Name()), err)
	}
	for _, a := range attachments {
		if d := r.found(kind, a, fresh); d != nil {
			d.Attached = state.Uncertain
		}
	}
}

// found is the volume of the machine that the disk has, if nothing else knows of it.
func (r *Reconciler) found(kind plugins.DeviceMountableVolumePlugin, m plugins.DeviceMount, fresh map[*state.DeviceVolume]bool) *state.DeviceVolume {
	name := state.DeviceName(kind, m.VolumeName)
	d := r.actual.Devices[name]
	if d != nil && !fresh[d] {
		return nil
	}
	if d == nil {
		d = r.actual.Device(name, kind, m.Spec)
		fresh[d] = true
	}
	if limiter, ok := kind.(plugins.AttachLimiter); ok {
		_, driver := limiter.AttachLimit(m.Spec)
		d.Driver = state.DeviceName(kind, driver)
	}
	return d
}

// strange records what is left alone.
func (r *Reconciler) strange(ctx context.Context, path string, err error) {
	r.events.Record(ctx, event.Event{
		Warning: true, Object: "directory " + path, Reason: "Unknown",
		Message: fmt.Sprintf("%v: it is left alone; look at it, and remove it by hand", err),
	})
}

// verify finds what is not mounted any more: somebody has unmounted it. What is wanted is
// mounted again, for which it must not count as mounted.
func (r *Reconciler) verify(ctx context.Context) {
	table, err := mount.Table(func(*mount.Entry) bool { return true })
	if err != nil {
		r.strange(ctx, "/proc/self/mountinfo", err)
		return
	}
	there := make(map[string]bool, len(table))
	for _, e := range table {
		there[e.Mountpoint] = true
	}
	for _, m := range r.actual.Mounts {
		if m.Mounted == state.Yes && !m.Busy && (lost(m.Place, there) || m.ID.Block && !isDevice(m.Place.Path)) {
			m.Mounted = state.Uncertain
			r.gone(ctx, "pod "+m.Owner(), m.ID.Name, m.Place.Path)
		}
	}
	for _, d := range r.actual.Devices {
		if d.Mounted == state.Yes && !d.Busy && lost(d.Place, there) {
			d.Mounted = state.Uncertain
			r.gone(ctx, "volume "+d.Spec.Name(), d.Spec.Name(), d.Place.Path)
		}
	}
}

func lost(p state.Place, there map[string]bool) bool {
	for _, m := range p.Mountpoints {
		if !there[m] {
			return true
		}
	}
	return false
}

func isDevice(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode()&fs.ModeDevice != 0
}

func (r *Reconciler) gone(ctx context.Context, object, volume, path string) {
	r.warn(ctx, object, "Unmounted", volume, fmt.Errorf("%s is not mounted any more, and is mounted again if it is wanted: find out who unmounts it", path))
}
