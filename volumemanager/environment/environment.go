package environment

import (
	"cmp"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/trivet-csi/trivet/volumemanager/downward"
	"github.com/trivet-csi/trivet/volumemanager/manifest"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// Machine holds the values for variables that do not come from the pod.
type Machine struct {
	Objects *manifest.Objects
	// Node is the name of the machine.
	Node string
	// Dir is a directory on the filesystem for ephemeral storage.
	Dir string
}

// Variables are the variables of a container by name.
type Variables map[string]variable

// variable holds a value, or the error why it is unknown. The error fails only its users.
type variable struct {
	value string
	err   error
}

// defaultServiceAccount is the default of an API server.
const defaultServiceAccount = "default"

// Variables returns the variables of envFrom and then those of env. A later variable replaces an
// earlier one of the same name, and a value may refer to earlier ones.
func (m Machine) Variables(pod *corev1.Pod, container *corev1.Container) (Variables, error) {
	v := Variables{}
	for i, source := range container.EnvFrom {
		if err := m.addAll(v, pod, field.NewPath("envFrom").Index(i), source); err != nil {
			return nil, err
		}
	}
	for i := range container.Env {
		if err := m.add(v, pod, container, field.NewPath("env").Index(i), &container.Env[i]); err != nil {
			return nil, err
		}
	}
	return v, nil
}

func (m Machine) addAll(v Variables, pod *corev1.Pod, at *field.Path, source corev1.EnvFromSource) error {
	var from object
	switch {
	case source.ConfigMapRef != nil:
		from = m.configMap(at.Child("configMapRef"), pod, source.ConfigMapRef.Name, source.ConfigMapRef.Optional)
	case source.SecretRef != nil:
		from = m.secret(at.Child("secretRef"), pod, source.SecretRef.Name, source.SecretRef.Optional)
	default:
		return plugins.Invalidf("%s: want one of configMapRef and secretRef", at)
	}
	for key, value := range from.data {
		v[source.Prefix+key] = variable{value: value}
	}
	return from.check()
}

func (m Machine) add(v Variables, pod *corev1.Pod, container *corev1.Container, at *field.Path, e *corev1.EnvVar) (err error) {
	if e.ValueFrom == nil {
		v[e.Name] = v.of(e.Value)
		return nil
	}
	at = at.Child("valueFrom")
	var known variable
	switch from := e.ValueFrom; {
	case from.FieldRef != nil:
		known, err = m.field(at.Child("fieldRef"), pod, from.FieldRef)
	case from.ResourceFieldRef != nil:
		known.value, err = m.resource(at.Child("resourceFieldRef"), pod, container, from.ResourceFieldRef)
	case from.ConfigMapKeyRef != nil:
		ref := from.ConfigMapKeyRef
		return v.addKey(e.Name, ref.Key, m.configMap(at.Child("configMapKeyRef"), pod, ref.Name, ref.Optional))
	case from.SecretKeyRef != nil:
		ref := from.SecretKeyRef
		return v.addKey(e.Name, ref.Key, m.secret(at.Child("secretKeyRef"), pod, ref.Name, ref.Optional))
	case from.FileKeyRef != nil:
		known.err = plugins.Invalidf("%s: the files of volumes are not read: give the variable a value", at.Child("fileKeyRef"))
	default:
		err = plugins.Invalidf("%s: want one of fieldRef, resourceFieldRef, configMapKeyRef and secretKeyRef", at)
	}
	v[e.Name] = known
	return err
}

// field does not know addresses, because there is no pod network.
func (m Machine) field(at *field.Path, pod *corev1.Pod, of *corev1.ObjectFieldSelector) (variable, error) {
	switch of.FieldPath {
	case "status.hostIP", "status.hostIPs", "status.podIP", "status.podIPs":
		return variable{err: plugins.Invalidf("%s.fieldPath %q: pods have no addresses here: give the variable a value", at, of.FieldPath)}, nil
	}
	value, err := downward.Field(at, pod, of, map[string]string{
		"spec.nodeName":           m.Node,
		"spec.serviceAccountName": cmp.Or(pod.Spec.ServiceAccountName, defaultServiceAccount),
	})
	return variable{value: value}, err
}

// resource returns a resource of the container, or of the container that of names. A container
// without a limit has the limit of the pod.
func (m Machine) resource(at *field.Path, pod *corev1.Pod, container *corev1.Container, of *corev1.ResourceFieldSelector) (string, error) {
	of = of.DeepCopy()
	of.ContainerName = cmp.Or(of.ContainerName, container.Name)
	return downward.Resource(at, pod, of, func(name corev1.ResourceName) (resource.Quantity, error) {
		if whole := pod.Spec.Resources; whole != nil && !whole.Limits.Name(name, resource.BinarySI).IsZero() {
			return whole.Limits[name], nil
		}
		return downward.Machine(m.Dir)(name)
	})
}
