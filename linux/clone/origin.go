package clone

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
)

// The second half of the index of a packed tree has the origins: for each regular file with data, in order, a byte of the bits
// below, and what they say. Where the half ends or is zeros, files have no origin.
const (
	// originUsed means that the file has an origin.
	originUsed = 1 << iota
	// originChanged means that originState follows. Otherwise the origin has the size and the modification time of the file.
	originChanged
	// originMoved means that the length of a path and the path follow. Otherwise the origin has the path of the file.
	originMoved
)

// ErrBase means that the base of a packed tree has other files than the one from which the differences were determined.
var ErrBase = errors.New("the files of the base were changed")

// origin is the file of a base from which the data of a file of a packed tree differs only in some ranges.
type origin struct {
	originState
	// path is relative to the root of the base.
	path string
}

// originState is the state of an origin, in network byte order.
type originState struct {
	Size     int64
	Modified packedTime
}

func stateOf(st *unix.Stat_t) originState { return originState{st.Size, packedTimeOf(st.Mtim)} }

// append appends the record of an origin, which may be nil, of an entry with a path.
func (o *origin) append(record []byte, e *packedEntry, path string) ([]byte, error) {
	if o == nil {
		return append(record, 0), nil
	}
	marks, state, moved := byte(originUsed), []byte(nil), []byte(nil)
	if o.originState != (originState{e.Size, e.Modified}) {
		marks |= originChanged
		var err error
		if state, err = binary.Append(nil, binary.BigEndian, o.originState); err != nil {
			return nil, err
		}
	}
	if o.path != path {
		marks |= originMoved
		moved = append(binary.BigEndian.AppendUint16(nil, uint16(len(o.path))), o.path...)
	}
	return append(append(append(record, marks), state...), moved...), nil
}

// originReader reads origins. It does not trust them.
type originReader struct{ from *bufio.Reader }

// newOriginReader returns a reader of the origins in an index with a size.
func newOriginReader(index io.ReaderAt, size int64) *originReader {
	return &originReader{bufio.NewReaderSize(io.NewSectionReader(index, size/2, size/2), 64<<10)}
}

// next returns the origin of the next regular file with data; nil if there is none. path is that of the file.
func (r *originReader) next(e *packedEntry, path string) (*origin, error) {
	marks, err := r.from.ReadByte()
	if errors.Is(err, io.EOF) {
		return nil, nil
	}
	if err != nil || marks == 0 {
		return nil, err
	}
	if marks&originUsed == 0 || marks&^(originUsed|originChanged|originMoved) != 0 {
		return nil, fmt.Errorf("%w: origin with bits %x", ErrIndex, marks)
	}
	o := &origin{originState: originState{e.Size, e.Modified}, path: path}
	if marks&originChanged != 0 {
		err = binary.Read(r.from, binary.BigEndian, &o.originState)
	}
	if err == nil && marks&originMoved != 0 {
		o.path, err = r.path()
	}
	return o, incomplete(err)
}

// path reads a path.
func (r *originReader) path() (string, error) {
	var length uint16
	if err := binary.Read(r.from, binary.BigEndian, &length); err != nil {
		return "", err
	}
	b := make([]byte, length)
	if _, err := io.ReadFull(r.from, b); err != nil {
		return "", err
	}
	if path := string(b); path != "" && len(path) < unix.PathMax && !strings.Contains(path, "\x00") {
		return path, nil
	}
	return "", fmt.Errorf("%w: origin with path %q", ErrIndex, b)
}

// openRegular opens the regular file at a path with O_PATH. It returns nil if there is none.
func openRegular(root *os.File, path string) (node *os.File, st unix.Stat_t, err error) {
	node, err = openat(root, path, unix.O_PATH|unix.O_NOFOLLOW, 0)
	for _, none := range []error{unix.ENOENT, unix.ENOTDIR, unix.ELOOP, unix.EXDEV, unix.ENAMETOOLONG} {
		if errors.Is(err, none) {
			return nil, st, nil
		}
	}
	if err != nil {
		return nil, st, err
	}
	if st, err = stat(node); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG {
		node.Close()
		return nil, st, err
	}
	return node, st, nil
}

