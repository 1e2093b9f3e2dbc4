package clone

import (
	"context"
	"errors"
	"iter"
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
)

// unaddressable are the flags of extents whose physical address is unknown or not unique.
const unaddressable = sys.ExtentUnknown | sys.ExtentDelalloc | sys.ExtentEncoded | sys.ExtentEncrypted |
	sys.ExtentNotAligned | sys.ExtentInline | sys.ExtentTail

// extentEnd returns the offset in the file at which an extent ends.
func extentEnd(e *sys.Extent) int64 { return int64(e.Logical + e.Length) }

// readExtents reads the first extents of a file between two offsets into m, and returns them and the offset up
// to which they are complete. The next call with m overwrites the returned extents.
func readExtents(m *sys.ExtentMap, f *os.File, from, end int64) ([]sys.Extent, int64, error) {
	found, err := m.Read(f, from, end)
	if err != nil {
		return nil, 0, err
	}
	if len(found) < sys.MaxExtents || found[sys.MaxExtents-1].Flags&sys.ExtentLast != 0 {
		return found, end, nil
	}
	upTo := extentEnd(&found[sys.MaxExtents-1])
	if upTo <= from {
		return nil, 0, fail("FS_IOC_FIEMAP", f, unix.EIO)
	}
	return found, min(upTo, end), nil
}

// Range is a part of an image, in bytes.
type Range struct{ Offset, Length int64 }

func (r Range) end() int64 { return r.Offset + r.Length }

// run is a range of a file, in bytes, whose data is contiguous on the disk. shift is the offset on the disk minus
// the offset in the file.
type run struct {
	from, end, shift int64
	// unaddressable means that the offset on the disk is unknown or not unique.
	unaddressable bool
}

// runs returns the runs of extents between two offsets. It joins adjacent extents, because the kernel may divide them
// differently in each call. It skips blocks that were never written, which read as zeros.
func runs(extents []sys.Extent, from, end int64) []run {
	var out []run
	for i := range extents {
		e := &extents[i]
		if e.Flags&(sys.ExtentUnwritten|sys.ExtentUnknown|sys.ExtentDelalloc) == sys.ExtentUnwritten {
			continue
		}
		r := run{
			from: max(from, int64(e.Logical)), end: min(end, extentEnd(e)),
			shift: int64(e.Physical) - int64(e.Logical), unaddressable: e.Flags&unaddressable != 0,
		}
		if r.from >= r.end {
			continue
		}
		from = r.end // the kernel may report an extent twice
		if n := len(out); n > 0 && out[n-1].end == r.from && out[n-1].shift == r.shift && out[n-1].unaddressable == r.unaddressable {
			out[n-1].end = r.end
		} else {
			out = append(out, r)
		}
	}
	return out
}

// Allocated yields the ranges of f with data between the offsets from and size, in order. The ranges neither
// overlap nor touch. All other bytes read as zeros. Dirty pages count as data. The memory that Allocated uses
// does not depend on the number of extents. After an error it yields no more ranges. The error is ctx.Err() if
// ctx ended.
func Allocated(ctx context.Context, f *os.File, from, size int64) iter.Seq2[Range, error] {
	return joined(func(yield func(Range, error) bool) {
		end, err := sizeOf(f)
		if err != nil {
			yield(Range{}, err)
			return
		}
		data(ctx, f, from, min(end, size))(yield)
	})
}

// data yields the ranges with data between two offsets within the file.
func data(ctx context.Context, f *os.File, from, end int64) iter.Seq2[Range, error] {
	return func(yield func(Range, error) bool) {
		m := new(sys.ExtentMap)
		for from < end {
			extents, upTo, err := readExtents(m, f, from, end)
			if sys.Unsupported(err) {
				seekData(ctx, f, from, end)(yield)
				return
			}
			if err = errors.Join(err, ctx.Err()); err != nil {
				yield(Range{}, err)
				return
			}
			for _, r := range runs(extents, from, upTo) {
				if !yield(Range{r.from, r.end - r.from}, nil) {
					return
				}
			}
			from = upTo
		}
	}
}

// seekData does the same as data with SEEK_DATA and SEEK_HOLE (lseek(2)), for filesystems without FIEMAP and
// for copies. It writes dirty pages first, as FIEMAP does.
func seekData(ctx context.Context, f *os.File, from, end int64) iter.Seq2[Range, error] {
	return func(yield func(Range, error) bool) {
		if err := sys.WriteBack(f); err != nil {
			yield(Range{}, err)
			return
		}
		for from < end {
			r, err := nextData(f, from, end)
			if err = errors.Join(err, ctx.Err()); err != nil {
				yield(Range{}, err)
				return
			}
			if r.Length == 0 || !yield(r, nil) {
				return
			}
			from = r.end()
		}
	}
}

// nextData is sys.NextData with a Range as the result.
func nextData(f *os.File, from, end int64) (Range, error) {
	start, stop, err := sys.NextData(f, from, end)
	return Range{start, stop - start}, err
}

// joined yields ranges, and joins those that touch.
func joined(ranges iter.Seq2[Range, error]) iter.Seq2[Range, error] {
	return func(yield func(Range, error) bool) {
		var last Range
		for r, err := range ranges {
			if err == nil && last.Length > 0 && last.end() == r.Offset {
				last.Length += r.Length
				continue
			}
			if last.Length > 0 && !yield(last, nil) {
				return
			}
			last = r
			if err != nil {
				yield(Range{}, err)
				return
			}
		}
		if last.Length > 0 {
			yield(last, nil)
		}
	}
}

// Unshared returns the number of bytes that are allocated to f and not shared with another file. ok is false
// if the filesystem does not report its extents, as on NFS.
func Unshared(f *os.File) (bytes int64, ok bool, err error) {
	const end = 1<<63 - 1 // the offset: blocks behind the end of the file count, too
	m := new(sys.ExtentMap)
	for from := int64(0); from < end; {
		extents, upTo, err := readExtents(m, f, from, end)
		if sys.Unsupported(err) {
			return 0, false, nil
		}
		if err != nil {
			return 0, false, err
		}
		for i := range extents {
			if extents[i].Flags&sys.ExtentShared == 0 {
				bytes += extentEnd(&extents[i]) - max(from, int64(extents[i].Logical))
			}
		}
		from = upTo
	}
	return bytes, true, nil
}
