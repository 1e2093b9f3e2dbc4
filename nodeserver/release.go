package nodeserver

import (
	"context"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/mount"
	"github.com/trivet-csi/trivet/volume"
)

// Release unstages a volume that is being deleted, of which no attachment is recorded,
// and which was forgotten: it is mounted at the path where the kubelet stages it and
// nowhere else, so it is published to no pod. A kubelet that dies between
// unpublishing and unstaging leaves such volumes: when it starts again, it looks for
// them in its pods' directories only, where they are no more.
//
// It tells whether the volume's device is free now, and was not before. ErrInUse if
// the volume is mounted elsewhere, ErrPrecondition if some process keeps the device;
// in that case the volume may have been unmounted, and nobody misses it.
func (s *Server) Release(ctx context.Context, id volume.ID, stagingPath string) (bool, error) {
	b, v, err := s.forTeardown(ctx, id.String())
	if err != nil {
		return false, err
	}
	source, ok, err := b.Present(ctx, v)
	if err != nil || !ok {
		return false, err
	}
	mounts, err := mount.Of(source)
	if err != nil {
		return false, err
	}
	for _, m := range mounts {
		if m.Mountpoint != stagingPath {
			return false, volume.Errorf(volume.ErrInUse, "volume %s is in use on this node: it is mounted at %s: unpublish and unstage it first", id, m.Mountpoint)
		}
	}
	for range mounts { // one may lie on another
		if err := s.unstageAt(ctx, b, v, stagingPath); err != nil {
			return false, err
		}
	}
	if err := b.Detach(ctx, v); err != nil {
		return false, fmt.Errorf("forgotten staged and being deleted: %w", err)
	}
	klog.FromContext(ctx).Info("Unstaged a volume that is being deleted and was forgotten", "device", source.Device, "mounts", len(mounts))
	return true, nil
}
