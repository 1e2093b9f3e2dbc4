// Package state holds the desired and the actual state of volumes. It starts no operations. Package
// reconciler changes the actual state until it matches the desired one.
//
// The types of this package are not safe for concurrent use.
package state

import (
	"cmp"
	"reflect"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// ID identifies a volume of a pod. The volume's path contains the same fields.
type ID struct {
	Pod types.UID
	// Plugin is the name of the plugin. Name is the name of the Spec.
	Plugin, Name string
	// Block is set for a raw device.
	Block bool
}

// String returns a readable text that is unique for each ID.
func (id ID) String() string {
	kind := "volume"
	if id.Block {
		kind = "device"
	}
	return kind + " " + id.Name + " of pod " + string(id.Pod) + " by " + id.Plugin
}

// DesiredStateOfWorld holds the volumes that the manifests request.
type DesiredStateOfWorld struct {
	// Complete is Complete of manifest.Objects. While it is false, a missing volume may be desired.
	Complete bool
	// Volumes are sorted by the namespace and name of the pod, then by their order in the pod.
	Volumes []*PodVolume
	Pods    map[types.UID]*Pod
	// ByID holds the volumes whose ID is known. Two volumes of a pod may have the same ID.
	ByID map[ID]*PodVolume
	// Devices holds the volumes of each device, keyed by the device's name.
	Devices map[string][]*PodVolume
	// Persistent holds the names of the PersistentVolumes that pods request.
	Persistent map[string]bool
}

// Pod is a pod of the manifests.
type Pod struct {
	*corev1.Pod
	Volumes []*PodVolume
	// Unknown is set if a volume is not resolved yet. Any existing volume of the pod may be that
	// volume.
	Unknown bool
}

// PodVolume is a volume that a pod requests.
type PodVolume struct {
	Pod *corev1.Pod
	// Name is the volume's name in the pod.
	Name string
	// Err is the reason why the volume cannot be set up now. The other fields are set as far as
	// they are known.
	Err error

	// ID is zero while it is unknown.
	ID     ID
	Spec   *plugins.Spec
	Plugin plugins.VolumePlugin
	// Device is the name of the volume's DeviceVolume, or empty.
	Device   string
	Args     plugins.MounterArgs
	SubPaths []SubPath
	// Size is the capacity of the PersistentVolume; zero for other volumes.
	Size resource.Quantity
	// NeedsNodeExpand is set if the node must expand the volume (plugins.NodeExpandAnnotation).
	NeedsNodeExpand bool
	// Exclusive is set if only one pod at a time may use the volume (ReadWriteOncePod).
	Exclusive bool
	// CopiedTo is the name of another claim of the pod, whose volume will be copied from this volume,
	// or empty. Some drivers do not copy a volume in use.
	CopiedTo string
}

// SubPath is a part of a volume that a container mounts.
type SubPath struct {
	Container string `json:"container"`
	// Index is the index of the volumeMount in the container.
	Index     int    `json:"-"`
	MountPath string `json:"mountPath"`
	SubPath   string `json:"subPath"`
	ReadOnly  bool   `json:"readOnly,omitempty"`
	// Path is the target of the bind mount on this machine.
	Path string `json:"path"`
}

// Known reports whether the volume is resolved.
func (v *PodVolume) Known() bool { return v.ID != ID{} }

// SetUpLike reports whether a volume that is set up as o requests needs no change for v. v and o must
// have the same ID.
func (v *PodVolume) SetUpLike(o *PodVolume) bool {
	return v == o || reflect.DeepEqual(v.Args, o.Args) && reflect.DeepEqual(v.SubPaths, o.SubPaths) && sameSource(v.Spec, o.Spec)
}

// sameSource reports whether two specs select the same data with the same mount options and readOnly.
func sameSource(a, b *plugins.Spec) bool {
	if a.ReadOnly != b.ReadOnly || (a.PersistentVolume == nil) != (b.PersistentVolume == nil) {
		return false
	}
	if a.PersistentVolume == nil {
		return reflect.DeepEqual(a.Volume, b.Volume)
	}
	one, other := a.PersistentVolume.Spec, b.PersistentVolume.Spec
	return reflect.DeepEqual(one.PersistentVolumeSource, other.PersistentVolumeSource) && reflect.DeepEqual(one.MountOptions, other.MountOptions)
}

// Certainty says whether a mount or an attachment exists.
type Certainty int

const (
	// No means that no part of the mount or attachment exists.
	No Certainty = iota
	// Uncertain means that the mount or attachment may exist in whole or in part. If it is desired, it
	// is set up as if it did not exist; otherwise it is torn down as if it existed.
	Uncertain
	// Yes means that the mount or attachment exists.
	Yes
)

// Phase is the phase of a volume that is shown to users.
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
	// Since is the time when the phase began.
	Since time.Time
	// Message is the last error, or says what the volume waits for.
	Message string
	// RetryAt is the time of the next retry. If it is zero, the next change triggers the retry.
	RetryAt time.Time
	// Busy is set while an operation is pending.
	Busy bool
}

