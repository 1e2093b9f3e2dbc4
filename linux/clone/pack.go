package clone

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"os"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/background"
	"github.com/trivet-csi/trivet/linux/sys"
	"github.com/trivet-csi/trivet/linux/tree"
)

// maxDense is the maximum size in bytes of a file whose ranges are not read, because all of it is data. Ranges of such files
// are joined up to this size.
const maxDense = 1 << 20

// Packed is a directory tree as one sequence of bytes, which Unpack turns into a tree. It begins with an index of all entries.
// The content of the regular files follows, in the order of the index and with holes. Only the index is stored.
type Packed struct {
	// IndexSize is the size of the index, and Size that of the index and the content of all files including holes. Bytes is
	// the space that the tree takes. All are in bytes. The second half of the index is zeros unless Since is called.
	IndexSize, Size, Bytes int64
	// Layout is a checksum of the index without access times. As long as it is the same, an offset has the same meaning.
	Layout string
	// Budget limits the comparison with the base of Since, and the kernel's reads ahead of ReadAt. It may be nil.
	Budget *background.Budget

	index, root *os.File
	mu          sync.Mutex
	reading     *packedFiles
	// base is nil before Since. originSize is the size of the origins in the index in bytes.
	base       *os.File
	snapshots  bool
	originSize int64
}

// Pack reads a tree, and writes its index to a file without a name. temporary makes such a file. The tree must not change until
// the result is closed, which also closes root. The end of ctx also ends the reads of the result.
// What Pack reads, and which trees it refuses, is described at Tree. If the filesystem lists the entries of directories in the same
// order, the result is the same for the same tree.
func Pack(ctx context.Context, root *os.File, temporary func() (*os.File, error)) (*Packed, error) {
	p := &Packed{root: root}
	inodes, err := temporary()
	if err == nil {
		defer inodes.Close()
		p.index, err = temporary()
	}
	if err == nil {
		err = p.write(ctx, inodes)
	}
	if err != nil {
		return nil, errors.Join(err, p.Close())
	}
	p.reading = newPackedFiles(root, p.index, p.IndexSize, p.Size, readFlags, ctx.Err)
	return p, nil
}

// Close closes the tree and the base.
func (p *Packed) Close() error {
	if p.base != nil {
		_ = p.base.Close()
	}
	if p.reading != nil {
		p.reading.close()
	}
	if p.index != nil {
		_ = p.index.Close()
	}
	return p.root.Close()
}

// write writes the index.
func (p *Packed) write(ctx context.Context, inodes *os.File) error {
	st, err := stat(p.root)
	if err != nil {
		return err
	}
	w := &packing{ctx: ctx, source: source{p.root.Name(), st.Dev}, index: newIndexWriter(p.index), seen: inodeSet{file: inodes}}
	if err := w.add("", p.root, p.root, &st); err != nil {
		return err
	}
	if err := tree.Descend(ctx, p.root, w); err != nil {
		if errors.Is(err, tree.ErrMoved) {
			err = &uncopyable{err}
		}
		return err
	}
	if err := w.index.to.Flush(); err != nil {
		return err
	}
	p.IndexSize, p.Size, p.Bytes = 2*w.index.size, 2*w.index.size+w.index.data, w.bytes
	p.Layout = strconv.FormatUint(w.index.sum.Sum64(), 16)
	return p.index.Truncate(p.IndexSize)
}

// packing is the tree.Handler that writes the index.
type packing struct {
	source
	ctx    context.Context
	index  *indexWriter
	seen   inodeSet
	xattrs xattrCopy
	depth  int
	bytes  int64
}

// Visit implements tree.Handler.
func (w *packing) Visit(in *tree.Entry) (*os.File, error) {
	e := &entry{Entry: in}
	if err := w.open(e); err != nil {
		return nil, err
	}
	defer e.node.Close()
	switch e.kind() {
	case unix.S_IFDIR:
		return w.enter(e)
	case unix.S_IFREG:
		f, err := reopen(w.ctx, e.node, readFlags)
		if err != nil {
			return nil, err
		}
		defer f.Close()
		return nil, w.add(e.Name, e.node, f, &e.st)
	}
	return nil, w.add(e.Name, e.node, nil, &e.st)
}

// enter adds a directory, and returns it.
func (w *packing) enter(e *entry) (*os.File, error) {
	if w.depth++; w.depth >= maxDepth {
		return nil, errTooDeep()
	}
	dir, err := tree.OpenDir(e.node, ".")
	if err != nil {
		return nil, err
	}
	if err := w.add(e.Name, e.node, dir, &e.st); err != nil {
		dir.Close()
		return nil, err
	}
	return dir, nil
}

// Leave implements tree.Handler.
func (w *packing) Leave(*tree.Entry, *os.File) (again bool, err error) {
	w.depth--
	w.index.leave()
	return false, nil
}

