// Package downward returns the values of the downward API, for volumes and for environment
// variables.
package downward

import (
	"maps"
	"runtime"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// Field returns the value that a fieldRef selects: a field of the pod's metadata, or a value of more,
// which is keyed by field path. at is the path of the fieldRef, for errors.
func Field(at *field.Path, pod *corev1.Pod, selector *corev1.ObjectFieldSelector, more map[string]string) (string, error) {
	if v := selector.APIVersion; v != "" && v != "v1" {
		return "", plugins.Invalidf("%s.apiVersion %q: it must be v1", at, v)
	}
	if value, ok := more[selector.FieldPath]; ok {
		return value, nil
	}
	switch selector.FieldPath {
	case "metadata.name":
		return pod.Name, nil
	case "metadata.namespace":
		return pod.Namespace, nil
	case "metadata.uid":
		return string(pod.UID), nil
	}
	if key, ok := subscript(selector.FieldPath, "metadata.labels"); ok {
		return pod.Labels[key], nil
	}
	if key, ok := subscript(selector.FieldPath, "metadata.annotations"); ok {
		return pod.Annotations[key], nil
	}
	return "", plugins.Invalidf("%s.fieldPath %q: use one of metadata.name, metadata.namespace, metadata.uid, metadata.labels['KEY'], metadata.annotations['KEY'], %s", at, selector.FieldPath, strings.Join(slices.Sorted(maps.Keys(more)), ", "))
}

// subscript returns the key if path is field['KEY'].
func subscript(path, field string) (key string, ok bool) {
	rest, begins := strings.CutPrefix(path, field+"['")
	key, ends := strings.CutSuffix(rest, "']")
	return key, begins && ends
}

// Capacity returns the amount of a resource that a container without a limit can use: CPUs, or bytes.
type Capacity func(corev1.ResourceName) (resource.Quantity, error)

// Resource returns the value that a resourceFieldRef selects, as a multiple of its divisor. at is the
// path of the resourceFieldRef, for errors.
func Resource(at *field.Path, pod *corev1.Pod, selector *corev1.ResourceFieldSelector, capacity Capacity) (string, error) {
	list, name, _ := strings.Cut(selector.Resource, ".")
	if list != "limits" && list != "requests" || !isResource(name) {
		return "", plugins.Invalidf("%s.resource %q: it must be limits or requests, followed by .cpu, .memory, .ephemeral-storage or .hugepages-SIZE", at, selector.Resource)
	}
	all := slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers)
	i := slices.IndexFunc(all, func(c corev1.Container) bool { return c.Name == selector.ContainerName })
	if i < 0 {
		return "", plugins.Invalidf("%s.containerName %q: the pod has no such container: change it", at, selector.ContainerName)
	}
	divisor := selector.Divisor
	if divisor.IsZero() {
		divisor = resource.MustParse("1")
	}
	if !slices.Contains(divisors(name), divisor.String()) {
		return "", plugins.Invalidf("%s.divisor %q: it must be one of %s", at, divisor.String(), strings.Join(divisors(name), ", "))
	}
	amount, err := quantity(all[i].Resources, list, corev1.ResourceName(name), capacity)
	if err != nil {
		return "", err
	}
	return divide(corev1.ResourceName(name), amount, divisor), nil
}

func isResource(name string) bool {
	known := []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage}
	return slices.Contains(known, corev1.ResourceName(name)) || strings.HasPrefix(name, corev1.ResourceHugePagesPrefix)
}

// divisors returns the divisors that an API server accepts for a resource.
func divisors(name string) []string {
	if corev1.ResourceName(name) == corev1.ResourceCPU {
		return []string{"1m", "1"}
	}
	return []string{"1", "1k", "1M", "1G", "1T", "1P", "1E", "1Ki", "1Mi", "1Gi", "1Ti", "1Pi", "1Ei"}
}

// quantity returns a container's request or limit; list is requests or limits. If the request is
// missing, it returns the limit, because an API server sets a missing request to the limit. If the
// limit is missing, it returns the capacity.
func quantity(r corev1.ResourceRequirements, list string, name corev1.ResourceName, capacity Capacity) (resource.Quantity, error) {
	limit, limited := r.Limits[name]
	if list == "requests" {
		if request, ok := r.Requests[name]; ok {
			return request, nil
		}
		return limit, nil
	}
	if limited && !limit.IsZero() {
		return limit, nil
	}
	return capacity(name)
}

// Machine returns the capacity of this machine. ephemeral-storage is the size of the filesystem that
// contains dir; huge pages are 0.
func Machine(dir string) Capacity {
	return func(name corev1.ResourceName) (resource.Quantity, error) {
		n, err := machine(name, dir)
		return *resource.NewQuantity(n, resource.BinarySI), err
	}
}

// machine returns the capacity as a number of CPUs or bytes.
func machine(name corev1.ResourceName, dir string) (int64, error) {
	switch name {
	case corev1.ResourceCPU:
		return int64(runtime.NumCPU()), nil
	case corev1.ResourceMemory:
		return plugins.AllocatableMemory()
	case corev1.ResourceEphemeralStorage:
		st, err := mount.Statfs(dir)
		if err != nil {
			return 0, err
		}
		return int64(st.Blocks) * st.Bsize, nil
	default:
		return 0, nil
	}
}

// divide returns quantity divided by divisor, rounded up. CPUs are counted in thousandths.
func divide(name corev1.ResourceName, quantity, divisor resource.Quantity) string {
	n, d := quantity.Value(), divisor.Value()
	if name == corev1.ResourceCPU {
		n, d = quantity.MilliValue(), divisor.MilliValue()
	}
	result := n / d
	if n%d > 0 {
		result++
	}
	return strconv.FormatInt(result, 10)
}
