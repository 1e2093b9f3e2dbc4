package plugins

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
)

// VolumePlugin is one kind of volume. All methods are safe for concurrent use. None blocks except
// on disk I/O.
type VolumePlugin interface {
	// Name returns the kubelet's name, such as kubernetes.io/empty-dir.
	Name() string
	// CanSupport reports whether a spec is of this kind. Each spec is of one kind only.
	CanSupport(spec *Spec) bool
	// NewMounter refuses a spec that is not valid, with an *InvalidError.
	NewMounter(spec *Spec, pod *corev1.Pod) (Mounter, error)
	// NewUnmounter needs only what is on disk, because the manifest may be removed. The name is
	// Spec.Name.
	NewUnmounter(name string, pod types.UID) (Unmounter, error)
	// Remounts reports whether SetUp must be repeated while the pod runs, because the content may
	// change: ConfigMaps, and drivers that require it.
	Remounts(spec *Spec) bool
}

// Mounter mounts a volume for one pod.
type Mounter interface {
	// Path returns the volume's path for the pod: Paths.PodVolume, or a path below it.
	Path() string
	// SetUp is idempotent, and may be called for a volume that is mounted and in use. After an
	// *UncertainError the volume may be mounted. Any other error leaves it unchanged.
	SetUp(ctx context.Context, args MounterArgs) error
}

// Warner is a Mounter that may set a volume up with less than was requested.
type Warner interface {
	// Warnings returns what the last SetUp could not provide, with the remedy.
	Warnings() []string
}

// MounterArgs are the settings of a pod for all its volumes.
type MounterArgs struct {
	FSGroup             *int64
	FSGroupChangePolicy corev1.PodFSGroupChangePolicy
}

// Unmounter unmounts a volume from one pod. TearDown is idempotent, also undoes an incomplete
// SetUp, and leaves nothing at Paths.PodVolume. It removes directories with rmdir(2) only,
// except content that the plugin itself created.
type Unmounter interface {
	TearDown(ctx context.Context) error
}

// PersistentVolumePlugin is a kind of PersistentVolumes.
type PersistentVolumePlugin interface {
	VolumePlugin
	AccessModes() []corev1.PersistentVolumeAccessMode
}

// DeviceMountableVolumePlugin is a kind that is mounted once for all pods of the node, before it
// is set up for each.
type DeviceMountableVolumePlugin interface {
	VolumePlugin
	// NeedsDeviceMount reports whether this volume does: not every driver stages.
	NeedsDeviceMount(spec *Spec) (bool, error)
	// VolumeName returns a name that all specs of one volume share, and no other volume of the
	// plugin has: driver and handle. It makes no call to the driver. It is not called for an
	// inline volume without attach and device mount.
	VolumeName(spec *Spec) (string, error)
	DeviceMounter
	// DeviceMounts returns the volumes that may be mounted for all pods according to the records
	// on disk, also those whose specs were removed.
	DeviceMounts() ([]DeviceMount, error)
}

// PodVolumeNamer is a kind where several PersistentVolumes can be one volume.
type PodVolumeNamer interface {
	DeviceMountableVolumePlugin
	// PodVolumeName returns the VolumeName of the volume that a pod may have under a name
	// (Spec.Name); empty if no record contains it.
	PodVolumeName(name string, pod types.UID, block bool) string
}

// DeviceMount is a volume that is mounted for all pods.
type DeviceMount struct {
	VolumeName string
	// Spec contains what is on disk: enough to unmount and to detach the volume. Its Name is the
	// name in the pods' directories.
	Spec *Spec
	// Block: it is a raw device.
	Block bool
}

// DeviceMounter mounts a volume for all pods of the node. Its methods are idempotent.
type DeviceMounter interface {
	// DeviceMountPath returns a path below Paths.Plugin.
	DeviceMountPath(spec *Spec) (string, error)
	// MountDevice takes the result of Attach. Errors are as those of SetUp.
	MountDevice(ctx context.Context, spec *Spec, attachment Attachment, args MounterArgs) error
	// UnmountDevice needs only the spec that DeviceMounts returns.
	UnmountDevice(ctx context.Context, spec *Spec) error
}

// Attachment is a controller's result for an attached volume: the publish context of CSI.
type Attachment map[string]string

// AttachableVolumePlugin is a kind that a controller attaches to the node.
type AttachableVolumePlugin interface {
	DeviceMountableVolumePlugin
	// NeedsAttach reports whether this volume must be attached.
	NeedsAttach(spec *Spec) (bool, error)
	Attacher
	// Attachments returns the volumes that may be attached according to the records on disk.
	Attachments() ([]DeviceMount, error)
}

