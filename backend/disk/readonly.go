package disk

import (
	"crypto/sha256"
	"encoding/hex"
	"os"

	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/volume"
)

// readOnlyTag is the tag of the read-only loop device on a volume's disk.
func readOnlyTag(id volume.ID) string {
	sum := sha256.Sum256([]byte(id.String()))
	return "trivet-disk:" + hex.EncodeToString(sum[:20])
}

// openPartition opens the volume's partition. The read-only device is a loop device on it:
// BLKROSET would make the partition read-only for all users.
func openPartition(v volume.Volume) (*os.File, error) {
	partition, err := blockdev.OpenPartition(node(v.ID))
	if err != nil {
		err = volume.Errorf(volume.ErrPrecondition, "volume %s has no device on this node: %w: stage it first", v.ID, err)
	}
	return partition, err
}
