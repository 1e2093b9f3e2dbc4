package controllerserver

import (
	"context"
	"errors"
	"maps"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/volume"
)

// CreateVolume implements csi.ControllerServer.
func (s *Server) CreateVolume(ctx context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	spec, err := CreateSpec(s.backends.Kinds(), req)
	if err != nil {
		return nil, err
	}
	b, err := s.backends.ByName(spec.Parameters.Backend)
	if err != nil {
		return nil, err
	}
	if err := s.backends.Kinds().CheckCapabilities(spec); err != nil {
		return nil, err
	}
	preferred := req.GetAccessibilityRequirements().GetPreferred()
	if spec.Source != nil {
		if err := checkSource(b, *spec.Source); err != nil {
			return nil, err
		}
		preferred = nil // the volume is created on the node of its source
	}
	if err := s.checkTopology(req.GetAccessibilityRequirements().GetRequisite(), preferred); err != nil {
		return nil, err
	}
	if err := s.checkIOLimits(spec.Parameters.IOLimits()); err != nil {
		return nil, err
	}
	v, err := s.create(ctx, b, spec)
	if err != nil {
		return nil, err
	}
	if err := s.limitCreated(ctx, b, v, spec); err != nil {
		return nil, err
	}
	return &csi.CreateVolumeResponse{Volume: s.message(v)}, nil
}

// create creates a volume. If the call has the permission to read the source on another node, the volume is created from there.
func (s *Server) create(ctx context.Context, b backend.Backend, spec volume.Spec) (volume.Volume, error) {
	if spec.Source == nil || s.Incoming == nil {
		return b.Create(ctx, spec)
	}
	from, err := s.Incoming(ctx)
	switch t, can := b.(backend.Transferrer); {
	case err != nil:
		return volume.Volume{}, err
	case from == nil:
		return b.Create(ctx, spec)
	case can:
		return t.Receive(ctx, spec, from)
	}
	return volume.Volume{}, volume.Errorf(volume.ErrInvalid, "volume_content_source: %v is on another node, and backend %s cannot receive it: create the volume on the node of its source", spec.Source, b.Name())
}

// CreateSpec converts a CreateVolumeRequest. It returns ErrNotFound if the ID of the content source is not from
// this driver, and ErrInvalid for other errors.
func CreateSpec(kinds backend.Kinds, req *csi.CreateVolumeRequest) (volume.Spec, error) {
	var spec volume.Spec
	if err := checkName(req.GetName()); err != nil {
		return spec, err
	}
	if _, err := (volume.IOLimits{}).With(req.GetMutableParameters()); err != nil {
		return spec, err
	}
	all := map[string]string{}
	maps.Copy(all, req.GetParameters())
	maps.Copy(all, req.GetMutableParameters()) // these take precedence (CSI specification, CreateVolume)
	params, err := kinds.Parse(all)
	if err != nil {
		return spec, err
	}
	caps, err := capabilities(req.GetVolumeCapabilities())
	if err != nil {
		return spec, err
	}
	source, err := sourceOf(req.GetVolumeContentSource())
	if err != nil {
		return spec, err
	}
	spec = volume.Spec{
		CoName: req.GetName(), Capacity: translate.Range(req.GetCapacityRange()),
		Capabilities: caps, Parameters: params, Source: source,
	}
	if err := spec.CheckID(); err != nil {
		return spec, err
	}
	return spec, spec.Capacity.Validate()
}

// capabilities converts the capabilities of a request. It returns ErrInvalid if there are none, or if one
// volume cannot have all of them.
func capabilities(in []*csi.VolumeCapability) ([]volume.Capability, error) {
	if len(in) == 0 {
		return nil, volume.Errorf(volume.ErrInvalid, "volume_capabilities are missing: give at least one")
	}
	out := make([]volume.Capability, 0, len(in))
	fsType := ""
	for _, c := range in {
		one, err := translate.Capability(c, "volume_capabilities")
		if err != nil {
			return nil, err
		}
		if len(out) > 0 && out[0].Block != one.Block {
			return nil, volume.Errorf(volume.ErrInvalid, "volume_capabilities request block and mount, but a volume has one access type: remove the others")
		}
		if fsType != "" && one.FSType != "" && fsType != one.FSType {
			return nil, volume.Errorf(volume.ErrInvalid, "volume_capabilities request filesystems %s and %s: request only one", fsType, one.FSType)
		}
		if one.FSType != "" {
			fsType = one.FSType
		}
		out = append(out, one)
	}
	return out, nil
}

// sourceOf converts a content source. It returns nil for a volume without a source, ErrNotFound if the ID is not
// from this driver, and ErrInvalid for other errors.
func sourceOf(c *csi.VolumeContentSource) (*volume.Source, error) {
	if c == nil {
		return nil, nil //nolint:nilnil // a volume without a source
	}
	var text, field string
	parse := volume.ParseID
	switch from := c.GetType().(type) {
	case *csi.VolumeContentSource_Snapshot:
		text, field, parse = from.Snapshot.GetSnapshotId(), "snapshot.snapshot_id", volume.ParseSnapshotID
	case *csi.VolumeContentSource_Volume:
		text, field = from.Volume.GetVolumeId(), "volume.volume_id"
	default:
		return nil, volume.Errorf(volume.ErrInvalid, "volume_content_source has neither snapshot nor volume: give one")
	}
	if text == "" {
		return nil, volume.Errorf(volume.ErrInvalid, "volume_content_source.%s is missing", field)
	}
	id, err := parse(text)
	if err != nil {
		return nil, volume.Errorf(volume.ErrNotFound, "volume_content_source.%s: %w", field, err)
	}
	return &volume.Source{Snapshot: c.GetSnapshot() != nil, ID: id}, nil
}

