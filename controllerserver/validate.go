package controllerserver

import (
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/volume"
)

// maxNameLength is the longest name of a volume, snapshot or group in bytes (CSI
// specification, "Size Limits").
const maxNameLength = 128

// checkName refuses a name that nothing can have.
func checkName(name string) error {
	switch {
	case name == "":
		return volume.Errorf(volume.ErrInvalid, "name is missing")
	case len(name) > maxNameLength:
		return volume.Errorf(volume.ErrInvalid, "name has %d bytes: at most %d are allowed", len(name), maxNameLength)
	}
	return nil
}

// requireID refuses a request without a volume ID.
func requireID(id string) error {
	if id == "" {
		return volume.Errorf(volume.ErrInvalid, "volume_id is missing")
	}
	return nil
}

func capacityRange(r *csi.CapacityRange) volume.Range {
	return volume.Range{Required: r.GetRequiredBytes(), Limit: r.GetLimitBytes()}
}

// CreateSpec reads a CreateVolumeRequest (ErrInvalid; ErrNotFound if its source is none
// of this driver's).
func CreateSpec(kinds backend.Kinds, req *csi.CreateVolumeRequest) (volume.Spec, error) {
	var spec volume.Spec
	if err := checkName(req.GetName()); err != nil {
		return spec, err
	}
	if len(req.GetMutableParameters()) > 0 {
		return spec, volume.Errorf(volume.ErrInvalid, "mutable_parameters: this driver has none (it does not advertise MODIFY_VOLUME)")
	}
	params, err := kinds.Parse(req.GetParameters())
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
		CoName: req.GetName(), Capacity: capacityRange(req.GetCapacityRange()),
		Capabilities: caps, Parameters: params, Source: source,
	}
	if err := spec.CheckID(); err != nil {
		return spec, err
	}
	return spec, spec.Capacity.Validate()
}

// capabilities reads volume capabilities that one volume is to have together.
func capabilities(in []*csi.VolumeCapability) ([]volume.Capability, error) {
	if len(in) == 0 {
		return nil, volume.Errorf(volume.ErrInvalid, "volume_capabilities are missing: name at least one")
	}
	out := make([]volume.Capability, 0, len(in))
	fsType := ""
	for _, c := range in {
		one, err := translate.Capability(c, "volume_capabilities")
		if err != nil {
			return nil, err
		}
		if len(out) > 0 && out[0].Block != one.Block {
			return nil, volume.Errorf(volume.ErrInvalid, "volume_capabilities ask for block and mount: a volume is one of them, name one")
		}
		if fsType != "" && one.FSType != "" && fsType != one.FSType {
			return nil, volume.Errorf(volume.ErrInvalid, "volume_capabilities ask for filesystems %s and %s: name one", fsType, one.FSType)
		}
		if one.FSType != "" {
			fsType = one.FSType
		}
		out = append(out, one)
	}
	return out, nil
}

// placeable tells whether a volume of this node satisfies the topology that is
// asked for (ErrExhausted if not). With a preference only the first one will
// do: the scheduler has picked that node, and the pod cannot follow elsewhere. One
// that all nodes reach satisfies any.
func (s *Server) placeable(req *csi.TopologyRequirement) error {
	if s.Nodes != nil {
		return nil
	}
	preferred, requisite := req.GetPreferred(), req.GetRequisite()
	if len(preferred) > 0 && !s.here(preferred[0]) {
		return volume.Errorf(volume.ErrExhausted, "accessibility_requirements.preferred[0] is %v: volumes can be made here only on node %q", preferred[0].GetSegments(), s.node)
	}
	if len(requisite) > 0 && !slices.ContainsFunc(requisite, s.here) {
		return volume.Errorf(volume.ErrExhausted, "accessibility_requirements.requisite does not have node %q: volumes can be made here only on that node", s.node)
	}
	return nil
}

// inRequisite leaves of a requirement what has to hold: what is made of something else
// has one place, whatever is preferred.
func inRequisite(req *csi.TopologyRequirement) *csi.TopologyRequirement {
	return &csi.TopologyRequirement{Requisite: req.GetRequisite()}
}

