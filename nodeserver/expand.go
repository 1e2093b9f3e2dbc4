package nodeserver

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/blockdev"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/mount"
	"github.com/trivet-csi/trivet/volume"
)

// NodeExpandVolume implements csi.NodeServer: device and filesystem follow the
// image, which ControllerExpandVolume grew. The volume's ID says what is meant;
// the path only has to be there.
func (s *Server) NodeExpandVolume(ctx context.Context, req *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	b, v, _, err := s.volumeAt(ctx, req.GetVolumeId(), req.GetVolumePath())
	if err != nil {
		return nil, err
	}
	r := volume.Range{Required: req.GetCapacityRange().GetRequiredBytes(), Limit: req.GetCapacityRange().GetLimitBytes()}
	if err := r.Validate(); err != nil {
		return nil, err
	}
	if r.Required > v.Capacity {
		return nil, volume.Errorf(volume.ErrOutOfRange, "capacity_range.required_bytes %d: volume %s has %d bytes; call ControllerExpandVolume first", r.Required, v.ID, v.Capacity)
	}
	if v.Directory != nil { // it has nothing of its own that could follow
		return &csi.NodeExpandVolumeResponse{CapacityBytes: v.Capacity}, nil
	}
	expander, ok := b.(backend.Expander)
	if !ok {
		return nil, volume.Errorf(volume.ErrInvalid, "volume %s: its backend cannot grow volumes", v.ID)
	}
	source, ok, err := b.Present(ctx, v)
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, volume.Errorf(volume.ErrPrecondition, "volume %s is not staged on this node: call NodeStageVolume first, which grows it too", v.ID)
	}
	if err := expander.Follow(ctx, v); err != nil {
		return nil, err
	}
	if !v.Block {
		if err := growMounted(v, source.Device); err != nil {
			return nil, err
		}
	}
	crashpoint.Here(crashpoint.GrowDone)
	return &csi.NodeExpandVolumeResponse{CapacityBytes: v.Capacity}, nil
}

// growMounted grows the filesystem through a mount of it that may be written: a
// read-only bind mount would refuse, and which path the request names is not
// always one.
func growMounted(v volume.Volume, device string) error {
	mounts, err := mount.OfDevice(device)
	if err != nil {
		return err
	}
	for _, m := range mounts {
		if isReadOnly(m.Options) || isReadOnly(m.VFSOptions) {
			continue
		}
		return growAt(m.Mountpoint, device, v.FSType)
	}
	return volume.Errorf(volume.ErrPrecondition, "volume %s is mounted read-only on this node: its filesystem grows when it is staged to be written", v.ID)
}

func growAt(path, device, fsType string) error {
	root, err := os.Open(path)
	if err != nil {
		return err
	}
	defer root.Close()
	// Something else may be mounted over it, which must not be grown instead.
	ok, err := isOn(root, device)
	if err == nil && !ok {
		err = volume.Errorf(volume.ErrPrecondition, "%s does not show the filesystem on %s: unmount what covers it", path, device)
	}
	if err != nil {
		return err
	}
	d, err := os.Open(device)
	if err != nil {
		return err
	}
	defer d.Close()
	return blockdev.GrowFilesystem(root, d, fsType)
}

// isReadOnly looks for ro in a comma-separated list of mount options.
func isReadOnly(options string) bool {
	return slices.Contains(strings.Split(options, ","), "ro")
}

// volumeAt finds a volume by ID and looks at the path that came with it, which
// has to be there (ErrNotFound; CSI specification, NodeGetVolumeStats).
func (s *Server) volumeAt(ctx context.Context, id, path string) (b backend.Backend, v volume.Volume, at mount.Info, err error) {
	if err = required("volume_id", id); err == nil {
		err = required("volume_path", path)
	}
	if err == nil {
		b, v, err = s.find(ctx, id)
	}
	if err == nil && filepath.IsAbs(path) {
		at, err = mount.Inspect(path)
		err = explainStale(err)
	}
	if err == nil && !at.Exists {
		err = volume.Errorf(volume.ErrNotFound, "volume_path %q: volume %s is not there", path, v.ID)
	}
	return b, v, at, err
}
