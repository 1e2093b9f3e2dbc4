package blockdev

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"github.com/google/uuid"
)

// layout describes what mkfs writes for a type of filesystem. Each structure with a UUID has a checksum of its own, so
// that a copy with other UUIDs needs new checksums of these structures only.
type layout struct {
	// unit is the size of the blocks in bytes. A block with a structure is read completely, so that the structure is in one extent.
	unit int
	// super is the offset of the primary superblock.
	super int64
	// identities returns the UUIDs of a filesystem with a primary superblock.
	identities func(super []byte) [][]byte
	// structures returns the structures at the beginning of data, which is at an offset that is a multiple of blockSize.
	structures func(offset int64, data, super []byte) []structure
}

// structure is a part of an extent that has UUIDs and a checksum.
type structure struct {
	start, end int // offsets in the extent
	// seal updates the checksum. If mkfs writes no checksum, it removes it.
	seal   func([]byte)
	places []place
}

// place is where an extent contains an identity.
type place struct {
	at       int // offset in the extent
	identity int // index in template.identities
}

// layouts contains the layout of each type of filesystem.
var layouts = map[string]layout{
	"ext4": {
		unit: blockSize, super: extSuperOffset, structures: ext4Structures,
		identities: func(super []byte) [][]byte { return [][]byte{uuidAt(super, superUUID), uuidAt(super, superHashSeed)} },
	},
	"xfs": {
		unit: blockSize, super: 0, structures: xfsStructures,
		identities: func(super []byte) [][]byte { return [][]byte{uuidAt(super, xfsUUID)} },
	},
	// The UUIDs of the chunk tree and of the top-level subvolume stay, because the kernel does not compare those of
	// different filesystems.
	"btrfs": {
		unit: 16 << 10, super: btrfsSuper, structures: btrfsStructures, // the default size of a node
		identities: func(super []byte) [][]byte { return [][]byte{uuidAt(super, btrfsFSID), uuidAt(super, btrfsDeviceUUID)} },
	},
}

// uuidAt returns a copy of the UUID at an offset.
func uuidAt(b []byte, offset int) []byte { return bytes.Clone(b[offset : offset+len(uuid.UUID{})]) }

// findStructures finds the structures of an extent that contain identities. The error is errUnsuitable if an identity
// is outside of them, or a checksum differs from what seal writes.
func (e *extent) findStructures(identities [][]byte, super []byte, l layout) error {
	found := 0
	for at := 0; at+blockSize <= len(e.data); {
		next := at + blockSize
		for _, s := range l.structures(e.offset+int64(at), e.data[at:], super) {
			s.start, s.end = s.start+at, s.end+at
			next = max(next, s.end)
			s.findPlaces(e.data, identities)
			if len(s.places) == 0 {
				continue
			}
			sealed := bytes.Clone(e.data[s.start:s.end])
			if s.seal(sealed); !bytes.Equal(sealed, e.data[s.start:s.end]) {
				return fmt.Errorf("unknown checksum at byte %d: %w", e.offset+int64(s.start), errUnsuitable)
			}
			found += len(s.places)
			e.structures = append(e.structures, s)
		}
		at = next
	}
	for _, id := range identities {
		found -= bytes.Count(e.data, id)
	}
	if found != 0 {
		return fmt.Errorf("a UUID of the filesystem is in an unknown place of the %d bytes at byte %d: %w", len(e.data), e.offset, errUnsuitable)
	}
	return nil
}

// findPlaces finds the identities in the structure. data is that of the extent.
func (s *structure) findPlaces(data []byte, identities [][]byte) {
	for i, id := range identities {
		for at := s.start; ; {
			n := bytes.Index(data[at:s.end], id)
			if n < 0 {
				break
			}
			s.places = append(s.places, place{at + n, i})
			at += n + len(id)
		}
	}
}

// castagnoli is the table of CRC-32C.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Offsets and values in an ext4 (linux/fs/ext4/ext4.h, linux/include/linux/jbd2.h).
const (
	blockSize      = 4096
	blocksPerGroup = 8 * blockSize

	superUUID       = 0x68
	superHashSeed   = 0xEC
	superChecksum   = 0x3FC
	journalMagic    = "\xc0\x3b\x39\x98"
	journalChecksum = 0xFC
)

