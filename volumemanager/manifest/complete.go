package manifest

import (
	"bytes"
	"cmp"
	"maps"
	"path"
	"reflect"
	"slices"
	"strings"

	snapshotv1 "github.com/kubernetes-csi/external-snapshotter/client/v8/apis/volumesnapshot/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
)

// completePod and the other functions whose names begin with complete are values of kind.complete, or parts
// of such functions.
func completePod(pod *corev1.Pod) field.ErrorList {
	pod.Status = corev1.PodStatus{}
	spec := field.NewPath("spec")
	volumes := sets.New[string]()
	var errs field.ErrorList
	for i := range pod.Spec.Volumes {
		at, v := spec.Child("volumes").Index(i), &pod.Spec.Volumes[i]
		errs = append(errs, checkUnique(at.Child("name"), v.Name, volumes)...)
		errs = append(errs, completeSource(at, &v.VolumeSource)...)
	}
	// A truncated manifest may lack the containers.
	if len(pod.Spec.Containers) == 0 {
		errs = append(errs, field.Required(spec.Child("containers"), "a pod needs at least one container with a name"))
	}
	return append(errs, checkContainers(spec, &pod.Spec, volumes)...)
}

// checkUnique checks that a name is not in taken and is valid as the name of a directory, and adds it
// to taken.
func checkUnique(at *field.Path, name string, taken sets.Set[string]) field.ErrorList {
	if taken.Has(name) {
		return field.ErrorList{field.Duplicate(at, name)}
	}
	taken.Insert(name)
	return validate(at, name, validation.IsDNS1123Label)
}

// completeSource checks the source of a pod's volume. It sets the defaults of a volumeClaimTemplate.
func completeSource(at *field.Path, source *corev1.VolumeSource) field.ErrorList {
	errs := checkOneSource(at, *source)
	if c := source.PersistentVolumeClaim; c != nil {
		errs = append(errs, checkSubdomain(at.Child("persistentVolumeClaim", "claimName"), c.ClaimName)...)
	}
	if c := source.CSI; c != nil {
		errs = append(errs, checkDriverName(at.Child("csi", "driver"), c.Driver)...)
	}
	if e := source.Ephemeral; e != nil {
		at := at.Child("ephemeral", "volumeClaimTemplate")
		if e.VolumeClaimTemplate == nil {
			return append(errs, field.Required(at, "the volume's claim is created from this template"))
		}
		errs = append(errs, completeClaimSpec(at.Child("spec"), &e.VolumeClaimTemplate.Spec)...)
	}
	return errs
}

// checkOneSource checks that exactly one field is set in a struct of pointers.
func checkOneSource(at *field.Path, source any) field.ErrorList {
	var set []string
	for f, v := range reflect.ValueOf(source).Fields() {
		if !v.IsNil() {
			name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
			set = append(set, name)
		}
	}
	switch len(set) {
	case 0:
		return field.ErrorList{field.Required(at, "set one source")}
	case 1:
		return nil
	default:
		return field.ErrorList{field.Forbidden(at, "only one source is allowed, not "+strings.Join(set, " and ")+": remove all but one")}
	}
}

// checkContainers checks the fields of containers that concern volumes. volumes has the names of the pod's
// volumes.
func checkContainers(spec *field.Path, pod *corev1.PodSpec, volumes sets.Set[string]) (errs field.ErrorList) {
	names := sets.New[string]()
	check := func(at *field.Path, c *corev1.Container) {
		// The paths of subPath mounts contain the container's name.
		errs = append(errs, checkUnique(at.Child("name"), c.Name, names)...)
		errs = append(errs, checkMounts(at, c, volumes)...)
	}
	for i := range pod.InitContainers {
		check(spec.Child("initContainers").Index(i), &pod.InitContainers[i])
	}
	for i := range pod.Containers {
		check(spec.Child("containers").Index(i), &pod.Containers[i])
	}
	for i := range pod.EphemeralContainers {
		check(spec.Child("ephemeralContainers").Index(i), (*corev1.Container)(&pod.EphemeralContainers[i].EphemeralContainerCommon))
	}
	return errs
}

