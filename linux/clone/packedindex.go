package clone

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io"
	"strings"

	"github.com/cespare/xxhash/v2"
	"golang.org/x/sys/unix"
)

// The index of a packed tree is packedMagic, and then the records of all entries in the order of a walk: that of an entry, its
// extended attributes, and for a directory the records of its content and a recordLeave. The first entry is the root, which
// has no name. A record begins with its kind. The index ends with as many bytes for origins. packedMagic must change if the origins
// of the same trees change, so that an interrupted transfer does not continue with others.
const (
	packedMagic = "packed tree 1\n"

	recordEntry     = 1
	recordAttribute = 2
	recordLeave     = 3
)

// ErrIndex means that the index of a packed tree is not one that Pack writes.
var ErrIndex = errors.New("the index of the packed tree is invalid")

// packedHeader is the first part of the record of an entry, in network byte order. The name and the target of a symbolic link
// follow.
type packedHeader struct {
	Mode, UID, GID uint32
	// Flags are those of plainFlags, and Protection those of protectionMask.
	Flags, Protection uint32
	Device            uint64
	// Inode identifies a file with several names, and Links is their number. Inode is 0 for other files.
	Inode uint64
	Links uint32
	Marks uint8
	// Size is that of a regular file in bytes.
	Size          int64
	Modified      packedTime
	NameLength    uint16
	TargetLength  uint16
	AccessedAtEnd packedTime // after all fields that the checksum contains
}

// packedTime is a time in seconds and nanoseconds since 1970.
type packedTime struct {
	Seconds     int64
	Nanoseconds uint32
}

// accessedSize is the size of packedHeader.AccessedAtEnd.
const accessedSize = 12

// Bits of packedHeader.Marks.
const (
	// markDense means that all of a small regular file is data.
	markDense = 1 << iota
	// markAgain means that an earlier entry is another name of the same file, and has its data and attributes.
	markAgain
)

// packedEntry is an entry of a packed tree.
type packedEntry struct {
	packedHeader
	name, target string
}

func (e *packedEntry) kind() uint32 { return e.Mode & unix.S_IFMT }

// dataSize is the size of the data of the entry in the packed tree, in bytes.
func (e *packedEntry) dataSize() int64 {
	if e.Marks&markAgain != 0 {
		return 0
	}
	return e.Size
}

// stat returns the attributes of the entry.
func (e *packedEntry) stat() *unix.Stat_t {
	st := &unix.Stat_t{Mode: e.Mode, Uid: e.UID, Gid: e.GID, Rdev: e.Device, Atim: e.AccessedAtEnd.timespec(), Mtim: e.Modified.timespec()}
	assign(&st.Nlink, e.Links)
	return st
}

// assign assigns a number to a field whose type depends on the architecture.
func assign[T uint32 | uint64](field *T, n uint32) { *field = T(n) }

func (t packedTime) timespec() unix.Timespec {
	return unix.Timespec{Sec: t.Seconds, Nsec: int64(t.Nanoseconds)}
}

func packedTimeOf(t unix.Timespec) packedTime { return packedTime{t.Sec, uint32(t.Nsec)} }

// indexWriter writes an index.
type indexWriter struct {
	to *bufio.Writer
	// size is the size of the records, and data that of the data of all entries, in bytes.
	size, data int64
	// sum is the checksum of the index without access times, because reading a symbolic link changes that of the link.
	sum hash.Hash64
	buf []byte
}

func newIndexWriter(to io.Writer) *indexWriter {
	w := &indexWriter{to: bufio.NewWriterSize(to, 1<<20), sum: xxhash.New()}
	w.sum.Write([]byte(packedMagic))
	_, _ = w.to.WriteString(packedMagic) // a bufio.Writer returns its first error from Flush
	w.size = int64(len(packedMagic))
	return w
}

// write writes a record, of which the last bytes are not in the checksum.
func (w *indexWriter) write(record []byte, unchecked int) {
	w.sum.Write(record[:len(record)-unchecked])
	_, _ = w.to.Write(record) // see newIndexWriter
	w.size += int64(len(record))
	w.buf = record[:0]
}

