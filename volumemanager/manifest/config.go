package manifest

import (
	"bytes"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func completeConfigMap(o *corev1.ConfigMap) field.ErrorList {
	data, binary := field.NewPath("data"), field.NewPath("binaryData")
	errs := append(keys(data, o.Data), keys(binary, o.BinaryData)...)
	for _, k := range slices.Sorted(maps.Keys(o.BinaryData)) {
		if _, both := o.Data[k]; both {
			errs = append(errs, field.Invalid(binary.Key(k), k, "data has this key too: remove one"))
		}
	}
	return errs
}

// completeSecret merges stringData into data. A key in both has the value of stringData.
func completeSecret(o *corev1.Secret) field.ErrorList {
	errs := append(keys(field.NewPath("data"), o.Data), keys(field.NewPath("stringData"), o.StringData)...)
	if o.Data == nil {
		o.Data = make(map[string][]byte)
	}
	for k, v := range o.StringData {
		o.Data[k] = []byte(v)
	}
	o.StringData = nil
	fill(&o.Type, corev1.SecretTypeOpaque)
	return errs
}

// immutableChange returns a message if an immutable object was changed, which an API server refuses;
// otherwise "". An object with another UID is another object.
func immutableChange(before, after metav1.Object) string {
	changed := false
	switch b := before.(type) {
	case *corev1.ConfigMap:
		a := after.(*corev1.ConfigMap)
		changed = isSet(b.Immutable) && (!isSet(a.Immutable) || !maps.Equal(b.Data, a.Data) || !maps.EqualFunc(b.BinaryData, a.BinaryData, bytes.Equal))
	case *corev1.Secret:
		a := after.(*corev1.Secret)
		changed = isSet(b.Immutable) && (!isSet(a.Immutable) || !maps.EqualFunc(b.Data, a.Data, bytes.Equal))
	}
	if !changed || before.GetUID() != after.GetUID() {
		return ""
	}
	return "immutable: true: its data and this field cannot be changed: give the new object another name, or remove this one first"
}

func isSet(flag *bool) bool { return flag != nil && *flag }

func keys[V any](at *field.Path, data map[string]V) (errs field.ErrorList) {
	for _, k := range slices.Sorted(maps.Keys(data)) {
		errs = append(errs, all(at.Key(k), k, validation.IsConfigMapKey)...)
	}
	return errs
}

// fill sets a field that is zero to its default.
func fill[T comparable](to *T, value T) {
	if *to == *new(T) {
		*to = value
	}
}

// fillPointer sets a field that is nil to its default.
func fillPointer[T any](to **T, value T) {
	if *to == nil {
		*to = &value
	}
}
