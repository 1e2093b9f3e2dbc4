package manifest

import (
	"path"
	"reflect"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func completePod(pod *corev1.Pod) field.ErrorList {
	pod.Status = corev1.PodStatus{}
	spec := field.NewPath("spec")
	volumes := sets.New[string]()
	var errs field.ErrorList
	for i := range pod.Spec.Volumes {
		at, v := spec.Child("volumes").Index(i), &pod.Spec.Volumes[i]
		errs = append(errs, unique(at.Child("name"), v.Name, volumes)...)
		errs = append(errs, completeSource(at, &v.VolumeSource)...)
	}
	// An incomplete manifest has no containers.
	if len(pod.Spec.Containers) == 0 {
		errs = append(errs, field.Required(spec.Child("containers"), "a pod needs at least one container with a name"))
	}
	return append(errs, checkContainers(spec, &pod.Spec, volumes)...)
}

// unique checks a name that becomes the name of a directory, and adds it to taken.
func unique(at *field.Path, name string, taken sets.Set[string]) field.ErrorList {
	if taken.Has(name) {
		return field.ErrorList{field.Duplicate(at, name)}
	}
	taken.Insert(name)
	return all(at, name, validation.IsDNS1123Label)
}

func completeSource(at *field.Path, source *corev1.VolumeSource) field.ErrorList {
	errs := oneOf(at, *source)
	if c := source.PersistentVolumeClaim; c != nil {
		errs = append(errs, subdomain(at.Child("persistentVolumeClaim", "claimName"), c.ClaimName)...)
	}
	if c := source.CSI; c != nil {
		errs = append(errs, driverName(at.Child("csi", "driver"), c.Driver)...)
	}
	if e := source.Ephemeral; e != nil {
		at := at.Child("ephemeral", "volumeClaimTemplate")
		if e.VolumeClaimTemplate == nil {
			return append(errs, field.Required(at, "the claim is created from it"))
		}
		errs = append(errs, completeClaimSpec(at.Child("spec"), &e.VolumeClaimTemplate.Spec)...)
	}
	return errs
}

// oneOf checks that exactly one field is set in a struct of pointers.
func oneOf(at *field.Path, source any) field.ErrorList {
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
		return field.ErrorList{field.Forbidden(at, "it has the sources "+strings.Join(set, " and ")+": remove all but one")}
	}
}

func checkContainers(spec *field.Path, pod *corev1.PodSpec, volumes sets.Set[string]) (errs field.ErrorList) {
	names := sets.New[string]()
	check := func(at *field.Path, c *corev1.Container) {
		// The name becomes the name of a directory of subPaths.
		errs = append(errs, unique(at.Child("name"), c.Name, names)...)
		errs = append(errs, checkUses(at, c, volumes)...)
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

func checkUses(at *field.Path, c *corev1.Container, volumes sets.Set[string]) (errs field.ErrorList) {
	checkName := func(at *field.Path, name string) {
		if !volumes.Has(name) {
			errs = append(errs, field.Invalid(at, name, "spec.volumes has no volume of this name: add it, or correct the name"))
		}
	}
	for i, m := range c.VolumeMounts {
		at := at.Child("volumeMounts").Index(i)
		checkName(at.Child("name"), m.Name)
		errs = append(errs, inside(at.Child("subPath"), m.SubPath)...)
		errs = append(errs, inside(at.Child("subPathExpr"), m.SubPathExpr)...)
	}
	for i, d := range c.VolumeDevices {
		checkName(at.Child("volumeDevices").Index(i).Child("name"), d.Name)
	}
	return errs
}

func inside(at *field.Path, sub string) field.ErrorList {
	if path.IsAbs(sub) || slices.Contains(strings.Split(sub, "/"), "..") {
		return field.ErrorList{field.Invalid(at, sub, "must be relative to the volume and must not contain ..")}
	}
	return nil
}
