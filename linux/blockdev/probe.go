package blockdev

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
)

// ErrNotBlank means that a device or image has data, so that no filesystem may be created on it.
var ErrNotBlank = errors.New("not blank")

// RequireBlank returns an error unless an image contains only zeros. It reads all bytes except holes. A
// failed read is also an error.
//
// A filesystem that cannot report holes (NFS before 4.2, and some servers of 4.2) reports the whole image as data. If
// such an image has no allocated blocks, RequireBlank reads only both ends of it. RequireBlank does not rely on the
// number of blocks alone, because some servers update it seconds after a write.
func RequireBlank(image *os.File) error {
	size, err := Size(image)
	if err != nil {
		return err
	}
	if err := sys.WriteBack(image); err != nil {
		return fmt.Errorf("probing an image: %w", err)
	}
	unknown, err := holesUnknown(image, size)
	if err != nil {
		return err
	}
	if unknown {
		return errors.Join(requireZeros(image, 0, min(size, edge)), requireZeros(image, max(0, size-edge), size))
	}
	for at := int64(0); at < size; {
		start, end, err := sys.NextData(image, at, size)
		if err != nil {
			return fmt.Errorf("probing an image: %w", err)
		}
		if err := requireZeros(image, start, end); err != nil {
			return err
		}
		at = end
	}
	return nil
}

// holesUnknown reports whether the filesystem cannot report holes: it reports an image without allocated
// blocks as data.
func holesUnknown(image *os.File, size int64) (bool, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(image.Fd()), &st); err != nil {
		return false, fmt.Errorf("probing %s: fstat: %w", image.Name(), err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Blocks > 0 {
		return false, nil
	}
	hole, err := unix.Seek(int(image.Fd()), 0, unix.SEEK_HOLE)
	if err != nil {
		return false, fmt.Errorf("probing %s: SEEK_HOLE: %w", image.Name(), err)
	}
	return hole == size, nil
}

// requireZeros returns ErrNotBlank unless all bytes from start to end are zeros.
func requireZeros(image *os.File, start, end int64) error {
	return requireZerosWith(image, make([]byte, min(256<<10, end-start)), span{start, end})
}

// requireZerosWith does the same as requireZeros for a span, with a buffer for the reads.
func requireZerosWith(image *os.File, buf []byte, s span) error {
	for at := s.start; at < s.end; {
		n, err := image.ReadAt(buf[:min(int64(len(buf)), s.end-at)], at)
		if err != nil && !errors.Is(err, io.EOF) {
			return fmt.Errorf("probing %s: %w", image.Name(), err)
		}
		if n == 0 {
			return fmt.Errorf("probing %s: the image was truncated while it was read", image.Name())
		}
		if i := bytes.IndexFunc(buf[:n], func(r rune) bool { return r != 0 }); i >= 0 {
			return fmt.Errorf("%s has data at byte %d: %w", image.Name(), at+int64(i), ErrNotBlank)
		}
		at += int64(n)
	}
	return nil
}

// Offsets and values of the superblocks (linux/fs/ext4/ext4.h, xfs_format.h, uapi/linux/btrfs_tree.h).
const (
	extSuperOffset = 1024
	extMagicAt     = 0x38
	extMagic       = "\x53\xef"
	extStateValid  = 0x1
	extStateError  = 0x2
	btrfsSuper     = 64 << 10
	btrfsMagic     = "_BHRfS_M"
	xfsMagic       = "XFSB"
)

// Superblock contains fields of the superblock of a filesystem.
type Superblock struct {
	// Size is the size of the filesystem in bytes.
	Size int64
	// Dirty means that the filesystem must be checked before it is mounted, because it has
	// recorded errors, or was not unmounted and has no journal.
	Dirty bool
	// blockSize is the size of a block in bytes, and incompat contains the incompat feature flags. They are only set for an
	// ext4.
	blockSize int64
	incompat  uint32
}

// superblockFormat describes the superblock of a filesystem on a device.
type superblockFormat struct {
	offset  int64 // on the device
	size    int   // bytes that are read
	magicAt int   // offset of magic in the superblock
	magic   string
	parse   func(super []byte) Superblock
}

// superblockFormats contains the format for each type of filesystem.
var superblockFormats = map[string]superblockFormat{
	"ext4": {extSuperOffset, extSuperSize, extMagicAt, extMagic, parseExt4},
	"xfs": {0, 16, 0, xfsMagic, func(super []byte) Superblock {
		be := binary.BigEndian
		return Superblock{Size: int64(be.Uint64(super[8:])) * int64(be.Uint32(super[4:]))}
	}},
	"btrfs": {btrfsSuper, 0x80, btrfsMagicAt, btrfsMagic, func(super []byte) Superblock {
		return Superblock{Size: int64(binary.LittleEndian.Uint64(super[0x70:]))}
	}},
}

// ErrNoFS means that the device or image has no filesystem of the expected type.
var ErrNoFS = errors.New("no filesystem of that type")

// ReadSuperblock reads the superblock of a filesystem of type fsType. The error is ErrNoFS if there is none.
func ReadSuperblock(f io.ReaderAt, fsType string) (Superblock, error) {
	format, ok := superblockFormats[fsType]
	if !ok {
		return Superblock{}, fmt.Errorf("filesystem %q: %w", fsType, ErrNoFS)
	}
	super := make([]byte, format.size)
	if _, err := f.ReadAt(super, format.offset); err != nil {
		return Superblock{}, fmt.Errorf("reading the superblock: %w", err)
	}
	if !format.isIn(super) {
		return Superblock{}, fmt.Errorf("%s: %w", fsType, ErrNoFS)
	}
	return format.parse(super), nil
}

// isIn reports whether the bytes of a superblock have the magic number of the format.
func (f superblockFormat) isIn(super []byte) bool {
	return bytes.HasPrefix(super[f.magicAt:], []byte(f.magic))
}

// parseExt4 reads s_blocks_count, s_state, s_log_block_size and s_feature_incompat (linux/fs/ext4/ext4.h).
func parseExt4(super []byte) Superblock {
	le := binary.LittleEndian
	blocks := uint64(le.Uint32(super[0x150:]))<<32 | uint64(le.Uint32(super[0x4:]))
	state := le.Uint16(super[0x3A:])
	shift := 10 + le.Uint32(super[0x18:])&0xf
	return Superblock{
		Size:      int64(blocks << shift),
		Dirty:     state&extStateValid == 0 || state&extStateError != 0,
		blockSize: 1 << shift,
		incompat:  le.Uint32(super[extIncompat:]),
	}
}