// checkMounts checks the volumeMounts and volumeDevices of a container.
func checkMounts(at *field.Path, c *corev1.Container, volumes sets.Set[string]) (errs field.ErrorList) {
	checkName := func(at *field.Path, name string) {
		if !volumes.Has(name) {
			errs = append(errs, field.Invalid(at, name, "spec.volumes has no volume of this name: add it, or correct the name"))
		}
	}
	for i, m := range c.VolumeMounts {
		at := at.Child("volumeMounts").Index(i)
		checkName(at.Child("name"), m.Name)
		errs = append(errs, checkSubPath(at.Child("subPath"), m.SubPath)...)
		errs = append(errs, checkSubPath(at.Child("subPathExpr"), m.SubPathExpr)...)
	}
	for i, d := range c.VolumeDevices {
		checkName(at.Child("volumeDevices").Index(i).Child("name"), d.Name)
	}
	return errs
}

// checkSubPath checks that a subPath or subPathExpr does not lead out of the volume.
func checkSubPath(at *field.Path, sub string) field.ErrorList {
	if path.IsAbs(sub) || slices.Contains(strings.Split(sub, "/"), "..") {
		return field.ErrorList{field.Invalid(at, sub, "must be relative to the volume and must not contain ..")}
	}
	return nil
}

// Short names for the table of kinds.
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
	spec.PersistentVolumeReclaimPolicy = cmp.Or(spec.PersistentVolumeReclaimPolicy, corev1.PersistentVolumeReclaimRetain)
	errs := append(checkOneSource(at, spec.PersistentVolumeSource), checkModes(at, spec.AccessModes, &spec.VolumeMode)...)
	errs = append(errs, checkSize(at.Child("capacity"), spec.Capacity)...)
	errs = append(errs, checkSupported(at.Child("persistentVolumeReclaimPolicy"), spec.PersistentVolumeReclaimPolicy,
		corev1.PersistentVolumeReclaimDelete, corev1.PersistentVolumeReclaimRecycle, corev1.PersistentVolumeReclaimRetain)...)
	if csi := spec.CSI; csi != nil {
		errs = append(errs, checkDriverName(at.Child("csi", "driver"), csi.Driver)...)
		if csi.VolumeHandle == "" {
			errs = append(errs, field.Required(at.Child("csi", "volumeHandle"), "the driver identifies the volume by this handle"))
		}
	}
	return errs
}

func completeClaim(c *claim) field.ErrorList {
	c.Status = corev1.PersistentVolumeClaimStatus{}
	return completeClaimSpec(field.NewPath("spec"), &c.Spec)
}

func completeClaimSpec(at *field.Path, spec *corev1.PersistentVolumeClaimSpec) field.ErrorList {
	errs := append(checkModes(at, spec.AccessModes, &spec.VolumeMode), checkSize(at.Child("resources", "requests"), spec.Resources.Requests)...)
	if spec.VolumeName != "" {
		errs = append(errs, checkSubdomain(at.Child("volumeName"), spec.VolumeName)...)
	}
	return errs
}

// checkModes checks access modes and volume mode, and sets the default of the volume mode.
func checkModes(at *field.Path, access []corev1.PersistentVolumeAccessMode, mode **corev1.PersistentVolumeMode) (errs field.ErrorList) {
	fillPointer(mode, corev1.PersistentVolumeFilesystem)
	if len(access) == 0 {
		errs = append(errs, field.Required(at.Child("accessModes"), "for example ReadWriteOnce"))
	}
	for i, m := range access {
		errs = append(errs, checkSupported(at.Child("accessModes").Index(i), m,
			corev1.ReadWriteOnce, corev1.ReadOnlyMany, corev1.ReadWriteMany, corev1.ReadWriteOncePod)...)
	}
	return append(errs, checkSupported(at.Child("volumeMode"), **mode, corev1.PersistentVolumeBlock, corev1.PersistentVolumeFilesystem)...)
}

// checkSize checks that a list of resources has a positive amount of storage.
func checkSize(at *field.Path, list corev1.ResourceList) field.ErrorList {
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
	errs = append(errs, checkSupported(field.NewPath("reclaimPolicy"), *c.ReclaimPolicy, corev1.PersistentVolumeReclaimDelete, corev1.PersistentVolumeReclaimRetain)...)
	return append(errs, checkSupported(field.NewPath("volumeBindingMode"), *c.VolumeBindingMode, storagev1.VolumeBindingImmediate, storagev1.VolumeBindingWaitForFirstConsumer)...)
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
	errs := checkDriverName(field.NewPath("metadata", "name"), d.Name)
	errs = append(errs, checkSupported(at.Child("fsGroupPolicy"), *spec.FSGroupPolicy,
		storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy, storagev1.FileFSGroupPolicy, storagev1.NoneFSGroupPolicy)...)
	for i, m := range spec.VolumeLifecycleModes {
		errs = append(errs, checkSupported(at.Child("volumeLifecycleModes").Index(i), m, storagev1.VolumeLifecyclePersistent, storagev1.VolumeLifecycleEphemeral)...)
	}
	return errs
}

