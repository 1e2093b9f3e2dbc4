package clone

import (
	"context"
	"errors"
	"io"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/volume"
)

const (
	// maxDepth is how many directories deep a tree is copied.
	maxDepth = 10000
	// maxOpen is how many directories are kept open on each side; those above are opened
	// again on the way back.
	maxOpen = 64
)

// Tree copies what is in the directory src into the empty directory dst, both open for
// reading, and src's own owner, mode, times and extended attributes onto dst.
//
// All of it is copied: owners, modes, times of access and change to the nanosecond,
// extended attributes of all namespaces with ACLs and capabilities, hard links within the
// tree, holes, symbolic links, pipes, sockets, device nodes, and the flags of chattr(1).
// Files are copied as File does. Not copied are project IDs (dst's is inherited), flags
// that belong to a filesystem's own inner life, and, on dst itself, immutable and
// append-only, with which it could not be moved.
//
// Nothing in src is trusted, and src is not written to; only reading a symbolic link may
// touch its time of access. Links are not followed, pipes and devices not opened. The tree
// may be changed meanwhile by others: then the copy has some of each state, or it is an
// error.
//
// dst is durable when Tree returns: by one syncfs(2) of its filesystem, on NFS too, where
// closing a file has flushed it besides. An error leaves a part of the copy. It is
// ctx.Err() if ctx ended; volume.ErrPrecondition, which names the path, if something is
// mounted in src, if a directory was moved meanwhile, or is more than 10000 deep;
// ErrNested if a btrfs subvolume is in src.
func Tree(ctx context.Context, dst, src *os.File, o Options) (Result, error) {
	st, err := stat(src)
	if err != nil {
		return Result{}, err
	}
	c := &treeCopy{Options: o, dev: st.Dev, links: links{root: dst}}
	if err := c.copyRoot(ctx, dst, src); err != nil {
		return Result{}, err
	}
	if err := unix.Syncfs(int(dst.Fd())); err != nil {
		return Result{}, fail("syncfs", dst, err)
	}
	return Result{Shared: c.files > 0 && c.shared == c.files, Bytes: c.bytes}, nil
}

// treeCopy is one copy of a tree under way.
type treeCopy struct {
	Options
	// dev is the filesystem that all of the tree is on.
	dev uint64
	// path are the directories from the root to the one being copied; but for the last
	// maxOpen they are closed.
	path   []*directory
	links  links
	xattrs xattrCopy

	files, shared int
	// bytes is what the copy has been allocated, copied how much of that was copied or
	// shared.
	bytes, copied int64
}

// entry is something in a directory of the source.
type entry struct {
	*place
	dir *directory
	// node is open by O_PATH: that neither waits for anything nor does anything.
	node *os.File
	st   unix.Stat_t
}

func (e *entry) kind() uint32 { return e.st.Mode & unix.S_IFMT }

// copyRoot opens both anew: those of the caller stay where they are read.
func (c *treeCopy) copyRoot(ctx context.Context, dst, src *os.File) error {
	d := &directory{place: &place{}}
	defer d.close()
	defer c.links.close()
	if err := d.open(src, ".", dst, "."); err != nil {
		return err
	}
	// What is made in dst would inherit it.
	if err := unix.Removexattr(self(d.dst), "system.posix_acl_default"); err != nil && !errors.Is(err, unix.ENODATA) && !hasNone(err) {
		return fail("removexattr", d.dst, err)
	}
	if err := c.copyContent(ctx, d); err != nil {
		return err
	}
	if err := c.links.end(ctx); err != nil {
		return err
	}
	return d.at(c.finishDirectory(d))
}

// copyContent copies what is in a directory, which is open before and after.
func (c *treeCopy) copyContent(ctx context.Context, d *directory) error {
	c.path = append(c.path, d)
	defer func() { c.path = c.path[:len(c.path)-1] }()
	if n := len(c.path) - maxOpen; n > 0 {
		c.path[n-1].close()
	}
	for {
		name, err := d.list.next(d.src)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err = errors.Join(err, ctx.Err()); err != nil {
			return d.at(err)
		}
		if err := c.copyEntry(ctx, d, name); err != nil {
			return err
		}
	}
}

func (c *treeCopy) copyEntry(ctx context.Context, d *directory, name string) error {
	e := &entry{place: &place{in: d.place, name: name}, dir: d}
	if err := c.look(e); err != nil {
		return e.at(err)
	}
	if e.kind() == unix.S_IFDIR {
		return c.copyDirectory(ctx, e)
	}
	defer e.node.Close()
	if e.st.Nlink > 1 {
		return e.at(c.copyLinked(ctx, e))
	}
	return e.at(c.copyOther(ctx, e))
}

// copyOther copies anything but a directory.
func (c *treeCopy) copyOther(ctx context.Context, e *entry) error {
	if e.kind() == unix.S_IFREG {
		return c.copyFile(ctx, e)
	}
	return c.copyNode(e)
}

// copyLinked copies a file with several names at the first, and adds the others.
func (c *treeCopy) copyLinked(ctx context.Context, e *entry) error {
	l, err := linkOf(e)
	if err != nil {
		return err
	}
	if found, err := c.links.add(l, e); found || err != nil {
		return err
	}
	if err := c.copyOther(ctx, e); err != nil {
		return err
	}
	return c.links.keep(l, e)
}

