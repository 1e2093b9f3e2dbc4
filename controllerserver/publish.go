package controllerserver

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/volume"
)

// ControllerPublishVolume implements csi.ControllerServer.
func (s *Server) ControllerPublishVolume(ctx context.Context, req *csi.ControllerPublishVolumeRequest) (*csi.ControllerPublishVolumeResponse, error) {
	c, err := PublishArgs(req)
	if err != nil {
		return nil, err
	}
	b, v, static, err := s.backends.Described(ctx, req.GetVolumeId(), req.GetVolumeContext())
	if err != nil {
		return nil, err
	}
	if err := s.checkNode(v, req.GetNodeId()); err != nil {
		return nil, err
	}
	if err := s.backends.Supports(v, c); err != nil {
		return nil, err
	}
	if publisher, ok := b.(backend.Publisher); ok && !static { // a static volume has no record
		if err := s.checkLimit(ctx, publisher, v); err != nil {
			return nil, err
		}
		at := backend.Publication{Node: req.GetNodeId(), ReadOnly: req.GetReadonly(), MultiNode: c.Mode.MultiNode()}
		if err := publisher.Publish(ctx, v, at); err != nil {
			return nil, err
		}
	}
	resp := &csi.ControllerPublishVolumeResponse{}
	if req.GetReadonly() {
		resp.PublishContext = map[string]string{translate.ReadOnlyKey: "true"}
	}
	return resp, nil
}

// PublishArgs returns the capability of a ControllerPublishVolumeRequest. It returns ErrInvalid if a field is
// missing or invalid.
func PublishArgs(req *csi.ControllerPublishVolumeRequest) (volume.Capability, error) {
	err := cmp.Or(translate.Required("volume_id", req.GetVolumeId()), translate.Required("node_id", req.GetNodeId()))
	if err != nil {
		return volume.Capability{}, err
	}
	return translate.Capability(req.GetVolumeCapability(), "volume_capability")
}

// checkNode refuses a node that cannot use the volume (ErrNotFound).
func (s *Server) checkNode(v volume.Volume, node string) error {
	switch {
	case s.Nodes != nil && v.ID.Shared():
		if !s.Nodes(node) {
			return volume.Errorf(volume.ErrNotFound, "node_id %q: the node does not exist", node)
		}
	case node != s.node:
		return volume.Errorf(volume.ErrNotFound, "node_id %q: volume %s is on node %q and cannot be published elsewhere", node, v.ID, s.node)
	}
	return nil
}

// checkLimit returns ErrExhausted if the volume is not published yet and the node has its maximum of
// published volumes. Volumes of shared pools do not count, because several controllers publish them.
func (s *Server) checkLimit(ctx context.Context, p backend.Publisher, v volume.Volume) error {
	if v.ID.Shared() {
		return nil
	}
	published := 0
	for _, other := range backend.As[backend.Publisher](s.backends) {
		published += other.PublishedCount()
	}
	if published < s.maxVolumes {
		return nil
	}
	nodes, err := p.PublishedNodes(ctx, v)
	if err != nil || slices.Contains(nodes, s.node) {
		return err
	}
	return volume.Errorf(volume.ErrExhausted, "node %q has its limit of %d published volumes: unpublish some or raise maxVolumesPerNode", s.node, s.maxVolumes)
}

// ControllerUnpublishVolume implements csi.ControllerServer. It succeeds if the volume does not
// exist.
func (s *Server) ControllerUnpublishVolume(ctx context.Context, req *csi.ControllerUnpublishVolumeRequest) (*csi.ControllerUnpublishVolumeResponse, error) {
	b, id, err := s.backendOf(req.GetVolumeId())
	if publisher, ok := b.(backend.Publisher); ok && err == nil {
		err = publisher.Unpublish(ctx, id, req.GetNodeId())
	}
	return &csi.ControllerUnpublishVolumeResponse{}, err
}

// ValidateVolumeCapabilities implements csi.ControllerServer.
func (s *Server) ValidateVolumeCapabilities(ctx context.Context, req *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	if err := translate.Required("volume_id", req.GetVolumeId()); err != nil {
		return nil, err
	}
	caps, err := capabilities(req.GetVolumeCapabilities())
	if err != nil {
		return nil, err
	}
	_, v, static, err := s.backends.Described(ctx, req.GetVolumeId(), req.GetVolumeContext())
	if err != nil {
		return nil, err
	}
	for _, c := range caps {
		if err := s.backends.Supports(v, c); err != nil {
			return &csi.ValidateVolumeCapabilitiesResponse{Message: err.Error()}, nil //nolint:nilerr // the response contains the error
		}
	}
	if !static { // a static volume has no record to compare with
		if reason := s.mismatch(v, req); reason != "" {
			return &csi.ValidateVolumeCapabilitiesResponse{Message: reason}, nil
		}
	}
	return &csi.ValidateVolumeCapabilitiesResponse{
		Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
			VolumeContext:      req.GetVolumeContext(),
			VolumeCapabilities: req.GetVolumeCapabilities(),
			Parameters:         req.GetParameters(),
			MutableParameters:  req.GetMutableParameters(),
		},
	}, nil
}

// mismatch describes a difference between a volume and the context or the parameters of a request. It returns an
// empty string if there is none.
func (s *Server) mismatch(v volume.Volume, req *csi.ValidateVolumeCapabilitiesRequest) string {
	// The context may lack keys that a later version of the driver has added.
	own := s.message(v).GetVolumeContext()
	for key, value := range req.GetVolumeContext() {
		if has, ok := own[key]; !ok || has != value {
			return fmt.Sprintf("volume_context %s %q: the volume has %v", key, value, own)
		}
	}
	limits, err := v.Limits().With(req.GetMutableParameters())
	switch {
	case err != nil:
		return err.Error()
	case limits != v.Limits():
		return fmt.Sprintf("mutable_parameters %v: the volume has the limits %+v", req.GetMutableParameters(), v.Limits())
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
		return fmt.Sprintf("parameters %v: the volume was created with other parameters", req.GetParameters())
	}
	requested := volume.Spec{CoName: v.CoName, Capabilities: []volume.Capability{{Block: v.Block, FSType: v.FSType}}, Parameters: p, Source: v.Source}
	if err := v.Satisfies(requested); err != nil {
		return fmt.Sprintf("parameters %v: %v", req.GetParameters(), err)
	}
	return ""
}
