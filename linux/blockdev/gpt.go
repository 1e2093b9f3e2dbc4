package blockdev

import (
	"bytes"
	"cmp"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"unicode/utf16"

	"github.com/trivet-csi/trivet/internal/crashpoint"
)

// GUID is a globally unique identifier in the format of a GPT: the first three fields are
// little-endian (UEFI specification 2.10, appendix A).
type GUID [16]byte

// NewGUID returns a random GUID (RFC 9562, version 4).
func NewGUID() GUID {
	var g GUID
	_, _ = rand.Read(g[:]) // never fails (crypto/rand)
	g[7], g[8] = g[7]&0x0f|0x40, g[8]&0x3f|0x80
	return g
}

// String returns the GUID in lower case, as in /dev/disk/by-partuuid.
func (g GUID) String() string {
	le := binary.LittleEndian
	return fmt.Sprintf("%08x-%04x-%04x-%x-%x", le.Uint32(g[0:]), le.Uint16(g[4:]), le.Uint16(g[6:]), g[8:10], g[10:])
}

// markType is the type of the partition of a claimed disk, e855209b-c0f3-4ca6-ac51-2bca4d5e1291. It must
// never change, because it identifies claimed disks.
var markType = GUID{0x9b, 0x20, 0x55, 0xe8, 0xf3, 0xc0, 0xa6, 0x4c, 0xac, 0x51, 0x2b, 0xca, 0x4d, 0x5e, 0x12, 0x91}

// Mark is the mark of a claimed disk: a GUID partition table with one partition, which contains the data.
type Mark struct {
	// GUID is the GUID of the partition, which identifies the claim.
	GUID GUID
	// Name is the name of the partition, up to 36 UTF-16 units.
	Name string
	// Start and Size describe the partition, in bytes.
	Start, Size int64
	// Complete means that a header has valid checksums. While a mark is written or removed, the disk may have
	// only the entry of the partition. Then Complete is false, and only GUID and Used are valid.
	Complete bool
	// Damaged means that the first of the two tables is not valid.
	Damaged bool
	// Used means that the partition may contain data. It is recorded on the disk before the first
	// use, because the record of the volume may be restored from an older backup.
	Used bool
	// otherHeader is the sector of the other header, according to the header that was read (AlternateLBA).
	otherHeader int64
}

// ErrNoMark means that the disk is not claimed.
var ErrNoMark = errors.New("no mark of a claim")

// Offsets and values of the table (UEFI specification 2.10, section 5.3).
const (
	gptHeaderSize  = 92
	gptEntrySize   = 128
	gptEntries     = 128
	gptEntryBytes  = gptEntries * gptEntrySize
	gptSignature   = "EFI PART"
	gptRevision    = 0x00010000
	gptNameUnits   = 36
	partitionAlign = mib

	// usedBit is an attribute of the entry. The partition type defines the bits 48 to 63.
	usedBit = 1 << 48

	// protectiveType is the type of the partition in a protective master boot record, at
	// protectiveAt (section 5.2.3).
	protectiveType, protectiveAt = 0xEE, 446 + 4
)

// table computes the locations of the parts of a GPT on a disk, in sectors.
type table struct {
	sector  int64 // bytes of a sector
	sectors int64 // number of sectors of the disk
}

// newTable returns the table of a disk. Both arguments are in bytes.
func newTable(size int64, sector int) table {
	return table{int64(sector), size / int64(sector)}
}

// entrySectors returns the size of the array of entries, in sectors.
func (t table) entrySectors() int64 { return (gptEntryBytes + t.sector - 1) / t.sector }

// last returns the last sector of the disk, which contains the second header.
func (t table) last() int64 { return t.sectors - 1 }

// backupEntries returns the first sector of the second array of entries.
func (t table) backupEntries() int64 { return t.last() - t.entrySectors() }

