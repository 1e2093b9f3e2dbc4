package plugins

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
)

// VolumePlugin supports one type of volume. Its methods are safe for concurrent use, and block only
// on disk I/O.
type VolumePlugin interface {
	// Name returns the kubelet's name, such as kubernetes.io/empty-dir.
	Name() string
	// CanSupport reports whether the plugin supports a spec. At most one plugin may
	// support a spec (Registry.ForSpec).
	CanSupport(spec *Spec) bool
	// NewMounter returns an *InvalidError for an invalid spec.
	NewMounter(spec *Spec, pod *corev1.Pod) (Mounter, error)
	// NewUnmounter needs no manifest, because the manifest may have been removed. The parameter
	// name is Spec.Name.
	NewUnmounter(name string, pod types.UID) (Unmounter, error)
	// Remounts reports whether SetUp must be repeated while the pod runs, because the content may
	// change: for example a ConfigMap, or a CSI driver with requiresRepublish.
	Remounts(spec *Spec) bool
}

// Mounter mounts a volume for one pod.
type Mounter interface {
	// Path returns the volume's path for the pod: Paths.PodVolume, or a path below it.
	Path() string
	// SetUp is idempotent, and may be called for a volume that is mounted and in use. After an
	// *UncertainError the volume may be mounted. Any other error leaves the volume unchanged.
	SetUp(ctx context.Context, args MounterArgs) error
}

// Warner is a Mounter whose SetUp can succeed without a requested feature, such as a size limit.
type Warner interface {
	// Warnings describes each feature that the last SetUp did not provide, and the remedy.
	Warnings() []string
}

// MounterArgs are the settings of a pod for all its volumes.
type MounterArgs struct {
	// FSGroup is the pod's fsGroup, or nil.
	FSGroup             *int64
	FSGroupChangePolicy corev1.PodFSGroupChangePolicy
}

// Unmounter unmounts a volume from one pod. TearDown is idempotent, also undoes an incomplete
// SetUp, and leaves nothing at Paths.PodVolume. It removes directories with rmdir(2) only, unless
// the plugin itself created their content.
type Unmounter interface {
	TearDown(ctx context.Context) error
}

// PersistentVolumePlugin is a VolumePlugin that supports PersistentVolumes.
type PersistentVolumePlugin interface {
	VolumePlugin
	// AccessModes returns the access modes that the plugin supports.
	AccessModes() []corev1.PersistentVolumeAccessMode
}

// DeviceMountableVolumePlugin is a VolumePlugin that can mount a volume once for all pods of the
// node, before SetUp for each pod.
type DeviceMountableVolumePlugin interface {
	VolumePlugin
	// NeedsDeviceMount reports whether a volume needs a device mount. For example, not every CSI
	// driver stages volumes.
	NeedsDeviceMount(spec *Spec) (bool, error)
	// VolumeName returns a name that is unique for each volume of the plugin, such as driver and
	// handle. All specs of one volume have the same VolumeName. The method makes no call to the
	// driver. It is not called for an inline volume that needs neither attach nor device mount.
	VolumeName(spec *Spec) (string, error)
	DeviceMounter
	// DeviceMounts returns the volumes that may be mounted for all pods according to the records
	// on disk, including volumes whose specs were removed.
	DeviceMounts() ([]DeviceMount, error)
}

// PodVolumeNamer is a plugin for which several PersistentVolumes can refer to one volume.
type PodVolumeNamer interface {
	DeviceMountableVolumePlugin
	// PodVolumeName returns the VolumeName of the volume that may be mounted in a pod; empty if no
	// record contains it. The parameter name is Spec.Name.
	PodVolumeName(name string, pod types.UID, block bool) string
}

// DeviceMount is a volume that may be mounted for all pods, or attached to the node.
type DeviceMount struct {
	VolumeName string
	// Spec contains the part of the spec that is recorded on disk. It suffices to unmount and to
	// detach the volume. Spec.Name is the volume's name in the pods' directories.
	Spec *Spec
	// Block is true for a raw device.
	Block bool
}

// DeviceMounter mounts a volume for all pods of the node. Its methods are idempotent.
type DeviceMounter interface {
	// DeviceMountPath returns a path below Paths.Plugin.
	DeviceMountPath(spec *Spec) (string, error)
	// MountDevice gets the result of Attach. Its errors have the same meaning as those of
	// Mounter.SetUp.
	MountDevice(ctx context.Context, spec *Spec, attachment Attachment, args MounterArgs) error
	// UnmountDevice needs only the spec that DeviceMounts returns.
	UnmountDevice(ctx context.Context, spec *Spec) error
}

// Attachment is a controller's result for an attached volume: the publish context of CSI.
type Attachment map[string]string

// AttachableVolumePlugin is a VolumePlugin whose volumes a controller can attach to the node.
type AttachableVolumePlugin interface {
	DeviceMountableVolumePlugin
	// NeedsAttach reports whether a volume must be attached.
	NeedsAttach(spec *Spec) (bool, error)
	Attacher
	// Attachments returns the volumes that may be attached according to the records on disk.
	Attachments() ([]DeviceMount, error)
}

