// Package nodeserver is the CSI Node service. It mounts a volume once on this node (stage), bind-mounts
// it for pods (publish), and reports its usage and health.
//
// The mount table of the kernel is the only state. The backends make volumes available on the
// node, and a mount.Source hides the kind of storage.
package nodeserver

import (
	"cmp"
	"context"
	"errors"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/linux/cgroup"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// Server implements csi.NodeServer.
type Server struct {
	csi.UnimplementedNodeServer
	backends   *backend.Registry
	node       string
	maxVolumes int
	// Abandon decides whether an NFS server that does not respond is abandoned. It returns
	// ErrUnavailable if nothing may be unmounted now. If Abandon is nil, no server is abandoned.
	Abandon mount.Abandon
	// HoldTrim ends the trim of a volume after its current step, and prevents another one until release is called. It may
	// be nil.
	HoldTrim func(ctx context.Context, id volume.ID) (release func())
	// InlineMemory is the maximum size of an inline volume in memory, in bytes; 0 allows none.
	InlineMemory int64
	// Cgroups is the hierarchy with the cgroups of the pods.
	Cgroups cgroup.Hierarchy
	// limiting is held while limits of a volume's I/O are set, and while the device of a volume with limits is detached.
	limiting volumeLocks
	// cleaned records the inline volumes that this process has cleaned up.
	cleaned cleanups
}

// New returns the service for one node. NodeGetInfo reports maxVolumes.
func New(backends *backend.Registry, node string, maxVolumes int) *Server {
	return &Server{backends: backends, node: node, maxVolumes: maxVolumes, Cgroups: cgroup.Root, cleaned: cleanups{ids: map[string]*cleanup{}}}
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

// forTeardown looks up the volume to unmount from path. If the volume's record is unreadable or its
// pool is unavailable, the returned volume has only an ID, by which the backend finds the mounts and
// the device: the pod must terminate in this case too.
func (s *Server) forTeardown(ctx context.Context, id, path string) (backend.Backend, volume.Volume, error) {
	b, parsed, err := s.backends.ByID(id)
	if errors.Is(err, volume.ErrNotFound) { // the ID is not from this driver
		b, err := s.findUnrecorded(id, path)
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

// findUnrecorded returns the backend of a volume without a record: a static volume, or an inline
// volume in memory. Its source is nil if no such volume is mounted at path.
func (s *Server) findUnrecorded(id, path string) (unrecorded, error) {
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

// unrecorded is the backend of a volume without a record, which only its mount identifies.
type unrecorded struct {
	backend.Backend
	source mount.Source // nil if the volume is not mounted
}

// Present implements backend.Backend.
func (u unrecorded) Present(context.Context, volume.Volume) (mount.Source, bool, error) {
	return u.source, u.source != nil, nil
}

// Detach implements backend.Backend.
func (unrecorded) Detach(context.Context, volume.Volume) error { return nil }

// findMounted looks up a volume. If no record of the volume is found, and its ID is not one that this
// driver generates, findMounted returns ErrNotFound unless the volume is mounted at one of the paths. An
// ID in the format of inline volumes may also be the ID of a static volume.
func (s *Server) findMounted(ctx context.Context, id string, paths ...string) (backend.Backend, volume.Volume, error) {
	b, v, err := s.find(ctx, id)
	if _, parseErr := volume.ParseID(id); parseErr == nil || !isMissing(err) {
		return b, v, err
	}
	for _, path := range paths {
		if !filepath.IsAbs(path) {
			continue
		}
		b, err := s.findUnrecorded(id, path)
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

// requireIDAndAbsolute refuses a request without volume_id, or without an absolute path.
func requireIDAndAbsolute(id, field, path string) error {
	return cmp.Or(translate.Required("volume_id", id), absolute(field, path))
}

// absolute refuses a path that is empty or not absolute.
func absolute(field, path string) error {
	if err := translate.Required(field, path); err != nil {
		return err
	}
	if !filepath.IsAbs(path) || filepath.Clean(path) != path {
		return volume.Errorf(volume.ErrInvalid, "%s %q: must be an absolute path without . and ..", field, path)
	}
	return nil
}

// Names of the request fields with the path where a volume is staged. An inline volume is staged at its
// target_path.
const (
	stagingField = "staging_target_path"
	targetField  = "target_path"
)

// request holds the fields that stage and publish have in common.
type request struct {
	id      string
	staging string
	// field is the name of the request field with the staging path.
	field      string
	target     string // only in a publish request
	capability volume.Capability
	options    mount.Options
	readOnly   bool
}

// newRequest reads the fields that stage and publish have in common. path is the staging path, and
// field is the name of its field in the request. newRequest returns ErrInvalid if a field is missing
// or invalid.
func newRequest(id, field, path string, c *csi.VolumeCapability, readOnly bool) (request, error) {
	r := request{id: id, staging: path, field: field}
	err := requireIDAndAbsolute(id, field, path)
	if err != nil {
		return r, err
	}
	if r.capability, err = translate.Capability(c, "volume_capability"); err != nil {
		return r, err
	}
	if r.options, err = mount.ParseFlags(r.capability.MountFlags); err != nil {
		return r, backend.ExplainMountFlags(r.capability.MountFlags, err)
	}
	if r.readOnly = readOnly || r.capability.Mode.ReadOnly(); r.readOnly {
		r.options = r.options.ReadOnly()
	}
	return r, nil
}

// publishRequest reads a NodePublishVolumeRequest. An inline volume is staged at its target.
func publishRequest(req *csi.NodePublishVolumeRequest) (request, error) {
	readOnly := req.GetReadonly() || req.GetPublishContext()[translate.ReadOnlyKey] == "true"
	r, err := newRequest(req.GetVolumeId(), targetField, req.GetTargetPath(), req.GetVolumeCapability(), readOnly)
	r.target = req.GetTargetPath()
	switch {
	case err != nil:
		return r, err
	case volume.IsInline(req.GetVolumeContext()):
		return r, r.checkInline()
	case req.GetStagingTargetPath() == "" && volume.InlineID(r.id):
		return r, volume.Errorf(volume.ErrPrecondition, "volume %s: an inline volume needs podInfoOnMount: true in the CSIDriver object", r.id)
	case req.GetStagingTargetPath() == "":
		return r, volume.Errorf(volume.ErrPrecondition, "staging_target_path is missing: call NodeStageVolume first and give its path")
	}
	r.staging, r.field = req.GetStagingTargetPath(), stagingField
	return r, absolute(stagingField, r.staging)
}

// checkInline refuses a request that no inline volume can satisfy (ErrInvalid).
func (r request) checkInline() error {
	switch {
	case !volume.InlineID(r.id):
		return volume.Errorf(volume.ErrInvalid, "volume_id %.80q: the ID of an inline volume is csi- and 64 hexadecimal digits, as the kubelet generates it", r.id)
	case r.capability.Block:
		return volume.Errorf(volume.ErrInvalid, "volume_capability requests a raw device, but an inline volume has a filesystem: use a claim with volumeMode Block")
	case len(r.capability.MountFlags) > 0:
		return volume.Errorf(volume.ErrInvalid, "volume_capability.mount.mount_flags %q: an inline volume has no mount flags: remove them", r.capability.MountFlags)
	}
	return nil
}
