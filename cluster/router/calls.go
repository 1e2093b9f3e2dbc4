package router

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-csi/trivet/internal/relay"
)

// serveFunc answers a call in the router.
type serveFunc func(*Server, context.Context, proto.Message) (proto.Message, error)

// served are the calls that the router itself answers. It forwards all other calls to the node that has the
// pool of the IDs in the request, or to Shared if that pool is not node-local.
var served = map[string]serveFunc{
	csi.Controller_ControllerGetCapabilities_FullMethodName:  typed((*Server).getCapabilities),
	csi.Controller_CreateVolume_FullMethodName:               typed((*Server).createVolume),
	csi.Controller_GetCapacity_FullMethodName:                typed((*Server).getCapacity),
	csi.Controller_ControllerPublishVolume_FullMethodName:    typed((*Server).publishVolume),
	csi.Controller_ControllerUnpublishVolume_FullMethodName:  typed((*Server).unpublishVolume),
	csi.Controller_ControllerModifyVolume_FullMethodName:     notServed,
	csi.Controller_ListVolumes_FullMethodName:                typed((*Server).listVolumes),
	csi.Controller_ControllerListVolumeHealth_FullMethodName: (*Server).listHealth,
	csi.Controller_ListSnapshots_FullMethodName:              typed((*Server).listSnapshots),
}

// typed returns the serveFunc of a method with message types.
func typed[Req, Resp proto.Message](serve func(*Server, context.Context, Req) (Resp, error)) serveFunc {
	return func(s *Server, ctx context.Context, req proto.Message) (proto.Message, error) {
		resp, err := serve(s, ctx, req.(Req))
		if err != nil {
			return nil, err
		}
		return resp, nil
	}
}

// notServed refuses a call that only a node's driver answers.
func notServed(*Server, context.Context, proto.Message) (proto.Message, error) {
	return nil, status.Error(codes.Unimplemented, "the controller's driver does not serve this method")
}

// Call implements relay.Service.
func (s *Server) Call(ctx context.Context, method string, req proto.Message) (proto.Message, error) {
	if serve := served[method]; serve != nil {
		return serve(s, ctx, req)
	}
	return s.callPool(ctx, method, req)
}

// callPool forwards a call to the node that has the pool of the IDs in the request, or to Shared.
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
