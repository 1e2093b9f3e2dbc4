package blockdev

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/command"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/sys"
)

const (
	// maxTemplateDevice is the largest device in bytes that is formatted from a template. mkfs
	// takes about 1 ms per GiB, and a template occupies about 0.5 MiB of memory.
	maxTemplateDevice = 16 * gib
	// maxTemplates and maxTemplateSize limit the memory of the cache to 16 MiB. A template that is larger,
	// because of options of mkfs, is not cached.
	maxTemplates    = 16
	maxTemplateSize = 1 << 20

	blockSize      = 4096
	blocksPerGroup = 8 * blockSize

	// Offsets in struct ext4_super_block (linux/fs/ext4/ext4.h).
	superUUID     = 0x68
	superHashSeed = 0xEC
	superChecksum = 0x3FC
)

// castagnoli is the table of CRC-32C.
var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// template holds the non-zero blocks of an empty ext4 of one size. With metadata_csum_seed, only the checksum
// of the superblock depends on the UUID, so that each copy of the template can have its own UUID.
type template struct {
	extents []extent // all but the first block
	first   []byte   // the block with the primary superblock
	backups []int64  // offsets of the other superblocks
}

// extent is a contiguous part of a template.
type extent struct {
	offset int64
	data   []byte
}

// template returns the template for an ext4 of size bytes. If the cache has none, it creates one with mke2fs.
func (f *Formatter) template(ctx context.Context, size int64, options []string) (*template, error) {
	key := strconv.FormatInt(size, 10) + " " + strings.Join(options, " ")
	if t, ok := f.templates.Get(key); ok {
		return t.(*template), nil
	}
	// Callers with the same key share one mke2fs, which must not end with the context of the
	// first caller.
	made := f.making.DoChan(key, func() (any, error) {
		t, err := makeTemplate(context.WithoutCancel(ctx), size, options)
		if err == nil && t.size() <= maxTemplateSize {
			f.templates.Add(key, t)
		}
		return t, err
	})
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case r := <-made:
		if r.Err != nil {
			return nil, r.Err
		}
		return r.Val.(*template), nil
	}
}

// makeTemplate runs mke2fs on a file in memory and keeps the blocks that it wrote.
func makeTemplate(ctx context.Context, size int64, options []string) (*template, error) {
	fd, err := unix.MemfdCreate("trivet-ext4-template", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("ext4 template: memfd_create: %w", err)
	}
	mem := os.NewFile(uintptr(fd), "ext4 template")
	defer mem.Close()
	if err := mem.Truncate(size); err != nil {
		return nil, fmt.Errorf("ext4 template: %w", err)
	}
	cmd := command.Command{
		Name: "mkfs.ext4", Args: append(ext4Args(size, false, options), inheritedPath),
		Env: []string{"MKE2FS_CONFIG=/dev/null"}, Hold: []*os.File{mem},
	}
	if err := cmd.Run(ctx); err != nil {
		return nil, err
	}
	return readTemplate(mem, size)
}

// readTemplate reads the blocks of an ext4 of size bytes that are not zero.
func readTemplate(f *os.File, size int64) (*template, error) {
	t := &template{}
	zeros := make([]byte, blockSize)
	for at := int64(0); at < size; {
		start, end, err := sys.NextData(f, at, size)
		if err != nil {
			return nil, fmt.Errorf("ext4 template: %w", err)
		}
		for at = start; at < end; at += blockSize {
			block := make([]byte, min(blockSize, size-at))
			if _, err := f.ReadAt(block, at); err != nil && !errors.Is(err, io.EOF) {
				return nil, fmt.Errorf("ext4 template: %w", err)
			}
			if !bytes.Equal(block, zeros[:len(block)]) {
				t.add(at, block)
			}
		}
	}
	if t.first == nil || !superblockFormats["ext4"].isIn(t.first[extSuperOffset:]) {
		return nil, fmt.Errorf("ext4 template: mkfs.ext4 wrote no superblock: %w", ErrNoFS)
	}
	t.backups = slices.DeleteFunc(backupsOf(size), func(offset int64) bool { return t.super(offset) == nil })
	return t, nil
}

// size returns the memory of the template in bytes.
func (t *template) size() int {
	size := len(t.first)
	for _, e := range t.extents {
		size += len(e.data)
	}
	return size
}

// add adds a block of the filesystem that is not zero. The offsets must increase.
func (t *template) add(offset int64, block []byte) {
	if offset == 0 {
		t.first = block
		return
	}
	if n := len(t.extents); n > 0 {
		if last := &t.extents[n-1]; last.offset+int64(len(last.data)) == offset {
			last.data = append(last.data, block...)
			return
		}
	}
	t.extents = append(t.extents, extent{offset, block})
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

// super returns the superblock at an offset, or nil if the template has no superblock at it.
func (t *template) super(offset int64) []byte {
	for _, e := range t.extents {
		if in := offset - e.offset; in >= 0 && in+extSuperSize <= int64(len(e.data)) {
			if super := e.data[in : in+extSuperSize]; superblockFormats["ext4"].isIn(super) {
				return super
			}
		}
	}
	return nil
}

// write copies the template to a blank image, with a new UUID and hash seed. It writes the primary
// superblock last.
func (t *template) write(image *os.File) error {
	id, seed := uuid.New(), make([]byte, 16)
	_, _ = rand.Read(seed) // never fails (crypto/rand)
	for _, e := range t.extents {
		if _, err := image.WriteAt(e.data, e.offset); err != nil {
			return err
		}
	}
	for _, offset := range t.backups {
		if _, err := image.WriteAt(setIdentity(bytes.Clone(t.super(offset)), id, seed), offset); err != nil {
			return err
		}
	}
	crashpoint.Here(crashpoint.StageHalfFormat)
	first := bytes.Clone(t.first)
	setIdentity(first[extSuperOffset:extSuperOffset+extSuperSize], id, seed)
	_, err := image.WriteAt(first, 0)
	return err
}

// setIdentity puts a UUID and a hash seed into a superblock and updates its checksum. The checksum is the
// CRC-32C of the bytes before it, with an initial value of all ones and without the final inversion.
func setIdentity(super []byte, id uuid.UUID, seed []byte) []byte {
	copy(super[superUUID:], id[:])
	copy(super[superHashSeed:], seed)
	sum := ^crc32.Checksum(super[:superChecksum], castagnoli)
	binary.LittleEndian.PutUint32(super[superChecksum:], sum)
	return super
}
