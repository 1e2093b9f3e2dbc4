package router

import (
	"context"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/volume"
)

// publishVolume answers ControllerPublishVolume. A shared volume can be published to every existing
// node, also while the node's driver is not running. A node-local volume can be published only to its
// own node, which validates the volume and the capability. The router does not record that publication.
func (s *Server) publishVolume(ctx context.Context, req *csi.ControllerPublishVolumeRequest) (*csi.ControllerPublishVolumeResponse, error) {
	if _, err := controllerserver.PublishArgs(req); err != nil {
		return nil, err
	}
	id, local := nodeLocal(req.GetVolumeId())
	if !local {
		if _, err := s.nodes.all(); err != nil {
			return nil, err
		}
		if s.nodes.named(req.GetNodeId()) == nil {
			return nil, volume.Errorf(volume.ErrNotFound, "node_id %q: no such node exists now", req.GetNodeId())
		}
		return relay.Call[*csi.ControllerPublishVolumeResponse](ctx, s.shared, csi.Controller_ControllerPublishVolume_FullMethodName, req)
	}
	n, err := s.nodes.forID(ctx, id)
	if err != nil {
		return nil, err
	}
	if req.GetNodeId() != n.name {
		return nil, volume.Errorf(volume.ErrNotFound, "node_id %q: volume %s is on node %q and cannot be published elsewhere", req.GetNodeId(), id, n.name)
	}
	resp, err := n.controller.ValidateVolumeCapabilities(ctx, &csi.ValidateVolumeCapabilitiesRequest{
		VolumeId: req.GetVolumeId(), VolumeCapabilities: []*csi.VolumeCapability{req.GetVolumeCapability()},
	})
	if err != nil {
		return nil, n.callError(ctx, err)
	}
	if resp.GetConfirmed() == nil {
		return nil, volume.Errorf(volume.ErrPrecondition, "%s", resp.GetMessage())
	}
	published := &csi.ControllerPublishVolumeResponse{}
	if req.GetReadonly() {
		published.PublishContext = map[string]string{translate.ReadOnlyKey: "true"}
	}
	return published, nil
}

// unpublishTime bounds the call to the node.
const unpublishTime = 2 * time.Second

// unpublishVolume answers ControllerUnpublishVolume. For a node-local volume the call always succeeds, so
// that volumes of a dead node can be detached. A node that published the volume itself, before a central
// controller called it, has a record of the publication and removes it.
func (s *Server) unpublishVolume(ctx context.Context, req *csi.ControllerUnpublishVolumeRequest) (*csi.ControllerUnpublishVolumeResponse, error) {
	id, local := nodeLocal(req.GetVolumeId())
	if !local {
		return relay.Call[*csi.ControllerUnpublishVolumeResponse](ctx, s.shared, csi.Controller_ControllerUnpublishVolume_FullMethodName, req)
	}
	if n, _ := s.nodes.servingRecorded(keyOf(id)); n != nil && n.connected() {
		limited, cancel := context.WithTimeout(ctx, unpublishTime)
		defer cancel()
		if _, err := n.controller.ControllerUnpublishVolume(limited, req); err != nil {
			klog.FromContext(ctx).V(4).Info("The node did not remove its record of the publication", "node", n.name, "reason", n.explain(limited, err).Error())
		}
	}
	return &csi.ControllerUnpublishVolumeResponse{}, nil
}
