package router

import (
	"context"
	"crypto/tls"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/volume"
)

// Options are what a router works with.
type Options struct {
	// Shared serves what concerns shared pools, and IDs that are nobody's. It may
	// publish a volume to any node.
	Shared controllerserver.Services
	// SharedPools are the names of the shared pools that are configured. Those that a
	// StorageClass says itself are shared in any case.
	SharedPools []string
	// Backends are the names of those that this version has.
	Backends []string
	// Owners is where it is recorded which node has which pool.
	Owners Owners
	// Client makes the TLS configuration for the driver of one node.
	Client func(node string) *tls.Config
}

// Server implements controllerserver.Services for all nodes.
type Server struct {
	csi.UnimplementedControllerServer
	csi.UnimplementedGroupControllerServer
	csi.UnimplementedSnapshotMetadataServer
	shared      controllerserver.Services
	sharedPools []string
	backends    []string
	nodes       *nodes
	// unanswered are the volumes that may be somewhere.
	unanswered unanswered
}

// New makes a router that knows no nodes yet. Its connections are closed when ctx
// ends.
func New(ctx context.Context, o Options) *Server {
	return &Server{
		shared: o.Shared, sharedPools: o.SharedPools, backends: o.Backends,
		nodes: newNodes(ctx, o.Client, o.Owners), unanswered: unanswered{calls: map[string]call{}},
	}
}

// SetHosts says which nodes there are now.
func (s *Server) SetHosts(hosts []Host) { s.nodes.set(hosts) }

// Ready tells whether it is known which nodes there are.
func (s *Server) Ready() bool { return s.nodes.ready() }

// Wait returns when all connections are closed, after the context given to New has
// ended.
func (s *Server) Wait() { s.nodes.wait() }

// withheld are capabilities that one process could have and a cluster cannot:
// where a node-local volume is published is recorded nowhere, so that the volumes of
// a dead node can be unpublished. Of those in shared pools it is, but a capability
// is of all volumes or of none.
var withheld = []csi.ControllerServiceCapability_RPC_Type{
	csi.ControllerServiceCapability_RPC_PUBLISH_READONLY,
	csi.ControllerServiceCapability_RPC_LIST_VOLUMES_PUBLISHED_NODES,
}

// ControllerGetCapabilities implements csi.ControllerServer: all that the drivers of
// this version can do, since sidecars ask once.
func (s *Server) ControllerGetCapabilities(ctx context.Context, req *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	resp, err := s.shared.ControllerGetCapabilities(ctx, req)
	if err != nil {
		return nil, err
	}
	resp.Capabilities = slices.DeleteFunc(resp.Capabilities, func(c *csi.ControllerServiceCapability) bool {
		return slices.Contains(withheld, c.GetRpc().GetType())
	})
	return resp, nil
}

// nodeLocal reads a volume ID, and tells whether it is one of a node-local pool.
func nodeLocal(text string) (volume.ID, bool) { return local(volume.ParseID(text)) }

// local tells of an ID that was read whether it is of a node-local pool.
func local(id volume.ID, foreign error) (volume.ID, bool) { return id, foreign == nil && !id.Shared() }

// isShared tells whether a StorageClass is of a shared pool.
func (s *Server) isShared(p volume.Parameters) bool {
	_, _, direct := volume.ParseDirectPool(p.Pool)
	return direct || p.Backend == volume.BackendNFS || slices.Contains(s.sharedPools, p.Pool)
}

// byID sends a call to where its volume is: shared serves what is not in a
// node-local pool. A method of the client is given as an expression; believe refuses
// an answer that is not the node's to give.
func byID[Req interface{ GetVolumeId() string }, Resp any](
	ctx context.Context, s *Server, req Req,
	shared func(controllerserver.Services, context.Context, Req) (Resp, error),
	forward func(controllerserver.Clients, context.Context, Req, ...grpc.CallOption) (Resp, error),
	believe func(context.Context, *node, Resp) error,
) (Resp, error) {
	id, local := nodeLocal(req.GetVolumeId())
	if !local {
		return shared(s.shared, ctx, req)
	}
	return atOwner(ctx, s, id, req, forward, believe)
}

// atOwner makes a call at the node that has the pool of an ID.
func atOwner[Req, Resp any](
	ctx context.Context, s *Server, id volume.ID, req Req,
	forward func(controllerserver.Clients, context.Context, Req, ...grpc.CallOption) (Resp, error),
	believe func(context.Context, *node, Resp) error,
) (Resp, error) {
	var none Resp
	n, err := s.nodes.having(ctx, id)
	if err != nil {
		return none, err
	}
	resp, err := forward(n.controller, ctx, req)
	if err != nil {
		return none, n.failed(ctx, err)
	}
	if err := believe(ctx, n, resp); err != nil {
		return none, err
	}
	return resp, nil
}

// anything believes an answer that names no volume.
func anything[Resp any](context.Context, *node, Resp) error { return nil }

// failed is the answer to a call that a node failed. If that may be because its pools
// are others than they were, it is asked for them before the call is tried again.
func (n *node) failed(ctx context.Context, err error) error {
	if code := status.Code(err); n.connected() && (code == codes.Unavailable || code == codes.FailedPrecondition) {
		n.ask(ctx, freshness)
	}
	return n.explain(ctx, err)
}

// DeleteVolume implements csi.ControllerServer.
func (s *Server) DeleteVolume(ctx context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	return byID(ctx, s, req, controllerserver.Services.DeleteVolume, controllerserver.Clients.DeleteVolume, anything[*csi.DeleteVolumeResponse])
}

// ControllerExpandVolume implements csi.ControllerServer.
func (s *Server) ControllerExpandVolume(ctx context.Context, req *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	return byID(ctx, s, req, controllerserver.Services.ControllerExpandVolume, controllerserver.Clients.ControllerExpandVolume, anything[*csi.ControllerExpandVolumeResponse])
}

// ValidateVolumeCapabilities implements csi.ControllerServer.
func (s *Server) ValidateVolumeCapabilities(ctx context.Context, req *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	return byID(ctx, s, req, controllerserver.Services.ValidateVolumeCapabilities, controllerserver.Clients.ValidateVolumeCapabilities, anything[*csi.ValidateVolumeCapabilitiesResponse])
}

// ControllerGetVolume implements csi.ControllerServer.
func (s *Server) ControllerGetVolume(ctx context.Context, req *csi.ControllerGetVolumeRequest) (*csi.ControllerGetVolumeResponse, error) {
	return byID(ctx, s, req, controllerserver.Services.ControllerGetVolume, controllerserver.Clients.ControllerGetVolume,
		func(ctx context.Context, n *node, resp *csi.ControllerGetVolumeResponse) error {
			resp.Status = nil // where it is published is recorded nowhere
			if err := n.answered(resp.GetVolume().GetVolumeId(), req.GetVolumeId()); err != nil {
				return err
			}
			return s.nodes.believe(ctx, n, resp.GetVolume())
		})
}

// ControllerGetVolumeHealth implements csi.ControllerServer.
func (s *Server) ControllerGetVolumeHealth(ctx context.Context, req *csi.ControllerGetVolumeHealthRequest) (*csi.ControllerGetVolumeHealthResponse, error) {
	return byID(ctx, s, req, controllerserver.Services.ControllerGetVolumeHealth, controllerserver.Clients.ControllerGetVolumeHealth,
		func(_ context.Context, n *node, resp *csi.ControllerGetVolumeHealthResponse) error {
			return n.answered(resp.GetVolumeHealth().GetVolumeId(), req.GetVolumeId())
		})
}
