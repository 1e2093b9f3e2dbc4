package clone

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/trace"
	"github.com/trivet-csi/trivet/linux/background"
	"github.com/trivet-csi/trivet/linux/sys"
)

const (
	// chunk is the number of bytes that are copied between two checks of the context, without a budget.
	chunk = 8 << 20
	// smallFile is the size in bytes below which the kernel writes a file later, because to wait for each small file takes long.
	smallFile = 64 << 10
)

// Options are the options of a copy.
type Options struct {
	// Unshared means that blocks are not shared. The copy then has its own space from the beginning.
	Unshared bool
	// OnlyShared means that nothing is copied if blocks cannot be shared (ErrNotShared).
	OnlyShared bool
	// Progress is called repeatedly with the number of bytes copied so far. It may be nil.
	Progress func(bytes int64)
	// Budget limits the reads and writes if blocks are not shared.
	Budget *background.Budget
}

// Result describes a finished copy.
type Result struct {
	// Shared means that all files of the copy share their blocks with the source.
	Shared bool
	// Bytes is the size that is allocated to the copy, including shared blocks.
	Bytes int64
}

// File copies the content of src to dst, including holes. dst must be an empty regular file that is open for
// writing, and src a regular file that is open for reading. If the filesystem supports it, the files share
// their blocks (ioctl_ficlone(2)), and the copy is a consistent snapshot. Otherwise the data is copied, by the
// filesystem or its server if they support it (copy_file_range(2)) and there is no budget, and no process may write
// to src during the call.
//
// dst and src may also be block devices. File writes all bytes to a device, including zeros, because the
// device may have other content. If the device is larger than src, its content after the copy does not change.
//
// dst is durable when File returns. File copies the flag FS_NOCOW_FL if the filesystem has that flag, because
// btrfs shares no blocks between files that differ in it. After an error dst contains a part of the copy. The
// error is ctx.Err() if ctx ended, and ErrTooSmall if dst is a device smaller than src. File rejects a dst
// that is not empty, and a dst or src that is neither a file nor a device.
func File(ctx context.Context, dst, src *os.File, o Options) (_ Result, err error) {
	ctx, span := trace.Start(ctx, "copy file")
	defer span.End(&err)
	c, err := newFileCopy(dst, src, o)
	if err != nil {
		return Result{}, err
	}
	if err := c.run(ctx); err != nil {
		return Result{}, err
	}
	if err := dst.Sync(); err != nil {
		return Result{}, err
	}
	return c.finish()
}

// ShareRest makes the content of dst from an offset on that of src, with the same blocks (ioctl_ficlonerange(2)). dst has the
// size of the offset, which is a multiple of the block size of the filesystem. ErrNotShared if the filesystem cannot share
// blocks, also if both files are empty. The result is not durable.
func ShareRest(dst, src *os.File, from int64) error {
	size, err := sizeOf(src)
	if err != nil || from > 0 && from >= size {
		return err
	}
	if from == 0 { // the flag of a file with content cannot be changed
		if err := copyFlags(dst, src, sys.FlagNoCOW); err != nil && !sys.Unsupported(err) {
			return err
		}
	}
	err = sys.ShareBlocks(dst, src, from)
	if err != nil && refused(err) {
		return ErrNotShared
	}
	return err
}

// fileCopy is the state of one call of File, or of one file that Tree copies.
type fileCopy struct {
	Options
	dst, src *os.File
	size     int64
	// anyDevice means that dst or src is a block device. dstDevice means that dst is a block device.
	anyDevice, dstDevice bool
	// shared means that dst shares its blocks with src.
	shared bool
	// offload means that copy_file_range(2) is used. It is cleared when the kernel refuses the call. Within a budget it is not used,
	// because only reads have the idle I/O priority.
	offload bool
	// punch means that zeros become holes, because src does not report holes: it is a device, or can be on a filesystem such as NFS
	// before 4.2. There is a budget only on local filesystems, which report them, so zeros that are allocated stay allocated.
	punch bool
	// to writes to dst.
	to  io.WriterAt
	buf []byte
	// done is the number of bytes that were reported to Progress.
	done int64
}

// newFileCopy verifies that dst and src can be copied.
func newFileCopy(dst, src *os.File, o Options) (*fileCopy, error) {
	c := &fileCopy{Options: o, dst: dst, src: src, offload: !o.Unshared && o.Budget == nil}
	for _, f := range []*os.File{dst, src} {
		st, err := stat(f)
		if err != nil {
			return nil, err
		}
		switch kind := st.Mode & unix.S_IFMT; {
		case kind == unix.S_IFBLK:
			c.anyDevice, c.dstDevice = true, c.dstDevice || f == dst
		case kind != unix.S_IFREG:
			return nil, fmt.Errorf("%q is neither a file nor a block device: only those can be copied", f.Name())
		case f == dst && st.Size != 0:
			return nil, fmt.Errorf("%q has %d bytes: copy to an empty file", f.Name(), st.Size)
		}
	}
	c.punch = !c.dstDevice && (c.anyDevice || o.Budget == nil)
	var err error
	c.size, err = sizeOf(src)
	return c, err
}

