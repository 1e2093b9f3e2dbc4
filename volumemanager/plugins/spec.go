package plugins

import (
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
)

// Spec is a volume as a pod has it in its manifest, or as a PersistentVolume: one of the
// two.
type Spec struct {
	Volume           *corev1.Volume
	PersistentVolume *corev1.PersistentVolume
	// ReadOnly is what the pod's claim asks for.
	ReadOnly bool
}

// Name is the PersistentVolume's, or the volume's in the pod. Paths have it.
func (s *Spec) Name() string {
	if s.PersistentVolume != nil {
		return s.PersistentVolume.Name
	}
	return s.Volume.Name
}

// Block tells whether it is a raw device.
func (s *Spec) Block() bool {
	pv := s.PersistentVolume
	return pv != nil && pv.Spec.VolumeMode != nil && *pv.Spec.VolumeMode == corev1.PersistentVolumeBlock
}

// NodeExpandAnnotation is "true" on a PersistentVolume that has grown, as long as the
// machine has not followed.
const NodeExpandAnnotation = "trivet.dev/node-expand"

// ErrNotFound means: no manifest has the object.
var ErrNotFound = errors.New("no manifest has it")

// InvalidError is of a spec that cannot become a volume until its manifest is changed.
type InvalidError struct{ Reason string }

func (e *InvalidError) Error() string { return e.Reason }

// Invalidf makes an *InvalidError. It names the field, its value and the remedy.
func Invalidf(format string, args ...any) error {
	return &InvalidError{fmt.Sprintf(format, args...)}
}

// UncertainError is of an operation that may have been done, or is still under way.
type UncertainError struct{ Err error }

func (e *UncertainError) Error() string { return e.Err.Error() }

func (e *UncertainError) Unwrap() error { return e.Err }

// RefusedError is of a volume that is not there, for certain: who would have made it says
// so, and is not making it for an earlier call either.
type RefusedError struct{ Err error }

func (e *RefusedError) Error() string { return e.Err.Error() }

func (e *RefusedError) Unwrap() error { return e.Err }

// Refused tells whether a failed operation ends the uncertainty of those before it.
func Refused(err error) bool {
	_, ok := errors.AsType[*RefusedError](err)
	return ok
}

// Uncertain tells whether an operation may have been done although it failed.
func Uncertain(err error) bool {
	_, ok := errors.AsType[*UncertainError](err)
	return ok
}
