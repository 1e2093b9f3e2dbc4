package nodeserver

import (
	"context"
	"errors"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// Server implements csi.NodeServer.
type Server struct {
	csi.UnimplementedNodeServer
	backends   *backend.Registry
	node       string
	maxVolumes int
	// Abandon reports whether a server that does not answer is given up, or nothing may be
	// unmounted now (ErrUnavailable).
	Abandon mount.Abandon
	// InlineMemory is the largest inline volume in memory, in bytes; 0 allows none.
	InlineMemory int64
	cleaned      cleanups
}

// New returns the service for one node; maxVolumes is what NodeGetInfo reports.
func New(backends *backend.Registry, node string, maxVolumes int) *Server {
	return &Server{backends: backends, node: node, maxVolumes: maxVolumes, cleaned: cleanups{ids: map[string]*cleanup{}}}
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

// forTeardown finds a volume that is to be unmounted from path. Pods must be able to go
// when the record of the volume cannot be read any more, or its pool is not available; then
// the ID is enough to recognise its mounts and its device.
func (s *Server) forTeardown(ctx context.Context, id, path string) (backend.Backend, volume.Volume, error) {
	b, parsed, err := s.backends.ByID(id)
	if errors.Is(err, volume.ErrNotFound) { // the ID is not from this driver
		b, err := s.unrecorded(id, path)
		return b, volume.Volume{}, err
	}
	if err != nil {
		return nil, volume.Volume{}, err
	}
	v, err := b.Get(ctx, parsed)
	if errors.Is(err, volume.ErrNotFound) || errors.Is(err, volume.ErrDamaged) || errors.Is(err, volume.ErrUnavailable) {
		return b, volume.Volume{ID: parsed}, nil
	}
	return b, v, err
}

// unrecorded is the backend of a volume without a record: a static one, or an inline one in
// memory. Only what is mounted at path tells which.
func (s *Server) unrecorded(id, path string) (unrecorded, error) {
	memory := &mount.MemorySource{Name: memoryName(id)}
	if ok, err := memory.Owns(path); ok || err != nil {
		return unrecorded{source: memory}, err
	}
	for _, p := range backend.As[backend.StaticProvider](s.backends) {
		if source, err := p.StaticAt(path); source != nil || err != nil {
			return unrecorded{source: source}, err
		}
	}
	return unrecorded{}, nil
}

// unrecorded implements what the calls that bring a path alone need of a backend.
type unrecorded struct {
	backend.Backend
	source mount.Source // nil: no such volume is mounted at the path
}

// Present implements backend.Backend.
func (u unrecorded) Present(context.Context, volume.Volume) (mount.Source, bool, error) {
	return u.source, u.source != nil, nil
}

// Detach implements backend.Backend.
func (unrecorded) Detach(context.Context, volume.Volume) error { return nil }

// findMounted looks up a volume that is mounted at one of the paths, if it has no record.
// ErrNotFound.
func (s *Server) findMounted(ctx context.Context, id string, paths ...string) (backend.Backend, volume.Volume, error) {
	if !s.isUnrecorded(id) {
		return s.find(ctx, id)
	}
	for _, path := range paths {
		if !filepath.IsAbs(path) {
			continue
		}
		b, err := s.unrecorded(id, path)
		if b.source != nil || err != nil {
			return b, volume.Volume{}, err
		}
	}
	return nil, volume.Volume{}, volume.Errorf(volume.ErrNotFound, "volume %q has no record on this node, and is not mounted at the paths %q", id, paths)
}

// find looks up a volume that has a record.
func (s *Server) find(ctx context.Context, id string) (backend.Backend, volume.Volume, error) {
	if volume.InlineID(id) {
		return s.inline(id)
	}
	return s.backends.Volume(ctx, id)
}

// isUnrecorded reports whether an ID is of a volume that has no record here. A static volume
// may have an ID like that of an inline volume.
func (s *Server) isUnrecorded(id string) bool {
	if volume.InlineID(id) {
		_, _, err := s.inline(id)
		return isMissing(err)
	}
	_, err := volume.ParseID(id)
	return err != nil
}