// entry writes the record of an entry.
func (w *indexWriter) entry(e *packedEntry) error {
	if e.dataSize() > maxPacked-w.data {
		return errUncopyable("the files have together more than %d bytes, including holes: shorten the largest", int64(maxPacked))
	}
	w.data += e.dataSize()
	e.NameLength, e.TargetLength = uint16(len(e.name)), uint16(len(e.target))
	w.sum.Write([]byte(e.name + e.target))
	record, err := binary.Append(append(w.buf, recordEntry), binary.BigEndian, &e.packedHeader)
	if err != nil {
		return err
	}
	w.write(record, accessedSize)
	record = append(append(w.buf, e.name...), e.target...)
	w.write(record, len(record))
	return nil
}

// maxPacked is the maximum size of the data of a packed tree in bytes.
const maxPacked = 1 << 61

// attribute writes an extended attribute of the last entry.
func (w *indexWriter) attribute(name string, value []byte) {
	record := w.buf
	record = append(record, recordAttribute, byte(len(name)))
	record = binary.BigEndian.AppendUint32(record, uint32(len(value)))
	w.write(append(append(record, name...), value...), 0)
}

// leave ends the content of a directory.
func (w *indexWriter) leave() { w.write(append(w.buf, recordLeave), 0) }

// packedRecord is a record of an index: an entry, an extended attribute of the last entry, or neither at the end of a
// directory. It is valid until the next record is read.
type packedRecord struct {
	entry *packedEntry
	// attribute is the name of an extended attribute; empty for none.
	attribute string
	value     []byte
	// data is the offset of the data of the entry behind the index.
	data int64
}

// indexReader reads an index. It trusts neither the records nor their order.
type indexReader struct {
	from *bufio.Reader
	// end is the size of the data of all entries, and data the offset of that of the next entry.
	end, data int64
	depth     int
	// last is the type of the last entry if its extended attributes may follow.
	last  uint32
	begun bool
	buf   []byte
}

// newIndexReader returns a reader of the records of an index, which have a size. data is the size of the data of all entries.
func newIndexReader(index io.ReaderAt, size, data int64) *indexReader {
	return &indexReader{from: bufio.NewReaderSize(io.NewSectionReader(index, 0, size), 64<<10), end: data}
}

// next returns the next record, and io.EOF at the end of a complete index. Other errors are ErrIndex if the index is
// invalid.
func (r *indexReader) next() (packedRecord, error) {
	if !r.begun {
		magic, err := r.read(len(packedMagic))
		if err != nil || string(magic) != packedMagic {
			return packedRecord{}, errors.Join(fmt.Errorf("%w: it begins with %q", ErrIndex, magic), err)
		}
	}
	kind, err := r.from.ReadByte()
	if r.begun && r.depth == 0 {
		return packedRecord{}, r.ended(err)
	}
	if err != nil {
		return packedRecord{}, incomplete(err)
	}
	r.begun = true
	switch {
	case kind == recordEntry:
		return r.entry()
	case kind == recordAttribute && r.last != 0:
		return r.attribute()
	case kind == recordLeave && r.depth > 0:
		r.depth, r.last = r.depth-1, 0
		return packedRecord{}, nil
	}
	return packedRecord{}, fmt.Errorf("%w: unexpected record of kind %d", ErrIndex, kind)
}

// ended returns io.EOF if nothing follows the root, and the data of all entries ends with the packed tree.
func (r *indexReader) ended(err error) error {
	switch {
	case err == nil:
		return fmt.Errorf("%w: records follow its end", ErrIndex)
	case errors.Is(err, io.EOF) && r.data != r.end:
		return fmt.Errorf("%w: the data of its files ends at %d, not at %d", ErrIndex, r.data, r.end)
	}
	return err
}

// incomplete returns ErrIndex if the index ends within a record.
func incomplete(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("%w: it is incomplete", ErrIndex)
	}
	return err
}

// read reads n bytes, which are valid until the next call.
func (r *indexReader) read(n int) ([]byte, error) {
	if cap(r.buf) < n {
		r.buf = make([]byte, n)
	}
	_, err := io.ReadFull(r.from, r.buf[:n])
	return r.buf[:n], incomplete(err)
}

