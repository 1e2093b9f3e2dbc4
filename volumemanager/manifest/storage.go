package manifest

import (
	"slices"
	"strings"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

type (
	claim    = corev1.PersistentVolumeClaim
	class    = storagev1.StorageClass
	driver   = storagev1.CSIDriver
	snapshot = snapshotv1.VolumeSnapshot
	content  = snapshotv1.VolumeSnapshotContent
)

func completeVolume(pv *corev1.PersistentVolume) field.ErrorList {
	pv.Status = corev1.PersistentVolumeStatus{}
	at, spec := field.NewPath("spec"), &pv.Spec
	fill(&spec.PersistentVolumeReclaimPolicy, corev1.PersistentVolumeReclaimRetain)
	errs := append(oneOf(at, spec.PersistentVolumeSource), modes(at, spec.AccessModes, &spec.VolumeMode)...)
	errs = append(errs, size(at.Child("capacity"), spec.Capacity)...)
	errs = append(errs, among(at.Child("persistentVolumeReclaimPolicy"), spec.PersistentVolumeReclaimPolicy,
		corev1.PersistentVolumeReclaimDelete, corev1.PersistentVolumeReclaimRecycle, corev1.PersistentVolumeReclaimRetain)...)
	if csi := spec.CSI; csi != nil {
		errs = append(errs, driverName(at.Child("csi", "driver"), csi.Driver)...)
		if csi.VolumeHandle == "" {
			errs = append(errs, field.Required(at.Child("csi", "volumeHandle"), "the driver identifies the volume by it"))
		}
	}
	return errs
}

func completeClaim(c *claim) field.ErrorList {
	c.Status = corev1.PersistentVolumeClaimStatus{}
	return completeClaimSpec(field.NewPath("spec"), &c.Spec)
}

func completeClaimSpec(at *field.Path, spec *corev1.PersistentVolumeClaimSpec) field.ErrorList {
	errs := append(modes(at, spec.AccessModes, &spec.VolumeMode), size(at.Child("resources", "requests"), spec.Resources.Requests)...)
	if spec.VolumeName != "" {
		errs = append(errs, subdomain(at.Child("volumeName"), spec.VolumeName)...)
	}
	return errs
}

// modes checks access modes and volume mode, and sets the default of the volume mode.
func modes(at *field.Path, access []corev1.PersistentVolumeAccessMode, mode **corev1.PersistentVolumeMode) (errs field.ErrorList) {
	fillPointer(mode, corev1.PersistentVolumeFilesystem)
	if len(access) == 0 {
		errs = append(errs, field.Required(at.Child("accessModes"), "for example ReadWriteOnce"))
	}
	for i, m := range access {
		errs = append(errs, among(at.Child("accessModes").Index(i), m,
			corev1.ReadWriteOnce, corev1.ReadOnlyMany, corev1.ReadWriteMany, corev1.ReadWriteOncePod)...)
	}
	return append(errs, among(at.Child("volumeMode"), **mode, corev1.PersistentVolumeBlock, corev1.PersistentVolumeFilesystem)...)
}

func size(at *field.Path, list corev1.ResourceList) field.ErrorList {
	at = at.Key(string(corev1.ResourceStorage))
	storage, set := list[corev1.ResourceStorage]
	switch {
	case !set:
		return field.ErrorList{field.Required(at, "for example 1Gi")}
	case storage.Sign() <= 0:
		return field.ErrorList{field.Invalid(at, storage.String(), "must be more than 0")}
	default:
		return nil
	}
}

func completeClass(c *class) (errs field.ErrorList) {
	fillPointer(&c.ReclaimPolicy, corev1.PersistentVolumeReclaimDelete)
	fillPointer(&c.VolumeBindingMode, storagev1.VolumeBindingImmediate)
	if c.Provisioner == "" {
		errs = append(errs, field.Required(field.NewPath("provisioner"), "the name of a CSI driver, or kubernetes.io/no-provisioner"))
	}
	errs = append(errs, among(field.NewPath("reclaimPolicy"), *c.ReclaimPolicy, corev1.PersistentVolumeReclaimDelete, corev1.PersistentVolumeReclaimRetain)...)
	return append(errs, among(field.NewPath("volumeBindingMode"), *c.VolumeBindingMode, storagev1.VolumeBindingImmediate, storagev1.VolumeBindingWaitForFirstConsumer)...)
}

func completeDriver(d *driver) field.ErrorList {
	at, spec := field.NewPath("spec"), &d.Spec
	fillPointer(&spec.AttachRequired, true)
	fillPointer(&spec.PodInfoOnMount, false)
	fillPointer(&spec.StorageCapacity, false)
	fillPointer(&spec.FSGroupPolicy, storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy)
	fillPointer(&spec.RequiresRepublish, false)
	fillPointer(&spec.SELinuxMount, false)
	if len(spec.VolumeLifecycleModes) == 0 {
		spec.VolumeLifecycleModes = []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecyclePersistent}
	}
	errs := driverName(field.NewPath("metadata", "name"), d.Name)
	errs = append(errs, among(at.Child("fsGroupPolicy"), *spec.FSGroupPolicy,
		storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy, storagev1.FileFSGroupPolicy, storagev1.NoneFSGroupPolicy)...)
	for i, m := range spec.VolumeLifecycleModes {
		errs = append(errs, among(at.Child("volumeLifecycleModes").Index(i), m, storagev1.VolumeLifecyclePersistent, storagev1.VolumeLifecycleEphemeral)...)
	}
	return errs
}

func completeSnapshot(s *snapshot) field.ErrorList {
	return oneOf(field.NewPath("spec", "source"), s.Spec.Source)
}

func completeContent(c *content) field.ErrorList {
	at := field.NewPath("spec")
	errs := append(oneOf(at.Child("source"), c.Spec.Source), driverName(at.Child("driver"), c.Spec.Driver)...)
	return append(errs, among(at.Child("deletionPolicy"), c.Spec.DeletionPolicy,
		snapshotv1.VolumeSnapshotContentDelete, snapshotv1.VolumeSnapshotContentRetain)...)
}

// driverName checks the name of a CSI driver (csi-spec, GetPluginInfoResponse.name; Kubernetes allows
// no underscores). It is also the name of a directory.
func driverName(at *field.Path, name string) field.ErrorList {
	const maxLength = 63
	if len(name) > maxLength {
		return field.ErrorList{field.TooLong(at, name, maxLength)}
	}
	return subdomain(at, strings.ToLower(name))
}

func among[T ~string](at *field.Path, value T, valid ...T) field.ErrorList {
	if slices.Contains(valid, value) {
		return nil
	}
	return field.ErrorList{field.NotSupported(at, value, valid)}
}