// openOrigin opens the origin of the current file. ErrBase if it is not in the state that the origin has.
func (f *packedFiles) openOrigin(ctx context.Context) (*os.File, error) {
	node, st, err := openRegular(f.base, f.origin.path)
	if err != nil {
		return nil, err
	}
	if node == nil {
		return nil, fmt.Errorf("%w: %q is missing", ErrBase, f.origin.path)
	}
	defer node.Close()
	if err := f.checkOrigin(&st); err != nil {
		return nil, err
	}
	return reopen(ctx, node, readFlags)
}

// checkOrigin returns ErrBase if the state of the current file's origin is another one.
func (f *packedFiles) checkOrigin(st *unix.Stat_t) error {
	if got := stateOf(st); got != f.origin.originState {
		return fmt.Errorf("%w: %q has the size and modification time %v, expected %v", ErrBase, f.origin.path, got, f.origin.originState)
	}
	return nil
}

// share makes the content of the file dst of an entry from an offset on that of its origin. The offset is a multiple of the block
// size of the filesystem. bytes is the size of the data of the origin, without its holes.
func (f *packedFiles) share(dst *os.File, e *packedEntry, from int64) (bytes int64, err error) {
	src, err := f.openOrigin(context.Background())
	if err != nil {
		return 0, err
	}
	defer src.Close()
	if err := dst.Truncate(from); err != nil {
		return 0, err
	}
	if err := ShareRest(dst, src, from); err != nil {
		return 0, err
	}
	st, err := stat(src)
	if err == nil {
		err = f.checkOrigin(&st) // the base may be removed meanwhile
	}
	if err != nil {
		return 0, err
	}
	return min(st.Size, st.Blocks*blockUnit), dst.Truncate(e.Size)
}

// differences yields the ranges of the current file from an offset on that differ from its origin. A range is either data or a
// hole. It returns false if the caller needs no more ranges.
func (f *packedFiles) differences(ctx context.Context, from int64, yield func(Range, error) bool) bool {
	older, err := f.openOrigin(ctx)
	if err == nil {
		defer older.Close()
		err = f.open(ctx)
	}
	var p *pair
	if err == nil {
		p, err = newPair(older, f.file, f.budget)
	}
	if err != nil {
		yield(Range{}, err)
		return false
	}
	if f.snapshots {
		p.byAddress, p.readUnaddressable = true, true
	}
	for r, err := range joined(p.differences(ctx, from-f.start)) {
		if err == nil {
			r, err = p.completed(ctx, r)
		}
		if err != nil {
			yield(Range{}, err)
			return false
		}
		for part, err := range parts(ctx, f.file, r) {
			if part.Offset += f.start; !yield(part, err) || err != nil {
				return false
			}
		}
	}
	return true
}

// completed returns a range of the differences up to the end of the last block of older, if newer is larger and has a hole there. A
// part of a block cannot become a hole.
func (p *pair) completed(ctx context.Context, r Range) (Range, error) {
	if r.end() != p.common || p.common == p.size {
		return r, nil
	}
	end := min(p.size, (p.common+maxBlock-1)/maxBlock*maxBlock)
	for d, err := range data(ctx, p.newer, p.common, end) {
		if err != nil {
			return r, err
		}
		end = d.Offset
		break
	}
	return Range{r.Offset, end - r.Offset}, nil
}

// parts yields the parts of a range of a file, in order. Each is either data or a hole.
func parts(ctx context.Context, file *os.File, r Range) iter.Seq2[Range, error] {
	return func(yield func(Range, error) bool) {
		at := r.Offset
		for d, err := range joined(data(ctx, file, r.Offset, r.end())) {
			if err == nil && d.Offset > at && !yield(Range{at, d.Offset - at}, nil) {
				return
			}
			if !yield(d, err) || err != nil {
				return
			}
			at = d.end()
		}
		if at < r.end() {
			yield(Range{at, r.end() - at}, nil)
		}
	}
}