// Attacher attaches a volume to the node. A durable record precedes the call to the controller.
// Its methods are idempotent.
type Attacher interface {
	Attach(ctx context.Context, spec *Spec) (Attachment, error)
	// Detach needs only the spec that Attachments returns.
	Detach(ctx context.Context, spec *Spec) error
}

// BlockVolumePlugin is a kind that can be a raw device.
type BlockVolumePlugin interface {
	VolumePlugin
	NewBlockVolumeMapper(spec *Spec, pod *corev1.Pod) (BlockVolumeMapper, error)
	NewBlockVolumeUnmapper(name string, pod types.UID) (BlockVolumeUnmapper, error)
}

// BlockVolumeMapper publishes a raw device to one pod.
type BlockVolumeMapper interface {
	// Path returns Paths.PodDevice: a symbolic link to the device.
	Path() string
	// SetUpDevice stages the device once for all pods. MapPodDevice publishes it to the pod. Both
	// are idempotent. Errors are as those of Mounter.SetUp.
	SetUpDevice(ctx context.Context, attachment Attachment) error
	MapPodDevice(ctx context.Context) error
}

// BlockVolumeUnmapper unpublishes a raw device from one pod. It is idempotent.
// DeviceMounter.UnmountDevice undoes SetUpDevice, for a spec with volumeMode Block.
type BlockVolumeUnmapper interface {
	UnmapPodDevice(ctx context.Context) error
}

// AttachLimiter is a kind with a maximum number of volumes for each node.
type AttachLimiter interface {
	// AttachLimit returns the limit of the spec's driver (0: none), and the driver's name.
	AttachLimit(spec *Spec) (limit int64, driver string)
}

// ProvisionableVolumePlugin is a kind whose volumes can be created.
type ProvisionableVolumePlugin interface {
	VolumePlugin
	// Provisions reports whether the plugin serves the provisioner of a StorageClass.
	Provisions(class *storagev1.StorageClass) bool
	// Provision creates a volume, or finds the existing one with the name of the
	// PersistentVolume. After an *UncertainError the volume may exist: repeat the same call, or
	// delete the volume. That remains so until a call succeeds or fails with a *RefusedError.
	// Any other error changes nothing.
	Provision(ctx context.Context, o ProvisionOptions) (*corev1.PersistentVolume, error)
}

// ProvisionOptions describes a volume to create.
type ProvisionOptions struct {
	PVName string
	Claim  *corev1.PersistentVolumeClaim
	Class  *storagev1.StorageClass
	// Source is the source of the content; none for an empty volume.
	Source ProvisionSource
}

// ProvisionSource is the source of a volume's content. At most one field is set.
type ProvisionSource struct {
	Volume         *corev1.PersistentVolume
	SnapshotHandle string
}

// DeletableVolumePlugin is a kind whose volumes can be deleted, with their data.
type DeletableVolumePlugin interface {
	VolumePlugin
	Delete(ctx context.Context, pv *corev1.PersistentVolume) error
}

// RecyclableVolumePlugin is a kind whose volumes can be scrubbed: their content is removed, so
// that another claim can use them.
type RecyclableVolumePlugin interface {
	VolumePlugin
	Recycle(ctx context.Context, pv *corev1.PersistentVolume) error
}

// ExpandableVolumePlugin is a kind whose volumes a controller expands.
type ExpandableVolumePlugin interface {
	VolumePlugin
	// Expand returns the new size, which may be larger than requested, and whether the node must
	// expand the volume too.
	Expand(ctx context.Context, pv *corev1.PersistentVolume, size resource.Quantity) (actual resource.Quantity, node bool, err error)
}

// NodeExpandableVolumePlugin is a kind whose device or filesystem is expanded on the node.
type NodeExpandableVolumePlugin interface {
	VolumePlugin
	// NodeExpand is called while the volume is mounted.
	NodeExpand(ctx context.Context, spec *Spec, o NodeExpandOptions) error
}

// NodeExpandOptions are the paths of a volume and its requested size.
type NodeExpandOptions struct {
	Path            string // of a pod's mount or device
	DeviceMountPath string
	Size            resource.Quantity
}

// Host is the part of the manager that plugins use.
type Host interface {
	Paths() Paths
	NodeName() string
	// ConfigMap and Secret return objects of the manifests (ErrNotFound).
	ConfigMap(namespace, name string) (*corev1.ConfigMap, error)
	Secret(namespace, name string) (*corev1.Secret, error)
	// CSIDriver returns an object of the manifests; nil if there is none.
	CSIDriver(name string) *storagev1.CSIDriver
	// Token signs a service-account token that is bound to a pod, as the TokenRequest API
	// does.
	Token(pod *corev1.Pod, audiences []string, lifetime time.Duration) (token string, expires time.Time, err error)
}
