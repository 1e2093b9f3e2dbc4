// Package translate turns CSI's protobuf messages into the domain's types and
// back, for the services that share them. It decides nothing.
package translate

import (
	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/volume"
)

// TopologyKey is the key of the one topology segment that volumes and nodes
// have.
const TopologyKey = "csi.trivet.dev/node"

// ReadOnlyKey in a publish context says that the controller published the
// volume read-only.
const ReadOnlyKey = "csi.trivet.dev/readonly"

// Topology is the segment of a node.
func Topology(node string) *csi.Topology {
	return &csi.Topology{Segments: map[string]string{TopologyKey: volume.TopologyValue(node)}}
}

// Capability reads a volume capability. ErrInvalid if it has no access type or
// access mode. field names it in errors.
func Capability(c *csi.VolumeCapability, field string) (volume.Capability, error) {
	mode := c.GetAccessMode().GetMode()
	if mode == csi.VolumeCapability_AccessMode_UNKNOWN {
		return volume.Capability{}, volume.Errorf(volume.ErrInvalid, "%s.access_mode is missing: name one", field)
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
		return out, volume.Errorf(volume.ErrInvalid, "%s has neither block nor mount: name one", field)
	}
	return out, nil
}

// VolumeHealth makes the message for what is wrong with a volume.
func VolumeHealth(id string, conditions []backend.Condition) *csi.VolumeHealth {
	h := &csi.VolumeHealth{VolumeId: id}
	for _, c := range conditions {
		h.HealthStatuses = append(h.HealthStatuses, &csi.VolumeHealth_VolumeHealthEntry{
			Status: volumeSeverity[c.Severity], Reason: string(c.Reason), Message: c.Message,
		})
	}
	return h
}

var volumeSeverity = map[backend.Severity]csi.VolumeHealthErrorType{
	backend.Degraded:     csi.VolumeHealthErrorType_DEGRADED,
	backend.Inaccessible: csi.VolumeHealthErrorType_INACCESSIBLE,
	backend.DataLoss:     csi.VolumeHealthErrorType_DATA_LOSS,
}
