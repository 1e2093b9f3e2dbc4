package nodeserver

import (
	"cmp"
	"context"
	"errors"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// NodeExpandVolume implements csi.NodeServer: it resizes the device and the filesystem
// after ControllerExpandVolume. The volume's ID decides; the path only has to exist.
func (s *Server) NodeExpandVolume(ctx context.Context, req *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	id, path := req.GetVolumeId(), req.GetVolumePath()
	if err := requireIDAndPath(id, path); err != nil {
		return nil, err
	}
	b, v, err := s.find(ctx, id)
	if err != nil {
		return nil, err
	}
	if _, err := inspectVolumePath(id, path); err != nil {
		return nil, err
	}
	r := translate.Range(req.GetCapacityRange())
	if err := r.Validate(); err != nil {
		return nil, err
	}
	if r.Required > v.Capacity {
		return nil, volume.Errorf(volume.ErrOutOfRange, "capacity_range.required_bytes %d: volume %s has %d bytes; call ControllerExpandVolume first", r.Required, v.ID, v.Capacity)
	}
	if err := grow(ctx, b, v); err != nil {
		return nil, err
	}
	crashpoint.Here(crashpoint.GrowDone)
	return &csi.NodeExpandVolumeResponse{CapacityBytes: v.Capacity}, nil
}

// grow makes the device of a staged volume as large as its storage, and its filesystem as
// large as the device.
func grow(ctx context.Context, b backend.Backend, v volume.Volume) error {
	expander, ok := b.(backend.Expander)
	if !ok {
		return volume.Errorf(volume.ErrInvalid, "volume %s: its backend cannot grow volumes", v.ID)
	}
	source, ok, err := b.Present(ctx, v)
	if err != nil {
		return err
	}
	if !ok {
		return volume.Errorf(volume.ErrPrecondition, "volume %s is not staged on this node: call NodeStageVolume first, which grows it too", v.ID)
	}
	if err := expander.ResizeDevice(ctx, v); err != nil {
		return err
	}
	err = source.Grow()
	if errors.Is(err, mount.ErrCannotGrow) {
		return volume.Errorf(volume.ErrPrecondition, "volume %s: %w", v.ID, err)
	}
	return err
}

// requireIDAndPath refuses a request without volume_id or volume_path.
func requireIDAndPath(id, path string) error {
	return cmp.Or(translate.Required("volume_id", id), translate.Required("volume_path", path))
}

// inspectVolumePath inspects the path that came with a volume, which has to exist
// (ErrNotFound; CSI specification, NodeGetVolumeStats).
func inspectVolumePath(id, path string) (at mount.Info, err error) {
	if filepath.IsAbs(path) {
		at, err = mount.Inspect(path)
	}
	if err == nil && !at.Exists {
		err = volume.Errorf(volume.ErrNotFound, "volume_path %q: volume %s is not there", path, id)
	}
	return at, explainStale(err)
}
