package blockdev

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"

	"github.com/google/uuid"
)

// ErrForeign means that the UUID of a btrfs cannot be changed by rewriting only the superblocks, because Format did not
// create the filesystem.
var ErrForeign = errors.New("the filesystem was not created with the settings of this driver")

// Offsets and values in the superblocks (linux/fs/ext4/ext4.h, uapi/linux/btrfs_tree.h).
const (
	extSuperSize    = 1024
	extIncompat     = 0x60
	extNeedsReplay  = 0x4    // EXT4_FEATURE_INCOMPAT_RECOVER
	extChecksumSeed = 0x2000 // EXT4_FEATURE_INCOMPAT_CSUM_SEED

	btrfsSuperSize    = 4096
	btrfsFSID         = 0x20
	btrfsOffset       = 0x30
	btrfsMagicAt      = 0x40
	btrfsIncompat     = 0xbc
	btrfsChecksumType = 0xc4
	btrfsCRC32C       = 0 // BTRFS_CSUM_TYPE_CRC32
	btrfsMetadataUUID = 0x23b
	btrfsHasMetadata  = 1 << 10 // BTRFS_FEATURE_INCOMPAT_METADATA_UUID
)

// Reidentify durably gives the filesystem on a copy of an image a new UUID, so that the copy and the original can be
// mounted on one node. No other process may have the copy open for writing. If the copied filesystem was in use, the
// content of its journal is kept. An interrupted call must be repeated. The error is ErrUnclean if an ext4 has
// errors, ErrNoFS if the superblock of a btrfs is damaged, ErrForeign if a btrfs has checksums of another type than Format creates.
//
// Reidentify does not change an xfs, because its UUID is also in its log and in all its metadata. The caller
// must mount it with nouuid. It does not change an ext4 that Format did not create either, because its checksums can
// depend on its UUID. The kernel mounts several of these with the same UUID.
func Reidentify(ctx context.Context, image *os.File, fsType string) error {
	var err error
	switch fsType {
	case "ext4":
		err = reidentifyExt4(ctx, image)
	case "btrfs":
		err = reidentifyBtrfs(image)
	case "xfs":
		return nil
	default:
		err = ErrNoFS
	}
	if err == nil {
		err = image.Sync()
	}
	if err != nil {
		return fmt.Errorf("changing the UUID of the %s on %s: %w", fsType, image.Name(), err)
	}
	return nil
}

// reidentifyExt4 changes the superblocks, the primary one last. It first replays the journal, which may
// contain an old superblock. The hash seed stays, because the indexes of directories depend on
// it.
func reidentifyExt4(ctx context.Context, image *os.File) error {
	sb, err := ReadSuperblock(image, "ext4")
	if err != nil {
		return err
	}
	if sb.incompat&extChecksumSeed == 0 || sb.blockSize != blockSize {
		return nil
	}
	if sb.Dirty || sb.incompat&extNeedsReplay != 0 {
		if err := preen(ctx, image); err != nil {
			return err
		}
		if sb, err = ReadSuperblock(image, "ext4"); err != nil {
			return err
		}
	}
	id := uuid.New()
	for _, offset := range append(backupsOf(sb.Size), extSuperOffset) {
		if err := rewriteExt4(image, offset, id); err != nil {
			return err
		}
	}
	return nil
}

// rewriteExt4 changes the superblock at an offset. It is no error if the offset has no superblock.
func rewriteExt4(image *os.File, offset int64, id uuid.UUID) error {
	super, err := readAt(image, offset, extSuperSize)
	if err != nil || !superblockFormats["ext4"].isIn(super) {
		return err
	}
	copy(super[superUUID:], id[:])
	sealExt4(super)
	_, err = image.WriteAt(super, offset)
	return err
}

// reidentifyBtrfs changes the superblocks, the primary one last. The metadata and a log that is not
// replayed yet keep their UUID (metadata_uuid, Linux 5.0). `btrfstune -m` does the same with two
// transactions, but breaks a filesystem with a log tree (btrfs-progs 6.2).
func reidentifyBtrfs(image *os.File) error {
	sb, err := ReadSuperblock(image, "btrfs")
	if err != nil {
		return err
	}
	id := uuid.New()
	for _, offset := range []int64{256 * gib, 64 * mib} { // the backups
		if offset+btrfsSuperSize > sb.Size {
			continue
		}
		// The kernel ignores a damaged backup and writes it again.
		if err := rewriteBtrfs(image, offset, id); err != nil && !errors.Is(err, ErrNoFS) && !errors.Is(err, ErrForeign) {
			return err
		}
	}
	return rewriteBtrfs(image, btrfsSuper, id)
}

// rewriteBtrfs changes the superblock at an offset. The error is ErrForeign if the checksum of the superblock is no CRC-32C, ErrNoFS if
// it is not valid.
func rewriteBtrfs(image *os.File, offset int64, id uuid.UUID) error {
	super, err := readAt(image, offset, btrfsSuperSize)
	if err != nil {
		return err
	}
	le := binary.LittleEndian
	present := superblockFormats["btrfs"].isIn(super) && le.Uint64(super[btrfsOffset:]) == uint64(offset)
	switch {
	case present && le.Uint16(super[btrfsChecksumType:]) != btrfsCRC32C:
		return fmt.Errorf("the superblock at byte %d has no CRC-32C: %w", offset, ErrForeign)
	case !present || le.Uint32(super) != crc32.Checksum(super[btrfsFSID:], castagnoli):
		return fmt.Errorf("no superblock with a valid CRC-32C at byte %d: %w", offset, ErrNoFS)
	}
	if features := le.Uint64(super[btrfsIncompat:]); features&btrfsHasMetadata == 0 {
		le.PutUint64(super[btrfsIncompat:], features|btrfsHasMetadata)
		copy(super[btrfsMetadataUUID:], super[btrfsFSID:btrfsFSID+16])
	}
	copy(super[btrfsFSID:], id[:])
	sealBtrfs(super)
	_, err = image.WriteAt(super, offset)
	return err
}

// readAt reads length bytes at an offset.
func readAt(image *os.File, offset int64, length int) ([]byte, error) {
	b := make([]byte, length)
	_, err := image.ReadAt(b, offset)
	return b, err
}
