package payload

import (
	"maps"
	"runtime"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/trivet-csi/trivet/mount"
	"github.com/trivet-csi/trivet/volumemanager/plugin"
)

// value is what the file of a downwardAPI item has.
func (m *mounter) value(at *field.Path, item corev1.DownwardAPIVolumeFile) (string, error) {
	switch of, resource := item.FieldRef, item.ResourceFieldRef; {
	case of != nil && resource == nil:
		return fieldValue(at.Child("fieldRef"), m.pod, of)
	case of == nil && resource != nil:
		return m.resourceValue(at.Child("resourceFieldRef"), resource)
	}
	return "", plugin.Invalidf("%s: want one of fieldRef and resourceFieldRef", at)
}

func fieldValue(at *field.Path, pod *corev1.Pod, of *corev1.ObjectFieldSelector) (string, error) {
	if v := of.APIVersion; v != "" && v != "v1" {
		return "", plugin.Invalidf("%s.apiVersion %q: want v1", at, v)
	}
	switch of.FieldPath {
	case "metadata.name":
		return pod.Name, nil
	case "metadata.namespace":
		return pod.Namespace, nil
	case "metadata.uid":
		return string(pod.UID), nil
	case "metadata.labels":
		return formatMap(pod.Labels), nil
	case "metadata.annotations":
		return formatMap(pod.Annotations), nil
	}
	if key, ok := subscript(of.FieldPath, "metadata.labels"); ok {
		return pod.Labels[key], nil
	}
	if key, ok := subscript(of.FieldPath, "metadata.annotations"); ok {
		return pod.Annotations[key], nil
	}
	return "", plugin.Invalidf("%s.fieldPath %q: a volume has metadata.name, .namespace, .uid, .labels, .annotations, .labels['KEY'] and .annotations['KEY'] of a pod: use one of them", at, of.FieldPath)
}

func subscript(path, of string) (key string, ok bool) {
	rest, begins := strings.CutPrefix(path, of+"['")
	key, ends := strings.CutSuffix(rest, "']")
	return key, begins && ends
}

// formatMap is as Kubernetes has it: a line for each key, sorted, without one at the end.
func formatMap(m map[string]string) string {
	var lines []string
	for _, key := range slices.Sorted(maps.Keys(m)) {
		lines = append(lines, key+"="+strconv.Quote(m[key]))
	}
	return strings.Join(lines, "\n")
}

func (m *mounter) resourceValue(at *field.Path, of *corev1.ResourceFieldSelector) (string, error) {
	what, name, _ := strings.Cut(of.Resource, ".")
	if what != "limits" && what != "requests" || !isResource(name) {
		return "", plugin.Invalidf("%s.resource %q: want limits or requests, and .cpu, .memory, .ephemeral-storage or .hugepages-SIZE behind it", at, of.Resource)
	}
	i := slices.IndexFunc(containers(m.pod), func(c *corev1.Container) bool { return c.Name == of.ContainerName })
	if i < 0 {
		return "", plugin.Invalidf("%s.containerName %q: the pod has no such container: change it", at, of.ContainerName)
	}
	divisor := of.Divisor
	if divisor.IsZero() {
		divisor = resource.MustParse("1")
	}
	if !slices.Contains(divisors(name), divisor.String()) {
		return "", plugin.Invalidf("%s.divisor %q: want one of %s", at, divisor.String(), strings.Join(divisors(name), ", "))
	}
	quantity, err := m.quantity(containers(m.pod)[i].Resources, what, corev1.ResourceName(name))
	if err != nil {
		return "", err
	}
	return divide(corev1.ResourceName(name), quantity, divisor), nil
}

func isResource(name string) bool {
	known := []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage}
	return slices.Contains(known, corev1.ResourceName(name)) || strings.HasPrefix(name, corev1.ResourceHugePagesPrefix)
}

// divisors are those that an API server accepts.
func divisors(name string) []string {
	if corev1.ResourceName(name) == corev1.ResourceCPU {
		return []string{"1m", "1"}
	}
	return []string{"1", "1k", "1M", "1G", "1T", "1P", "1E", "1Ki", "1Mi", "1Gi", "1Ti", "1Pi", "1Ei"}
}

// quantity is a container's request or limit. A request that is not there is the limit,
// as an API server fills it in; a limit that is not there is what the machine has.
func (m *mounter) quantity(r corev1.ResourceRequirements, what string, name corev1.ResourceName) (resource.Quantity, error) {
	limit, limited := r.Limits[name]
	if what == "requests" {
		if request, ok := r.Requests[name]; ok {
			return request, nil
		}
		return limit, nil
	}
	if limited && !limit.IsZero() {
		return limit, nil
	}
	return machine(name, m.host.Paths().Root)
}

// machine is what pods can have of a resource on this machine, of ephemeral-storage what the
// filesystem of a directory has. Huge pages are none.
func machine(name corev1.ResourceName, dir string) (resource.Quantity, error) {
	var n int64
	switch name {
	case corev1.ResourceCPU:
		n = int64(runtime.NumCPU())
	case corev1.ResourceMemory:
		var err error
		if n, err = plugin.AllocatableMemory(); err != nil {
			return resource.Quantity{}, err
		}
	case corev1.ResourceEphemeralStorage:
		st, err := mount.Statfs(dir)
		if err != nil {
			return resource.Quantity{}, err
		}
		n = int64(st.Blocks) * st.Bsize
	default:
	}
	return *resource.NewQuantity(n, resource.BinarySI), nil
}

// divide rounds up. CPUs count in thousandths.
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
