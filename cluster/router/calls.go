package router

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/volume"
)

// Call implements relay.Service. The router answers some calls itself. It forwards all others to the node that
// has the pool of the IDs in the request, or to Options.Shared if that pool is not node-local.
func (s *Server) Call(ctx context.Context, method string, req proto.Message) (proto.Message, error) {
	switch req := req.(type) {
	case *csi.ControllerGetCapabilitiesRequest:
		return s.getCapabilities(ctx, req)
	case *csi.CreateVolumeRequest:
		return s.createVolume(ctx, req)
	case *csi.GetCapacityRequest:
		return s.getCapacity(ctx, req)
	case *csi.ControllerPublishVolumeRequest:
		return s.publishVolume(ctx, req)
	case *csi.ControllerUnpublishVolumeRequest:
		return s.unpublishVolume(ctx, req)
	case *csi.ValidateVolumeCapabilitiesRequest:
		return s.validateCapabilities(ctx, method, req)
	case *csi.ControllerModifyVolumeRequest:
		// A node also changes the namespace of a volume by this call, for FlexVolume. An orchestrator must not.
		if _, err := (volume.IOLimits{}).With(req.GetMutableParameters()); err != nil {
			return nil, err
		}
	case *csi.ListVolumesRequest:
		return s.listVolumes(ctx, req)
	case *csi.ControllerListVolumeHealthRequest:
		return s.listHealth(ctx, req)
	case *csi.ListSnapshotsRequest:
		return s.listSnapshots(ctx, req)
	}
	return s.callPool(ctx, method, req)
}

// callPool forwards a call to the node that has the pool of the IDs in the request, or to Options.Shared.
func (s *Server) callPool(ctx context.Context, method string, req proto.Message) (proto.Message, error) {
	ids, err := relay.IDs(req)
	if err != nil {
		return nil, err
	}
	if len(ids) == 0 || ids[0].Shared() {
		switch req.(type) {
		case *csi.CreateSnapshotRequest, *csi.CreateVolumeGroupSnapshotRequest:
			return s.callCopying(ctx, ids, method, req)
		}
		return s.shared.Call(ctx, method, req)
	}
	n, err := s.nodes.forID(ctx, ids[0])
	if err != nil {
		return nil, err
	}
	resp, err := n.service.Call(ctx, method, req)
	if err != nil {
		return nil, n.callError(ctx, err)
	}
	if err := s.nodes.verifyResponse(ctx, n, ids[0], req, resp); err != nil {
		return nil, err
	}
	return resp, nil
}

// Stream implements relay.Service.
func (s *Server) Stream(ctx context.Context, method string, req proto.Message, send func(any) error) error {
	ids, err := relay.IDs(req)
	if err != nil {
		return err
	}
	if len(ids) == 0 || ids[0].Shared() {
		return s.shared.Stream(ctx, method, req, send)
	}
	n, err := s.nodes.forID(ctx, ids[0])
	if err != nil {
		return err
	}
	if err := n.service.Stream(ctx, method, req, send); err != nil {
		return n.callError(ctx, err)
	}
	return nil
}

// callError adds the node to the error of a call. If the error may mean that the node's pools changed,
// it requests the pools, so that the retry uses the new ones.
func (n *node) callError(ctx context.Context, err error) error {
	if code := status.Code(err); n.connected() && (code == codes.Unavailable || code == codes.FailedPrecondition) {
		n.requestPools(ctx, freshness)
	}
	return n.explain(ctx, err)
}
