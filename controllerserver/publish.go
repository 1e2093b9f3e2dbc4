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
	b, v, static, err := s.backends.Described(ctx, req.GetVolumeId(), req.GetVolumeContext())
	if err != nil {
		return nil, err
	}
	if err := s.checkNode(v, req.GetNodeId()); err != nil {
		return nil, err
	}
	if err := v.Supports(c); err != nil {
		return nil, err
	}
	publisher, ok := b.(backend.Publisher)
	if ok && !static { // which has no record to keep it in
		err = s.publish(ctx, publisher, v, backend.Publication{
			Node: req.GetNodeId(), ReadOnly: req.GetReadonly(), MultiNode: c.Mode.MultiNode(),
		})
	}
	if err != nil {
		return nil, err
	}
	resp := &csi.ControllerPublishVolumeResponse{}
	if req.GetReadonly() {
		resp.PublishContext = map[string]string{translate.ReadOnlyKey: "true"}
	}
	return resp, nil
}

// checkNode refuses a node on which the volume cannot be had.
func (s *Server) checkNode(v volume.Volume, node string) error {
	switch {
	case s.Nodes != nil && v.ID.Shared():
		if !s.Nodes(node) {
			return volume.Errorf(volume.ErrNotFound, "node_id %q: there is no such node", node)
		}
	case node != s.node:
		return volume.Errorf(volume.ErrNotFound, "node_id %q: volume %s is on node %q and cannot be published elsewhere", node, v.ID, s.node)
	}
	return nil
}

// publish records a publication, unless the node has its limit of volumes. That is
// known of node-local pools only: volumes of a shared one are published by several
// controllers.
func (s *Server) publish(ctx context.Context, p backend.Publisher, v volume.Volume, at backend.Publication) error {
	if !v.ID.Shared() {
		if err := s.checkLimit(ctx, p, v); err != nil {
			return err
		}
	}
	return p.Publish(ctx, v, at)
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
