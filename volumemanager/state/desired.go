package state

import (
	"reflect"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// ID identifies a volume of a pod, as its path does.
type ID struct {
	Pod types.UID
	// Plugin is the name of the plugin, Name the name of the Spec.
	Plugin, Name string
	// Block is set for a raw device.
	Block bool
}

// String returns a text for people. It is unique.
func (id ID) String() string {
	kind := "volume"
	if id.Block {
		kind = "device"
	}
	return kind + " " + id.Name + " of pod " + string(id.Pod) + " by " + id.Plugin
}

// DesiredStateOfWorld holds the volumes that the manifests request.
type DesiredStateOfWorld struct {
	// Complete is set if the manifests are complete: a missing volume is not desired
	// (manifest.Objects).
	Complete bool
	// Volumes are sorted by the names of their pods, and by their order in the pod.
	Volumes []*PodVolume
	Pods    map[types.UID]*Pod
	// ByID holds the volumes whose ID is known. Two volumes of a pod may have one ID.
	ByID map[ID]*PodVolume
	// Devices holds the volumes of each device, keyed by its name.
	Devices map[string][]*PodVolume
	// Persistent holds the names of all PersistentVolumes in use.
	Persistent map[string]bool
}

// Pod is a pod of the manifests.
type Pod struct {
	*corev1.Pod
	Volumes []*PodVolume
	// Unknown is set if a volume is not resolved yet: each existing volume of the pod may be it.
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
	// Device is the name of its DeviceVolume, or empty.
	Device   string
	Args     plugins.MounterArgs
	SubPaths []SubPath
	// Size is the capacity of the PersistentVolume; zero for other volumes.
	Size resource.Quantity
	// Resized is set if the node must expand the volume (plugins.NodeExpandAnnotation).
	Resized bool
	// Alone is set if only one pod may use it at a time (ReadWriteOncePod).
	Alone bool
	// Copy is another claim of the pod that will be a copy of this volume, or empty. Some drivers
	// do not copy a volume in use.
	Copy string
}

// SubPath is a part of a volume that a container mounts.
type SubPath struct {
	Container string `json:"container"`
	// Index is the index of the volumeMount in the container.
	Index     int    `json:"-"`
	MountPath string `json:"mountPath"`
	SubPath   string `json:"subPath"`
	ReadOnly  bool   `json:"readOnly,omitempty"`
	// Path is its path on this machine.
	Path string `json:"path"`
}

// Known reports whether the volume is resolved.
func (v *PodVolume) Known() bool { return v.ID != ID{} }

// SetUpLike reports whether a volume that was set up as o needs no further set-up for v. Both have
// one ID.
func (v *PodVolume) SetUpLike(o *PodVolume) bool {
	return v == o || reflect.DeepEqual(v.Args, o.Args) && reflect.DeepEqual(v.SubPaths, o.SubPaths) && sameSource(v.Spec, o.Spec)
}

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
