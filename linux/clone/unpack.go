package clone

import (
	"context"
	"errors"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
	"github.com/trivet-csi/trivet/linux/tree"
)

// earlyFlags are the flags that affect how data is written, so that they are set on an empty file.
const earlyFlags = sys.FlagNoCOW | sys.FlagCompress | sys.FlagNoCompress

var (
	// ErrTooMany means that a packed tree has more files and directories than Target.MaxInodes.
	ErrTooMany = errors.New("the tree has too many files and directories")
	// ErrTooLarge means that the files of a packed tree begin with more data of the base than Target.MaxShared.
	ErrTooLarge = errors.New("the tree has too much data of the base")
)

// Target describes the tree that is made of a packed tree (Packed).
type Target struct {
	// Root is a directory, and Index the complete index of the packed tree. Both are open until the tree is closed.
	Root, Index *os.File
	// IndexSize is the size of the index, and Size that of the packed tree, in bytes.
	IndexSize, Size int64
	// MaxInodes is the maximum number of files and directories; 0 for no maximum.
	MaxInodes int64
	// Base is the tree from which the differences are received (Packed.Since), as it was then. It is on the same filesystem, and is
	// only used by Unpack and OpenUnpacked. It is nil for none. MaxShared is the maximum size of its data in the new tree, in bytes.
	Base      *os.File
	MaxShared int64
	// Each is called before each record of the index is read. It ends the call with its error.
	Each func() error
	// WriteOut means that a write waits until the disk has the data, except that of small files. It is not durable then.
	WriteOut bool
}

// files finds the files of the tree, and opens them with flags.
func (t *Target) files(flags int, each func() error) *packedFiles {
	f := newPackedFiles(t.Root, t.Index, t.IndexSize, t.Size, flags, each)
	f.base = t.Base
	return f
}

// Unpacked is a tree that is made of a packed tree. Neither the index nor the order of the data is trusted: nothing is written
// outside of the root, and not more than the size of the packed tree.
type Unpacked struct {
	Target
	// SharedBytes is the size of the data of the base in the tree that Unpack has made.
	SharedBytes int64
	writing     *packedFiles
}

// Unpack makes all entries of a packed tree in the empty directory t.Root: files have their size and the data of their origin in
// t.Base, with the same blocks, or no data, and no entry has its attributes. The error is ErrIndex if the index is invalid, and
// ErrTooMany before an entry is made. After another error, the root contains a part of the tree. It is ErrTooLarge, ErrBase if the
// base is another one, and ErrNotShared if blocks cannot be shared.
func Unpack(t Target) (*Unpacked, error) {
	if err := t.checkInodes(); err != nil {
		return nil, err
	}
	b := &unpacking{packedFiles: t.files(0, t.Each), links: links{root: t.Root}, maxShared: t.MaxShared}
	defer b.close()
	defer b.links.close()
	if err := removeDefaultACL(t.Root); err != nil {
		return nil, err
	}
	if err := b.run(); err != nil {
		return nil, err
	}
	u := newUnpacked(t)
	u.SharedBytes = b.shared
	return u, nil
}

// checkInodes returns ErrTooMany if the index has more than MaxInodes files and directories.
func (t *Target) checkInodes() error {
	if t.MaxInodes == 0 {
		return nil
	}
	f := newPackedFiles(t.Root, t.Index, t.IndexSize, t.Size, 0, t.Each)
	for count := int64(0); count <= t.MaxInodes; {
		r, err := f.read()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if r.entry != nil && r.entry.Marks&markAgain == 0 {
			count++
		}
	}
	return ErrTooMany
}

func newUnpacked(t Target) *Unpacked {
	t.Base = nil
	return &Unpacked{Target: t, writing: t.files(unix.O_RDWR, t.Each)}
}

// unpacking makes the entries.
type unpacking struct {
	*packedFiles
	links links
	// shared is the size of the data of the base so far, in bytes.
	shared, maxShared int64
}

