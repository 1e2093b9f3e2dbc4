package clone

import (
	"context"
	"errors"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/trace"
	"github.com/trivet-csi/trivet/linux/sys"
	"github.com/trivet-csi/trivet/linux/tree"
)

// maxDepth is the maximum depth of a copied tree, in directories.
const maxDepth = 10000

// Tree copies the content of the directory src into the empty directory dst, and the owner, mode, times and
// extended attributes of src to dst. Both directories must be open for reading.
//
// Tree copies owners, modes, access and modification times with nanoseconds, extended attributes of all
// namespaces including ACLs and capabilities, hard links within the tree, holes, symbolic links, pipes,
// sockets, device nodes, and the flags of chattr(1). It copies the content of files as File does. It does not
// copy project IDs (files inherit the ID of dst) and flags that the filesystem sets. dst itself does not get
// the flags immutable and append-only, which would prevent moving it.
//
// Tree does not trust the content of src and does not write to src, but reading a symbolic link may change the
// access time of the link. Tree follows no symbolic links and opens no pipes and devices. If another process
// changes the tree during the call, the copy mixes several states, or Tree fails.
//
// dst is durable when Tree returns, because Tree calls syncfs(2) on the filesystem, and closing each file on
// NFS flushes it. After an error dst contains a part of the copy. The error is ctx.Err() if ctx ended, and
// ErrUncopyable, with the path, if src contains a mount point, a btrfs subvolume, a directory that was moved
// during the call, or more than 10000 levels.
func Tree(ctx context.Context, dst, src *os.File, o Options) (_ Result, err error) {
	ctx, span := trace.Start(ctx, "copy directory")
	defer span.End(&err)
	st, err := stat(src)
	if err != nil {
		return Result{}, err
	}
	c := &treeCopy{Options: o, source: source{src.Name(), st.Dev}, ctx: ctx, links: links{root: dst}}
	defer c.dirs.Close()
	defer c.links.close()
	if err := c.begin(dst, src, &st); err != nil {
		return Result{}, err
	}
	if err := tree.Descend(ctx, src, c); err != nil {
		if errors.Is(err, tree.ErrMoved) {
			err = &uncopyable{err}
		}
		return Result{}, err
	}
	if err := unix.Syncfs(int(dst.Fd())); err != nil {
		return Result{}, fail("syncfs", dst, err)
	}
	return Result{Shared: c.files > 0 && c.shared == c.files, Bytes: c.bytes}, nil
}

// treeCopy is the tree.Handler that copies each entry of the source.
type treeCopy struct {
	Options
	source
	ctx context.Context
	// dstFlags and srcFlags are added when files are opened (sys.NoDelegation): a pod of this node may change them through a mount of its own.
	dstFlags, srcFlags int
	// dirs are the directories of the copy, from its root to the current one. states are the states that the
	// corresponding directories of the source had when they were opened.
	dirs   tree.Stack
	states []unix.Stat_t
	links  links
	xattrs xattrCopy

	// files is the number of copied regular files. shared is the number of those that share all their blocks with
	// the source.
	files, shared int
	// bytes is the space that is allocated to the copy. copied is the number of bytes that were reported to
	// Progress.
	bytes, copied int64
}

// source is a tree that is read.
type source struct {
	// name is the name of the tree in errors.
	name string
	// dev is st_dev of the tree. Every entry must have it.
	dev uint64
}

// entry is an entry of a directory of the source.
type entry struct {
	*tree.Entry
	// dst is the corresponding directory of the copy.
	dst *os.File
	// node is the source, opened with O_PATH, which has no side effects and does not block. st is its state.
	node *os.File
	st   unix.Stat_t
}

// kind returns the type of the file (S_IFMT).
func (e *entry) kind() uint32 { return e.st.Mode & unix.S_IFMT }

