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

// PublishArgs checks the fields of a ControllerPublishVolumeRequest and returns its capability
// (ErrInvalid).
func PublishArgs(req *csi.ControllerPublishVolumeRequest) (volume.Capability, error) {
	if err := translate.Required("volume_id", req.GetVolumeId()); err != nil {
		return volume.Capability{}, err
	}
	if err := translate.Required("node_id", req.GetNodeId()); err != nil {
		return volume.Capability{}, err
	}
	return translate.Capability(req.GetVolumeCapability(), "volume_capability")
}

// checkNode refuses a node that cannot use the volume (ErrNotFound).
func (s *Server) checkNode(v volume.Volume, node string) error {
	switch {
	case s.Nodes != nil && v.ID.Shared():
		if !s.Nodes(node) {
			return volume.Errorf(volume.ErrNotFound, "node_id %q: no such node exists", node)
		}
	case node != s.node:
		return volume.Errorf(volume.ErrNotFound, "node_id %q: volume %s is on node %q and cannot be published elsewhere", node, v.ID, s.node)
	}
	return nil
}

// checkLimit refuses a volume that is not published yet if the node has its maximum of
// published volumes (ErrExhausted). Volumes of shared pools do not count: several controllers
// publish them.
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
	if err := translate.Required("volume_id", req.GetVolumeId()); err != nil {
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
