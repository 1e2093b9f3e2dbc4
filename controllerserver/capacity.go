package controllerserver

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/volume"
)

// GetCapacity implements csi.ControllerServer. It returns the capacity for CreateVolume with the
// same parameters.
func (s *Server) GetCapacity(ctx context.Context, req *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	query, err := s.capacityQuery(req)
	if err != nil {
		return nil, err
	}
	b, err := s.backends.ByName(query.Parameters.Backend)
	if err != nil {
		return nil, err
	}
	if t := req.GetAccessibleTopology(); t != nil && !s.here(t) {
		return &csi.GetCapacityResponse{MaximumVolumeSize: wrapperspb.Int64(0)}, nil
	}
	for _, c := range req.GetVolumeCapabilities() {
		one := volume.Capability{
			Block: c.GetBlock() != nil, FSType: c.GetMount().GetFsType(),
			Mode: volume.AccessMode(c.GetAccessMode().GetMode().String()),
		}
		switch err := b.Supports(one); {
		case err != nil && one.Mode.MultiNode(): // the backend has no such volumes
			return &csi.GetCapacityResponse{MaximumVolumeSize: wrapperspb.Int64(0)}, nil
		case err != nil:
			return nil, err
		}
	}
	c, err := b.Capacity(ctx, query)
	if err != nil {
		return nil, err
	}
	return &csi.GetCapacityResponse{
		AvailableCapacity: c.Available,
		MaximumVolumeSize: wrapperspb.Int64(c.Max),
		MinimumVolumeSize: wrapperspb.Int64(c.Min),
	}, nil
}

// capacityQuery converts a GetCapacityRequest (ErrInvalid). external-provisioner sends the
// parameters of a class unchanged, and no capabilities.
func (s *Server) capacityQuery(req *csi.GetCapacityRequest) (backend.CapacityQuery, error) {
	params, err := s.backends.Kinds().Parse(req.GetParameters())
	if err != nil {
		return backend.CapacityQuery{}, err
	}
	q := backend.CapacityQuery{Parameters: params, FSType: params.Get(volume.ParamFSType)}
	for _, c := range req.GetVolumeCapabilities() {
		q.Block = q.Block || c.GetBlock() != nil
		if t := c.GetMount().GetFsType(); t != "" {
			q.FSType = t
		}
	}
	switch {
	case q.Block:
		q.FSType = ""
	case q.FSType == "":
		q.FSType = volume.FSTypes[0]
	}
	return q, nil
}
