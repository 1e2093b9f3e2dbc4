package controllerserver

import (
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/volume"
)

// maxNameLength is the longest volume name in bytes (CSI specification, "Size
// Limits").
const maxNameLength = 128

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

// CreateSpec reads a CreateVolumeRequest (ErrInvalid).
func CreateSpec(req *csi.CreateVolumeRequest) (volume.Spec, error) {
	var spec volume.Spec
	switch name := req.GetName(); {
	case name == "":
		return spec, volume.Errorf(volume.ErrInvalid, "name is missing")
	case len(name) > maxNameLength:
		return spec, volume.Errorf(volume.ErrInvalid, "name has %d bytes: at most %d are allowed", len(name), maxNameLength)
	case req.GetVolumeContentSource() != nil:
		return spec, volume.Errorf(volume.ErrInvalid, "volume_content_source: this driver cannot make a volume from another or from a snapshot (it does not advertise it)")
	case len(req.GetMutableParameters()) > 0:
		return spec, volume.Errorf(volume.ErrInvalid, "mutable_parameters: this driver has none (it does not advertise MODIFY_VOLUME)")
	}
	params, err := volume.ParseParameters(req.GetParameters())
	if err != nil {
		return spec, err
	}
	caps, err := capabilities(req.GetVolumeCapabilities())
	if err != nil {
		return spec, err
	}
	spec = volume.Spec{
		CoName: req.GetName(), Capacity: capacityRange(req.GetCapacityRange()),
		Capabilities: caps, Parameters: params,
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

// maxPage bounds a page where the request does not, well below what a gRPC message
// holds.
const maxPage = 5000

// PageLimit reads max_entries (ErrInvalid); 0 means as many as a page may have.
func PageLimit(maxEntries int32) (int, error) {
	if maxEntries < 0 {
		return 0, volume.Errorf(volume.ErrInvalid, "max_entries is %d: it must not be negative", maxEntries)
	}
	if maxEntries == 0 || maxEntries > maxPage {
		return maxPage, nil
	}
	return int(maxEntries), nil
}
