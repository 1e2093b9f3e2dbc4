package clone

import (
	"context"
	"errors"
	"iter"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Numbers and structures of uapi/linux/fiemap.h (kernel documentation,
// filesystems/fiemap.rst).
const (
	fsIocFiemap = 0xc020660b // FS_IOC_FIEMAP
	fiemapSync  = 1 << 0     // FIEMAP_FLAG_SYNC

	extentLast      = 1 << 0  // FIEMAP_EXTENT_LAST
	extentUnknown   = 1 << 1  // FIEMAP_EXTENT_UNKNOWN
	extentDelalloc  = 1 << 2  // FIEMAP_EXTENT_DELALLOC
	extentEncoded   = 1 << 3  // FIEMAP_EXTENT_ENCODED
	extentEncrypted = 1 << 7  // FIEMAP_EXTENT_DATA_ENCRYPTED
	extentUnaligned = 1 << 8  // FIEMAP_EXTENT_NOT_ALIGNED
	extentInline    = 1 << 9  // FIEMAP_EXTENT_DATA_INLINE
	extentTail      = 1 << 10 // FIEMAP_EXTENT_DATA_TAIL
	extentUnwritten = 1 << 11 // FIEMAP_EXTENT_UNWRITTEN
	extentShared    = 1 << 13 // FIEMAP_EXTENT_SHARED

	// elusive is of extents that are not where they are said to be, or not alone there.
	elusive = extentUnknown | extentDelalloc | extentEncoded | extentEncrypted | extentUnaligned | extentInline | extentTail

	// windowExtents is how many extents are held in memory at once.
	windowExtents = 1024
)

// extent is struct fiemap_extent.
type extent struct {
	logical, physical, length uint64
	_                         [2]uint64
	flags                     uint32
	_                         [3]uint32
}

func (e *extent) end() int64 { return int64(e.logical + e.length) }

// extentMap is struct fiemap, and reads the extents of a file.
type extentMap struct {
	start, length  uint64
	flags          uint32
	mapped, wanted uint32
	_              uint32
	extents        [windowExtents]extent
}

// window reads the extents that a file has between two offsets, and until where they
// tell: that is end, or before it if there are more. What they are read into is the next
// window's.
func (m *extentMap) window(f *os.File, from, end int64) ([]extent, int64, error) {
	m.start, m.length = uint64(from), uint64(end-from)
	m.flags, m.wanted, m.mapped = fiemapSync, windowExtents, 0
	if err := ioctl(f, fsIocFiemap, unsafe.Pointer(m)); err != nil {
		return nil, 0, fail("FS_IOC_FIEMAP", f, err)
	}
	found := m.extents[:m.mapped]
	if len(found) < windowExtents || found[windowExtents-1].flags&extentLast != 0 {
		return found, end, nil
	}
	upTo := found[windowExtents-1].end()
	if upTo <= from {
		return nil, 0, fail("FS_IOC_FIEMAP", f, unix.EIO)
	}
	return found, min(upTo, end), nil
}

// Range is a part of an image, in bytes.
type Range struct{ Offset, Length int64 }

func (r Range) end() int64 { return r.Offset + r.Length }

// run is a range with data in one piece. shift is where on the disk it is, less where in
// the file.
type run struct {
	from, end, shift int64
	elusive          bool
}

// runs are what has data among extents between two offsets, each as long as it can be:
// how the kernel divides them up may differ from call to call. Blocks that were never
// written to read as zeros, and are no data.
func runs(extents []extent, from, end int64) []run {
	var out []run
	for i := range extents {
		e := &extents[i]
		if e.flags&(extentUnwritten|extentUnknown|extentDelalloc) == extentUnwritten {
			continue
		}
		r := run{
			from: max(from, int64(e.logical)), end: min(end, e.end()),
			shift: int64(e.physical) - int64(e.logical), elusive: e.flags&elusive != 0,
		}
		if r.from >= r.end {
			continue
		}
		from = r.end // what the kernel tells twice counts once
		if n := len(out); n > 0 && out[n-1].end == r.from && out[n-1].shift == r.shift && out[n-1].elusive == r.elusive {
			out[n-1].end = r.end
		} else {
			out = append(out, r)
		}
	}
	return out
}

// Allocated yields what has data in f, from an offset on and before that of size: in
// order, and in ranges that neither overlap nor touch. What it leaves out reads as
// zeros. Data in the cache counts. It holds little in memory, however many extents
// there are. The error, which is the last that it yields, is ctx.Err() if ctx ended.
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

// data yields what has data between two offsets that the file has.
func data(ctx context.Context, f *os.File, from, end int64) iter.Seq2[Range, error] {
	return func(yield func(Range, error) bool) {
		m := new(extentMap)
		for from < end {
			extents, upTo, err := m.window(f, from, end)
			if hasNone(err) {
				sought(ctx, f, from, end)(yield)
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

// sought is data by SEEK_DATA and SEEK_HOLE (lseek(2)).
func sought(ctx context.Context, f *os.File, from, end int64) iter.Seq2[Range, error] {
	return func(yield func(Range, error) bool) {
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

// nextData is the first range with data between two offsets, empty and at the end if
// there is none. Where nobody knows of holes, as on a block device, all is data.
func nextData(f *os.File, from, end int64) (Range, error) {
	if from >= end {
		return Range{end, 0}, nil
	}
	start, err := unix.Seek(int(f.Fd()), from, unix.SEEK_DATA)
	switch {
	case errors.Is(err, unix.ENXIO), err == nil && start >= end:
		return Range{end, 0}, nil
	case errors.Is(err, unix.EINVAL):
		return Range{from, end - from}, nil
	case err != nil:
		return Range{}, fail("SEEK_DATA", f, err)
	}
	stop, err := unix.Seek(int(f.Fd()), start, unix.SEEK_HOLE)
	if err != nil {
		return Range{}, fail("SEEK_HOLE", f, err)
	}
	return Range{start, min(stop, end) - start}, nil
}

// joined makes one of ranges that touch.
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

// Unshared is how many bytes of f are in blocks that no other file has. ok is false where
// the filesystem cannot say, as NFS.
func Unshared(f *os.File) (bytes int64, ok bool, err error) {
	const end = 1<<63 - 1 // blocks behind the end of the file are its, too
	m := new(extentMap)
	for from := int64(0); from < end; {
		extents, upTo, err := m.window(f, from, end)
		if hasNone(err) {
			return 0, false, nil
		}
		if err != nil {
			return 0, false, err
		}
		for i := range extents {
			if extents[i].flags&extentShared == 0 {
				bytes += extents[i].end() - max(from, int64(extents[i].logical))
			}
		}
		from = upTo
	}
	return bytes, true, nil
}
