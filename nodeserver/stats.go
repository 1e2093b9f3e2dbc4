package nodeserver

import (
	"context"
	"errors"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// NodeGetVolumeStats implements csi.NodeServer: bytes and inodes of a filesystem, the size
// of a raw device.
func (s *Server) NodeGetVolumeStats(ctx context.Context, req *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	id, path := req.GetVolumeId(), req.GetVolumePath()
	if err := requireIDAndPath(id, path); err != nil {
		return nil, err
	}
	b, v, err := s.findMounted(ctx, id, path)
	if err != nil {
		return nil, err
	}
	at, err := inspectVolumePath(id, path)
	if err != nil {
		return nil, err
	}
	var source mount.Source
	if at.IsMount {
		if source, err = owner(ctx, b, v, path); err != nil {
			return nil, explainStale(err)
		}
	}
	if source == nil {
		return nil, volume.Errorf(volume.ErrNotFound, "volume_path %q: volume %s is not mounted there", path, id)
	}
	if v.Block {
		return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{
			{Unit: csi.VolumeUsage_BYTES, Total: v.Capacity},
		}}, nil
	}
	resp, err := filesystemStats(path)
	if meter, ok := b.(backend.Meter); ok && err == nil {
		err = replaceUsage(ctx, meter, v, resp)
	}
	return resp, err
}

// replaceUsage replaces the usage of the filesystem with that of a volume which is only a
// part of it.
func replaceUsage(ctx context.Context, meter backend.Meter, v volume.Volume, resp *csi.NodeGetVolumeStatsResponse) error {
	m, ok, err := meter.Measure(ctx, v)
	if err != nil || !ok {
		return err
	}
	for _, u := range resp.GetUsage() {
		total, used := m.Bytes, m.UsedBytes
		if u.GetUnit() == csi.VolumeUsage_INODES {
			total, used = m.Inodes, m.UsedInodes
		}
		if total > 0 {
			u.Total, u.Used, u.Available = total, used, max(0, min(u.GetAvailable(), total-used))
		}
	}
	return nil
}

func filesystemStats(path string) (*csi.NodeGetVolumeStatsResponse, error) {
	st, err := mount.Statfs(path)
	if err != nil {
		return nil, explainStale(err)
	}
	usage := []*csi.VolumeUsage{{
		Unit:      csi.VolumeUsage_BYTES,
		Total:     int64(st.Blocks) * st.Frsize,
		Available: int64(st.Bavail) * st.Frsize,
		Used:      int64(st.Blocks-st.Bfree) * st.Frsize,
	}}
	if st.Files > 0 { // btrfs has no fixed number of inodes, and counts none
		usage = append(usage, &csi.VolumeUsage{
			Unit:      csi.VolumeUsage_INODES,
			Total:     int64(st.Files),
			Available: int64(st.Ffree),
			Used:      int64(st.Files - st.Ffree),
		})
	}
	return &csi.NodeGetVolumeStatsResponse{Usage: usage}, nil
}

// explainStale adds the meaning of ESTALE to an error.
func explainStale(err error) error {
	if err = mount.ExplainStale(err); errors.Is(err, mount.ErrStale) {
		return volume.Errorf(volume.ErrPrecondition, "%w", err)
	}
	return err
}
