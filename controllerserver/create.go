package controllerserver

import (
	"context"
	"errors"
	"fmt"
	"maps"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/volume"
)

// CreateVolume implements csi.ControllerServer.
func (s *Server) CreateVolume(ctx context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	spec, err := CreateSpec(s.backends.Kinds(), req)
	if err != nil {
		return nil, err
	}
	b, err := s.backends.ByName(spec.Parameters.Backend)
	if err != nil {
		return nil, err
	}
	for _, c := range spec.Capabilities {
		if err := b.Supports(c); err != nil {
			return nil, err
		}
	}
	if err := spec.CheckMountFlags(); err != nil {
		return nil, err
	}
	where := req.GetAccessibilityRequirements()
	if spec.Source != nil {
		if err := checkSource(b, *spec.Source); err != nil {
			return nil, err
		}
		where = inRequisite(where)
	}
	if err := s.placeable(where); err != nil {
		return nil, err
	}
	v, err := b.Create(ctx, spec)
	if err != nil {
		return nil, err
	}
	return &csi.CreateVolumeResponse{Volume: s.message(v)}, nil
}

// DeleteVolume implements csi.ControllerServer. What is not there is deleted.
func (s *Server) DeleteVolume(ctx context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	if err := requireID(req.GetVolumeId()); err != nil {
		return nil, err
	}
	b, id, err := s.backends.ByID(req.GetVolumeId())
	if errors.Is(err, volume.ErrNotFound) { // not an ID of ours: there never was such a volume
		return &csi.DeleteVolumeResponse{}, nil
	}
	if err != nil {
		return nil, err
	}
	err = b.Delete(ctx, id)
	if errors.Is(err, volume.ErrInUse) && s.Release != nil {
		err = s.deleteForgotten(ctx, b, id, err)
	}
	if err != nil {
		return nil, err
	}
	return &csi.DeleteVolumeResponse{}, nil
}

// deleteForgotten deletes a volume that is staged on this node, if it was forgotten
// there; refused is why it was not deleted as it is.
func (s *Server) deleteForgotten(ctx context.Context, b backend.Backend, id volume.ID, refused error) error {
	released, err := s.Release(ctx, id)
	switch {
	case err != nil:
		return err
	case !released:
		return refused
	}
	return b.Delete(ctx, id)
}

// ControllerExpandVolume implements csi.ControllerServer. An image grows here, its
// device and filesystem follow on the node; a directory has nothing that follows.
func (s *Server) ControllerExpandVolume(ctx context.Context, req *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	if err := requireID(req.GetVolumeId()); err != nil {
		return nil, err
	}
	if req.GetCapacityRange() == nil {
		return nil, volume.Errorf(volume.ErrInvalid, "capacity_range is missing: name required_bytes")
	}
	b, v, err := s.backends.Volume(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if req.GetVolumeCapability() != nil {
		c, err := translate.Capability(req.GetVolumeCapability(), "volume_capability")
		if err != nil {
			return nil, err
		}
		if err := v.Supports(c); err != nil {
			return nil, volume.Errorf(volume.ErrInvalid, "%v", err)
		}
	}
	expander, ok := b.(backend.Expander)
	if !ok {
		return nil, volume.Errorf(volume.ErrInvalid, "volume %s: its backend cannot grow volumes", v.ID)
	}
	v, err = expander.Expand(ctx, v, capacityRange(req.GetCapacityRange()))
	if err != nil {
		return nil, err
	}
	return &csi.ControllerExpandVolumeResponse{CapacityBytes: v.Capacity, NodeExpansionRequired: v.Directory == nil}, nil
}

// ControllerModifyVolume implements csi.ControllerServer for FlexVolume, which gives
// volumes to namespaces with it. MODIFY_VOLUME is not advertised: no orchestrator has
// anything to modify.
func (s *Server) ControllerModifyVolume(ctx context.Context, req *csi.ControllerModifyVolumeRequest) (*csi.ControllerModifyVolumeResponse, error) {
	if err := requireID(req.GetVolumeId()); err != nil {
		return nil, err
	}
	change, err := volume.ParseNamespaceChange(req.GetMutableParameters())
	if err != nil {
		return nil, err
	}
	b, v, err := s.backends.Volume(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	setter, ok := b.(backend.NamespaceSetter)
	if !ok || v.ID.Shared() {
		return nil, volume.Errorf(volume.ErrInvalid, "volume %s: volumes of its pool belong to no namespace", v.ID)
	}
	return &csi.ControllerModifyVolumeResponse{}, setter.SetNamespace(ctx, v.ID, change)
}

// ValidateVolumeCapabilities implements csi.ControllerServer.
func (s *Server) ValidateVolumeCapabilities(ctx context.Context, req *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	if err := requireID(req.GetVolumeId()); err != nil {
		return nil, err
	}
	caps, err := capabilities(req.GetVolumeCapabilities())
	if err != nil {
		return nil, err
	}
	b, v, static, err := s.backends.Described(ctx, req.GetVolumeId(), req.GetVolumeContext())
	if err != nil {
		return nil, err
	}
	reason := unsupported(b, v, caps)
	if reason == "" && !static { // of which there is nothing to compare with
		reason = s.mismatch(v, req)
	}
	if reason != "" {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: reason}, nil
	}
	return &csi.ValidateVolumeCapabilitiesResponse{
		Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
			VolumeContext:      req.GetVolumeContext(),
			VolumeCapabilities: req.GetVolumeCapabilities(),
			Parameters:         req.GetParameters(),
		},
	}, nil
}

// unsupported says why a volume cannot have capabilities; empty if it can.
func unsupported(b backend.Backend, v volume.Volume, caps []volume.Capability) string {
	for _, c := range caps {
		if err := errors.Join(b.Supports(c), v.Supports(c)); err != nil {
			return err.Error()
		}
	}
	return ""
}

// mismatch says what of a request's context and parameters is not true of a
// volume; empty if all is.
func (s *Server) mismatch(v volume.Volume, req *csi.ValidateVolumeCapabilitiesRequest) string {
	if c := req.GetVolumeContext(); len(c) > 0 && !maps.Equal(c, s.message(v).GetVolumeContext()) {
		return fmt.Sprintf("volume_context %v: the volume's is %v", c, s.message(v).GetVolumeContext())
	}
	parameters := maps.Clone(req.GetParameters())
	if namespace, given := parameters[volume.ParamNamespace]; given {
		if err := v.CheckNamespace(namespace); err != nil {
			return err.Error()
		}
		delete(parameters, volume.ParamNamespace)
	}
	if len(parameters) == 0 {
		return ""
	}
	p, err := s.backends.Kinds().Parse(parameters)
	if err != nil {
		return err.Error()
	}
	p.Namespace = v.Namespace
	fsType := p.Get(volume.ParamFSType)
	if p.Backend != v.ID.Backend || (p.Pool != "" && p.Pool != v.ID.Pool) || (fsType != "" && !v.Block && fsType != v.FSType) {
		return fmt.Sprintf("parameters %v: the volume was made with others", req.GetParameters())
	}
	same := volume.Spec{CoName: v.CoName, Capabilities: []volume.Capability{{Block: v.Block, FSType: v.FSType}}, Parameters: p, Source: v.Source}
	if err := v.Satisfies(same); err != nil {
		return fmt.Sprintf("parameters %v: %v", req.GetParameters(), err)
	}
	return ""
}