func (u *unpacking) run() error {
	for {
		r, err := u.read()
		if errors.Is(err, io.EOF) {
			return u.links.end(u.each)
		}
		if err == nil {
			err = u.make(r)
		}
		if err != nil {
			return err
		}
	}
}

// make makes the entry of a record.
func (u *unpacking) make(r packedRecord) error {
	e := r.entry
	switch {
	case e == nil && r.attribute != "":
		return nil
	case e == nil:
		return u.leave()
	case e.kind() == unix.S_IFDIR:
		if e.name != "" {
			if err := unix.Mkdirat(int(u.dirs.Top().Fd()), e.name, 0o700); err != nil {
				return fail("mkdirat", u.dirs.Top(), err)
			}
		}
		return u.enter(e)
	}
	named := &entry{Entry: &tree.Entry{Name: e.name}, dst: u.dirs.Top(), st: *e.stat()}
	l := link{inode: e.Inode}
	if e.Marks&markAgain != 0 {
		found, err := u.links.add(l, named)
		if err == nil && !found {
			err = errors.Join(ErrIndex, fail("linkat", named.dst, unix.ENOENT))
		}
		return err
	}
	if err := u.create(named.dst, e); err != nil || e.Inode == 0 {
		return err
	}
	return u.links.store(l, named)
}

