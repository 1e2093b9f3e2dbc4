// Package environment computes the environment variables that a kubelet gives to a container, and
// expands a subPathExpr with them.
package environment

import (
	"cmp"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/trivet-csi/trivet/volumemanager/downward"
	"github.com/trivet-csi/trivet/volumemanager/manifest"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// Machine holds what the values of variables depend on besides the pod.
type Machine struct {
	Objects *manifest.Objects
	// Node is the name of the machine.
	Node string
	// Dir is a directory on the filesystem for ephemeral storage.
	Dir string
}

// Variables are the variables of a container by name.
type Variables map[string]variable

// variable holds a value, or the error that says why the value is unknown. Expand returns the error
// only if the expression uses the variable.
type variable struct {
	value string
	err   error
}

// Variables returns the variables of a container, first those of envFrom and then those of env. A
// later variable replaces an earlier one of the same name, and the value of a variable may refer to
// earlier variables.
func (m Machine) Variables(pod *corev1.Pod, container *corev1.Container) (Variables, error) {
	v := Variables{}
	for i, source := range container.EnvFrom {
		if err := m.addEnvFrom(v, pod, field.NewPath("envFrom").Index(i), source); err != nil {
			return nil, err
		}
	}
	for i := range container.Env {
		if err := m.addEnv(v, pod, container, field.NewPath("env").Index(i), &container.Env[i]); err != nil {
			return nil, err
		}
	}
	return v, nil
}

// addEnvFrom adds a variable for each key of an object. at is the field of the source, for errors.
func (m Machine) addEnvFrom(v Variables, pod *corev1.Pod, at *field.Path, source corev1.EnvFromSource) error {
	var from object
	switch {
	case source.ConfigMapRef != nil:
		from = m.configMap(at.Child("configMapRef"), pod, source.ConfigMapRef.Name, source.ConfigMapRef.Optional)
	case source.SecretRef != nil:
		from = m.secret(at.Child("secretRef"), pod, source.SecretRef.Name, source.SecretRef.Optional)
	default:
		return plugins.Invalidf("%s: set one of configMapRef and secretRef", at)
	}
	for key, value := range from.data {
		v[source.Prefix+key] = variable{value: value}
	}
	return from.check()
}

// addEnv adds the variable e. at is the field of the variable, for errors.
func (m Machine) addEnv(v Variables, pod *corev1.Pod, container *corev1.Container, at *field.Path, e *corev1.EnvVar) (err error) {
	if e.ValueFrom == nil {
		v[e.Name] = v.resolve(e.Value)
		return nil
	}
	at = at.Child("valueFrom")
	var result variable
	switch from := e.ValueFrom; {
	case from.FieldRef != nil:
		result, err = m.field(at.Child("fieldRef"), pod, from.FieldRef)
	case from.ResourceFieldRef != nil:
		result.value, err = m.resource(at.Child("resourceFieldRef"), pod, container, from.ResourceFieldRef)
	case from.ConfigMapKeyRef != nil:
		ref := from.ConfigMapKeyRef
		return v.addKey(e.Name, ref.Key, m.configMap(at.Child("configMapKeyRef"), pod, ref.Name, ref.Optional))
	case from.SecretKeyRef != nil:
		ref := from.SecretKeyRef
		return v.addKey(e.Name, ref.Key, m.secret(at.Child("secretKeyRef"), pod, ref.Name, ref.Optional))
	case from.FileKeyRef != nil:
		result.err = plugins.Invalidf("%s: files in volumes are not supported: set value instead of valueFrom", at.Child("fileKeyRef"))
	default:
		err = plugins.Invalidf("%s: set one of fieldRef, resourceFieldRef, configMapKeyRef and secretKeyRef", at)
	}
	v[e.Name] = result
	return err
}

// field returns the value of a fieldRef. For an address it returns a variable with an error, because the
// volume manager gives pods no addresses. For a pod without a service account it returns default, the
// account that an API server sets.
func (m Machine) field(at *field.Path, pod *corev1.Pod, selector *corev1.ObjectFieldSelector) (variable, error) {
	switch selector.FieldPath {
	case "status.hostIP", "status.hostIPs", "status.podIP", "status.podIPs":
		return variable{err: plugins.Invalidf("%s.fieldPath %q: pods of the volume manager have no addresses: set value instead of valueFrom", at, selector.FieldPath)}, nil
	}
	value, err := downward.Field(at, pod, selector, map[string]string{
		"spec.nodeName":           m.Node,
		"spec.serviceAccountName": cmp.Or(pod.Spec.ServiceAccountName, "default"),
	})
	return variable{value: value}, err
}

// resource returns the value of a resourceFieldRef. The default of containerName is the name of
// container. For a container without a limit, the value is the limit of the pod; if the pod has no limit
// either, the value is the machine's capacity.
func (m Machine) resource(at *field.Path, pod *corev1.Pod, container *corev1.Container, selector *corev1.ResourceFieldSelector) (string, error) {
	selector = selector.DeepCopy()
	selector.ContainerName = cmp.Or(selector.ContainerName, container.Name)
	return downward.Resource(at, pod, selector, func(name corev1.ResourceName) (resource.Quantity, error) {
		if r := pod.Spec.Resources; r != nil && !r.Limits.Name(name, resource.BinarySI).IsZero() {
			return r.Limits[name], nil
		}
		return downward.Machine(m.Dir)(name)
	})
}

// object is a ConfigMap or Secret that contains variables.
type object struct {
	// at is the field that refers to the object.
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
	return fmt.Errorf("%s: %s %s: %w: add it, or set optional: true", o.at, o.kind, o.key, plugins.ErrNotFound)
}

// addKey sets a variable to the value of a key of an object. If the key or the object is missing and
// the reference is optional, it leaves the variable unchanged.
func (v Variables) addKey(name, key string, from object) error {
	value, found := from.data[key]
	switch {
	case found:
		v[name] = variable{value: value}
	case !from.found:
		return from.check()
	case !from.optional:
		return fmt.Errorf("%s: %s %s has no key %q: add the key, or set optional: true", from.at, from.kind, from.key, key)
	}
	return nil
}

// Expand replaces each $(NAME) in a subPathExpr with the value of the variable. It returns an error if
// the variable is unknown or empty, because an empty value would select another path, at worst the
// whole volume.
func (v Variables) Expand(expression string) (string, error) {
	return expand(expression, func(name string) (string, error) {
		known, ok := v[name]
		switch {
		case !ok:
			return "", plugins.Invalidf("variable %q is not in the container's env or envFrom: add it", name)
		case known.err == nil && known.value == "":
			return "", plugins.Invalidf("variable %q is empty: give it a value", name)
		}
		return known.value, known.err
	})
}

// resolve returns a variable with the given value, in which the references to other variables are
// replaced. A reference to an unknown variable is not replaced.
func (v Variables) resolve(value string) variable {
	value, err := expand(value, func(name string) (string, error) {
		if known, ok := v[name]; ok {
			return known.value, known.err
		}
		return "$(" + name + ")", nil
	})
	return variable{value, err}
}

// expand replaces $(NAME) with the value of NAME, and $$ with $.
func expand(text string, value func(name string) (string, error)) (string, error) {
	var b strings.Builder
	for rest := text; rest != ""; {
		before, after, found := strings.Cut(rest, "$")
		b.WriteString(before)
		if !found {
			break
		}
		name, further, closed := strings.Cut(strings.TrimPrefix(after, "("), ")")
		switch {
		case strings.HasPrefix(after, "$"):
			b.WriteByte('$')
			rest = after[1:]
		case strings.HasPrefix(after, "(") && closed:
			replacement, err := value(name)
			if err != nil {
				return "", err
			}
			b.WriteString(replacement)
			rest = further
		default:
			b.WriteByte('$')
			rest = after
		}
	}
	return b.String(), nil
}