// contentSource is the inverse of sourceOf.
func contentSource(s *volume.Source) *csi.VolumeContentSource {
	switch {
	case s == nil:
		return nil
	case s.Snapshot:
		return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
			Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: s.ID.String()},
		}}
	}
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
		Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: s.ID.String()},
	}}
}

// checkSource refuses a source that the backend cannot copy (ErrInvalid, see "CreateVolume Errors" in the
// CSI specification).
func checkSource(b backend.Backend, s volume.Source) error {
	_, snapshots := b.(backend.Snapshotter)
	cloner, clones := b.(backend.Cloner)
	if !snapshots && !clones {
		return volume.Errorf(volume.ErrInvalid, "volume_content_source: backend %s cannot create a volume from another volume or from a snapshot: remove volume_content_source", b.Name())
	}
	if s.ID.Backend != b.Name() {
		return volume.Errorf(volume.ErrInvalid, "volume_content_source is %v, but parameter %s=%q names another backend: use a StorageClass of backend %s", &s, volume.ParamBackend, b.Name(), s.ID.Backend)
	}
	if clones {
		return cloner.CheckSource(s)
	}
	return nil
}

// DeleteVolume implements csi.ControllerServer. It succeeds if the volume does not exist.
func (s *Server) DeleteVolume(ctx context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	b, id, err := s.backendOf(req.GetVolumeId())
	if err != nil || b == nil {
		return &csi.DeleteVolumeResponse{}, err
	}
	err = b.Delete(ctx, id)
	if errors.Is(err, volume.ErrInUse) && s.Release != nil {
		released, releaseErr := s.Release(ctx, id)
		switch {
		case releaseErr != nil:
			err = releaseErr
		case released:
			err = b.Delete(ctx, id)
		}
	}
	return &csi.DeleteVolumeResponse{}, err
}

// ControllerExpandVolume implements csi.ControllerServer. It expands the storage of a volume.
// NodeExpandVolume expands the device and the filesystem; a directory has neither.
func (s *Server) ControllerExpandVolume(ctx context.Context, req *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	if req.GetCapacityRange() == nil {
		return nil, volume.Errorf(volume.ErrInvalid, "capacity_range is missing: set required_bytes")
	}
	b, v, err := s.volume(ctx, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	if req.GetVolumeCapability() != nil {
		c, err := translate.Capability(req.GetVolumeCapability(), "volume_capability")
		if err != nil {
			return nil, err
		}
		if err := s.backends.Supports(v, c); err != nil {
			return nil, volume.Errorf(volume.ErrInvalid, "%v", err)
		}
	}
	expander, ok := b.(backend.Expander)
	if !ok {
		return nil, volume.Errorf(volume.ErrInvalid, "volume %s: its backend cannot expand volumes", v.ID)
	}
	v, err = expander.Expand(ctx, v, translate.Range(req.GetCapacityRange()))
	if err != nil {
		return nil, err
	}
	return &csi.ControllerExpandVolumeResponse{CapacityBytes: v.Capacity, NodeExpansionRequired: v.Directory == nil}, nil
}

// GetCapacity implements csi.ControllerServer. It returns the capacity for CreateVolume with the
// same parameters.
func (s *Server) GetCapacity(ctx context.Context, req *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	query, err := s.capacityQuery(req)
	if err != nil {
		return nil, err
	}
	b, err := s.backends.ByName(query.Parameters.Backend)
	if err != nil {
		return nil, err
	}
	if t := req.GetAccessibleTopology(); t != nil && !s.here(t) {
		return &csi.GetCapacityResponse{MaximumVolumeSize: wrapperspb.Int64(0)}, nil
	}
	for _, c := range req.GetVolumeCapabilities() {
		one := volume.Capability{
			Block: c.GetBlock() != nil, FSType: c.GetMount().GetFsType(),
			Mode: volume.AccessMode(c.GetAccessMode().GetMode().String()),
		}
		switch err := s.backends.CheckCapability(b, one); {
		case err != nil && one.Mode.MultiNode(): // no volume of the backend has this mode
			return &csi.GetCapacityResponse{MaximumVolumeSize: wrapperspb.Int64(0)}, nil
		case err != nil:
			return nil, err
		}
	}
	c, err := b.Capacity(ctx, query)
	if err != nil {
		return nil, err
	}
	return &csi.GetCapacityResponse{
		AvailableCapacity: c.Available,
		MaximumVolumeSize: wrapperspb.Int64(c.Max),
		MinimumVolumeSize: wrapperspb.Int64(c.Min),
	}, nil
}

// capacityQuery converts a GetCapacityRequest. It returns ErrInvalid for invalid parameters.
// external-provisioner sends the parameters of a class unchanged, and no capabilities.
func (s *Server) capacityQuery(req *csi.GetCapacityRequest) (backend.CapacityQuery, error) {
	params, err := s.backends.Kinds().Parse(req.GetParameters())
	if err != nil {
		return backend.CapacityQuery{}, err
	}
	q := backend.CapacityQuery{Parameters: params, FSType: params.Get(volume.ParamFSType)}
	for _, c := range req.GetVolumeCapabilities() {
		q.Block = q.Block || c.GetBlock() != nil
		if t := c.GetMount().GetFsType(); t != "" {
			q.FSType = t
		}
	}
	switch {
	case q.Block:
		q.FSType = ""
	case q.FSType == "":
		q.FSType = volume.FSTypes[0]
	}
	return q, nil
}
