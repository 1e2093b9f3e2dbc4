package plugins

import (
	"context"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
)

// VolumePlugin is one kind of volume. All its methods are safe for concurrent use; none
// waits for anything but the disk.
type VolumePlugin interface {
	// Name is as the kubelet has it: kubernetes.io/empty-dir.
	Name() string
	// CanSupport tells whether a spec is of this kind. No spec is of two.
	CanSupport(spec *Spec) bool
	// NewMounter refuses a spec that is not valid, with an *InvalidError.
	NewMounter(spec *Spec, pod *corev1.Pod) (Mounter, error)
	// NewUnmounter works from what is on disk alone: the manifests may be gone. The name
	// is Spec.Name.
	NewUnmounter(name string, pod types.UID) (Unmounter, error)
	// Remounts tells whether SetUp is to be called again while the pod runs, because what
	// the volume has may have changed: ConfigMaps, and drivers that ask for it.
	Remounts(spec *Spec) bool
}

// Mounter makes a volume appear for one pod.
type Mounter interface {
	// Path is where the pod finds the volume: Paths.PodVolume, or below it.
	Path() string
	// SetUp is idempotent, and may be called for a volume that is mounted and in use. An
	// error that is an *UncertainError leaves it possibly mounted; after any other it is
	// as it was before.
	SetUp(ctx context.Context, args MounterArgs) error
}

// Warner is a Mounter that may have set a volume up with less than was asked for.
type Warner interface {
	// Warnings says what that is, and what to do about it, as SetUp has found it.
	Warnings() []string
}

// MounterArgs is what a pod asks of all its volumes.
type MounterArgs struct {
	FSGroup             *int64
	FSGroupChangePolicy corev1.PodFSGroupChangePolicy
}

// Unmounter takes a volume away from one pod. TearDown is idempotent, works for what was
// set up by half, and leaves nothing at Paths.PodVolume. It removes directories with
// rmdir(2) only, but for content that the plugin itself has made.
type Unmounter interface {
	TearDown(ctx context.Context) error
}

// PersistentVolumePlugin is a kind that PersistentVolumes may have.
type PersistentVolumePlugin interface {
	VolumePlugin
	AccessModes() []corev1.PersistentVolumeAccessMode
}

// DeviceMountableVolumePlugin is a kind that is mounted once for all pods of the machine,
// before it is set up for each.
type DeviceMountableVolumePlugin interface {
	VolumePlugin
	// NeedsDeviceMount tells whether this very volume does: not every driver stages.
	NeedsDeviceMount(spec *Spec) (bool, error)
	// VolumeName is the same for all specs of one volume, and tells it from all others of
	// the plugin: the driver and the handle. It needs no driver. A pod's own volume that
	// needs neither to be attached nor mounted for all pods is not asked for it.
	VolumeName(spec *Spec) (string, error)
	DeviceMounter
	// DeviceMounts are the volumes that are, or may be, mounted for all pods as the disk
	// has it, also those whose specs are gone.
	DeviceMounts() ([]DeviceMount, error)
}

// PodVolumeNamer is a kind of which several PersistentVolumes may be one volume.
type PodVolumeNamer interface {
	DeviceMountableVolumePlugin
	// PodVolumeName is the VolumeName of what a pod has, or may have, by a name (Spec.Name);
	// empty if the disk does not say.
	PodVolumeName(name string, pod types.UID, block bool) string
}

// DeviceMount is a volume that is mounted for all pods.
type DeviceMount struct {
	VolumeName string
	// Spec has as much as the disk has of it: enough to be taken down, and detached. Its
	// Name is one that pods' directories have.
	Spec *Spec
	// Block says that it is a raw device.
	Block bool
}

// DeviceMounter mounts a volume for all pods of the machine. Both are idempotent.
type DeviceMounter interface {
	// DeviceMountPath is below Paths.Plugin.
	DeviceMountPath(spec *Spec) (string, error)
	// MountDevice gets what Attach gave. Errors are as those of SetUp.
	MountDevice(ctx context.Context, spec *Spec, attachment Attachment, args MounterArgs) error
	// UnmountDevice needs no more of spec than DeviceMounts gives.
	UnmountDevice(ctx context.Context, spec *Spec) error
}

// Attachment is what a controller told of a volume that it attached: CSI's publish
// context.
type Attachment map[string]string

// AttachableVolumePlugin is a kind that a controller attaches to the machine.
type AttachableVolumePlugin interface {
	DeviceMountableVolumePlugin
	// NeedsAttach tells whether this very volume does.
	NeedsAttach(spec *Spec) (bool, error)
	Attacher
	// Attachments are the volumes that are, or may be, attached, as the disk has it.
	Attachments() ([]DeviceMount, error)
}

