package blockdev

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/linux/sys"
)

// trimStep is the number of addresses of ext4 and xfs that one step trims. A smaller step does not shorten the time for
// which the kernel locks a group of blocks, and repeats the search of an allocation group of xfs more often.
const trimStep = 256 << 20

// ErrNotWritable means that a filesystem is not mounted writable.
var ErrNotWritable = errors.New("the filesystem is not mounted writable on this node")

// Trimmed is the result of one step of a trim.
type Trimmed struct {
	// Bytes is the number of bytes that the kernel has discarded. ext4 and btrfs do not discard blocks again that are
	// unused since an earlier trim.
	Bytes uint64
	// Next is the address at which the next step begins.
	Next uint64
	// Done means that the whole filesystem is trimmed.
	Done bool
}

// Trim discards the unused blocks of a part of the mounted filesystem on a device, from an address on. Only the end of the
// process interrupts it. Meanwhile the filesystem can be unmounted, but the device stays in use. Trim returns
// ErrNotWritable if the filesystem is not mounted writable.
func Trim(device, fsType string, from uint64) (Trimmed, error) {
	root, err := mount.OpenAside(device)
	if err != nil {
		return Trimmed{}, err
	}
	if root == nil {
		return Trimmed{}, fmt.Errorf("%s: %w", device, ErrNotWritable)
	}
	defer root.Close()
	if fsType == "btrfs" {
		return trimChunk(root, from)
	}
	n, err := sys.Trim(root, from, trimStep)
	if errors.Is(err, unix.EINVAL) && from > 0 { // from is after the last address
		return Trimmed{Done: true}, nil
	}
	return Trimmed{Bytes: n, Next: from + trimStep}, err
}

// trimChunk trims the next chunk of a btrfs. The addresses of a btrfs are logical: they have gaps, and exceed the size of
// the device after a balance. The first step also trims the space of the device that belongs to no chunk, however large
// it is (btrfs_trim_fs in fs/btrfs/extent-tree.c).
func trimChunk(root *os.File, from uint64) (Trimmed, error) {
	const chunkTree, firstChunkTree, chunkItem = 3, 256, 228 // of uapi/linux/btrfs_tree.h
	chunks, err := sys.SearchBtrfs(root, sys.BtrfsKeys{
		Tree: chunkTree, MinObject: firstChunkTree, MaxObject: firstChunkTree, MinType: chunkItem, MaxType: chunkItem,
		MinOffset: from, MaxOffset: ^uint64(0), MaxTrans: ^uint64(0),
	})
	if err != nil || len(chunks) == 0 {
		return Trimmed{Done: err == nil}, err
	}
	if len(chunks[0].Data) < 8 {
		return Trimmed{}, fmt.Errorf("chunk %d of the btrfs on %s has no length", chunks[0].Offset, root.Name())
	}
	length := binary.LittleEndian.Uint64(chunks[0].Data)
	n, err := sys.Trim(root, chunks[0].Offset, length)
	return Trimmed{Bytes: n, Next: chunks[0].Offset + length}, err
}