// look opens an entry, which is no more than that.
func (c *treeCopy) look(e *entry) (err error) {
	e.node, err = openat(e.dir.src, e.name, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if errors.Is(err, unix.EXDEV) {
		return volume.Errorf(volume.ErrPrecondition, "something is mounted there, which a copy would leave out: unmount it")
	}
	if err != nil {
		return err
	}
	if e.st, err = stat(e.node); err == nil && e.st.Dev != c.dev {
		err = c.errForeign(e)
	}
	if err != nil {
		e.node.Close()
	}
	return err
}

// errForeign is of what is on another filesystem and not mounted there.
func (c *treeCopy) errForeign(e *entry) error {
	if nested, err := IsSubvolume(e.node); err == nil && nested {
		return errNested(e.dir.src.Name(), strconv.Quote(e.String()))
	}
	return volume.Errorf(volume.ErrPrecondition, "it is on another filesystem, which a copy would leave out: move it away")
}

// copyDirectory leaves the one above open, whatever it closes meanwhile.
func (c *treeCopy) copyDirectory(ctx context.Context, e *entry) error {
	d, err := c.enter(e)
	if err != nil {
		return e.at(err)
	}
	defer d.close()
	if err := c.copyContent(ctx, d); err != nil {
		return err
	}
	return e.at(c.leave(e, d))
}

// leave ends what enter began, when all that is in the directory is copied.
func (c *treeCopy) leave(e *entry, d *directory) error {
	if err := e.dir.reopen(d); err != nil {
		return err
	}
	if err := c.finishDirectory(d); err != nil {
		return err
	}
	return c.copyLocks(d.dst, d.src)
}

// enter makes a directory, and opens both.
func (c *treeCopy) enter(e *entry) (*directory, error) {
	defer e.node.Close()
	if len(c.path) >= maxDepth {
		return nil, volume.Errorf(volume.ErrPrecondition, "it is more than %d directories deep: move it up", maxDepth)
	}
	if err := unix.Mkdirat(int(e.dir.dst.Fd()), e.name, 0o700); err != nil {
		return nil, fail("mkdirat", e.dir.dst, err)
	}
	d := &directory{place: e.place}
	if err := d.open(e.node, ".", e.dir.dst, e.name); err != nil {
		d.close()
		return nil, err
	}
	return d, nil
}

// finishDirectory copies a directory's own attributes, the times last: all else changes
// them.
func (c *treeCopy) finishDirectory(d *directory) error {
	if err := likeFlags(d.dst, d.src, plainFlags); err != nil {
		return err
	}
	return c.finish(d.dst, d.src, &d.st)
}

// finish gives what was made all attributes that need no flag, and counts it.
func (c *treeCopy) finish(dst, src *os.File, st *unix.Stat_t) error {
	if err := c.copyAttributes(dst, src, st); err != nil {
		return err
	}
	made, err := stat(dst)
	c.bytes += made.Blocks * blockUnit
	return err
}

func (c *treeCopy) copyFile(ctx context.Context, e *entry) error {
	src, err := reopen(ctx, e.node)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := openat(e.dir.dst, e.name, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	// A file of NFS says at its end whether the server has it (close(2)).
	return errors.Join(c.fill(ctx, e, dst, src), dst.Close())
}

// fill copies content and attributes of a file.
func (c *treeCopy) fill(ctx context.Context, e *entry, dst, src *os.File) error {
	if err := c.copyBytes(ctx, dst, src); err != nil {
		return err
	}
	if err := likeFlags(dst, src, plainFlags); err != nil {
		return err
	}
	if err := c.finish(dst, src, &e.st); err != nil {
		return err
	}
	if e.st.Nlink > 1 { // links sets the locks when the copy has all its names
		return nil
	}
	return c.copyLocks(dst, src)
}

func (c *treeCopy) copyBytes(ctx context.Context, dst, src *os.File) error {
	o := Options{Unshared: c.Unshared}
	before := c.copied
	o.Progress = func(bytes int64) {
		c.copied = before + bytes
		if c.Progress != nil {
			c.Progress(c.copied)
		}
	}
	f, err := newFileCopy(dst, src, o)
	if err != nil {
		return err
	}
	if err := f.run(ctx); err != nil {
		return err
	}
	r, err := f.finish()
	c.files++
	if r.Shared {
		c.shared++
	}
	return err
}

// copyNode copies what has no content: a link, pipe, socket or device.
func (c *treeCopy) copyNode(e *entry) error {
	if err := makeNode(e); err != nil {
		return err
	}
	dst, err := openat(e.dir.dst, e.name, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer dst.Close()
	return c.finish(dst, e.node, &e.st)
}

func makeNode(e *entry) error {
	dir := int(e.dir.dst.Fd())
	if e.kind() != unix.S_IFLNK {
		return fail("mknodat", e.dir.dst, unix.Mknodat(dir, e.name, e.kind()|0o600, int(e.st.Rdev)))
	}
	target := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(int(e.node.Fd()), "", target)
	if err != nil {
		return fail("readlinkat", e.node, err)
	}
	return fail("symlinkat", e.dir.dst, unix.Symlinkat(string(target[:n]), dir, e.name))
}

// copyLocks makes immutable and append-only what its source is, after all else.
func (c *treeCopy) copyLocks(dst, src *os.File) error {
	want, err := locks(src)
	if err != nil || want == 0 {
		return err
	}
	return setLocks(dst, xflagImmutable|xflagAppend, want)
}
