package environment

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// object is a ConfigMap or Secret that contains variables.
type object struct {
	at       *field.Path
	kind     string
	key      types.NamespacedName
	optional bool
	found    bool
	data     map[string]string
}

func (m Machine) configMap(at *field.Path, pod *corev1.Pod, name string, optional *bool) object {
	o := newObject(at, "ConfigMap", pod, name, optional)
	if c := m.Objects.ConfigMaps[o.key]; c != nil {
		o.found, o.data = true, c.Data
	}
	return o
}

func (m Machine) secret(at *field.Path, pod *corev1.Pod, name string, optional *bool) object {
	o := newObject(at, "Secret", pod, name, optional)
	if s := m.Objects.Secrets[o.key]; s != nil {
		o.found, o.data = true, map[string]string{}
		for key, value := range s.Data {
			o.data[key] = string(value)
		}
	}
	return o
}

func newObject(at *field.Path, kind string, pod *corev1.Pod, name string, optional *bool) object {
	return object{at: at, kind: kind, key: types.NamespacedName{Namespace: pod.Namespace, Name: name}, optional: optional != nil && *optional}
}

// check returns an error if the object is missing and not optional.
func (o object) check() error {
	if o.found || o.optional {
		return nil
	}
	return fmt.Errorf("%s: %s %s: %w: add it, or set optional", o.at, o.kind, o.key, plugins.ErrNotFound)
}

// addKey leaves the variable unchanged if its source is optional and missing.
func (v Variables) addKey(name, key string, from object) error {
	value, found := from.data[key]
	switch {
	case found:
		v[name] = variable{value: value}
	case !from.found:
		return from.check()
	case !from.optional:
		return fmt.Errorf("%s: %s %s has no key %q: add the key, or set optional", from.at, from.kind, from.key, key)
	}
	return nil
}