func completeSnapshot(s *snapshot) field.ErrorList {
	return checkOneSource(field.NewPath("spec", "source"), s.Spec.Source)
}

func completeContent(c *content) field.ErrorList {
	at := field.NewPath("spec")
	errs := append(checkOneSource(at.Child("source"), c.Spec.Source), checkDriverName(at.Child("driver"), c.Spec.Driver)...)
	return append(errs, checkSupported(at.Child("deletionPolicy"), c.Spec.DeletionPolicy,
		snapshotv1.VolumeSnapshotContentDelete, snapshotv1.VolumeSnapshotContentRetain)...)
}

// checkDriverName checks the name of a CSI driver (csi-spec, GetPluginInfoResponse.name), which
// becomes the name of a directory. Like Kubernetes, it allows no underscores.
func checkDriverName(at *field.Path, name string) field.ErrorList {
	const maxLength = 63
	if len(name) > maxLength {
		return field.ErrorList{field.TooLong(at, name, maxLength)}
	}
	return checkSubdomain(at, strings.ToLower(name))
}

func checkSupported[T ~string](at *field.Path, value T, valid ...T) field.ErrorList {
	if slices.Contains(valid, value) {
		return nil
	}
	return field.ErrorList{field.NotSupported(at, value, valid)}
}

func completeConfigMap(o *corev1.ConfigMap) field.ErrorList {
	data, binary := field.NewPath("data"), field.NewPath("binaryData")
	errs := append(checkKeys(data, o.Data), checkKeys(binary, o.BinaryData)...)
	for _, k := range slices.Sorted(maps.Keys(o.BinaryData)) {
		if _, both := o.Data[k]; both {
			errs = append(errs, field.Invalid(binary.Key(k), k, "data has this key too: remove one"))
		}
	}
	return errs
}

// completeSecret merges stringData into data. A key in both has the value of stringData.
func completeSecret(o *corev1.Secret) field.ErrorList {
	errs := append(checkKeys(field.NewPath("data"), o.Data), checkKeys(field.NewPath("stringData"), o.StringData)...)
	if o.Data == nil {
		o.Data = make(map[string][]byte)
	}
	for k, v := range o.StringData {
		o.Data[k] = []byte(v)
	}
	o.StringData = nil
	o.Type = cmp.Or(o.Type, corev1.SecretTypeOpaque)
	return errs
}

// immutableChange returns a message if the data or the field immutable of an immutable ConfigMap or
// Secret was changed; otherwise "". An API server refuses such a change. An object with another UID
// is a new object.
func immutableChange(before, after metav1.Object) string {
	changed := false
	switch b := before.(type) {
	case *corev1.ConfigMap:
		a := after.(*corev1.ConfigMap)
		changed = ptr.Deref(b.Immutable, false) && (!ptr.Deref(a.Immutable, false) || !maps.Equal(b.Data, a.Data) || !maps.EqualFunc(b.BinaryData, a.BinaryData, bytes.Equal))
	case *corev1.Secret:
		a := after.(*corev1.Secret)
		changed = ptr.Deref(b.Immutable, false) && (!ptr.Deref(a.Immutable, false) || !maps.EqualFunc(b.Data, a.Data, bytes.Equal))
	}
	if !changed || before.GetUID() != after.GetUID() {
		return ""
	}
	return "the object is immutable (immutable: true), so its data and this field cannot change: undo the change, or give the changed object another name, or remove the old object first"
}

// checkKeys checks the keys of a ConfigMap or Secret.
func checkKeys[V any](at *field.Path, data map[string]V) (errs field.ErrorList) {
	for _, k := range slices.Sorted(maps.Keys(data)) {
		errs = append(errs, validate(at.Key(k), k, validation.IsConfigMapKey)...)
	}
	return errs
}

// fillPointer sets a field that is nil to its default.
func fillPointer[T any](to **T, value T) {
	if *to == nil {
		*to = &value
	}
}