// Attacher attaches a volume to the node. It writes a durable record before it calls the
// controller. Its methods are idempotent.
type Attacher interface {
	Attach(ctx context.Context, spec *Spec) (Attachment, error)
	// Detach needs only the spec that Attachments returns.
	Detach(ctx context.Context, spec *Spec) error
}

// BlockVolumePlugin is a VolumePlugin whose volumes can be raw devices.
type BlockVolumePlugin interface {
	VolumePlugin
	NewBlockVolumeMapper(spec *Spec, pod *corev1.Pod) (BlockVolumeMapper, error)
	NewBlockVolumeUnmapper(name string, pod types.UID) (BlockVolumeUnmapper, error)
}

// BlockVolumeMapper publishes a raw device to one pod.
type BlockVolumeMapper interface {
	// Path returns Paths.PodDevice, the path of a symbolic link to the device.
	Path() string
	// SetUpDevice stages the device once for all pods. MapPodDevice publishes it to the pod. Both
	// are idempotent. Their errors have the same meaning as those of Mounter.SetUp.
	SetUpDevice(ctx context.Context, attachment Attachment) error
	MapPodDevice(ctx context.Context) error
}

// BlockVolumeUnmapper unpublishes a raw device from one pod. It is idempotent. To undo SetUpDevice,
// call DeviceMounter.UnmountDevice with a spec of volumeMode Block.
type BlockVolumeUnmapper interface {
	UnmapPodDevice(ctx context.Context) error
}

// AttachLimiter is a VolumePlugin with a maximum number of volumes for each node.
type AttachLimiter interface {
	// AttachLimit returns the limit of the spec's driver (0 if there is none), and the driver's
	// name.
	AttachLimit(spec *Spec) (limit int64, driver string)
}

// ProvisionableVolumePlugin is a VolumePlugin that can create volumes.
type ProvisionableVolumePlugin interface {
	VolumePlugin
	// Provisions reports whether the plugin serves the provisioner of a StorageClass.
	Provisions(class *storagev1.StorageClass) bool
	// Provision creates a volume, or finds the existing one with the name of the
	// PersistentVolume. After an *UncertainError the volume may exist until a later call succeeds
	// or fails with a *RefusedError, so the caller must repeat the call, or delete the volume. Any
	// other error means that this call created nothing.
	Provision(ctx context.Context, o ProvisionOptions) (*corev1.PersistentVolume, error)
}

// ProvisionOptions describes a volume to create.
type ProvisionOptions struct {
	// PVName is the name of the PersistentVolume.
	PVName string
	Claim  *corev1.PersistentVolumeClaim
	Class  *storagev1.StorageClass
	// Source has no field set if the volume is created empty.
	Source ProvisionSource
}

// ProvisionSource is the source of a volume's content. At most one field is set.
type ProvisionSource struct {
	Volume         *corev1.PersistentVolume
	SnapshotHandle string
}

// DeletableVolumePlugin is a VolumePlugin that can delete volumes with their data.
type DeletableVolumePlugin interface {
	VolumePlugin
	Delete(ctx context.Context, pv *corev1.PersistentVolume) error
}

// RecyclableVolumePlugin is a VolumePlugin that can recycle volumes: it removes their content, so
// that another claim can use them.
type RecyclableVolumePlugin interface {
	VolumePlugin
	Recycle(ctx context.Context, pv *corev1.PersistentVolume) error
}

// ExpandableVolumePlugin is a VolumePlugin whose volumes a controller can expand.
type ExpandableVolumePlugin interface {
	VolumePlugin
	// Expand returns the new size, which may be larger than requested, and whether the node must
	// expand the volume too.
	Expand(ctx context.Context, pv *corev1.PersistentVolume, size resource.Quantity) (actual resource.Quantity, nodeExpandRequired bool, err error)
}

// NodeExpandableVolumePlugin is a VolumePlugin that expands the device or the filesystem of a volume
// on the node.
type NodeExpandableVolumePlugin interface {
	VolumePlugin
	// NodeExpand is called while the volume is mounted.
	NodeExpand(ctx context.Context, spec *Spec, o NodeExpandOptions) error
}

// NodeExpandOptions are the paths of a volume and its requested size.
type NodeExpandOptions struct {
	// Path is the path of a pod's mount or raw device.
	Path string
	// DeviceMountPath is empty if the volume needs no device mount.
	DeviceMountPath string
	Size            resource.Quantity
}

// Host is the part of the manager that plugins use.
type Host interface {
	Paths() Paths
	NodeName() string
	// ConfigMap and Secret return an object of the manifests, or ErrNotFound if there is none.
	ConfigMap(namespace, name string) (*corev1.ConfigMap, error)
	Secret(namespace, name string) (*corev1.Secret, error)
	// CSIDriver returns the CSIDriver object of the manifests; nil if there is none.
	CSIDriver(name string) *storagev1.CSIDriver
	// Token signs a service-account token that is bound to a pod, as the TokenRequest API
	// does.
	Token(pod *corev1.Pod, audiences []string, lifetime time.Duration) (token string, expires time.Time, err error)
}
