package manifest

import (
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func completeConfigMap(o *corev1.ConfigMap) field.ErrorList {
	data, binary := field.NewPath("data"), field.NewPath("binaryData")
	errs := append(keys(data, o.Data), keys(binary, o.BinaryData)...)
	for _, k := range slices.Sorted(maps.Keys(o.BinaryData)) {
		if _, both := o.Data[k]; both {
			errs = append(errs, field.Invalid(binary.Key(k), k, "data has it too: leave one"))
		}
	}
	return errs
}

// completeSecret merges stringData, which wins, into data.
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

func keys[V any](at *field.Path, data map[string]V) (errs field.ErrorList) {
	for _, k := range slices.Sorted(maps.Keys(data)) {
		errs = append(errs, all(at.Key(k), k, validation.IsConfigMapKey)...)
	}
	return errs
}

// fill gives a field its default.
func fill[T comparable](to *T, value T) {
	if *to == *new(T) {
		*to = value
	}
}

// fillPointer gives an optional field its default.
func fillPointer[T any](to **T, value T) {
	if *to == nil {
		*to = &value
	}
}