// room returns the range of the partition of a claimed disk in bytes: the range between the tables, aligned
// to a MiB. The size is 0 if there is no space.
func (t table) room() (start, size int64) {
	end := t.backupEntries() * t.sector / partitionAlign * partitionAlign
	return partitionAlign, max(0, end-partitionAlign)
}

// Room returns the size in bytes of the partition on a claimed disk of size bytes, with sectors of sector bytes.
func Room(size int64, sector int) int64 {
	_, n := newTable(size, sector).room()
	return n
}

// ReadMark reads the mark of a disk of size bytes. It returns ErrNoMark only if the disk is certainly not
// claimed, and another error after a failed read.
//
// The partition entry in the first table claims the disk. The entry is in one sector, which is written atomically.
// The entry is written first and removed last. If the disk has an entry without a valid table, and a boot record that
// another program has written since, the entry is ignored.
func ReadMark(disk io.ReaderAt, size int64, sector int) (Mark, error) {
	t := newTable(size, sector)
	if _, room := t.room(); room == 0 {
		return Mark{}, ErrNoMark
	}
	m, err := t.read(disk, 1)
	if !errors.Is(err, ErrNoMark) {
		return m, err
	}
	if m, err = t.read(disk, t.last()); !errors.Is(err, ErrNoMark) {
		m.Damaged = true
		return m, err
	}
	boot, first := make([]byte, t.sector), make([]byte, gptEntrySize)
	_, err1 := disk.ReadAt(boot, 0)
	_, err2 := disk.ReadAt(first, 2*t.sector)
	if err := cmp.Or(err1, err2); err != nil {
		return Mark{}, fmt.Errorf("reading the partition table: %w", err)
	}
	blank := bytes.Equal(boot, make([]byte, t.sector))
	if !bytes.Equal(first[:16], markType[:]) || !blank && boot[protectiveAt] != protectiveType {
		return Mark{}, ErrNoMark
	}
	return Mark{GUID: GUID(first[16:32]), Used: isUsed(first)}, nil
}

// isUsed reports whether an entry has the attribute usedBit.
func isUsed(entry []byte) bool { return binary.LittleEndian.Uint64(entry[48:])&usedBit != 0 }

// read reads the table whose header is in the sector at. The numbers are the offsets of the fields of a header (UEFI
// specification 2.10, section 5.3.2).
func (t table) read(disk io.ReaderAt, at int64) (Mark, error) {
	header := make([]byte, t.sector)
	if _, err := disk.ReadAt(header, at*t.sector); err != nil {
		return Mark{}, fmt.Errorf("reading the partition table: %w", err)
	}
	le := binary.LittleEndian
	sum := le.Uint32(header[16:])
	le.PutUint32(header[16:], 0)
	if string(header[:8]) != gptSignature || le.Uint32(header[12:]) != gptHeaderSize ||
		crc32.ChecksumIEEE(header[:gptHeaderSize]) != sum || le.Uint64(header[24:]) != uint64(at) {
		return Mark{}, ErrNoMark
	}
	entriesAt := le.Uint64(header[72:])
	if le.Uint32(header[80:]) != gptEntries || le.Uint32(header[84:]) != gptEntrySize ||
		entriesAt < 2 || entriesAt > uint64(t.sectors-t.entrySectors()) {
		return Mark{}, ErrNoMark
	}
	entries := make([]byte, gptEntryBytes)
	if _, err := disk.ReadAt(entries, int64(entriesAt)*t.sector); err != nil {
		return Mark{}, fmt.Errorf("reading the partition table: %w", err)
	}
	if crc32.ChecksumIEEE(entries) != le.Uint32(header[88:]) {
		return Mark{}, ErrNoMark
	}
	m, err := t.parse(entries)
	m.otherHeader = int64(min(le.Uint64(header[32:]), uint64(t.last())))
	return m, err
}

