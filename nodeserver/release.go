package nodeserver

import (
	"context"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// Release unstages a volume that is being deleted and has no attachment, if the kubelet
// forgot it: if its only mount is at the path where the kubelet stages it, so that no pod
// has it. A kubelet that dies between unpublishing and unstaging leaves such volumes: when
// it starts again, it searches only the directories of its pods.
//
// It reports whether it released the volume. ErrInUse if the volume is mounted elsewhere,
// ErrPrecondition if a process uses its device; the volume may then have been unmounted,
// which is safe because no publication exists.
func (s *Server) Release(ctx context.Context, id volume.ID, stagingPath string) (bool, error) {
	b, v, err := s.forTeardown(ctx, id.String(), stagingPath)
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
	for range mounts { // there may be several, one over the other
		if err := s.unstageAt(ctx, b, v, stagingPath); err != nil {
			return false, err
		}
	}
	if err := b.Detach(ctx, v); err != nil {
		return false, fmt.Errorf("unstaging a deleted volume that the kubelet forgot: %w", err)
	}
	klog.FromContext(ctx).Info("Unstaged a volume that is being deleted and that the kubelet forgot", "source", source.String(), "mounts", len(mounts))
	return true, nil
}
