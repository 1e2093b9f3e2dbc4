package state

import (
	"cmp"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/plugin"
)

// Certainty is whether something is there.
type Certainty int

const (
	// No means: it is not there, nor any part of it.
	No Certainty = iota
	// Uncertain means: it may be there, whole or in part. What is not wanted is taken down
	// as if it were there, what is wanted set up as if it were not.
	Uncertain
	// Yes means: it is there.
	Yes
)

// Phase is what is going on with a volume, for people.
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

// Progress is what is told of a volume.
type Progress struct {
	Phase Phase
	// Since is when the phase began.
	Since time.Time
	// Message is what is waited for, or the last error.
	Message string
	// RetryAt is when it is tried again; zero: when something changes.
	RetryAt time.Time
}

// Tell changes what is told.
func (p *Progress) Tell(phase Phase, message string, retryAt time.Time) {
	since := p.Since
	if phase != p.Phase {
		since = time.Now()
	}
	*p = Progress{phase, since, message, retryAt}
}

// ActualStateOfWorld is what is there, or may be.
type ActualStateOfWorld struct {
	Mounts  map[ID]*Mount
	Devices map[string]*DeviceVolume
	// Pods are those that have a directory, or may have.
	Pods map[types.UID]*PodDirectory

	// loose were found on the disk, by what it says of the device that they come by.
	loose map[looseKey][]*Mount
}

// looseKey is a device's Name, or else those of the plugin and of the spec.
type looseKey struct{ device, plugin, name string }

// NewActual is an empty one.
func NewActual() *ActualStateOfWorld {
	return &ActualStateOfWorld{map[ID]*Mount{}, map[string]*DeviceVolume{}, map[types.UID]*PodDirectory{}, map[looseKey][]*Mount{}}
}

// Mount is a volume of one pod.
type Mount struct {
	ID ID
	// Pod is the pod's namespace and name; empty if only the disk knows it.
	Pod string
	// Mounted is Yes when all its subPaths are there too.
	Mounted Certainty
	// Busy: an operation is pending.
	Busy bool
	// Last is what was wanted when it was last set up; nil: that is not known.
	Last *PodVolume
	// Round is the one in which it was last set up.
	Round uint64
	// Place is where the pod finds it.
	Place Place
	// Expanded is the size that it has on this machine; zero: that is not known.
	Expanded resource.Quantity
	// Warning is what is not as asked for, though it is mounted.
	Warning string
	Progress

	// devices are those that it comes by; several only while it is not known which: the disk
	// does not say, or it is wanted by another and not set up by that.
	devices map[*DeviceVolume]bool
	// loose is the key that it was found by.
	loose looseKey
}

// Owner is the pod, by its name if that is known.
func (m *Mount) Owner() string { return cmp.Or(m.Pod, string(m.ID.Pod)) }

// Place is where something is.
type Place struct {
	Path string
	// Mountpoints are the paths, without links, that have to be in the mount table as long
	// as it is there.
	Mountpoints []string
}

// DeviceVolume is a volume that is, or may be, on the machine for all pods.
type DeviceVolume struct {
	// Name is unique: the plugin's and the VolumeName.
	Name string
	// Plugin is the plugin.
	Plugin plugin.DeviceMountableVolumePlugin
	// Spec is enough to take it down: that which it was last brought up by.
	Spec *plugin.Spec
	// Driver is the one whose limit it counts for, or empty.
	Driver     string
	Attached   Certainty
	Attachment plugin.Attachment
	// Mounted is also that of a raw device.
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

// Mount finds or makes a volume of a pod, which then is not mounted.
func (a *ActualStateOfWorld) Mount(id ID) *Mount {
	m := a.Mounts[id]
	if m == nil {
		m = &Mount{ID: id, devices: map[*DeviceVolume]bool{}}
		a.Mounts[id] = m
	}
	return m
}

// Found adds a volume of a pod that the disk has, and nothing else knows of, with the name
// of the device that it comes by. If that is empty it may be any with the volume's name.
func (a *ActualStateOfWorld) Found(id ID, device string) {
	m := a.Mount(id)
	m.Mounted, m.loose = Uncertain, looseKey{device: device}
	if device == "" {
		m.loose = looseKey{plugin: id.Plugin, name: id.Name}
	}
	a.loose[m.loose] = append(a.loose[m.loose], m)
	for _, d := range a.Devices {
		if slices.Contains(d.keys(), m.loose) {
			m.MayComeBy(d)
		}
	}
}

// Forget drops a volume of a pod.
func (a *ActualStateOfWorld) Forget(m *Mount) {
	m.unlink()
	delete(a.Mounts, m.ID)
	if rest := slices.DeleteFunc(a.loose[m.loose], func(o *Mount) bool { return o == m }); len(rest) > 0 {
		a.loose[m.loose] = rest
	} else {
		delete(a.loose, m.loose)
	}
}

// Device finds or makes a volume of the machine, which then is not there.
func (a *ActualStateOfWorld) Device(name string, kind plugin.DeviceMountableVolumePlugin, spec *plugin.Spec) *DeviceVolume {
	d := a.Devices[name]
	if d != nil {
		return d
	}
	d = &DeviceVolume{Name: name, Plugin: kind, Spec: spec, mounts: map[*Mount]bool{}}
	a.Devices[name] = d
	for _, key := range d.keys() {
		for _, m := range a.loose[key] {
			if m.Last == nil {
				m.MayComeBy(d)
			}
		}
	}
	return d
}

// keys are those of what may come by it.
func (d *DeviceVolume) keys() []looseKey {
	return []looseKey{{device: d.Name}, {plugin: d.Plugin.Name(), name: d.Spec.Name()}}
}

// Link says that a volume of a pod comes by this device, and by no other.
func (m *Mount) Link(d *DeviceVolume) {
	if m.devices[d] && len(m.devices) == 1 {
		return
	}
	m.unlink()
	m.MayComeBy(d)
}

// MayComeBy says that a volume of a pod may come by this device, too.
func (m *Mount) MayComeBy(d *DeviceVolume) {
	m.devices[d] = true
	d.mounts[m] = true
}

func (m *Mount) unlink() {
	for d := range m.devices {
		delete(d.mounts, m)
	}
	clear(m.devices)
}

// Waits tells whether an operation of the volume, or of what it comes by, is pending.
func (m *Mount) Waits() bool {
	for d := range m.devices {
		if d.Busy {
			return true
		}
	}
	return m.Busy
}

// Waits tells whether an operation of the device, or of what pods have of it, is pending.
func (d *DeviceVolume) Waits() bool {
	for m := range d.mounts {
		if m.Busy {
			return true
		}
	}
	return d.Busy
}

// As tells whether it is, or would be, mounted as a pod wants it: a filesystem, or a raw
// device, which has its PersistentVolume's name.
func (d *DeviceVolume) As(v *PodVolume) bool {
	return d.Spec.Block() == v.ID.Block && (!v.ID.Block || d.Spec.Name() == v.Spec.Name())
}

// UsedBy is a pod's volume, but for one, that has it or may have; nil: there is none.
func (d *DeviceVolume) UsedBy(but *Mount) *Mount {
	for m := range d.mounts {
		if m != but && (m.Mounted != No || m.Busy) {
			return m
		}
	}
	return nil
}

// There tells whether anything of it is on the machine, or may be.
func (d *DeviceVolume) There() bool {
	return d.Attached != No || d.Mounted != No || d.Busy || d.UsedBy(nil) != nil
}