// parse reads the mark from the entries of a valid table: one partition of type markType within the disk. The numbers
// are the offsets of the fields of an entry (UEFI specification 2.10, section 5.3.3).
func (t table) parse(entries []byte) (Mark, error) {
	le := binary.LittleEndian
	first, last := le.Uint64(entries[32:]), le.Uint64(entries[40:])
	blank := make([]byte, gptEntryBytes-gptEntrySize)
	if !bytes.Equal(entries[:16], markType[:]) || !bytes.Equal(entries[gptEntrySize:], blank) ||
		first < 2 || last < first || last >= uint64(t.sectors) {
		return Mark{}, ErrNoMark
	}
	var units []uint16
	for at := 56; at < gptEntrySize; at += 2 {
		if u := le.Uint16(entries[at:]); u != 0 {
			units = append(units, u)
		}
	}
	return Mark{
		GUID: GUID(entries[16:32]), Name: string(utf16.Decode(units)),
		Start: int64(first) * t.sector, Size: int64(last-first+1) * t.sector, Complete: true, Used: isUsed(entries),
	}, nil
}

// entries returns the partition entry array with the one partition of the mark.
func (t table) entries(m Mark) []byte {
	b, le := make([]byte, t.entrySectors()*t.sector), binary.LittleEndian
	copy(b, markType[:])
	copy(b[16:], m.GUID[:])
	le.PutUint64(b[32:], uint64(m.Start/t.sector))
	le.PutUint64(b[40:], uint64((m.Start+m.Size)/t.sector-1))
	if m.Used {
		le.PutUint64(b[48:], usedBit)
	}
	units := utf16.Encode([]rune(m.Name))
	for i, u := range units[:min(len(units), gptNameUnits)] {
		le.PutUint16(b[56+2*i:], u)
	}
	return b
}

// header returns the header for sector at. The other header is in sector other, and the entries begin in
// sector entriesAt.
func (t table) header(entries []byte, m Mark, at, other, entriesAt int64) []byte {
	b, le := make([]byte, t.sector), binary.LittleEndian
	copy(b, gptSignature)
	le.PutUint32(b[8:], gptRevision)
	le.PutUint32(b[12:], gptHeaderSize)
	le.PutUint64(b[24:], uint64(at))
	le.PutUint64(b[32:], uint64(other))
	le.PutUint64(b[40:], uint64(2+t.entrySectors()))  // first usable
	le.PutUint64(b[48:], uint64(t.backupEntries()-1)) // last usable
	copy(b[56:], m.GUID[:])                           // the disk GUID is that of its only partition
	le.PutUint64(b[72:], uint64(entriesAt))
	le.PutUint32(b[80:], gptEntries)
	le.PutUint32(b[84:], gptEntrySize)
	le.PutUint32(b[88:], crc32.ChecksumIEEE(entries[:gptEntryBytes]))
	le.PutUint32(b[16:], crc32.ChecksumIEEE(b[:gptHeaderSize]))
	return b
}

// protective returns the master boot record that protects the disk from tools without GPT support (UEFI
// specification 2.10, section 5.2.3).
func (t table) protective() []byte {
	b, le := make([]byte, t.sector), binary.LittleEndian
	e := b[446:]
	copy(e, []byte{0, 0, 2, 0, protectiveType, 0xFF, 0xFF, 0xFF})
	le.PutUint32(e[8:], 1)
	le.PutUint32(e[12:], uint32(min(t.sectors-1, 0xFFFFFFFF)))
	le.PutUint16(b[510:], 0xAA55)
	return b
}

// WriteMark durably claims a blank disk of size bytes. The caller must set GUID and Name of m, and must have
// opened the disk with OpenExclusive.
func WriteMark(disk *os.File, m Mark, size int64, sector int) (Mark, error) {
	t := newTable(size, sector)
	m.Start, m.Size = t.room()
	if m.Size == 0 {
		return m, fmt.Errorf("%s has %d bytes, too few for a partition: %w", disk.Name(), size, ErrNoMark)
	}
	m.Complete, m.Damaged = true, false
	entries := t.entries(m)
	err := t.write(disk, entries[:t.sector], 2)
	if err == nil {
		crashpoint.Here(crashpoint.ClaimEntry)
		err = t.writeBackup(disk, m, entries)
	}
	if err == nil {
		err = t.writePrimary(disk, m, entries)
	}
	if err == nil {
		err = t.write(disk, t.protective(), 0)
	}
	if err == nil {
		crashpoint.Here(crashpoint.ClaimMarked)
	}
	return m, err
}

