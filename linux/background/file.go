package background

import (
	"context"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
)

// NoReadAhead makes the kernel read from a file or device only what the task reads. Otherwise it would read the following content while the
// disk rests, which can be several MiB (read_ahead_kb). It changes the open file description (FADV_RANDOM in posix_fadvise(2)); without a
// budget, it does nothing.
func (b *Budget) NoReadAhead(f *os.File) {
	if b != nil {
		_ = unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_RANDOM) // without it, the task only disturbs others more
	}
}

// ReadAt reads content at an offset, in pieces with the idle I/O priority.
func (b *Budget) ReadAt(ctx context.Context, from io.ReaderAt, content []byte, at int64) (n int, err error) {
	read := func(content []byte, at int64) (n int, err error) {
		err = b.Idle(func() (err error) {
			n, err = from.ReadAt(content, at)
			return err
		})
		return n, err
	}
	return b.each(ctx, read, content, at)
}

// WriteAt writes content at an offset, in pieces.
func (b *Budget) WriteAt(ctx context.Context, to io.WriterAt, content []byte, at int64) (n int, err error) {
	return b.each(ctx, to.WriteAt, content, at)
}

// each calls do with each piece of content.
func (b *Budget) each(ctx context.Context, do func([]byte, int64) (int, error), content []byte, at int64) (done int, err error) {
	for done < len(content) && err == nil {
		piece := content[done:]
		piece = piece[:min(b.PieceSize(), int64(len(piece)))]
		err = b.Do(ctx, func() (int64, error) {
			n, err := do(piece, at+int64(done))
			done += n
			return int64(n), err
		})
	}
	return done, err
}

// Writer writes to a file. With a budget, it waits until the disk has what it writes, because the kernel would write much at once later.
// The written data is not durable yet. Writes to a device have the idle I/O priority.
type Writer struct {
	File   *os.File
	Budget *Budget
	// early is the file in another open file description; nil without a budget.
	early *os.File
	// isDevice means that the file is a block device.
	isDevice bool
}

// Writer returns a writer to a file or device, which stays open after Close.
func (b *Budget) Writer(file *os.File) (*Writer, error) {
	w := &Writer{File: file, Budget: b}
	if b == nil {
		return w, nil
	}
	info, err := file.Stat()
	if err != nil {
		return nil, err
	}
	w.isDevice = info.Mode()&os.ModeDevice != 0
	// An error of writing back is reported once for an open file description (sync_file_range(2), fsync(2)), so with one
	// description a sync of the file would not get it.
	w.early, err = os.OpenFile(sys.Path(file), os.O_WRONLY, 0)
	return w, err
}

// Close ends the use of the file.
func (w *Writer) Close() {
	if w.early != nil {
		w.early.Close()
	}
}

// WriteAt implements io.WriterAt.
func (w *Writer) WriteAt(content []byte, at int64) (n int, err error) {
	err = w.withPriority(func() (err error) {
		if n, err = w.File.WriteAt(content, at); err == nil && w.early != nil {
			err = sys.WriteOut(w.early, at, int64(n))
		}
		return err
	})
	return n, err
}

// withPriority calls a part of a write with the I/O priority of the file.
func (w *Writer) withPriority(part func() error) error {
	if w.isDevice {
		return w.Budget.Idle(part)
	}
	return part()
}