// here tells whether a topology segment takes in this node, or any will do.
func (s *Server) here(t *csi.Topology) bool {
	value, has := t.GetSegments()[translate.TopologyKey]
	return !has || s.Nodes != nil || value == volume.TopologyValue(s.node)
}

// PublishArgs are what ControllerPublishVolume needs (ErrInvalid).
func PublishArgs(req *csi.ControllerPublishVolumeRequest) (volume.Capability, error) {
	if err := requireID(req.GetVolumeId()); err != nil {
		return volume.Capability{}, err
	}
	if req.GetNodeId() == "" {
		return volume.Capability{}, volume.Errorf(volume.ErrInvalid, "node_id is missing")
	}
	if req.GetVolumeCapability() == nil {
		return volume.Capability{}, volume.Errorf(volume.ErrInvalid, "volume_capability is missing")
	}
	return translate.Capability(req.GetVolumeCapability(), "volume_capability")
}

// requireSnapshotID refuses a request without a snapshot ID.
func requireSnapshotID(id string) error {
	if id == "" {
		return volume.Errorf(volume.ErrInvalid, "snapshot_id is missing")
	}
	return nil
}

// snapshotRequest is one for a snapshot, or for a group of them.
type snapshotRequest interface {
	GetName() string
	GetParameters() map[string]string
}

func snapshotSpec(req snapshotRequest) (volume.SnapshotSpec, error) {
	spec := volume.SnapshotSpec{CoName: req.GetName()}
	if err := checkName(req.GetName()); err != nil {
		return spec, err
	}
	var err error
	spec.Parameters, err = volume.ParseSnapshotParameters(req.GetParameters())
	return spec, err
}

// checkSetID refuses (ErrInvalid) snapshots of a volume whose ID would be longer than IDs
// may be: only an export that stands in it makes it so.
func checkSetID(source volume.ID, spec volume.SnapshotSpec) error {
	id := source
	id.Name = spec.Name()
	if n := len(id.String()); n > volume.MaxIDLength {
		return volume.Errorf(volume.ErrInvalid, "name %q: the ID %s would have %d bytes, at most %d are allowed: use a shorter name", spec.CoName, id, n, volume.MaxIDLength)
	}
	return nil
}

// GroupArgs are what CreateVolumeGroupSnapshot needs: the volumes are in one pool, and of
// one backend, since only there is one moment for all (ErrPrecondition: CSI specification,
// "Cannot snapshot multiple volumes together"; ErrInvalid, and ErrNotFound for what is no
// volume of this driver's).
func GroupArgs(req *csi.CreateVolumeGroupSnapshotRequest) (volume.SnapshotSpec, []volume.ID, error) {
	spec, err := snapshotSpec(req)
	if err != nil {
		return spec, nil, err
	}
	spec.Group = true
	switch n := len(req.GetSourceVolumeIds()); {
	case n == 0:
		return spec, nil, volume.Errorf(volume.ErrInvalid, "source_volume_ids are missing: name at least one")
	case n > volume.MaxGroup:
		return spec, nil, volume.Errorf(volume.ErrInvalid, "source_volume_ids are %d: a group has at most %d", n, volume.MaxGroup)
	}
	var ids []volume.ID
	for _, text := range req.GetSourceVolumeIds() {
		id, err := volume.ParseID(text)
		switch {
		case err != nil:
			return spec, nil, err
		case slices.Contains(ids, id):
			return spec, nil, volume.Errorf(volume.ErrInvalid, "source_volume_ids name %q twice: name each volume once", text)
		case len(ids) > 0 && (id.Backend != ids[0].Backend || !samePool(id, ids[0])):
			return spec, nil, volume.Errorf(volume.ErrPrecondition, "source_volume_ids %q and %q are not in one pool or not of one backend: make a group for each", ids[0], id)
		}
		ids = append(ids, id)
	}
	return spec, ids, checkSetID(ids[0], spec)
}