// GrowMark durably resizes the partition of a claimed disk to the current size of the disk. At least one table
// is valid at each moment. GrowMark zeroes the old second table, because its sectors may now be in the
// partition.
func GrowMark(disk *os.File, m Mark, size int64, sector int) (Mark, error) {
	t := newTable(size, sector)
	_, room := t.room()
	if room < m.Size {
		return m, fmt.Errorf("%s is now smaller than its partition: %w", disk.Name(), ErrNoMark)
	}
	m.Size = room
	entries := t.entries(m)
	if err := t.writeBackup(disk, m, entries); err != nil {
		return m, err
	}
	crashpoint.Here(crashpoint.GrowBackup)
	first := m.otherHeader - t.entrySectors()
	if n := min(m.otherHeader+1, t.backupEntries()) - first; first > 1 && n > 0 {
		if err := t.write(disk, make([]byte, n*t.sector), first); err != nil {
			return m, err
		}
	}
	if err := t.writePrimary(disk, m, entries); err != nil {
		return m, err
	}
	return m, t.write(disk, t.protective(), 0)
}

// UseMark durably records in the mark of a claimed disk that the partition may contain data from now on. At
// least one table is valid at each moment.
func UseMark(disk *os.File, m Mark, size int64, sector int) error {
	t := newTable(size, sector)
	if !m.Damaged { // the disk may be larger than when the tables were written
		t.sectors = m.otherHeader + 1
	}
	if t.backupEntries()*t.sector < m.Start+m.Size {
		return fmt.Errorf("%s: its second partition table would overlap its partition: %w", disk.Name(), ErrNoMark)
	}
	m.Used = true
	entries := t.entries(m)
	if err := t.writeBackup(disk, m, entries); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.StageNoted)
	return t.writePrimary(disk, m, entries)
}

// writeBackup durably writes the second table: the entries, and then the header.
func (t table) writeBackup(disk *os.File, m Mark, entries []byte) error {
	entriesAt := t.backupEntries()
	return t.write(disk, append(bytes.Clone(entries), t.header(entries, m, t.last(), 1, entriesAt)...), entriesAt)
}

// writePrimary durably writes the first table: the header, and then the entries.
func (t table) writePrimary(disk *os.File, m Mark, entries []byte) error {
	return t.write(disk, append(t.header(entries, m, 1, t.last(), 2), entries...), 1)
}

// write durably writes b, beginning at sector at.
func (t table) write(disk *os.File, b []byte, at int64) error {
	_, err := disk.WriteAt(b, at*t.sector)
	if err = cmp.Or(err, disk.Sync()); err != nil {
		return fmt.Errorf("writing the partition table of %s: %w", disk.Name(), err)
	}
	return nil
}

// EraseMark durably frees a disk. It zeroes the tables, and the sector with the partition entry last. The
// caller must have opened the disk with OpenExclusive.
func EraseMark(disk *os.File, size int64, sector int) error {
	t := newTable(size, sector)
	for _, part := range []struct{ at, sectors int64 }{
		{0, 2}, // the boot record and the first header
		{t.backupEntries(), t.entrySectors() + 1}, // the second table
		{3, t.entrySectors() - 1},                 // the first entries without the first sector
		{2, 1},
	} {
		if err := t.write(disk, make([]byte, part.sectors*t.sector), part.at); err != nil {
			return err
		}
		crashpoint.Here(crashpoint.ReapErasing)
	}
	return nil
}
