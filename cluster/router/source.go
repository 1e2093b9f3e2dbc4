package router

import (
	"context"
	"errors"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/volume"
)

// createFrom creates a volume from a source. If the source is in a node-local pool, the volume is created on
// the source's node, and a retry uses the same pool. If the pool is shared, Options.Shared creates the volume.
func (s *Server) createFrom(ctx context.Context, spec volume.Spec, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	source := spec.Source
	switch shared := s.isShared(spec.Parameters); {
	case shared != source.ID.Shared():
		return nil, volume.Errorf(volume.ErrInvalid, "volume_content_source is %v, and parameter %s=%q: one of the pools is node-local, the other is shared: use a StorageClass of the source's pool", source, volume.ParamPool, spec.Parameters.Pool)
	case shared && source.Snapshot:
		return relay.Call[*csi.CreateVolumeResponse](ctx, s.shared, csi.Controller_CreateVolume_FullMethodName, req)
	case shared:
		resp, err := s.callCopying(ctx, []volume.ID{source.ID}, csi.Controller_CreateVolume_FullMethodName, req)
		if err != nil {
			return nil, err
		}
		return resp.(*csi.CreateVolumeResponse), nil
	}
	n, err := s.nodes.forID(ctx, source.ID)
	if err != nil {
		return nil, retryable(err)
	}
	if len(within([]*node{n}, req.GetAccessibilityRequirements().GetRequisite())) == 0 {
		return nil, volume.Errorf(volume.ErrExhausted, "accessibility_requirements.requisite does not contain node %q, which has the source %v: a volume is created on the node of its source", n.name, source)
	}
	return s.createOn(ctx, n, spec, req)
}

// callCopying makes a call that copies volumes of a shared pool. If Options.Shared refuses the call because
// a volume is staged, the call is first sent to the node where the volume is staged, because only that node
// can copy a consistent state. The call is then repeated at Options.Shared, which returns that copy.
func (s *Server) callCopying(ctx context.Context, sources []volume.ID, method string, req proto.Message) (proto.Message, error) {
	resp, err := s.shared.Call(ctx, method, req)
	if !inUse(err) {
		return resp, err
	}
	n := s.stagedOn(ctx, sources)
	if n == nil {
		return resp, err
	}
	if _, err := n.service.Call(ctx, method, req); err != nil {
		return nil, n.callError(ctx, err)
	}
	return s.shared.Call(ctx, method, req)
}

// inUse reports whether an error may mean that a volume is staged. The error may be ErrPending, because a
// controller on the node where the volume is staged sees the device but not the mount, as during staging.
func inUse(err error) bool {
	code := status.Code(err)
	return errors.Is(err, volume.ErrPrecondition) || errors.Is(err, volume.ErrPending) || code == codes.FailedPrecondition || code == codes.Aborted
}

// stagedOn returns the node to which volumes of a shared pool are published. It returns nil if they are
// published to no node or to several nodes, or if Options.Shared does not return one of the volumes.
func (s *Server) stagedOn(ctx context.Context, volumes []volume.ID) *node {
	found := ""
	for _, id := range volumes {
		resp, err := relay.Call[*csi.ControllerGetVolumeResponse](ctx, s.shared, csi.Controller_ControllerGetVolume_FullMethodName, &csi.ControllerGetVolumeRequest{VolumeId: id.String()})
		if err != nil {
			return nil
		}
		for _, name := range resp.GetStatus().GetPublishedNodeIds() {
			if found != "" && found != name {
				return nil
			}
			found = name
		}
	}
	return s.nodes.named(found)
}