// entry reads the record of an entry.
func (r *indexReader) entry() (packedRecord, error) {
	e := &packedEntry{}
	b, err := r.read(binary.Size(&e.packedHeader))
	if err != nil {
		return packedRecord{}, err
	}
	if _, err := binary.Decode(b, binary.BigEndian, &e.packedHeader); err != nil {
		return packedRecord{}, err
	}
	text, err := r.read(int(e.NameLength) + int(e.TargetLength))
	if err != nil {
		return packedRecord{}, err
	}
	e.name, e.target = string(text[:e.NameLength]), string(text[e.NameLength:])
	if err := r.check(e); err != nil {
		return packedRecord{}, fmt.Errorf("%w: entry %q: %w", ErrIndex, e.name, err)
	}
	record := packedRecord{entry: e, data: r.data}
	r.data += e.dataSize()
	if r.last = e.kind(); r.last == unix.S_IFDIR {
		r.depth++
	}
	if e.Marks&markAgain != 0 {
		r.last = 0
	}
	return record, nil
}

// check refuses an entry that Pack does not write.
func (r *indexReader) check(e *packedEntry) error {
	kind := e.kind()
	linked := kind == unix.S_IFLNK
	switch {
	case (e.name == "") != (r.depth == 0), e.name == ".", e.name == "..", len(e.name) > unix.NAME_MAX, strings.ContainsAny(e.name, "/\x00"):
		return errors.New("invalid name")
	case r.depth == 0 && kind != unix.S_IFDIR:
		return errors.New("the root is not a directory")
	case r.depth >= maxDepth && kind == unix.S_IFDIR:
		return errTooDeep()
	case kind == 0, e.Mode&^(unix.S_IFMT|0o7777) != 0, !packable(kind):
		return fmt.Errorf("invalid mode %o", e.Mode)
	case linked != (e.target != ""), len(e.target) >= unix.PathMax, strings.Contains(e.target, "\x00"):
		return errors.New("invalid target of a symbolic link")
	case e.Size < 0, kind != unix.S_IFREG && e.Size != 0, e.dataSize() > r.end-r.data:
		return fmt.Errorf("invalid size %d", e.Size)
	case (e.Inode == 0) != (e.Links < 2), e.Inode != 0 && kind == unix.S_IFDIR, e.Inode == 0 && e.Marks&markAgain != 0:
		return fmt.Errorf("invalid number of names %d", e.Links)
	case e.Marks&^(markDense|markAgain) != 0, e.Flags&^plainFlags != 0, e.Protection&^protectionMask != 0:
		return fmt.Errorf("invalid flags %x, %x, %x", e.Marks, e.Flags, e.Protection)
	case e.Modified.Nanoseconds >= 1e9, e.AccessedAtEnd.Nanoseconds >= 1e9:
		return errors.New("invalid time")
	}
	return nil
}

// packable reports whether a packed tree can contain files of a type.
func packable(kind uint32) bool {
	switch kind {
	case unix.S_IFREG, unix.S_IFDIR, unix.S_IFLNK, unix.S_IFIFO, unix.S_IFSOCK, unix.S_IFCHR, unix.S_IFBLK:
		return true
	}
	return false
}

// attribute reads the record of an extended attribute.
func (r *indexReader) attribute() (packedRecord, error) {
	b, err := r.read(5)
	if err != nil {
		return packedRecord{}, err
	}
	name, value := int(b[0]), int64(binary.BigEndian.Uint32(b[1:]))
	if name == 0 || value > xattrMax {
		return packedRecord{}, fmt.Errorf("%w: extended attribute with %d bytes in its name and %d bytes in its value", ErrIndex, name, value)
	}
	if b, err = r.read(name + int(value)); err != nil {
		return packedRecord{}, err
	}
	record := packedRecord{attribute: string(b[:name]), value: b[name:]}
	if strings.Contains(record.attribute, "\x00") {
		return record, fmt.Errorf("%w: extended attribute %q", ErrIndex, record.attribute)
	}
	return record, nil
}
