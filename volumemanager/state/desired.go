package state

import (
	"reflect"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/plugin"
)

// ID tells one volume of one pod from all others, as its path does.
type ID struct {
	Pod types.UID
	// Plugin is the plugin's name, Name the Spec's.
	Plugin, Name string
	// Block: it is a raw device.
	Block bool
}

// String is for people, and a key.
func (id ID) String() string {
	kind := "volume"
	if id.Block {
		kind = "device"
	}
	return kind + " " + id.Name + " of pod " + string(id.Pod) + " by " + id.Plugin
}

// DesiredStateOfWorld is what the manifests want.
type DesiredStateOfWorld struct {
	// Complete says that what is not here is not wanted (manifest.Objects).
	Complete bool
	// Volumes are in the order of their pods' names, and of the volumes in them.
	Volumes []*PodVolume
	Pods    map[types.UID]*Pod
	// ByID has the volumes that are known; two of a pod may be the same.
	ByID map[ID]*PodVolume
	// Devices has those that come by a device, by its name.
	Devices map[string][]*PodVolume
	// Persistent are the names of all PersistentVolumes in use.
	Persistent map[string]bool
}

// Pod is one that is wanted.
type Pod struct {
	*corev1.Pod
	Volumes []*PodVolume
	// Unknown says that of some volume it is not known yet what it is: any that is there
	// may be it.
	Unknown bool
}

// PodVolume is a volume that a pod wants.
type PodVolume struct {
	Pod *corev1.Pod
	// Name is that in the pod.
	Name string
	// Err is why it cannot be had now. What else is known is set nevertheless.
	Err error

	// ID is zero while it is not known.
	ID     ID
	Spec   *plugin.Spec
	Plugin plugin.VolumePlugin
	// Device is the name of the volume that is brought to the machine once for all pods,
	// or empty.
	Device   string
	Args     plugin.MounterArgs
	SubPaths []SubPath
	// Size is the PersistentVolume's; zero for others.
	Size resource.Quantity
	// Resized: the node has to follow a growth (plugin.NodeExpandAnnotation).
	Resized bool
	// Alone: no two pods may have it at a time (ReadWriteOncePod).
	Alone bool
	// Copy is another claim of the pod that is still to be made a copy of it, or empty.
	// There are drivers that copy nothing which is in use.
	Copy string
}

// SubPath is a part of a volume that one container has.
type SubPath struct {
	Container string `json:"container"`
	// Index is that of the volumeMount in the container.
	Index     int    `json:"-"`
	MountPath string `json:"mountPath"`
	SubPath   string `json:"subPath"`
	ReadOnly  bool   `json:"readOnly,omitempty"`
	// Path is where it is on this machine.
	Path string `json:"path"`
}

// Known tells whether it is known which volume it is.
func (v *PodVolume) Known() bool { return v.ID != ID{} }

// SetUpLike tells whether what was set up as o needs nothing more to be v: both are of
// one ID.
func (v *PodVolume) SetUpLike(o *PodVolume) bool {
	return v == o || reflect.DeepEqual(v.Args, o.Args) && reflect.DeepEqual(v.SubPaths, o.SubPaths) && sameSource(v.Spec, o.Spec)
}

func sameSource(a, b *plugin.Spec) bool {
	if a.ReadOnly != b.ReadOnly || (a.PersistentVolume == nil) != (b.PersistentVolume == nil) {
		return false
	}
	if a.PersistentVolume == nil {
		return reflect.DeepEqual(a.Volume, b.Volume)
	}
	one, other := a.PersistentVolume.Spec, b.PersistentVolume.Spec
	return reflect.DeepEqual(one.PersistentVolumeSource, other.PersistentVolumeSource) && reflect.DeepEqual(one.MountOptions, other.MountOptions)
}
