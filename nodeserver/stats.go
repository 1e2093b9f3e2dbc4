package nodeserver

import (
	"context"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/mount"
	"github.com/trivet-csi/trivet/volume"
)

// NodeGetVolumeStats implements csi.NodeServer: bytes and inodes of a
// filesystem, the size of a raw device.
func (s *Server) NodeGetVolumeStats(ctx context.Context, req *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	path := req.GetVolumePath()
	if id := req.GetVolumeId(); id != "" && foreign(id) && filepath.IsAbs(path) {
		return staticStats(path)
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
	return filesystemStats(path)
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
