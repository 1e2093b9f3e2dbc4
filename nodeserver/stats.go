package nodeserver

import (
	"context"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/mount"
	"github.com/trivet-csi/trivet/volume"
)

// NodeGetVolumeStats implements csi.NodeServer: bytes and inodes of a
// filesystem, the size of a raw device.
func (s *Server) NodeGetVolumeStats(ctx context.Context, req *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	path := req.GetVolumePath()
	if id := req.GetVolumeId(); id != "" && filepath.IsAbs(path) && s.isStatic(id) {
		return staticStats(id, path)
	}
	b, v, at, err := s.volumeAt(ctx, req.GetVolumeId(), path)
	if err != nil {
		return nil, err
	}
	mine := false
	if at.IsMount {
		if mine, err = published(ctx, b, v, path, at); err != nil {
			return nil, err
		}
	}
	if !mine {
		return nil, volume.Errorf(volume.ErrNotFound, "volume_path %q: volume %s is not mounted there", path, v.ID)
	}
	if v.Block {
		return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{
			{Unit: csi.VolumeUsage_BYTES, Total: v.Capacity},
		}}, nil
	}
	resp, err := filesystemStats(path)
	if meter, ok := b.(backend.Meter); ok && err == nil {
		err = measured(ctx, meter, v, resp)
	}
	return resp, err
}

// measured puts the size of a volume that has no filesystem of its own in place of
// its filesystem's.
func measured(ctx context.Context, meter backend.Meter, v volume.Volume, resp *csi.NodeGetVolumeStatsResponse) error {
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
