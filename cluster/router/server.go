package router

import (
	"context"
	"crypto/tls"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/volume"
)

// Options are what a router works with.
type Options struct {
	// Shared answers the calls for shared pools, and for IDs that are not of this driver. It
	// may publish a volume to any node.
	Shared relay.Service
	// SharedPools are the names of the shared pools that are configured. Those that a
	// StorageClass says itself are shared in any case.
	SharedPools []string
	// Kinds are the kinds of volumes of this version.
	Kinds backend.Kinds
	// Owners is where it is recorded which node has which pool.
	Owners Owners
	// Client makes the TLS configuration for the driver of one node.
	Client func(node string) *tls.Config
}

// Server is a relay.Service that answers controller calls for all nodes.
type Server struct {
	shared      relay.Service
	sharedPools []string
	kinds       backend.Kinds
	nodes       *nodes
	// unanswered are the volumes that may be somewhere.
	unanswered unanswered
}

// New makes a router that knows no nodes yet. Its connections are closed when ctx
// ends.
func New(ctx context.Context, o Options) *Server {
	return &Server{
		shared: o.Shared, sharedPools: o.SharedPools, kinds: o.Kinds,
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

// getCapabilities answers with the capabilities of this version: sidecars ask only once.
func (s *Server) getCapabilities(ctx context.Context, req *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	resp, err := relay.Call[*csi.ControllerGetCapabilitiesResponse](ctx, s.shared, csi.Controller_ControllerGetCapabilities_FullMethodName, req)
	if err != nil {
		return nil, err
	}
	resp.Capabilities = slices.DeleteFunc(resp.Capabilities, func(c *csi.ControllerServiceCapability) bool {
		return slices.Contains(withheld, c.GetRpc().GetType())
	})
	return resp, nil
}

// nodeLocal reads a volume ID, and tells whether its pool is node-local.
func nodeLocal(text string) (volume.ID, bool) {
	id, err := volume.ParseID(text)
	return id, err == nil && !id.Shared()
}

// isShared tells whether a StorageClass is of a shared pool.
func (s *Server) isShared(p volume.Parameters) bool {
	return s.kinds.Shared(p) || slices.Contains(s.sharedPools, p.Pool)
}
