package nodeserver

import (
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/mount"
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
		return volume.Errorf(volume.ErrInvalid, "%s %q: want an absolute path without . and ..", field, path)
	}
	return nil
}

// request is what stage and publish have in common.
type request struct {
	id         string
	staging    string
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
	r := request{id: req.GetVolumeId(), staging: req.GetStagingTargetPath()}
	if err := required("volume_id", r.id); err != nil {
		return r, err
	}
	if err := absolute("staging_target_path", r.staging); err != nil {
		return r, err
	}
	r.readOnly = volume.AccessMode(req.GetVolumeCapability().GetAccessMode().GetMode().String()).ReadOnly()
	return r, r.setCapability(req.GetVolumeCapability())
}

func publishRequest(req *csi.NodePublishVolumeRequest) (request, error) {
	r := request{
		id: req.GetVolumeId(), staging: req.GetStagingTargetPath(), target: req.GetTargetPath(),
		readOnly: req.GetReadonly() || req.GetPublishContext()[translate.ReadOnlyKey] == "true" ||
			volume.AccessMode(req.GetVolumeCapability().GetAccessMode().GetMode().String()).ReadOnly(),
	}
	if err := required("volume_id", r.id); err != nil {
		return r, err
	}
	if err := absolute("target_path", r.target); err != nil {
		return r, err
	}
	if err := r.setCapability(req.GetVolumeCapability()); err != nil {
		return r, err
	}
	if r.staging == "" {
		return r, volume.Errorf(volume.ErrPrecondition, "staging_target_path is missing: call NodeStageVolume first and name its path")
	}
	return r, absolute("staging_target_path", r.staging)
}