// Report replaces the reported state.
func (p *Progress) Report(phase Phase, message string, retryAt time.Time) {
	if phase != p.Phase {
		p.Since = time.Now()
	}
	p.Phase, p.Message, p.RetryAt = phase, message, retryAt
}

// ActualStateOfWorld holds the volumes that exist or may exist.
type ActualStateOfWorld struct {
	Mounts  map[ID]*Mount
	Devices map[string]*DeviceVolume
	// Pods holds the pods that have or may have a directory.
	Pods map[types.UID]*Progress

	// found holds the mounts that were found on disk.
	found map[foundKey][]*Mount
}

// foundKey identifies the device of a found mount by the device's name or, if that is unknown, by the
// names of the plugin and the volume.
type foundKey struct{ device, plugin, name string }

// NewActual returns an empty state.
func NewActual() *ActualStateOfWorld {
	return &ActualStateOfWorld{map[ID]*Mount{}, map[string]*DeviceVolume{}, map[types.UID]*Progress{}, map[foundKey][]*Mount{}}
}

// Mount is a volume of one pod.
type Mount struct {
	ID ID
	// Pod is the pod's namespace and name; empty if the mount was only found on disk.
	Pod string
	// Mounted is Yes only if all subPaths of the volume are mounted too.
	Mounted Certainty
	// Last is the desired volume of the last set-up; nil if unknown.
	Last *PodVolume
	// Generation is the reconciler's generation at the last set-up.
	Generation uint64
	// Place is the location in the pod's directory.
	Place Place
	// NodeSize is the size of the volume's filesystem or device on this machine; zero if unknown.
	NodeSize resource.Quantity
	// Warning says how a mounted volume differs from the request.
	Warning string
	Progress

	// devices holds the device of the mount. It holds several candidates if the device was not
	// recorded on disk, or if the pod now requests another device that is not set up yet.
	devices map[*DeviceVolume]bool
	// found is the mount's key in ActualStateOfWorld.found.
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
	// Spec is the spec of the last set-up. It is sufficient for the tear-down.
	Spec *plugins.Spec
	// Driver is the driver whose volume limit includes this volume, or empty.
	Driver   string
	Attached Certainty
	// Attachment is the result of the last attach; nil if the volume was not attached by this process.
	Attachment plugins.Attachment
	// Mounted also covers the staging of a raw device.
	Mounted Certainty
	Place   Place
	// NodeSize has the same meaning as in Mount.
	NodeSize resource.Quantity
	Progress

	mounts map[*Mount]bool
}

// Mount returns a volume of a pod. If the volume is missing, Mount adds it as not mounted.
func (a *ActualStateOfWorld) Mount(id ID) *Mount {
	m := a.Mounts[id]
	if m == nil {
		m = &Mount{ID: id, devices: map[*DeviceVolume]bool{}}
		a.Mounts[id] = m
	}
	return m
}

// AddFound adds a volume of a pod that was found on disk. device is the name of its device. If it is
// empty, each device with the names of the volume and its plugin is a candidate.
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

// Device returns a DeviceVolume. If it is missing, Device adds it as not attached.
func (a *ActualStateOfWorld) Device(name string, plugin plugins.DeviceMountableVolumePlugin, spec *plugins.Spec) *DeviceVolume {
	d := a.Devices[name]
	if d != nil {
		return d
	}
	d = &DeviceVolume{Name: name, Plugin: plugin, Spec: spec, mounts: map[*Mount]bool{}}
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

// keys returns the keys in ActualStateOfWorld.found of mounts that may use the device.
func (d *DeviceVolume) keys() []foundKey {
	return []foundKey{{device: d.Name}, {plugin: d.Plugin.Name(), name: d.Spec.Name()}}
}

// Link makes d the only device of the mount.
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

// unlink removes all devices of the mount.
func (m *Mount) unlink() {
	for d := range m.devices {
		delete(d.mounts, m)
	}
	clear(m.devices)
}

// OperationPending reports whether an operation of the volume or of its device is pending.
func (m *Mount) OperationPending() bool {
	busy := m.Busy
	for d := range m.devices {
		busy = busy || d.Busy
	}
	return busy
}

// OperationPending reports whether an operation of the device or of one of its mounts is pending.
func (d *DeviceVolume) OperationPending() bool {
	busy := d.Busy
	for m := range d.mounts {
		busy = busy || m.Busy
	}
	return busy
}

// Matches reports whether the device is set up as a pod requires: as a filesystem or as a raw
// device. A raw device must also be of the same PersistentVolume.
func (d *DeviceVolume) Matches(v *PodVolume) bool {
	return d.Spec.Block() == v.ID.Block && (!v.ID.Block || d.Spec.Name() == v.Spec.Name())
}

// UsedBy returns a mount that uses or may use the device, or nil. It ignores the mount except.
func (d *DeviceVolume) UsedBy(except *Mount) *Mount {
	for m := range d.mounts {
		if m != except && (m.Mounted != No || m.Busy) {
			return m
		}
	}
	return nil
}

// Exists reports whether a part of the device is or may be set up on the machine.
func (d *DeviceVolume) Exists() bool {
	return d.Attached != No || d.Mounted != No || d.Busy || d.UsedBy(nil) != nil
}
