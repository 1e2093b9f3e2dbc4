package controllerserver

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/volume"
)

// Server implements Services for the volumes of one node, or for those of pools that
// all nodes reach.
type Server struct {
	csi.UnimplementedControllerServer
	csi.UnimplementedGroupControllerServer
	csi.UnimplementedSnapshotMetadataServer
	backends   *backend.Registry
	node       string
	maxVolumes int
	// Release takes from this node a volume that is to be deleted and is still
	// staged here, if nobody can be using it, and tells whether it did. nil: such a
	// volume is not deleted.
	Release func(ctx context.Context, id volume.ID) (bool, error)
	// Nodes tells whether there is such a node, where the pools are ones that all
	// nodes reach: their volumes have no topology. nil: the pools are this node's.
	Nodes func(node string) bool
}

// New makes the service for the backends of node; maxVolumes bounds how many
// volumes of its own pools may be controller-published to it.
func New(backends *backend.Registry, node string, maxVolumes int) *Server {
	return &Server{backends: backends, node: node, maxVolumes: maxVolumes}
}

// ControllerGetCapabilities implements csi.ControllerServer.
func (s *Server) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	types := []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES,
		csi.ControllerServiceCapability_RPC_GET_CAPACITY,
		csi.ControllerServiceCapability_RPC_GET_VOLUME,
		csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	}
	if len(backend.As[backend.Publisher](s.backends)) > 0 {
		types = append(types, csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME,
			csi.ControllerServiceCapability_RPC_PUBLISH_READONLY,
			csi.ControllerServiceCapability_RPC_LIST_VOLUMES_PUBLISHED_NODES)
	}
	if len(backend.As[backend.Expander](s.backends)) > 0 {
		types = append(types, csi.ControllerServiceCapability_RPC_EXPAND_VOLUME)
	}
	if len(backend.As[backend.HealthChecker](s.backends)) > 0 {
		types = append(types, csi.ControllerServiceCapability_RPC_GET_VOLUME_HEALTH,
			csi.ControllerServiceCapability_RPC_LIST_VOLUME_HEALTH)
	}
	snapshots := len(backend.As[backend.Snapshotter](s.backends)) > 0
	if snapshots {
		types = append(types, csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT,
			csi.ControllerServiceCapability_RPC_LIST_SNAPSHOTS,
			csi.ControllerServiceCapability_RPC_GET_SNAPSHOT)
	}
	if snapshots || len(backend.As[backend.Cloner](s.backends)) > 0 {
		types = append(types, csi.ControllerServiceCapability_RPC_CLONE_VOLUME)
	}
	resp := &csi.ControllerGetCapabilitiesResponse{}
	for _, t := range types {
		resp.Capabilities = append(resp.Capabilities, &csi.ControllerServiceCapability{
			Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: t}},
		})
	}
	return resp, nil
}

// message is a volume as CSI has it. The same volume gives the same message.
func (s *Server) message(v volume.Volume) *csi.Volume {
	m := &csi.Volume{
		VolumeId:      v.ID.String(),
		CapacityBytes: v.Capacity,
		VolumeContext: s.context(v),
		ContentSource: contentSource(v.Source),
	}
	if !v.ID.Shared() {
		m.AccessibleTopology = []*csi.Topology{translate.Topology(s.node)}
	}
	return m
}

// context is the volume context. It is the same also when the record cannot be read.
func (s *Server) context(v volume.Volume) map[string]string {
	enforced := backend.EnforcedHard
	if b, err := s.backends.ByName(v.ID.Backend); err == nil {
		if limiter, ok := b.(backend.Limiter); ok {
			enforced = limiter.Enforced(v)
		}
	}
	return map[string]string{"backend": v.ID.Backend, "pool": v.ID.Pool, "enforced": enforced}
}
