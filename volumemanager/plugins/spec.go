package plugins

import (
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
)

// Spec is a volume in the manifest of a pod, or a PersistentVolume. Exactly one of the two fields is set.
type Spec struct {
	Volume           *corev1.Volume
	PersistentVolume *corev1.PersistentVolume
	// ReadOnly is readOnly of the volume in the pod that refers to the claim.
	ReadOnly bool
}

// Name returns the name of the PersistentVolume, or of the volume in the pod. It is part of paths.
func (s *Spec) Name() string {
	if s.PersistentVolume != nil {
		return s.PersistentVolume.Name
	}
	return s.Volume.Name
}

// Block reports whether the volume is a raw device.
func (s *Spec) Block() bool {
	pv := s.PersistentVolume
	return pv != nil && pv.Spec.VolumeMode != nil && *pv.Spec.VolumeMode == corev1.PersistentVolumeBlock
}

// NodeExpandAnnotation is "true" on a PersistentVolume that was expanded by the controller and not
// yet on the node.
const NodeExpandAnnotation = "trivet.dev/node-expand"

// ErrNotFound means that no manifest contains the object.
var ErrNotFound = errors.New("no manifest has it")

// InvalidError means that a spec cannot be mounted until its manifest is changed.
type InvalidError struct{ Reason string }

func (e *InvalidError) Error() string { return e.Reason }

// Invalidf returns an *InvalidError. The text names the field, its value and the remedy.
func Invalidf(format string, args ...any) error {
	return &InvalidError{fmt.Sprintf(format, args...)}
}

// UncertainError means that a failed operation may have taken effect, or may still run.
type UncertainError struct{ Err error }

func (e *UncertainError) Error() string { return e.Err.Error() }

func (e *UncertainError) Unwrap() error { return e.Err }

// RefusedError means that a volume does not exist, and that no earlier call is creating it.
type RefusedError struct{ Err error }

func (e *RefusedError) Error() string { return e.Err.Error() }

func (e *RefusedError) Unwrap() error { return e.Err }

// Refused reports whether an error is a *RefusedError.
func Refused(err error) bool {
	_, ok := errors.AsType[*RefusedError](err)
	return ok
}

// Uncertain reports whether an error is an *UncertainError.
func Uncertain(err error) bool {
	_, ok := errors.AsType[*UncertainError](err)
	return ok
}