// run copies the content. The copy is not durable yet.
func (c *fileCopy) run(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if c.anyDevice {
		return c.copyData(ctx)
	}
	if err := copyFlags(c.dst, c.src, sys.FlagNoCOW); err != nil && !sys.Unsupported(err) {
		return err
	}
	if !c.Unshared {
		err := sys.ShareBlocks(c.dst, c.src, 0)
		if err == nil {
			c.shared = true
			return nil
		}
		if !refused(err) {
			return err
		}
		if c.OnlyShared {
			return ErrNotShared
		}
	}
	return c.copyData(ctx)
}

// finish returns the result. If the copy shares its blocks, finish makes the only call of Progress.
func (c *fileCopy) finish() (Result, error) {
	if c.dstDevice {
		return Result{Bytes: c.size}, nil
	}
	st, err := stat(c.dst)
	r := Result{Shared: c.shared, Bytes: st.Blocks * blockUnit}
	if c.shared {
		c.report(r.Bytes)
	}
	return r, err
}

// refused reports whether an error means that the kernel, the filesystem or the server cannot share or
// copy the blocks of these two files (ioctl_ficlone(2), copy_file_range(2)). Copying with read(2) and
// write(2) may still work.
func refused(err error) bool {
	return sys.Unsupported(err) || errors.Is(err, unix.EXDEV) || errors.Is(err, unix.EINVAL) ||
		errors.Is(err, unix.EBADF) || errors.Is(err, unix.ETXTBSY)
}

// makeRoom extends dst to the size of src. It returns ErrTooSmall if dst is a device that is smaller than src.
func (c *fileCopy) makeRoom() error {
	if !c.dstDevice {
		return c.dst.Truncate(c.size)
	}
	room, err := sizeOf(c.dst)
	if err == nil && room < c.size {
		err = fmt.Errorf("%w: %q has %d bytes, %q has %d: copy to a device that is at least as large", ErrTooSmall, c.dst.Name(), room, c.src.Name(), c.size)
	}
	return err
}

// copyData copies the ranges with data. If dst or src is a device, it copies all bytes.
func (c *fileCopy) copyData(ctx context.Context) error {
	if err := c.makeRoom(); err != nil {
		return err
	}
	c.to = c.dst
	if c.size >= smallFile {
		w, err := c.Budget.Writer(c.dst)
		if err != nil {
			return err
		}
		defer w.Close()
		c.to = w
		c.Budget.NoReadAhead(c.src)
	}
	if c.anyDevice {
		c.offload = false // copy_file_range(2) rejects devices
		return c.copyRange(ctx, Range{Length: c.size})
	}
	for r, err := range seekData(ctx, c.src, 0, c.size) {
		if err == nil {
			err = c.copyRange(ctx, r)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// copyRange copies the bytes of a range, and reports the progress.
func (c *fileCopy) copyRange(ctx context.Context, r Range) error {
	for r.Length > 0 {
		var n int64
		err := c.Budget.Do(ctx, func() (_ int64, err error) {
			n, err = c.copyChunk(r.Offset, min(r.Length, chunk, c.Budget.PieceSize()))
			return 2 * n, err // n bytes are read and written
		})
		if err != nil {
			return err
		}
		r.Offset, r.Length = r.Offset+n, r.Length-n
		c.report(n)
	}
	return nil
}

// report adds a number of bytes to the progress.
func (c *fileCopy) report(bytes int64) {
	c.done += bytes
	if c.Progress != nil {
		c.Progress(c.done)
	}
}

// copyChunk copies up to length bytes, and returns their number. If the kernel cannot copy, copy_file_range(2) may
// return 0 instead of an error (section BUGS of its manual page).
func (c *fileCopy) copyChunk(at, length int64) (int64, error) {
	if !c.offload {
		return c.readWrite(at, length)
	}
	from, to := at, at
	n, err := unix.CopyFileRange(int(c.src.Fd()), &from, int(c.dst.Fd()), &to, int(length), 0)
	switch {
	case errors.Is(err, unix.EINTR):
		return 0, nil
	case refused(err), err == nil && n == 0:
		c.offload = false
		return c.readWrite(at, length)
	}
	return int64(n), fail("copy_file_range", c.dst, err)
}

// readWrite does the same as copyChunk with read(2) and write(2).
func (c *fileCopy) readWrite(at, length int64) (int64, error) {
	if c.buf == nil {
		c.buf = make([]byte, min(c.size, 1<<20))
	}
	b := c.buf[:min(length, int64(len(c.buf)))]
	n := 0
	err := c.Budget.Idle(func() (err error) {
		n, err = c.src.ReadAt(b, at)
		return err
	})
	if n == 0 {
		if errors.Is(err, io.EOF) {
			err = &fs.PathError{Op: "read", Path: c.src.Name(), Err: io.ErrUnexpectedEOF}
		}
		return 0, err
	}
	if c.punch && zero(b[:n]) {
		return int64(n), nil
	}
	n, err = c.to.WriteAt(b[:n], at)
	return int64(n), err
}

// zero reports whether all bytes are 0: the first is 0, and each equals the one before it.
func zero(b []byte) bool { return b[0] == 0 && bytes.Equal(b[1:], b[:len(b)-1]) }
