package nodeserver

import (
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// required refuses an empty field.
func required(field, value string) error {
	if value == "" {
		return volume.Errorf(volume.ErrInvalid, "%s is missing", field)
	}
	return nil
}

// absolute refuses a path that is empty or not absolute.
func absolute(field, path string) error {
	if err := required(field, path); err != nil {
		return err
	}
	if !filepath.IsAbs(path) || filepath.Clean(path) != path {
		return volume.Errorf(volume.ErrInvalid, "%s %q: must be an absolute path without . and ..", field, path)
	}
	return nil
}

// Fields that hold the path where a volume is staged. An inline volume is staged at its
// target.
const (
	stagingField = "staging_target_path"
	targetField  = "target_path"
)

// request is what stage and publish have in common.
type request struct {
	id      string
	staging string
	// field is the name of the field that has the staging path.
	field      string
	target     string // publish only
	capability volume.Capability
	options    mount.Options
	readOnly   bool
}

func (r *request) setCapability(c *csi.VolumeCapability) (err error) {
	if c == nil {
		return volume.Errorf(volume.ErrInvalid, "volume_capability is missing")
	}
	if r.capability, err = translate.Capability(c, "volume_capability"); err != nil {
		return err
	}
	if r.options, err = mount.ParseFlags(r.capability.MountFlags); err != nil {
		return volume.Errorf(volume.ErrInvalid, "volume_capability.mount.mount_flags %q: %w: remove it from mountOptions", r.capability.MountFlags, err)
	}
	if r.readOnly {
		r.options = r.options.ReadOnly()
	}
	return nil
}

func stageRequest(req *csi.NodeStageVolumeRequest) (request, error) {
	r := request{id: req.GetVolumeId(), staging: req.GetStagingTargetPath(), field: stagingField}
	if err := required("volume_id", r.id); err != nil {
		return r, err
	}
	if err := absolute(stagingField, r.staging); err != nil {
		return r, err
	}
	r.readOnly = volume.AccessMode(req.GetVolumeCapability().GetAccessMode().GetMode().String()).ReadOnly()
	return r, r.setCapability(req.GetVolumeCapability())
}

func publishRequest(req *csi.NodePublishVolumeRequest) (request, error) {
	r, err := targetRequest(req)
	if err != nil {
		return r, err
	}
	r.staging, r.field = req.GetStagingTargetPath(), stagingField
	if r.staging == "" && volume.InlineID(r.id) {
		return r, volume.Errorf(volume.ErrPrecondition, "volume %s: an inline volume needs podInfoOnMount: true in the CSIDriver object", r.id)
	}
	if r.staging == "" {
		return r, volume.Errorf(volume.ErrPrecondition, "staging_target_path is missing: call NodeStageVolume first and name its path")
	}
	return r, absolute(stagingField, r.staging)
}

// inlineRequest is the request for an inline volume, which is staged at its target.
func inlineRequest(req *csi.NodePublishVolumeRequest) (request, error) {
	r, err := targetRequest(req)
	if err != nil {
		return r, err
	}
	r.staging, r.field = r.target, targetField
	switch {
	case !volume.InlineID(r.id):
		return r, volume.Errorf(volume.ErrInvalid, "volume_id %.80q: the ID of an inline volume is csi- and 64 hex digits, as the kubelet makes it", r.id)
	case r.capability.Block:
		return r, volume.Errorf(volume.ErrInvalid, "volume_capability asks for a raw device, and an inline volume has a filesystem: use a claim with volumeMode Block")
	case len(r.capability.MountFlags) > 0:
		return r, volume.Errorf(volume.ErrInvalid, "volume_capability.mount.mount_flags %q: an inline volume has no mount flags: remove them", r.capability.MountFlags)
	}
	return r, nil
}

// targetRequest is a request to publish, without the staging path.
func targetRequest(req *csi.NodePublishVolumeRequest) (request, error) {
	r := request{
		id: req.GetVolumeId(), target: req.GetTargetPath(),
		readOnly: req.GetReadonly() || req.GetPublishContext()[translate.ReadOnlyKey] == "true" ||
			volume.AccessMode(req.GetVolumeCapability().GetAccessMode().GetMode().String()).ReadOnly(),
	}
	if err := required("volume_id", r.id); err != nil {
		return r, err
	}
	if err := absolute(targetField, r.target); err != nil {
		return r, err
	}
	return r, r.setCapability(req.GetVolumeCapability())
}
