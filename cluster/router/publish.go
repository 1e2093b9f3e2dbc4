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

// publishVolume answers ControllerPublishVolume. A volume in a shared pool can be
// published on every node that there is, also while its driver is not running. A
// node-local volume can be published on its node alone, and nothing is recorded; the
// node says whether it has the volume, and as it is asked for.
func (s *Server) publishVolume(ctx context.Context, req *csi.ControllerPublishVolumeRequest) (*csi.ControllerPublishVolumeResponse, error) {
	if _, err := controllerserver.PublishArgs(req); err != nil {
		return nil, err
	}
	id, local := nodeLocal(req.GetVolumeId())
	if !local {
		if err := s.nodes.knows(req.GetNodeId()); err != nil {
			return nil, err
		}
		return relay.Call[*csi.ControllerPublishVolumeResponse](ctx, s.shared, csi.Controller_ControllerPublishVolume_FullMethodName, req)
	}
	n, err := s.nodes.having(ctx, id)
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
		return nil, n.failed(ctx, err)
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

// unpublishTime bounds what the node is told when a volume is unpublished.
const unpublishTime = 2 * time.Second

// unpublishVolume answers ControllerUnpublishVolume. For a node-local volume
// it always succeeds, so that the volumes of a dead node can be detached.
func (s *Server) unpublishVolume(ctx context.Context, req *csi.ControllerUnpublishVolumeRequest) (*csi.ControllerUnpublishVolumeResponse, error) {
	id, local := nodeLocal(req.GetVolumeId())
	if !local {
		return relay.Call[*csi.ControllerUnpublishVolumeResponse](ctx, s.shared, csi.Controller_ControllerUnpublishVolume_FullMethodName, req)
	}
	if n, _ := s.nodes.recorded(keyOf(id)); n != nil && n.connected() {
		n.forgetPublished(ctx, req)
	}
	return &csi.ControllerUnpublishVolumeResponse{}, nil
}

// forgetPublished has a node remove its record of where a volume is published, which
// is there if it once served its volumes alone.
func (n *node) forgetPublished(ctx context.Context, req *csi.ControllerUnpublishVolumeRequest) {
	ctx, cancel := context.WithTimeout(ctx, unpublishTime)
	defer cancel()
	if _, err := n.controller.ControllerUnpublishVolume(ctx, req); err != nil {
		klog.FromContext(ctx).V(4).Info("The node did not remove its record of where the volume is published", "node", n.name, "reason", n.explain(ctx, err).Error())
	}
}
