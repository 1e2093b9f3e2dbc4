package disk

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"os"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// readOnlyTag is the tag of the read-only loop device on a volume's disk.
func readOnlyTag(id volume.ID) string {
	sum := sha256.Sum256([]byte(id.String()))
	return "trivet-disk:" + hex.EncodeToString(sum[:20])
}

// ReadOnlyDevice implements backend.BlockProvider: a loop device on the disk's
// partition. BLKROSET would make the partition read-only for all users.
func (b *Backend) ReadOnlyDevice(ctx context.Context, v volume.Volume) (mount.BlockDevice, error) {
	return b.loops.AttachReadOnly(ctx, readOnlyTag(v.ID), v.SectorSize, func() (*os.File, error) {
		partition, err := blockdev.OpenPartition(node(v.ID))
		if err != nil {
			err = volume.Errorf(volume.ErrPrecondition, "volume %s has no device on this node: %w: stage it first", v.ID, err)
		}
		return partition, err
	})
}

// PresentReadOnly implements backend.BlockProvider.
func (b *Backend) PresentReadOnly(_ context.Context, v volume.Volume) (mount.BlockDevice, bool, error) {
	number, ok, err := b.loops.Find(readOnlyTag(v.ID))
	return &blockdev.DeviceSource{Path: blockdev.LoopPath(number)}, ok, err
}

// ReleaseReadOnly implements backend.BlockProvider. The device stays while it is published.
func (b *Backend) ReleaseReadOnly(ctx context.Context, v volume.Volume) error {
	return backend.ExplainDetach(v, b.loops.DetachUnmounted(ctx, readOnlyTag(v.ID)))
}
