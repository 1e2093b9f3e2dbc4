package nodeserver

import (
	"context"
	"path/filepath"
	"strings"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/mount"
	"github.com/trivet-csi/trivet/volume"
)

// Release unstages a volume that is being deleted and was forgotten: its
// orchestrator has detached it, and it is published nowhere. A kubelet that dies
// between unpublishing and unstaging leaves such volumes: when it starts again, it
// looks for them in its pods' directories only, where they are no more, and nobody
// would ever unstage them. stagingDir is where the kubelet has volumes staged; one
// that is mounted anywhere else as well is refused (ErrInUse).
func (s *Server) Release(ctx context.Context, id volume.ID, stagingDir string) error {
	b, v, err := s.forTeardown(ctx, id.String())
	if err != nil {
		return err
	}
	source, ok, err := b.Present(ctx, v)
	if err != nil {
		return err
	}
	if !ok { // a program has the image, no device
		return volume.Errorf(volume.ErrInUse, "volume %s is in use on this node: a program has its image locked", id)
	}
	mounts, err := mount.OfDevice(source.Device)
	if err != nil {
		return err
	}
	for _, m := range mounts {
		if !strings.HasPrefix(m.Mountpoint, filepath.Clean(stagingDir)+"/") {
			return volume.Errorf(volume.ErrInUse, "volume %s is in use on this node: it is mounted at %s: unpublish and unstage it first", id, m.Mountpoint)
		}
	}
	for _, m := range mounts {
		if err := s.unstageAt(ctx, b, v, m.Mountpoint); err != nil {
			return err
		}
	}
	klog.FromContext(ctx).Info("Unstaged a volume that is being deleted and was forgotten", "volume", id, "device", source.Device, "mounts", len(mounts))
	return b.Detach(ctx, v)
}