// Attacher attaches a volume to the machine. It writes down, before, that it may be.
// Both are idempotent.
type Attacher interface {
	Attach(ctx context.Context, spec *Spec) (Attachment, error)
	// Detach needs no more of spec than Attachments gives.
	Detach(ctx context.Context, spec *Spec) error
}

// BlockVolumePlugin is a kind that can be a raw device.
type BlockVolumePlugin interface {
	VolumePlugin
	NewBlockVolumeMapper(spec *Spec, pod *corev1.Pod) (BlockVolumeMapper, error)
	NewBlockVolumeUnmapper(name string, pod types.UID) (BlockVolumeUnmapper, error)
}

// BlockVolumeMapper makes a raw device appear for one pod.
type BlockVolumeMapper interface {
	// Path is Paths.PodDevice: a symbolic link to the device.
	Path() string
	// SetUpDevice brings the device to the machine, once for all pods; MapPodDevice gives
	// it to the pod. Both are idempotent; errors are as those of Mounter.SetUp.
	SetUpDevice(ctx context.Context, attachment Attachment) error
	MapPodDevice(ctx context.Context) error
}

// BlockVolumeUnmapper takes a raw device away from one pod. It is idempotent. What
// SetUpDevice did is undone by DeviceMounter.UnmountDevice, whose spec says Block.
type BlockVolumeUnmapper interface {
	UnmapPodDevice(ctx context.Context) error
}

// AttachLimiter is a kind of which only so many volumes can be on one machine.
type AttachLimiter interface {
	// AttachLimit is that of the spec's driver, and the driver's name; 0 is none.
	AttachLimit(spec *Spec) (limit int64, driver string)
}

// ProvisionableVolumePlugin is a kind whose volumes can be made.
type ProvisionableVolumePlugin interface {
	VolumePlugin
	// Provisions tells whether it is the one for a StorageClass's provisioner.
	Provisions(class *storagev1.StorageClass) bool
	// Provision makes a volume, or finds it made: the name of the PersistentVolume that it
	// is to be says which. An *UncertainError means that it may have been made: the same
	// call is to be repeated, or its volume deleted. It stays so until a call succeeds or
	// fails with a *RefusedError; any other error leaves it as it was before.
	Provision(ctx context.Context, o ProvisionOptions) (*corev1.PersistentVolume, error)
}

// ProvisionOptions is what a volume is to be made of.
type ProvisionOptions struct {
	PVName string
	Claim  *corev1.PersistentVolumeClaim
	Class  *storagev1.StorageClass
	// Source is the volume (Volume) or the handle of the snapshot that it is to be made
	// of, or neither.
	Source ProvisionSource
}

// ProvisionSource is what a volume is a copy of; at most one is set.
type ProvisionSource struct {
	Volume         *corev1.PersistentVolume
	SnapshotHandle string
}

// DeletableVolumePlugin is a kind whose volumes can be deleted with their data.
type DeletableVolumePlugin interface {
	VolumePlugin
	Delete(ctx context.Context, pv *corev1.PersistentVolume) error
}

// RecyclableVolumePlugin is a kind whose volumes can be scrubbed: all that is in them is
// removed, so that the next claim may have them.
type RecyclableVolumePlugin interface {
	VolumePlugin
	Recycle(ctx context.Context, pv *corev1.PersistentVolume) error
}

// ExpandableVolumePlugin is a kind whose volumes a controller makes larger.
type ExpandableVolumePlugin interface {
	VolumePlugin
	// Expand returns the size it has then, which may be larger than asked, and whether
	// the node has to follow.
	Expand(ctx context.Context, pv *corev1.PersistentVolume, size resource.Quantity) (actual resource.Quantity, node bool, err error)
}

// NodeExpandableVolumePlugin is a kind whose device or filesystem follows on the machine.
type NodeExpandableVolumePlugin interface {
	VolumePlugin
	// NodeExpand is called while the volume is mounted, with the path of a pod's mount or
	// device, and the device mount's.
	NodeExpand(ctx context.Context, spec *Spec, o NodeExpandOptions) error
}

// NodeExpandOptions is where a volume is, and how large it is to be.
type NodeExpandOptions struct {
	Path            string
	DeviceMountPath string
	Size            resource.Quantity
}

// Host is what a plugin is given of the manager.
type Host interface {
	Paths() Paths
	NodeName() string
	// ConfigMap and Secret give what the manifests have, or an error that errors.Is
	// ErrNotFound.
	ConfigMap(namespace, name string) (*corev1.ConfigMap, error)
	Secret(namespace, name string) (*corev1.Secret, error)
	// CSIDriver is nil if no manifest has it.
	CSIDriver(name string) *storagev1.CSIDriver
	// Token signs a service-account token that is bound to a pod, as the TokenRequest API
	// does.
	Token(pod *corev1.Pod, audiences []string, lifetime time.Duration) (token string, expires time.Time, err error)
}
