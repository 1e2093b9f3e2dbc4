// Package controllerserver implements the CSI Controller service. A handler validates its request, finds
// the backend, makes one call and converts the result. Only backends access storage.
package controllerserver

import (
	"context"
	"errors"
	"io"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/volume"
)

// Server implements Services for the volumes in the pools of one node, or in pools that all nodes can
// reach.
type Server struct {
	csi.UnimplementedControllerServer
	csi.UnimplementedGroupControllerServer
	csi.UnimplementedSnapshotMetadataServer
	backends   *backend.Registry
	node       string
	maxVolumes int
	// Release unstages a volume that is being deleted, if it is staged on this node and not in use,
	// and reports whether it unstaged it. If Release is nil, a staged volume cannot be deleted.
	Release func(ctx context.Context, id volume.ID) (bool, error)
	// Incoming returns the permission in a call of CreateVolume to read the source on another node, or nil if the
	// call has none. If Incoming is nil, sources on other nodes cannot be read.
	Incoming func(ctx context.Context) (backend.Incoming, error)
	// IOLimiter limits the I/O of the pods of this node. If it is nil, the I/O of volumes cannot be limited.
	IOLimiter IOLimiter
	// Nodes reports whether a node exists. It is set if all nodes can reach the pools, and volumes
	// therefore have no topology. If Nodes is nil, the pools are on this node.
	Nodes func(node string) bool
}

// New returns the service for the backends of node. maxVolumes is the maximum number of
// volumes in the node's own pools that are controller-published to it.
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
	if len(backend.As[backend.IOLimiter](s.backends)) > 0 {
		types = append(types, csi.ControllerServiceCapability_RPC_MODIFY_VOLUME)
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

// volume looks up the volume of a request. It returns ErrInvalid if id is empty.
func (s *Server) volume(ctx context.Context, id string) (backend.Backend, volume.Volume, error) {
	if err := translate.Required("volume_id", id); err != nil {
		return nil, volume.Volume{}, err
	}
	return s.backends.Volume(ctx, id)
}

// backendOf returns the backend of a volume, for a call that also succeeds if the volume does not
// exist. The backend is nil if the ID is not from this driver, so that no such volume can exist.
func (s *Server) backendOf(id string) (backend.Backend, volume.ID, error) {
	if err := translate.Required("volume_id", id); err != nil {
		return nil, volume.ID{}, err
	}
	b, parsed, err := s.backends.ByID(id)
	if errors.Is(err, volume.ErrNotFound) {
		return nil, parsed, nil
	}
	return b, parsed, err
}

// message converts a volume. The result depends only on the volume. The volume context is the same if the
// record cannot be read.
func (s *Server) message(v volume.Volume) *csi.Volume {
	enforced := backend.EnforcedHard
	if b, err := s.backends.ByName(v.ID.Backend); err == nil {
		if limiter, ok := b.(backend.Limiter); ok {
			enforced = limiter.Enforced(v)
		}
	}
	m := &csi.Volume{
		VolumeId:      v.ID.String(),
		CapacityBytes: v.Capacity,
		VolumeContext: map[string]string{"backend": v.ID.Backend, "pool": v.ID.Pool, "enforced": enforced},
		ContentSource: contentSource(v.Source),
	}
	if !v.ID.Shared() {
		m.AccessibleTopology = []*csi.Topology{translate.Topology(s.node)}
	}
	return m
}

// maxNameLength is the maximum length of the name of a volume, snapshot or group in bytes (CSI
// specification, "Size Limits").
const maxNameLength = 128

// checkName refuses an empty or too long name (ErrInvalid).
func checkName(name string) error {
	if len(name) > maxNameLength {
		return volume.Errorf(volume.ErrInvalid, "name has %d bytes: at most %d are allowed", len(name), maxNameLength)
	}
	return translate.Required("name", name)
}

// checkTopology refuses a topology that a volume of this node does not satisfy (ErrExhausted).
// Only the first preferred topology counts: it is the node that the scheduler has selected. A
// volume that all nodes can reach satisfies every topology.
func (s *Server) checkTopology(requisite, preferred []*csi.Topology) error {
	if s.Nodes != nil {
		return nil
	}
	if len(preferred) > 0 && !s.here(preferred[0]) {
		return volume.Errorf(volume.ErrExhausted, "accessibility_requirements.preferred[0] is %v: this driver creates volumes only on node %q", preferred[0].GetSegments(), s.node)
	}
	if len(requisite) > 0 && !slices.ContainsFunc(requisite, s.here) {
		return volume.Errorf(volume.ErrExhausted, "accessibility_requirements.requisite does not contain node %q: this driver creates volumes only on that node", s.node)
	}
	return nil
}

// here reports whether a topology includes this node.
func (s *Server) here(t *csi.Topology) bool {
	value, has := t.GetSegments()[translate.TopologyKey]
	return !has || s.Nodes != nil || value == volume.TopologyValue(s.node)
}

// Services are all services of a controller: for volumes and snapshots, for groups of snapshots,
// and for the blocks of a snapshot.
type Services interface {
	csi.ControllerServer
	csi.GroupControllerServer
	csi.SnapshotMetadataServer
}

// Clients are the clients of Services.
type Clients interface {
	csi.ControllerClient
	csi.GroupControllerClient
	csi.SnapshotMetadataClient
}

// NewClients returns the clients of a connection.
func NewClients(conn grpc.ClientConnInterface) Clients {
	return struct {
		csi.ControllerClient
		csi.GroupControllerClient
		csi.SnapshotMetadataClient
	}{csi.NewControllerClient(conn), csi.NewGroupControllerClient(conn), csi.NewSnapshotMetadataClient(conn)}
}

// Pass calls send with each message that receive returns, until the stream ends or a call fails.
func Pass[M any](receive func() (M, error), send func(M) error) error {
	for {
		m, err := receive()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := send(m); err != nil {
			return err
		}
	}
}
