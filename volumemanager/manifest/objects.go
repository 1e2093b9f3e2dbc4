package manifest

import (
	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Objects is what the manifests of a directory have, at one moment, as an API server
// would have it: with defaults and UIDs, without a status of pods, claims and volumes. It
// is shared, and never changed.
type Objects struct {
	// Complete says that every file has been read well at least once since the start, and
	// that every object that was there at the start has been valid. Until then, that an
	// object is not here means nothing: nothing is taken down or deleted for it. A file
	// that is broken later counts with what it had last, and so does an object.
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

// Problem is what is wrong with a manifest, and what to do about it.
type Problem struct {
	File string `json:"file"`
	// Object is kind, namespace and name, as far as they could be read.
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
