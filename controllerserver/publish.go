package controllerserver

import (
	"context"
	"errors"
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
	b, v, err := s.backends.Volume(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if req.GetNodeId() != s.node {
		return nil, volume.Errorf(volume.ErrNotFound, "node_id %q: volume %s is on node %q and cannot be published elsewhere", req.GetNodeId(), v.ID, s.node)
	}
	if err := v.Supports(c); err != nil {
		return nil, err
	}
	publisher, ok := b.(backend.Publisher)
	if !ok {
		return &csi.ControllerPublishVolumeResponse{}, nil
	}
	if err := s.checkLimit(ctx, publisher, v); err != nil {
		return nil, err
	}
	if err := publisher.Publish(ctx, v, s.node, req.GetReadonly()); err != nil {
		return nil, err
	}
	resp := &csi.ControllerPublishVolumeResponse{}
	if req.GetReadonly() {
		resp.PublishContext = map[string]string{translate.ReadOnlyKey: "true"}
	}
	return resp, nil
}

// checkLimit refuses one volume more than the node takes; a volume that is
// published already is none more.
func (s *Server) checkLimit(ctx context.Context, p backend.Publisher, v volume.Volume) error {
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

// ControllerUnpublishVolume implements csi.ControllerServer. A volume that is
// gone is published nowhere.
func (s *Server) ControllerUnpublishVolume(ctx context.Context, req *csi.ControllerUnpublishVolumeRequest) (*csi.ControllerUnpublishVolumeResponse, error) {
	if err := requireID(req.GetVolumeId()); err != nil {
		return nil, err
	}
	b, id, err := s.backends.ByID(req.GetVolumeId())
	if errors.Is(err, volume.ErrNotFound) {
		return &csi.ControllerUnpublishVolumeResponse{}, nil
	}
	if err != nil {
		return nil, err
	}
	if publisher, ok := b.(backend.Publisher); ok {
		if err := publisher.Unpublish(ctx, id, req.GetNodeId()); err != nil {
			return nil, err
		}
	}
	return &csi.ControllerUnpublishVolumeResponse{}, nil
}
