package controllerserver

import (
	"cmp"
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/volume"
)

// IOLimiter limits the I/O of the pods of this node.
type IOLimiter interface {
	// CheckIOLimits returns ErrInvalid if this node cannot limit the I/O of pods, and ErrUnavailable if that cannot be determined.
	CheckIOLimits() error
	// ApplyIOLimits makes the limits in the record of a volume effective for the pods that use the volume.
	ApplyIOLimits(ctx context.Context, id volume.ID) error
}

// ControllerModifyVolume implements csi.ControllerServer. It changes the limits of a volume's I/O, also while the volume is in
// use. FlexVolume assigns volumes to namespaces by this call.
func (s *Server) ControllerModifyVolume(ctx context.Context, req *csi.ControllerModifyVolumeRequest) (*csi.ControllerModifyVolumeResponse, error) {
	mutable := req.GetMutableParameters()
	if _, assign := mutable[volume.ParamNamespace]; assign {
		return &csi.ControllerModifyVolumeResponse{}, s.assignNamespace(ctx, req.GetVolumeId(), mutable)
	}
	limits, err := volume.IOLimits{}.With(mutable)
	if err != nil {
		return nil, err
	}
	b, v, err := s.volume(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if len(mutable) == 0 {
		return nil, volume.Errorf(volume.ErrInvalid, "mutable_parameters are missing: give at least one")
	}
	return &csi.ControllerModifyVolumeResponse{}, s.changeIOLimits(ctx, b, v.ID, &limits, func(l volume.IOLimits) (volume.IOLimits, error) { return l.With(mutable) })
}

// assignNamespace assigns a volume to the namespace in mutable parameters.
func (s *Server) assignNamespace(ctx context.Context, id string, mutable map[string]string) error {
	namespace, err := volume.ParseNamespaceChange(mutable)
	if err != nil {
		return err
	}
	b, v, err := s.volume(ctx, id)
	if err != nil {
		return err
	}
	setter, ok := b.(backend.NamespaceSetter)
	if !ok || v.ID.Shared() {
		return volume.Errorf(volume.ErrInvalid, "volume %s: volumes of its pool belong to no namespace", v.ID)
	}
	return setter.SetNamespace(ctx, v.ID, namespace)
}

// checkIOLimits returns ErrInvalid if new limits need a node that can limit the I/O of pods, and this one cannot.
func (s *Server) checkIOLimits(limits *volume.IOLimits) error {
	if s.IOLimiter == nil || !limits.Limited() { // without a node all pools are exports, where backends refuse limits
		return nil
	}
	return s.IOLimiter.CheckIOLimits()
}

// changeIOLimits changes the limits of a volume in its record, and makes them effective. limits are the new ones among them.
func (s *Server) changeIOLimits(ctx context.Context, b backend.Backend, id volume.ID, limits *volume.IOLimits, change func(volume.IOLimits) (volume.IOLimits, error)) error {
	limiter, ok := b.(backend.IOLimiter)
	switch {
	case !ok:
		return volume.Errorf(volume.ErrInvalid, "volume %s: the volumes of backend %s are directories, and only the I/O on a device can be limited: use a backend with devices", id, b.Name())
	case id.Shared():
		return volume.Errorf(volume.ErrInvalid, "volume %s is on an NFS export, whose volumes have no limits: use a pool of a node", id)
	}
	if err := s.checkIOLimits(limits); err != nil {
		return err
	}
	if err := limiter.ChangeIOLimits(ctx, id, change); err != nil || s.IOLimiter == nil {
		return err
	}
	return s.IOLimiter.ApplyIOLimits(ctx, id)
}

// limitCreated changes the limits of a volume that existed with other limits: an earlier call has created it, and the class of
// the claim was changed before the call was repeated. The new class may have no limits.
func (s *Server) limitCreated(ctx context.Context, b backend.Backend, v volume.Volume, spec volume.Spec) error {
	limits := cmp.Or(spec.Parameters.IOLimits(), &volume.IOLimits{})
	if v.Limits() == *limits {
		return nil
	}
	return s.changeIOLimits(ctx, b, v.ID, limits, func(volume.IOLimits) (volume.IOLimits, error) { return *limits, nil })
}