// begin prepares the root of the copy. It opens the root again, so that the file offset of dst does not change.
func (c *treeCopy) begin(dst, src *os.File, st *unix.Stat_t) (err error) {
	if err := removeDefaultACL(dst); err != nil {
		return err
	}
	if c.dstFlags, err = sys.NoDelegation(dst); err != nil {
		return err
	}
	if c.srcFlags, err = sys.NoDelegation(src); err != nil {
		return err
	}
	return c.push(dst, ".", st)
}

// removeDefaultACL removes the default ACL of a directory, which files that are created in it would inherit.
func removeDefaultACL(dir *os.File) error {
	err := unix.Removexattr(sys.Path(dir), "system.posix_acl_default")
	if err != nil && !errors.Is(err, unix.ENODATA) && !sys.Unsupported(err) {
		return fail("removexattr", dir, err)
	}
	return nil
}

// push enters a directory of the copy. st is the state of the corresponding directory of the source.
func (c *treeCopy) push(parent *os.File, name string, st *unix.Stat_t) error {
	dir, err := tree.OpenDir(parent, name)
	if err != nil {
		return err
	}
	c.states = append(c.states, *st)
	return c.dirs.Push(dir)
}

// Visit implements tree.Handler.
func (c *treeCopy) Visit(in *tree.Entry) (*os.File, error) {
	e := &entry{Entry: in, dst: c.dirs.Top()}
	if err := c.open(e); err != nil {
		return nil, err
	}
	defer e.node.Close()
	switch {
	case e.kind() == unix.S_IFDIR:
		return c.enter(e)
	case e.st.Nlink > 1:
		return nil, c.copyLinked(e)
	}
	return nil, c.copyOther(e)
}