// add writes an entry with its extended attributes to the index. file is open for reading if the entry is a regular file or
// a directory.
func (w *packing) add(name string, node, file *os.File, st *unix.Stat_t) error {
	e := &packedEntry{name: name, packedHeader: packedHeader{
		Mode: st.Mode, UID: st.Uid, GID: st.Gid, Device: st.Rdev,
		Modified: packedTimeOf(st.Mtim), AccessedAtEnd: packedTimeOf(st.Atim),
	}}
	var err error
	if e.kind() == unix.S_IFLNK {
		e.target, err = readLink(node)
	}
	if err == nil && file != nil {
		err = e.readFlags(file)
	}
	if err == nil && e.kind() == unix.S_IFREG {
		e.Size = st.Size
		if st.Size <= maxDense && st.Blocks*blockUnit >= st.Size {
			e.Marks |= markDense
		}
	}
	if err == nil && e.kind() != unix.S_IFDIR && st.Nlink > 1 {
		e.Inode, e.Links = st.Ino, uint32(st.Nlink)
		var again bool
		if again, err = w.seen.add(st.Ino); again {
			e.Marks |= markAgain
		}
	}
	if err == nil {
		err = w.index.entry(e)
	}
	if err != nil || e.Marks&markAgain != 0 {
		return err
	}
	w.bytes += st.Blocks * blockUnit
	return w.xattrs.each(sys.Path(node), func(name string, value []byte) error {
		if !label(name) {
			w.index.attribute(name, value)
		}
		return nil
	})
}

// label reports whether an extended attribute belongs to a security module, such as SELinux. The policy of each node determines
// these attributes. Capabilities do not belong to one.
func label(name string) bool {
	return strings.HasPrefix(name, "security.") && name != "security.capability"
}

// readFlags reads the flags and the protection of an open file or directory.
func (e *packedEntry) readFlags(file *os.File) error {
	flags, err := inodeFlags(file)
	if err != nil {
		return err
	}
	e.Flags = uint32(flags) & plainFlags
	e.Protection, err = protectionOf(file)
	return err
}

// ReadAt implements io.ReaderAt. It is fast if each call continues where the last one has ended.
func (p *Packed) ReadAt(b []byte, at int64) (n int, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for n < len(b) {
		var more int
		switch at := at + int64(n); {
		case at < p.IndexSize:
			more, err = p.index.ReadAt(b[n:][:min(int64(len(b)-n), p.IndexSize-at)], at)
		case at >= p.Size:
			return n, io.EOF
		default:
			p.reading.budget = p.Budget
			more, err = p.reading.readAt(b[n:], at)
		}
		n += more
		if err != nil && (more == 0 || !errors.Is(err, io.EOF)) {
			return n, err
		}
	}
	return n, nil
}

// Ranges yields the ranges of the index and of the data of the files from an offset on, in order. All other bytes are zeros. After
// Since, the data of a file with an origin is that of the origin instead, with zeros behind its end, except in the ranges.
func (p *Packed) Ranges(ctx context.Context, from int64) iter.Seq2[Range, error] {
	return func(yield func(Range, error) bool) {
		if end := p.IndexSize/2 + p.originSize; from < end && !yield(Range{from, end - from}, nil) {
			return
		}
		var dense Range // adjacent small files, as one range
		for r, err := range p.fileRanges(ctx, from) {
			small := err == nil && r.Length <= maxDense && p.base == nil // a hole that is sent stays a range
			if small && dense.Length > 0 && dense.end() == r.Offset && dense.Length < maxDense {
				dense.Length += r.Length
				continue
			}
			if dense.Length > 0 && !yield(dense, nil) {
				return
			}
			dense = Range{}
			if small {
				dense = r
			} else if !yield(r, err) {
				return
			}
		}
		if dense.Length > 0 {
			yield(dense, nil)
		}
	}
}

// fileRanges yields the ranges of the data of each file from an offset on, in order.
func (p *Packed) fileRanges(ctx context.Context, from int64) iter.Seq2[Range, error] {
	return func(yield func(Range, error) bool) {
		f := newPackedFiles(p.root, p.index, p.IndexSize, p.Size, readFlags, ctx.Err)
		f.base, f.snapshots, f.budget = p.base, p.snapshots, p.Budget
		defer f.close()
		for {
			err := f.next()
			if errors.Is(err, io.EOF) {
				return
			}
			if err != nil {
				yield(Range{}, err)
				return
			}
			if f.end() > from && !f.ranges(ctx, max(from, f.start), yield) {
				return
			}
		}
	}
}

// packedFiles finds and opens the regular files of a packed tree.
type packedFiles struct {
	root, index     *os.File
	indexSize, size int64
	// flags are those of open(2) for the files.
	flags int
	// each is called before each record is read. It ends the call with its error.
	each func() error
	// base contains the origins of files; nil if they have none. snapshots is that of comparison.
	base      *os.File
	snapshots bool
	// budget limits the reads of files and the comparison with the base.
	budget *background.Budget

	records *indexReader
	origins *originReader
	dirs    tree.Stack
	// current is the current file, start the offset of its data, and file is nil until it is open.
	current *packedEntry
	start   int64
	file    *os.File
	// origin is that of the entry of the last record; nil for none.
	origin *origin
}

