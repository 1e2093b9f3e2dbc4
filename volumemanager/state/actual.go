package state

import (
	"cmp"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// Certainty says whether something exists.
type Certainty int

const (
	// No means that neither it nor a part of it exists.
	No Certainty = iota
	// Uncertain means that it may exist in whole or in part. If it is not desired, it is torn down as if
	// it existed; if it is desired, it is set up as if it did not exist.
	Uncertain
	// Yes means that it exists.
	Yes
)

// Phase is the phase of a volume, for people.
type Phase string

// The phases.
const (
	Pending    Phase = "Pending"
	Attaching  Phase = "Attaching"
	Mounting   Phase = "Mounting"
	Mounted    Phase = "Mounted"
	Unmounting Phase = "Unmounting"
	Failed     Phase = "Failed"
)

// Progress is the reported state of a volume.
type Progress struct {
	Phase Phase
	// Since is when the phase began.
	Since time.Time
	// Message says what the volume waits for, or is the last error.
	Message string
	// RetryAt is the time of the next retry; zero: the next change.
	RetryAt time.Time
}

// Report replaces the reported state.
func (p *Progress) Report(phase Phase, message string, retryAt time.Time) {
	since := p.Since
	if phase != p.Phase {
		since = time.Now()
	}
	*p = Progress{phase, since, message, retryAt}
}

// ActualStateOfWorld holds the volumes that exist or may exist.
type ActualStateOfWorld struct {
	Mounts  map[ID]*Mount
	Devices map[string]*DeviceVolume
	// Pods holds the pods that have or may have a directory.
	Pods map[types.UID]*PodDirectory

	// found holds the mounts that were found on disk, keyed by what the disk says about their
	// device.
	found map[foundKey][]*Mount
}

// foundKey is the name of a device or, if that is unknown, the names of plugin and volume.
type foundKey struct{ device, plugin, name string }

// NewActual returns an empty state.
func NewActual() *ActualStateOfWorld {
	return &ActualStateOfWorld{map[ID]*Mount{}, map[string]*DeviceVolume{}, map[types.UID]*PodDirectory{}, map[foundKey][]*Mount{}}
}

// Mount is a volume of one pod.
type Mount struct {
	ID ID
	// Pod is the pod's namespace and name; empty if the mount was only found on disk.
	Pod string
	// Mounted is Yes if all its subPaths are mounted too.
	Mounted Certainty
	// Busy is set while an operation is pending.
	Busy bool
	// Last is the desired volume of the last set-up; nil if unknown.
	Last *PodVolume
	// Round is the reconciler's round of the last set-up.
	Round uint64
	// Place is the location in the pod's directory.
	Place Place
	// Expanded is the size on this machine; zero if unknown.
	Expanded resource.Quantity
	// Warning says how a mounted volume differs from the request.
	Warning string
	Progress

	// devices holds its device, or several candidates while the device is unknown: the disk does
	// not name it, or the pod now requests another device that is not set up yet.
	devices map[*DeviceVolume]bool
	// found is its key in ActualStateOfWorld.found.
	found foundKey
}

// Owner returns the pod's name, or its UID if the name is unknown.
func (m *Mount) Owner() string { return cmp.Or(m.Pod, string(m.ID.Pod)) }

// Place is the location of a volume.
type Place struct {
	Path string
	// Mountpoints are the paths, without symbolic links, that are in the mount table while the
	// volume is set up.
	Mountpoints []string
}

// DeviceVolume is a volume that is attached and mounted once for all pods of the machine.
type DeviceVolume struct {
	// Name is unique: it consists of the plugin's name and the VolumeName.
	Name   string
	Plugin plugins.DeviceMountableVolumePlugin
	// Spec is the spec of the last set-up. It suffices to tear the volume down.
	Spec *plugins.Spec
	// Driver is the driver whose volume limit counts it, or empty.
	Driver     string
	Attached   Certainty
	Attachment plugins.Attachment
	// Mounted also covers the staging of a raw device.
	Mounted Certainty
	Busy    bool
	Place   Place
	// Expanded is as in Mount.
	Expanded resource.Quantity
	Progress

	mounts map[*Mount]bool
}

// PodDirectory is a pod's directory.
type PodDirectory struct {
	Busy bool
	Progress
}

// Mount returns a volume of a pod. A new one is not mounted.
func (a *ActualStateOfWorld) Mount(id ID) *Mount {
	m := a.Mounts[id]
	if m == nil {
		m = &Mount{ID: id, devices: map[*DeviceVolume]bool{}}
		a.Mounts[id] = m
	}
	return m
}

// AddFound adds a volume of a pod that was found on disk, with the name of its device. If the name
// is empty, each device with the volume's name is a candidate.
func (a *ActualStateOfWorld) AddFound(id ID, device string) {
	m := a.Mount(id)
	m.Mounted, m.found = Uncertain, foundKey{device: device}
	if device == "" {
		m.found = foundKey{plugin: id.Plugin, name: id.Name}
	}
	a.found[m.found] = append(a.found[m.found], m)
	for _, d := range a.Devices {
		if slices.Contains(d.keys(), m.found) {
			m.AddCandidate(d)
		}
	}
}

// Forget removes a volume of a pod.
func (a *ActualStateOfWorld) Forget(m *Mount) {
	m.unlink()
	delete(a.Mounts, m.ID)
	if rest := slices.DeleteFunc(a.found[m.found], func(o *Mount) bool { return o == m }); len(rest) > 0 {
		a.found[m.found] = rest
	} else {
		delete(a.found, m.found)
	}
}

// Device returns a volume of the machine. A new one is not attached.
func (a *ActualStateOfWorld) Device(name string, kind plugins.DeviceMountableVolumePlugin, spec *plugins.Spec) *DeviceVolume {
	d := a.Devices[name]
	if d != nil {
		return d
	}
	d = &DeviceVolume{Name: name, Plugin: kind, Spec: spec, mounts: map[*Mount]bool{}}
	a.Devices[name] = d
	for _, key := range d.keys() {
		for _, m := range a.found[key] {
			if m.Last == nil {
				m.AddCandidate(d)
			}
		}
	}
	return d
}

// keys returns the keys under which its mounts may have been found.
func (d *DeviceVolume) keys() []foundKey {
	return []foundKey{{device: d.Name}, {plugin: d.Plugin.Name(), name: d.Spec.Name()}}
}

// Link sets the only device of a mount.
func (m *Mount) Link(d *DeviceVolume) {
	if m.devices[d] && len(m.devices) == 1 {
		return
	}
	m.unlink()
	m.AddCandidate(d)
}

// AddCandidate adds a possible device of a mount.
func (m *Mount) AddCandidate(d *DeviceVolume) {
	m.devices[d] = true
	d.mounts[m] = true
}

func (m *Mount) unlink() {
	for d := range m.devices {
		delete(d.mounts, m)
	}
	clear(m.devices)
}

// OperationPending reports whether an operation of the volume or of its device is pending.
func (m *Mount) OperationPending() bool {
	for d := range m.devices {
		if d.Busy {
			return true
		}
	}
	return m.Busy
}

// OperationPending reports whether an operation of the device or of one of its mounts is pending.
func (d *DeviceVolume) OperationPending() bool {
	for m := range d.mounts {
		if m.Busy {
			return true
		}
	}
	return d.Busy
}

// Matches reports whether the device is set up as a pod needs it: as a filesystem, or as a raw
// device, which is specific to its PersistentVolume.
func (d *DeviceVolume) Matches(v *PodVolume) bool {
	return d.Spec.Block() == v.ID.Block && (!v.ID.Block || d.Spec.Name() == v.Spec.Name())
}

// UsedBy returns a mount other than but that uses or may use the device, or nil.
func (d *DeviceVolume) UsedBy(but *Mount) *Mount {
	for m := range d.mounts {
		if m != but && (m.Mounted != No || m.Busy) {
			return m
		}
	}
	return nil
}

// Exists reports whether a part of the device is or may be set up on the machine.
func (d *DeviceVolume) Exists() bool {
	return d.Attached != No || d.Mounted != No || d.Busy || d.UsedBy(nil) != nil
}
