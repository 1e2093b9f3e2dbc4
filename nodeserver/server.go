package nodeserver

import (
	"context"
	"errors"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/volume"
)

// Server implements csi.NodeServer.
type Server struct {
	csi.UnimplementedNodeServer
	backends   *backend.Registry
	node       string
	maxVolumes int
	// Teardown tells how what is mounted from a server is unstaged: as ever, by
	// force, or not now (ErrUnavailable). nil: as ever.
	Teardown func() (force bool, err error)
	// InlineMemory is the largest inline volume in memory, in bytes; 0: there are none.
	InlineMemory int64
	settled      settled
}

// New makes the service for one node; maxVolumes is what NodeGetInfo reports.
func New(backends *backend.Registry, node string, maxVolumes int) *Server {
	return &Server{backends: backends, node: node, maxVolumes: maxVolumes, settled: settled{ids: map[string]*settling{}}}
}

// NodeGetCapabilities implements csi.NodeServer.
func (s *Server) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	types := []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	}
	if len(backend.As[backend.Expander](s.backends)) > 0 {
		types = append(types, csi.NodeServiceCapability_RPC_EXPAND_VOLUME)
	}
	if len(backend.As[backend.HealthChecker](s.backends)) > 0 {
		types = append(types, csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH,
			csi.NodeServiceCapability_RPC_GET_STORAGE_HEALTH)
	}
	resp := &csi.NodeGetCapabilitiesResponse{}
	for _, t := range types {
		resp.Capabilities = append(resp.Capabilities, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: t}},
		})
	}
	return resp, nil
}

// NodeGetInfo implements csi.NodeServer.
func (s *Server) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{
		NodeId:             s.node,
		MaxVolumesPerNode:  int64(s.maxVolumes),
		AccessibleTopology: translate.Topology(s.node),
	}, nil
}

// foreign tells whether an ID is none that this driver made.
func foreign(id string) bool {
	_, err := volume.ParseID(id)
	return err != nil
}

// forTeardown finds a volume that is to be taken down. Pods must be able to go
// when a volume's record cannot be read any more, or its pool is away; then the
// ID is all there is of it, and enough to recognise its device.
func (s *Server) forTeardown(ctx context.Context, id string) (backend.Backend, volume.Volume, error) {
	b, parsed, err := s.backends.ByID(id)
	if err != nil {
		return nil, volume.Volume{}, err
	}
	v, err := b.Get(ctx, parsed)
	if errors.Is(err, volume.ErrNotFound) || errors.Is(err, volume.ErrDamaged) || errors.Is(err, volume.ErrUnavailable) {
		return b, volume.Volume{ID: parsed}, nil
	}
	return b, v, err
}