// ext4Structures returns a superblock, or the superblock of the journal. With metadata_csum_seed, no other checksum
// depends on the UUID.
func ext4Structures(offset int64, data, _ []byte) []structure {
	switch {
	case offset == 0:
		return []structure{{start: extSuperOffset, end: extSuperOffset + extSuperSize, seal: sealExt4}}
	case bytes.HasPrefix(data, []byte(journalMagic)):
		return []structure{{end: extSuperSize, seal: func(super []byte) { clear(super[journalChecksum : journalChecksum+4]) }}}
	case superblockFormats["ext4"].isIn(data):
		return []structure{{end: extSuperSize, seal: sealExt4}}
	}
	return nil
}

// sealExt4 updates the checksum of a superblock: the CRC-32C of the bytes before it, with an initial value of all ones
// and without the final inversion.
func sealExt4(super []byte) {
	binary.LittleEndian.PutUint32(super[superChecksum:], ^crc32.Checksum(super[:superChecksum], castagnoli))
}

// backupsOf returns the offsets of backup superblocks in an ext4 of a size. They are in group 1 and in the
// groups that are powers of 3, 5 and 7 (sparse_super).
func backupsOf(size int64) []int64 {
	groups := (size/blockSize + blocksPerGroup - 1) / blocksPerGroup
	var offsets []int64
	add := func(group int64) {
		if group < groups {
			offsets = append(offsets, group*blocksPerGroup*blockSize)
		}
	}
	add(1)
	for _, base := range []int64{3, 5, 7} {
		for group := base; group < groups; group *= base {
			add(group)
		}
	}
	return offsets
}

// Offsets and values in an xfs (linux/fs/xfs/libxfs/xfs_format.h, xfs_log_format.h).
const (
	xfsUUID          = 32
	xfsInodeSize     = 104
	xfsInodeMagic    = "IN"
	xfsInodeChecksum = 100
	xfsLogMagic      = "\xfe\xed\xba\xbe"
	xfsLogHeader     = 512
	xfsLogChecksum   = 32
)

// xfsChecksums contains the offsets of the checksums of blocks, by their magic number: the superblock and the headers of
// an allocation group, and the roots of its B+trees.
var xfsChecksums = map[string]int{
	xfsMagic: 224, "XAGF": 216, "XAGI": 312, "XAFL": 32,
	"AB3B": 52, "AB3C": 52, "IAB3": 52, "FIB3": 52, "RMB3": 52, "R3FC": 52,
}

// xfsStructures returns the structures of a block: a header, a root of a B+tree, inodes, or the header of a log record,
// in which mkfs writes no checksum.
func xfsStructures(_ int64, data, super []byte) []structure {
	if checksum, ok := xfsChecksums[string(data[:4])]; ok {
		return []structure{{end: blockSize, seal: sealXFS(checksum)}}
	}
	switch {
	case bytes.HasPrefix(data, []byte(xfsLogMagic)):
		return []structure{{end: xfsLogHeader, seal: func(header []byte) { clear(header[xfsLogChecksum : xfsLogChecksum+4]) }}}
	case bytes.HasPrefix(data, []byte(xfsInodeMagic)):
		var inodes []structure
		size := int(binary.BigEndian.Uint16(super[xfsInodeSize:]))
		for at := 0; size > 0 && at+size <= blockSize; at += size {
			inodes = append(inodes, structure{start: at, end: at + size, seal: sealXFS(xfsInodeChecksum)})
		}
		return inodes
	}
	return nil
}

// sealXFS returns a function that updates the checksum at an offset of a structure. The checksum is the CRC-32C of the
// structure, in which it counts as zero.
func sealXFS(checksum int) func([]byte) {
	return func(b []byte) {
		clear(b[checksum : checksum+4])
		binary.LittleEndian.PutUint32(b[checksum:], crc32.Checksum(b, castagnoli))
	}
}

// Offsets in the superblock of a btrfs (linux/uapi/linux/btrfs_tree.h).
const (
	btrfsNodeSize   = 0x94
	btrfsDeviceUUID = 0x10b
)

// btrfsStructures returns a superblock, or a node of a tree. mkfs leaves nodes of trees that it has replaced, which are
// changed as well.
func btrfsStructures(_ int64, data, super []byte) []structure {
	size := int(binary.LittleEndian.Uint32(super[btrfsNodeSize:]))
	if superblockFormats["btrfs"].isIn(data) {
		size = btrfsSuperSize
	}
	if len(data) < size || !bytes.Equal(uuidAt(data, btrfsFSID), uuidAt(super, btrfsFSID)) {
		return nil
	}
	return []structure{{end: size, seal: sealBtrfs}}
}

// sealBtrfs updates the checksum of a superblock or a node: the CRC-32C of the bytes after the field with the checksum.
func sealBtrfs(b []byte) {
	binary.LittleEndian.PutUint32(b, crc32.Checksum(b[btrfsFSID:], castagnoli))
}
