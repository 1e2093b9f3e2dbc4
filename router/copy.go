package router

import (
	"context"
	"errors"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/volume"
)

// createFrom makes a volume of another or of a snapshot, on the node that has that: the
// pod that is to use it follows.
func (s *Server) createFrom(ctx context.Context, spec volume.Spec, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	source := spec.Source
	switch shared := s.isShared(spec.Parameters); {
	case shared != source.ID.Shared():
		return nil, volume.Errorf(volume.ErrInvalid, "volume_content_source is %v, and parameter %s=%q: one of the pools is of a node itself, the other is one that all nodes reach: use a StorageClass of the source's pool", source, volume.ParamPool, spec.Parameters.Pool)
	case shared && source.Snapshot:
		return s.shared.CreateVolume(ctx, req)
	case shared:
		return whereStaged(ctx, s, []volume.ID{source.ID}, req, controllerserver.Services.CreateVolume, controllerserver.Clients.CreateVolume)
	}
	n, err := s.nodes.having(ctx, source.ID)
	if err != nil {
		return nil, tryLater(err)
	}
	if len(within([]*node{n}, req.GetAccessibilityRequirements().GetRequisite())) == 0 {
		return nil, volume.Errorf(volume.ErrExhausted, "accessibility_requirements.requisite does not have node %q: %v is there, and so is what is made of it", n.name, source)
	}
	return s.createOn(ctx, n, spec, req)
}

// whereStaged makes a call that copies volumes of a shared pool. One that is staged can be
// copied at one moment by its node alone: if the call is refused it is made there, and
// once more here, where it finds what the node made.
func whereStaged[Req, Resp any](
	ctx context.Context, s *Server, sources []volume.ID, req Req,
	shared func(controllerserver.Services, context.Context, Req) (Resp, error),
	forward func(controllerserver.Clients, context.Context, Req, ...grpc.CallOption) (Resp, error),
) (Resp, error) {
	resp, err := shared(s.shared, ctx, req)
	if !inUse(err) {
		return resp, err
	}
	n := s.stagedOn(ctx, sources)
	if n == nil {
		return resp, err
	}
	if resp, err := forward(n.controller, ctx, req); err != nil {
		return resp, n.failed(ctx, err)
	}
	return shared(s.shared, ctx, req)
}

// inUse tells whether an error may be that of a volume which is staged. On its very node
// the controller can see the device and not what is mounted, which looks as if it were
// being staged (ErrPending).
func inUse(err error) bool {
	code := status.Code(err)
	return errors.Is(err, volume.ErrPrecondition) || errors.Is(err, volume.ErrPending) || code == codes.FailedPrecondition || code == codes.Aborted
}

// stagedOn is the one node on which volumes of a shared pool are published; nil if they
// are on none, or on several, or nobody says.
func (s *Server) stagedOn(ctx context.Context, volumes []volume.ID) *node {
	only := ""
	for _, id := range volumes {
		resp, err := s.shared.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{VolumeId: id.String()})
		if err != nil {
			return nil
		}
		for _, name := range resp.GetStatus().GetPublishedNodeIds() {
			if only != "" && only != name {
				return nil
			}
			only = name
		}
	}
	return s.nodes.named(only)
}