// open opens the node of an entry. The error is ErrUncopyable if the entry is a mount point or on another filesystem.
func (s source) open(e *entry) (err error) {
	e.node, err = openat(e.Dir, e.Name, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if errors.Is(err, unix.EXDEV) {
		return errUncopyable("a filesystem is mounted at this path, and a copy would not contain it: unmount it")
	}
	if err != nil {
		return err
	}
	if e.st, err = stat(e.node); err == nil && e.st.Dev != s.dev {
		err = s.errForeign(e)
	}
	if err != nil {
		e.node.Close()
	}
	return err
}

// errForeign returns the error for an entry that is on another filesystem but is not a mount point.
func (s source) errForeign(e *entry) error {
	if nested, err := IsSubvolume(e.node); err == nil && nested {
		return errNested(s.name, strconv.Quote(e.Path()))
	}
	return errUncopyable("it is on another filesystem, and a copy would not contain it: move it away")
}

func errTooDeep() error {
	return errUncopyable("it is more than %d directories deep: move it to a higher directory", maxDepth)
}

// enter creates the copy of a directory, and returns the open source directory.
func (c *treeCopy) enter(e *entry) (*os.File, error) {
	if len(c.states) >= maxDepth {
		return nil, errTooDeep()
	}
	if err := unix.Mkdirat(int(e.dst.Fd()), e.Name, 0o700); err != nil {
		return nil, fail("mkdirat", e.dst, err)
	}
	src, err := tree.OpenDir(e.node, ".")
	if err != nil {
		return nil, err
	}
	if err := c.push(e.dst, e.Name, &e.st); err != nil {
		src.Close()
		return nil, err
	}
	return src, nil
}

// Leave implements tree.Handler.
func (c *treeCopy) Leave(e *tree.Entry, src *os.File) (again bool, err error) {
	if e.Dir == nil { // the root
		if err := c.links.end(c.ctx.Err); err != nil {
			return false, err
		}
	}
	dst, err := c.dirs.Pop()
	if err != nil {
		return false, err
	}
	defer dst.Close()
	n := len(c.states) - 1
	st := c.states[n]
	c.states = c.states[:n]
	if err := copyFlags(dst, src, plainFlags); err != nil {
		return false, err
	}
	if err := c.finish(dst, src, &st); err != nil || e.Dir == nil {
		return false, err
	}
	return false, copyProtection(dst, src)
}

// copyOther copies an entry that is not a directory.
func (c *treeCopy) copyOther(e *entry) error {
	if e.kind() == unix.S_IFREG {
		return c.copyFile(e)
	}
	return c.copyNode(e)
}

// copyLinked copies a file with several hard links. The first name is copied, and the others are linked
// to that copy.
func (c *treeCopy) copyLinked(e *entry) error {
	l, err := linkOf(e)
	if err != nil {
		return err
	}
	if found, err := c.links.add(l, e); found || err != nil {
		return err
	}
	if err := c.copyOther(e); err != nil {
		return err
	}
	return c.links.store(l, e)
}

// finish copies the attributes of an entry, and adds the allocated space of its copy to c.bytes.
func (c *treeCopy) finish(dst, src *os.File, st *unix.Stat_t) error {
	if err := c.copyAttributes(dst, src, st); err != nil {
		return err
	}
	dstStat, err := stat(dst)
	c.bytes += dstStat.Blocks * blockUnit
	return err
}

// copyFile copies a regular file with its attributes.
func (c *treeCopy) copyFile(e *entry) error {
	src, err := reopen(c.ctx, e.node, readFlags|c.srcFlags)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := openat(e.dst, e.Name, unix.O_CREAT|unix.O_EXCL|unix.O_WRONLY|c.dstFlags, 0o600)
	if err != nil {
		return err
	}
	// On NFS, close(2) reports failed writes.
	return errors.Join(c.fill(e, dst, src), dst.Close())
}

// fill copies content and attributes of a file.
func (c *treeCopy) fill(e *entry, dst, src *os.File) error {
	if err := c.copyBytes(dst, src); err != nil {
		return err
	}
	if err := copyFlags(dst, src, plainFlags); err != nil {
		return err
	}
	if err := c.finish(dst, src, &e.st); err != nil {
		return err
	}
	if e.st.Nlink > 1 { // links.release sets the protection when the copy has all its names
		return nil
	}
	return copyProtection(dst, src)
}

// copyBytes copies the content of a regular file.
func (c *treeCopy) copyBytes(dst, src *os.File) error {
	o := Options{Unshared: c.Unshared, Budget: c.Budget}
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
	if err := f.run(c.ctx); err != nil {
		return err
	}
	r, err := f.finish()
	c.files++
	if r.Shared {
		c.shared++
	}
	return err
}

// copyNode copies a symbolic link, pipe, socket or device node.
func (c *treeCopy) copyNode(e *entry) error {
	target := ""
	if e.kind() == unix.S_IFLNK {
		var err error
		if target, err = readLink(e.node); err != nil {
			return err
		}
	}
	if err := makeNode(e.dst, e.Name, &e.st, target); err != nil {
		return err
	}
	dst, err := openat(e.dst, e.Name, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer dst.Close()
	return c.finish(dst, e.node, &e.st)
}

// makeNode creates a symbolic link, pipe, socket or device node with the type and the device of st, without its attributes.
func makeNode(dir *os.File, name string, st *unix.Stat_t, target string) error {
	if st.Mode&unix.S_IFMT == unix.S_IFLNK {
		return fail("symlinkat", dir, unix.Symlinkat(target, int(dir.Fd()), name))
	}
	return fail("mknodat", dir, unix.Mknodat(int(dir.Fd()), name, st.Mode&unix.S_IFMT|0o600, int(st.Rdev)))
}

// readLink returns the target of a symbolic link that was opened with O_PATH.
func readLink(node *os.File) (string, error) {
	target := make([]byte, unix.PathMax)
	n, err := unix.Readlinkat(int(node.Fd()), "", target)
	if err != nil {
		return "", fail("readlinkat", node, err)
	}
	return string(target[:n]), nil
}

// copyProtection copies the attributes immutable and append-only. It must be the last change of the copy.
func copyProtection(dst, src *os.File) error {
	protection, err := protectionOf(src)
	if err != nil || protection == 0 {
		return err
	}
	return setAttributes(dst, protectionMask, protection)
}
