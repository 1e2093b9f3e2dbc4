// Package translate converts between CSI's messages and the types of the domain, for the
// Controller and the Node service. It checks only what the CSI specification requires of every
// request.
package translate

import (
	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/volume"
)

// TopologyKey is the key of the topology segment of volumes and nodes.
const TopologyKey = "csi.trivet.dev/node"

// ReadOnlyKey is set in the publish context if ControllerPublishVolume was called with readonly.
const ReadOnlyKey = "csi.trivet.dev/readonly"

// Topology returns the topology segment of a node.
func Topology(node string) *csi.Topology {
	return &csi.Topology{Segments: map[string]string{TopologyKey: volume.TopologyValue(node)}}
}

// Required fails with ErrInvalid if a field is empty.
func Required(field, value string) error {
	if value == "" {
		return volume.Errorf(volume.ErrInvalid, "%s is missing", field)
	}
	return nil
}

// Range converts a capacity range, which may be nil.
func Range(r *csi.CapacityRange) volume.Range {
	return volume.Range{Required: r.GetRequiredBytes(), Limit: r.GetLimitBytes()}
}

// Capability converts a volume capability. It fails with ErrInvalid if the capability, its access type or its
// access mode is missing, if the access mode is unknown, or if it contains a volume mount group. field is its
// name in errors.
func Capability(c *csi.VolumeCapability, field string) (volume.Capability, error) {
	if c == nil {
		return volume.Capability{}, volume.Errorf(volume.ErrInvalid, "%s is missing", field)
	}
	mode := c.GetAccessMode().GetMode()
	if mode == csi.VolumeCapability_AccessMode_UNKNOWN {
		return volume.Capability{}, volume.Errorf(volume.ErrInvalid, "%s.access_mode is missing: set it", field)
	}
	if _, known := csi.VolumeCapability_AccessMode_Mode_name[int32(mode)]; !known {
		return volume.Capability{}, volume.Errorf(volume.ErrInvalid, "%s.access_mode %d is unknown to CSI 1.13", field, mode)
	}
	out := volume.Capability{Mode: volume.AccessMode(mode.String())}
	switch access := c.GetAccessType().(type) {
	case *csi.VolumeCapability_Block:
		out.Block = true
	case *csi.VolumeCapability_Mount:
		out.FSType = access.Mount.GetFsType()
		out.MountFlags = access.Mount.GetMountFlags()
		if access.Mount.GetVolumeMountGroup() != "" {
			return out, volume.Errorf(volume.ErrInvalid, "%s.mount.volume_mount_group %q: this driver leaves group ownership to the orchestrator (it does not advertise VOLUME_MOUNT_GROUP)", field, access.Mount.GetVolumeMountGroup())
		}
	default:
		return out, volume.Errorf(volume.ErrInvalid, "%s has neither block nor mount: set one of them", field)
	}
	return out, nil
}

// VolumeHealth converts the conditions of a volume.
func VolumeHealth(id string, conditions []backend.Condition) *csi.VolumeHealth {
	h := &csi.VolumeHealth{VolumeId: id}
	for _, c := range conditions {
		h.HealthStatuses = append(h.HealthStatuses, &csi.VolumeHealth_VolumeHealthEntry{
			Status: volumeSeverity[c.Severity], Reason: string(c.Reason), Message: c.Message,
		})
	}
	return h
}

// volumeSeverity maps the severity of a condition to the status in a CSI message.
var volumeSeverity = map[backend.Severity]csi.VolumeHealthErrorType{
	backend.Degraded:     csi.VolumeHealthErrorType_DEGRADED,
	backend.Inaccessible: csi.VolumeHealthErrorType_INACCESSIBLE,
	backend.DataLoss:     csi.VolumeHealthErrorType_DATA_LOSS,
}
