package nodeserver

import (
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

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

// newRequest reads the fields that stage and publish have in common (ErrInvalid). field is the
// name of the field that has path, which is the staging path.
func newRequest(id, field, path string, c *csi.VolumeCapability, readOnly bool) (request, error) {
	r := request{id: id, staging: path, field: field}
	if err := translate.Required("volume_id", id); err != nil {
		return r, err
	}
	if err := absolute(field, path); err != nil {
		return r, err
	}
	var err error
	if r.capability, err = translate.Capability(c, "volume_capability"); err != nil {
		return r, err
	}
	if r.options, err = mount.ParseFlags(r.capability.MountFlags); err != nil {
		return r, volume.Errorf(volume.ErrInvalid, "volume_capability.mount.mount_flags %q: %w: remove it from mountOptions", r.capability.MountFlags, err)
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
		return r, volume.Errorf(volume.ErrPrecondition, "staging_target_path is missing: call NodeStageVolume first and name its path")
	}
	r.staging, r.field = req.GetStagingTargetPath(), stagingField
	return r, absolute(stagingField, r.staging)
}

// checkInline refuses a request that no inline volume can satisfy (ErrInvalid).
func (r request) checkInline() error {
	switch {
	case !volume.InlineID(r.id):
		return volume.Errorf(volume.ErrInvalid, "volume_id %.80q: the ID of an inline volume is csi- and 64 hex digits, as the kubelet makes it", r.id)
	case r.capability.Block:
		return volume.Errorf(volume.ErrInvalid, "volume_capability asks for a raw device, and an inline volume has a filesystem: use a claim with volumeMode Block")
	case len(r.capability.MountFlags) > 0:
		return volume.Errorf(volume.ErrInvalid, "volume_capability.mount.mount_flags %q: an inline volume has no mount flags: remove them", r.capability.MountFlags)
	}
	return nil
}
