package router

import (
	"context"
	"crypto/tls"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/cluster/transfer"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/volume"
)

// Options configure a router.
type Options struct {
	// Shared answers the calls for shared pools and for IDs of other drivers. It can publish
	// volumes to all nodes.
	Shared relay.Service
	// SharedPools are the names of the configured shared pools. Pools that StorageClasses
	// define are always shared.
	SharedPools []string
	Kinds       backend.Kinds
	Owners      Owners
	// Client returns the TLS configuration for the driver of a node.
	Client func(node string) *tls.Config
	// Transfers reports whether volumes of a kind can be created from a source on another node. Sign signs the ticket
	// for that. If Transfers is nil, each volume is created on the node of its source.
	Transfers func(kind string) bool
	Sign      func(transfer.Ticket) ([]byte, error)
	// OnTransfer is called for each call that creates a volume from a source on another node, in a goroutine of its own. It may
	// be nil.
	OnTransfer func(context.Context, Transfer)
}

// Server is the relay.Service of the controller for all nodes.
type Server struct {
	shared      relay.Service
	sharedPools []string
	kinds       backend.Kinds
	nodes       *nodes
	unconfirmed unconfirmed
	transfers   func(kind string) bool
	sign        func(transfer.Ticket) ([]byte, error)
	onTransfer  func(context.Context, Transfer)
}

// New returns a router without nodes. It closes its connections when ctx ends.
func New(ctx context.Context, o Options) *Server {
	return &Server{
		shared: o.Shared, sharedPools: o.SharedPools, kinds: o.Kinds,
		nodes: newNodes(ctx, o.Client, o.Owners), unconfirmed: unconfirmed{calls: map[string]call{}},
		transfers: o.Transfers, sign: o.Sign, onTransfer: o.OnTransfer,
	}
}

// SetHosts replaces the nodes.
func (s *Server) SetHosts(hosts []Host) { s.nodes.set(hosts) }

// Ready reports whether SetHosts was called.
func (s *Server) Ready() bool {
	_, err := s.nodes.all()
	return err == nil
}

// Wait returns when all connections are closed, after the context of New has ended.
func (s *Server) Wait() { s.nodes.tasks.Wait() }

// withheld are the capabilities that are not advertised, because they need a record of publications
// and apply to all volumes of a driver. The router records no publications of node-local volumes, so
// that volumes of a dead node can be unpublished.
var withheld = []csi.ControllerServiceCapability_RPC_Type{
	csi.ControllerServiceCapability_RPC_PUBLISH_READONLY,
	csi.ControllerServiceCapability_RPC_LIST_VOLUMES_PUBLISHED_NODES,
}

// getCapabilities returns all capabilities of this driver version except the withheld ones, whether or
// not a pool supports them now, because sidecars request the capabilities only once.
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

// nodeLocal parses a volume ID. local is false if it is an ID of a shared pool or of another driver.
func nodeLocal(text string) (id volume.ID, local bool) {
	id, err := volume.ParseID(text)
	return id, err == nil && !id.Shared()
}

// isShared reports whether a StorageClass names or defines a shared pool.
func (s *Server) isShared(p volume.Parameters) bool {
	return s.kinds.Shared(p) || slices.Contains(s.sharedPools, p.Pool)
}
