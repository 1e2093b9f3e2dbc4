package downward

import (
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// Field returns the value that a fieldRef selects: a field of the pod's metadata, or an entry of
// more, whose keys are field paths.
func Field(at *field.Path, pod *corev1.Pod, of *corev1.ObjectFieldSelector, more map[string]string) (string, error) {
	if v := of.APIVersion; v != "" && v != "v1" {
		return "", plugins.Invalidf("%s.apiVersion %q: want v1", at, v)
	}
	if value, ok := more[of.FieldPath]; ok {
		return value, nil
	}
	switch of.FieldPath {
	case "metadata.name":
		return pod.Name, nil
	case "metadata.namespace":
		return pod.Namespace, nil
	case "metadata.uid":
		return string(pod.UID), nil
	}
	if key, ok := subscript(of.FieldPath, "metadata.labels"); ok {
		return pod.Labels[key], nil
	}
	if key, ok := subscript(of.FieldPath, "metadata.annotations"); ok {
		return pod.Annotations[key], nil
	}
	return "", plugins.Invalidf("%s.fieldPath %q: use one of metadata.name, metadata.namespace, metadata.uid, metadata.labels['KEY'], metadata.annotations['KEY'], %s", at, of.FieldPath, strings.Join(slices.Sorted(maps.Keys(more)), ", "))
}

func subscript(path, of string) (key string, ok bool) {
	rest, begins := strings.CutPrefix(path, of+"['")
	key, ends := strings.CutSuffix(rest, "']")
	return key, begins && ends
}