// Since makes Ranges yield the differences from a base, which must not change until the packed tree is closed, and is closed with it.
// If the base and the tree are read-only snapshots on one btrfs, files are identified by their inode numbers and compared by the
// addresses of their blocks. Otherwise files with the same path are compared by their content. The result is the same for the same
// trees. exists is called after the base was read. It ends the call with an error if the base was deleted, because its files may then
// have been missing. After an error, Ranges yields the whole content.
func (p *Packed) Since(base *os.File, exists func() error) error {
	c, err := newComparison(p.root, base)
	if err != nil {
		return err
	}
	f := newPackedFiles(p.root, p.index, p.IndexSize, p.Size, readFlags, p.reading.each)
	defer f.close()
	to := bufio.NewWriterSize(io.NewOffsetWriter(p.index, p.IndexSize/2), 64<<10)
	size, room := int64(0), p.IndexSize/2
	for record := []byte(nil); ; {
		err := f.next()
		if errors.Is(err, io.EOF) {
			if err := errors.Join(to.Flush(), exists()); err != nil {
				return err
			}
			p.base, p.snapshots, p.originSize = base, c.snapshots, size
			return nil
		}
		var o *origin
		path := ""
		if err == nil {
			path = f.dirs.Path(f.current.name)
			o, err = c.originOf(f, path)
		}
		if err == nil {
			record, err = o.append(record[:0], f.current, path)
		}
		if err != nil {
			return err
		}
		if size+int64(len(record)) > room {
			record = append(record[:0], 0)[:min(1, room-size)]
		}
		size += int64(len(record))
		_, _ = to.Write(record) // Flush returns the error
	}
}

// comparison finds the origins of the files of a tree in a base.
type comparison struct {
	base *os.File
	// snapshots means that the tree and the base are read-only snapshots on one btrfs. They are usually of the same subvolume, so that
	// a file has the same inode number in both. The same change time (ctime) does not mean the same content: a snapshot of a file that
	// is being written can have the change time of a write without its data.
	snapshots bool
}

func newComparison(root, base *os.File) (*comparison, error) {
	c := &comparison{base: base}
	for _, dir := range []*os.File{root, base} {
		ok, err := IsSubvolume(dir)
		if err == nil && ok {
			_, ok, err = sys.SubvolumeInfo(dir)
		}
		if err != nil || !ok {
			return c, err
		}
	}
	tree, err := sys.BtrfsUUID(root)
	if err != nil {
		return nil, err
	}
	other, err := sys.BtrfsUUID(base)
	c.snapshots = tree == other
	return c, err
}

// originOf returns the origin of the current file; nil if there is none.
func (c *comparison) originOf(f *packedFiles, path string) (*origin, error) {
	var newer unix.Stat_t
	if err := unix.Fstatat(int(f.dirs.Top().Fd()), f.current.name, &newer, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return nil, fail("fstatat", f.dirs.Top(), err)
	}
	path, node, older, err := c.find(path, newer.Ino)
	if err != nil || node == nil {
		return nil, err
	}
	defer node.Close()
	file, err := reopen(context.Background(), node, readFlags)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	flags, err := inodeFlags(file)
	if (flags^int(f.current.Flags))&sys.FlagNoCOW != 0 { // such files do not share blocks
		return nil, err
	}
	return &origin{originState: stateOf(&older), path: path}, err
}

// find opens the file of the base that corresponds to the file of the tree with a path and an inode number; nil if there is none.
func (c *comparison) find(path string, inode uint64) (at string, node *os.File, st unix.Stat_t, err error) {
	node, st, err = openRegular(c.base, path)
	if err != nil || !c.snapshots || node != nil && st.Ino == inode {
		return path, node, st, err
	}
	if node != nil {
		node.Close()
	}
	if at, err = sys.InodePath(c.base, inode); err != nil || at == "" {
		return "", nil, st, err
	}
	if node, st, err = openRegular(c.base, at); node != nil && st.Ino != inode {
		node.Close()
		node = nil
	}
	return at, node, st, err
}