func newPackedFiles(root, index *os.File, indexSize, size int64, flags int, each func() error) *packedFiles {
	return &packedFiles{root: root, index: index, indexSize: indexSize, size: size, flags: flags, each: each}
}

// end is the offset at which the data of the current file ends.
func (f *packedFiles) end() int64 { return f.start + f.current.dataSize() }

// close closes all files.
func (f *packedFiles) close() {
	f.closeFile()
	f.dirs.Close()
	f.records, f.current = nil, nil
}

func (f *packedFiles) closeFile() {
	if f.file != nil {
		f.file.Close()
		f.file = nil
	}
}

// next continues with the next regular file that has data. It returns io.EOF after the last one.
func (f *packedFiles) next() error {
	f.closeFile()
	for {
		r, err := f.step()
		if err != nil {
			return err
		}
		if r.entry != nil && r.entry.kind() == unix.S_IFREG && r.entry.dataSize() > 0 {
			f.current, f.start = r.entry, f.indexSize+r.data
			return nil
		}
	}
}

// step reads the next record, and enters or leaves its directory.
func (f *packedFiles) step() (packedRecord, error) {
	r, err := f.read()
	switch {
	case err != nil:
	case r.entry != nil && r.entry.kind() == unix.S_IFDIR:
		err = f.enter(r.entry)
	case r.entry == nil && r.attribute == "":
		err = f.leave()
	}
	return r, err
}

// read reads the next record, and the origin of its entry.
func (f *packedFiles) read() (packedRecord, error) {
	if f.records == nil {
		f.records = newIndexReader(f.index, f.indexSize/2, f.size-f.indexSize)
		f.origins = newOriginReader(f.index, f.indexSize)
	}
	if err := f.each(); err != nil {
		return packedRecord{}, err
	}
	r, err := f.records.next()
	f.origin = nil
	if e := r.entry; err == nil && f.base != nil && e != nil && e.dataSize() > 0 {
		f.origin, err = f.origins.next(e, f.dirs.Path(e.name))
	}
	return r, err
}

// leave closes the current directory.
func (f *packedFiles) leave() error {
	dir, err := f.dirs.Pop()
	if err == nil {
		err = dir.Close()
	}
	return err
}

// enter opens a directory of the tree.
func (f *packedFiles) enter(e *packedEntry) error {
	parent, name := f.root, "."
	if e.name != "" {
		parent, name = f.dirs.Top(), e.name
	}
	dir, err := tree.OpenDir(parent, name)
	if err != nil {
		return err
	}
	return f.dirs.Push(dir)
}

// open opens the current file.
func (f *packedFiles) open(ctx context.Context) error {
	node, err := openPacked(f.dirs.Top(), f.current.name, f.current)
	if err != nil {
		return err
	}
	defer node.Close()
	f.file, err = reopen(ctx, node, f.flags)
	if err == nil && f.current.Size > background.Piece {
		f.budget.NoReadAhead(f.file)
	}
	return err
}

// openPacked opens a name of an entry with O_PATH. It refuses a file of another type or size, because opening a device has effects.
func openPacked(dir *os.File, name string, e *packedEntry) (*os.File, error) {
	node, err := openat(dir, name, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	st, err := stat(node)
	if err == nil && (st.Mode&unix.S_IFMT != e.kind() || e.kind() == unix.S_IFREG && st.Size != e.Size) {
		err = &fs.PathError{Op: "open", Path: name, Err: fmt.Errorf("its type or size of %d bytes has changed", e.Size)}
	}
	if err != nil {
		node.Close()
		return nil, err
	}
	return node, nil
}

// ranges yields the ranges of the data of the current file from an offset on. It returns false if the caller needs no more ranges.
func (f *packedFiles) ranges(ctx context.Context, from int64, yield func(Range, error) bool) bool {
	if f.origin != nil {
		return f.differences(ctx, from, yield)
	}
	if f.current.Marks&markDense != 0 {
		return yield(Range{from, f.end() - from}, nil)
	}
	if err := f.open(ctx); err != nil {
		yield(Range{}, err)
		return false
	}
	for r, err := range Allocated(ctx, f.file, from-f.start, f.current.Size) {
		if r.Offset += f.start; !yield(r, err) || err != nil {
			return false
		}
	}
	return true
}

// find opens the file with the data at an offset.
func (f *packedFiles) find(at int64) error {
	if f.current != nil && at < f.start {
		f.close()
	}
	for f.current == nil || at >= f.end() {
		if err := f.next(); err != nil {
			return err
		}
	}
	if f.file != nil {
		return nil
	}
	return f.open(context.Background())
}

// readAt reads from the file with the data at an offset.
func (f *packedFiles) readAt(b []byte, at int64) (int, error) {
	if err := f.find(at); err != nil {
		return 0, err
	}
	n, err := f.file.ReadAt(b[:min(int64(len(b)), f.end()-at)], at-f.start)
	if n == 0 && errors.Is(err, io.EOF) {
		err = fail("read", f.file, io.ErrUnexpectedEOF)
	}
	return n, err
}
