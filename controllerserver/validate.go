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

// ValidateVolumeCapabilities implements csi.ControllerServer.
func (s *Server) ValidateVolumeCapabilities(ctx context.Context, req *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	if err := translate.Required("volume_id", req.GetVolumeId()); err != nil {
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
	reason := s.unsupported(b, v, caps)
	if reason == "" && !static { // a static volume has no record to compare with
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

// unsupported returns why a volume cannot have the capabilities; empty if it can.
func (s *Server) unsupported(b backend.Backend, v volume.Volume, caps []volume.Capability) string {
	for _, c := range caps {
		if err := errors.Join(b.Supports(c), s.backends.Supports(v, c)); err != nil {
			return err.Error()
		}
	}
	return ""
}

// mismatch returns which of the context and the parameters of a request differ from those of the
// volume; empty if none does.
func (s *Server) mismatch(v volume.Volume, req *csi.ValidateVolumeCapabilitiesRequest) string {
	if c := req.GetVolumeContext(); len(c) > 0 && !maps.Equal(c, s.message(v).GetVolumeContext()) {
		return fmt.Sprintf("volume_context %v: the volume has %v", c, s.message(v).GetVolumeContext())
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
		return fmt.Sprintf("parameters %v: the volume was created with others", req.GetParameters())
	}
	same := volume.Spec{CoName: v.CoName, Capabilities: []volume.Capability{{Block: v.Block, FSType: v.FSType}}, Parameters: p, Source: v.Source}
	if err := v.Satisfies(same); err != nil {
		return fmt.Sprintf("parameters %v: %v", req.GetParameters(), err)
	}
	return ""
}