// create creates a file that is not a directory.
func (u *unpacking) create(dir *os.File, e *packedEntry) error {
	if e.kind() != unix.S_IFREG {
		return makeNode(dir, e.name, e.stat(), e.target)
	}
	f, err := openat(dir, e.name, unix.O_CREAT|unix.O_EXCL|unix.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := setFlags(f, int(e.Flags), earlyFlags); err != nil {
		return err
	}
	if u.origin == nil {
		return f.Truncate(e.Size)
	}
	bytes, err := u.share(f, e, 0)
	if u.shared += bytes; err == nil && u.shared > u.maxShared {
		err = ErrTooLarge
	}
	return err
}

// setFlags sets the flags of chattr(1) in mask to those in flags. It omits flags that the filesystem does not have, because the
// tree may be from another type of filesystem.
func setFlags(f *os.File, flags, mask int) error {
	have, err := inodeFlags(f)
	if err != nil || have&mask == flags&mask {
		return err
	}
	if flags&sys.FlagNoCOW != 0 { // btrfs refuses it for a compressed file
		have &^= sys.FlagCompress & mask
	}
	for flag := 1; flag <= mask; flag <<= 1 {
		if mask&flag == 0 || have&flag == flags&flag {
			continue
		}
		next := have&^flag | flags&flag
		err := sys.SetInodeFlags(f, next)
		if err == nil {
			have = next
		} else if !sys.Unsupported(err) && !errors.Is(err, unix.EINVAL) {
			return err
		}
	}
	return nil
}

// Aligned returns the largest offset up to an offset that is a multiple of an alignment within its file. It only reads the index.
func (t *Target) Aligned(upTo, alignment int64) (int64, error) {
	f := newPackedFiles(t.Root, t.Index, t.IndexSize, t.Size, 0, t.Each)
	for {
		r, err := f.read()
		if errors.Is(err, io.EOF) {
			return upTo, nil
		}
		if err != nil {
			return 0, err
		}
		if r.entry == nil {
			continue
		}
		if start := t.IndexSize + r.data; start+r.entry.dataSize() > upTo {
			return upTo - max(0, upTo-start)%alignment, nil
		}
	}
}

// OpenUnpacked continues with a tree that Unpack has made, and whose content is complete up to an offset. It removes all data
// behind that, or replaces it by that of the base. With a base, the offset is one of Aligned for a multiple of the block size of the
// filesystem. The errors are those of Unpack.
func OpenUnpacked(t Target, upTo int64) (*Unpacked, error) {
	f := t.files(unix.O_RDWR, t.Each)
	defer f.close()
	for {
		err := f.next()
		if errors.Is(err, io.EOF) {
			return newUnpacked(t), nil
		}
		switch {
		case err != nil || f.end() <= upTo:
		case f.origin != nil:
			err = f.restore(max(0, upTo-f.start))
		default:
			err = f.clear(upTo)
		}
		if err != nil {
			return nil, err
		}
	}
}

// restore makes the content of the current file from an offset on that of its origin. If an earlier call was interrupted, the file
// has another size.
func (f *packedFiles) restore(from int64) error {
	node, _, err := openRegular(f.dirs.Top(), f.current.name)
	if err == nil && node == nil {
		err = fail("open", f.dirs.Top(), unix.ENOENT)
	}
	if err != nil {
		return err
	}
	defer node.Close()
	if f.file, err = reopen(context.Background(), node, f.flags); err != nil {
		return err
	}
	_, err = f.share(f.file, f.current, from)
	return err
}

// clear removes the data of the current file behind an offset.
func (f *packedFiles) clear(upTo int64) error {
	if f.start >= upTo {
		var st unix.Stat_t
		err := unix.Fstatat(int(f.dirs.Top().Fd()), f.current.name, &st, unix.AT_SYMLINK_NOFOLLOW)
		if err != nil || st.Blocks == 0 && st.Size == f.current.Size {
			return fail("fstatat", f.dirs.Top(), err)
		}
	}
	if err := f.open(context.Background()); err != nil {
		return err
	}
	from := max(0, upTo-f.start) // truncating within a hole could allocate a block
	return f.punch(Range{from, f.current.Size - from})
}

// maxBlock is at least the block size of every filesystem, in bytes.
const maxBlock = 64 << 10

// punch makes a range of the current file, which is open, read as zeros, and frees its blocks (fallocate(2)).
func (f *packedFiles) punch(r Range) error {
	if r.end() == f.current.Size { // otherwise the last block is not freed
		r.Length += maxBlock
	}
	err := unix.Fallocate(int(f.file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, r.Offset, r.Length)
	return fail("fallocate", f.file, err)
}

// PunchHole makes a range behind the index read as zeros, and frees its blocks.
func (u *Unpacked) PunchHole(r Range) error {
	for f := u.writing; r.Length > 0; {
		if err := f.find(r.Offset); err != nil {
			return err
		}
		n := min(r.Length, f.end()-r.Offset)
		if err := f.punch(Range{r.Offset - f.start, n}); err != nil {
			return err
		}
		r.Offset, r.Length = r.Offset+n, r.Length-n
	}
	return nil
}

// WriteAt implements io.WriterAt, for offsets behind the index. It is fast if each call is behind the last one.
func (u *Unpacked) WriteAt(b []byte, at int64) (n int, err error) {
	for n < len(b) {
		f := u.writing
		if err := f.find(at + int64(n)); err != nil {
			return n, err
		}
		part := b[n:][:min(int64(len(b)-n), f.end()-at-int64(n))]
		offset := at + int64(n) - f.start
		more, err := f.file.WriteAt(part, offset)
		if err == nil && u.WriteOut && more >= smallFile {
			err = sys.WriteOut(f.file, offset, int64(more)) // Sync reports the errors of another open file
		}
		if n += more; err != nil {
			return n, err
		}
	}
	return n, nil
}

// Sync makes what was written durable (syncfs(2)).
func (u *Unpacked) Sync() error { return fail("syncfs", u.Root, unix.Syncfs(int(u.Root.Fd()))) }

// Close closes the files that are open for writing.
func (u *Unpacked) Close() { u.writing.close() }

// Finish sets the attributes of all entries, after all data was written, and makes the tree durable. It can be repeated. The
// directory itself does not get the flags immutable and append-only, which would prevent moving it. Extended attributes and
// flags that the filesystem does not support are omitted.
func (u *Unpacked) Finish(ctx context.Context) error {
	u.writing.close()
	f := &finishing{packedFiles: u.files(0, ctx.Err)}
	defer f.close()
	for {
		r, err := f.read()
		if errors.Is(err, io.EOF) {
			return u.Sync()
		}
		if err == nil {
			err = f.apply(ctx, r)
		}
		if err != nil {
			return errors.Join(err, f.abort())
		}
	}
}

// finishing sets the attributes of entries.
type finishing struct {
	*packedFiles
	// pending is the entry whose extended attributes are being set; nil for none. node is it, opened with O_PATH, and plain is
	// open for reading if it is a regular file or a directory.
	pending     *packedEntry
	node, plain *os.File
}

// apply applies a record.
func (f *finishing) apply(ctx context.Context, r packedRecord) error {
	if r.attribute != "" {
		return f.attribute(r.attribute, r.value)
	}
	if err := f.complete(); err != nil {
		return err
	}
	if r.entry == nil {
		return f.leave()
	}
	if r.entry.kind() == unix.S_IFDIR {
		if err := f.enter(r.entry); err != nil {
			return err
		}
		return f.begin(ctx, f.dirs.Top(), ".", r.entry)
	}
	if r.entry.Marks&markAgain != 0 {
		return nil
	}
	return f.begin(ctx, f.dirs.Top(), r.entry.name, r.entry)
}

// attribute sets an extended attribute of the pending entry. It omits what describes only how the filesystem stores the data.
func (f *finishing) attribute(name string, value []byte) error {
	if label(name) {
		return nil
	}
	err := setXattr(sys.Path(f.node), name, value)
	switch {
	case errors.Is(err, unix.EINVAL) && strings.HasPrefix(name, "btrfs."):
		return nil
	case errors.Is(err, unix.ENOSPC) && f.hasRoom():
		return errUncopyable("%q: its extended attribute %q with %d bytes does not fit into this type of filesystem: remove the attribute, or use a pool with the type of filesystem of the source", f.pending.name, name, len(value))
	}
	return err
}

// hasRoom reports whether the filesystem has free space, so that ENOSPC means that an extended attribute is too large. XFS, which
// returns it for a quota, too, has no attributes that are too large.
func (f *finishing) hasRoom() bool {
	var st unix.Statfs_t
	err := unix.Fstatfs(int(f.root.Fd()), &st)
	return err == nil && st.Type != unix.XFS_SUPER_MAGIC && st.Bavail > 0
}

// begin begins with the attributes of an entry.
func (f *finishing) begin(ctx context.Context, dir *os.File, name string, e *packedEntry) (err error) {
	f.pending = e
	if f.node, err = openPacked(dir, name, e); err != nil {
		return err
	}
	if kind := e.kind(); kind == unix.S_IFREG || kind == unix.S_IFDIR {
		if f.plain, err = reopen(ctx, f.node, readFlags); err != nil {
			return err
		}
		protection, err := protectionOf(f.plain)
		if err == nil && protection != 0 { // by an earlier call
			err = setAttributes(f.plain, protectionMask, 0)
		}
		if err == nil {
			err = setFlags(f.plain, int(e.Flags), plainFlags)
		}
		if err != nil {
			return err
		}
	}
	return setOwner(f.node, e.stat())
}

// complete sets the remaining attributes of the pending entry.
func (f *finishing) complete() error {
	e := f.pending
	if e == nil {
		return nil
	}
	err := setModeAndTimes(f.node, e.stat())
	if err == nil && f.plain != nil && e.Protection != 0 && e.name != "" {
		err = setAttributes(f.plain, protectionMask, e.Protection)
	}
	return errors.Join(err, f.abort())
}

// abort closes the pending entry.
func (f *finishing) abort() (err error) {
	for _, file := range []*os.File{f.node, f.plain} {
		if file != nil {
			err = errors.Join(err, file.Close())
		}
	}
	f.pending, f.node, f.plain = nil, nil, nil
	return err
}
