package manifest

import (
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Objects are the objects of a directory's manifests, as an API server would return them: with
// defaults and UIDs, and without the status of pods, claims and volumes. They are shared and must not
// be modified.
type Objects struct {
	// Complete is set when every file was read successfully at least once, and every object of the
	// start was valid at least once. Until then a missing object is not a removed one: nothing must be
	// unmounted or deleted. If a file or an object becomes invalid later, its last valid version
	// applies.
	Complete bool

	Pods             map[types.NamespacedName]*corev1.Pod
	Claims           map[types.NamespacedName]*corev1.PersistentVolumeClaim
	Volumes          map[string]*corev1.PersistentVolume
	Classes          map[string]*storagev1.StorageClass
	ConfigMaps       map[types.NamespacedName]*corev1.ConfigMap
	Secrets          map[types.NamespacedName]*corev1.Secret
	Drivers          map[string]*storagev1.CSIDriver
	Snapshots        map[types.NamespacedName]*snapshotv1.VolumeSnapshot
	SnapshotContents map[string]*snapshotv1.VolumeSnapshotContent

	Problems []Problem
}

// Problem says what is wrong with a manifest and what to do.
type Problem struct {
	File string `json:"file"`
	// Object is kind, namespace and name, as far as they are known.
	Object  string `json:"object,omitempty"`
	Message string `json:"message"`
}

func newObjects() *Objects {
	return &Objects{
		Pods:             make(map[types.NamespacedName]*corev1.Pod),
		Claims:           make(map[types.NamespacedName]*corev1.PersistentVolumeClaim),
		Volumes:          make(map[string]*corev1.PersistentVolume),
		Classes:          make(map[string]*storagev1.StorageClass),
		ConfigMaps:       make(map[types.NamespacedName]*corev1.ConfigMap),
		Secrets:          make(map[types.NamespacedName]*corev1.Secret),
		Drivers:          make(map[string]*storagev1.CSIDriver),
		Snapshots:        make(map[types.NamespacedName]*snapshotv1.VolumeSnapshot),
		SnapshotContents: make(map[string]*snapshotv1.VolumeSnapshotContent),
	}
}
