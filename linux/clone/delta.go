package clone

import (
	"bytes"
	"context"
	"errors"
	"io"
	"iter"
	"math"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/background"
	"github.com/trivet-csi/trivet/linux/sys"
)

// compareBlock is the size of the blocks that are compared. compareBuffer is the size of one read. Both
// are in bytes.
const (
	compareBlock  = 64 << 10
	compareBuffer = 1 << 20
)

// Delta yields the ranges from an offset to the end of newer in which newer may differ from older. The ranges
// are in order, and neither overlap nor touch. To turn a copy of older into a copy of newer, set its size to
// that of newer, and copy these ranges from newer. If newer is larger than older, the bytes of newer that are
// behind the end of older and outside of the ranges are zeros.
//
// Neither file may change during the call. If both are immutable (SetImmutable) and on one xfs or btrfs, Delta
// detects equal content by its address on the disk and does not read it. Compressed data then counts as
// different. Otherwise Delta reads and compares the content, within the budget. After an error it yields no more
// ranges. The error is ctx.Err() if ctx ended.
func Delta(ctx context.Context, older, newer *os.File, from int64, budget *background.Budget) iter.Seq2[Range, error] {
	return joined(func(yield func(Range, error) bool) {
		p, err := newPair(older, newer, budget)
		if err != nil {
			yield(Range{}, err)
			return
		}
		p.differences(ctx, from)(yield)
	})
}

// pair holds two images that are compared.
type pair struct {
	older, newer *os.File
	// common is the size of the smaller image, and size that of newer, in bytes.
	common, size int64
	// byAddress means that equal addresses on the disk imply equal content. readUnaddressable means that the content of extents
	// without a unique address is compared then, and does not count as different.
	byAddress, readUnaddressable bool
	// budget limits the comparison of content.
	budget *background.Budget
}

// newPair reads the properties of two images.
func newPair(older, newer *os.File, budget *background.Budget) (*pair, error) {
	oldSize, err := sizeOf(older)
	if err != nil {
		return nil, err
	}
	newSize, err := sizeOf(newer)
	if err != nil {
		return nil, err
	}
	budget.NoReadAhead(older)
	budget.NoReadAhead(newer)
	p := &pair{older: older, newer: newer, common: min(oldSize, newSize), size: newSize, budget: budget}
	p.byAddress, err = comparableAddresses(older, newer)
	return p, err
}

// comparableAddresses reports whether two files can be compared by the addresses of their extents. They must
// be immutable, and on one device of a filesystem whose files share blocks. A file that is not immutable may
// have been overwritten in place.
func comparableAddresses(older, newer *os.File) (bool, error) {
	oldDev, oldStable, err := deviceOf(older)
	if err != nil {
		return false, err
	}
	newDev, newStable, err := deviceOf(newer)
	return oldStable && newStable && oldDev == newDev, err
}

// deviceOf returns st_dev of a file. stable means that the file is immutable, is on xfs or btrfs, and has its
// data on that device. The data of a realtime file of xfs is on another device.
func deviceOf(f *os.File) (dev uint64, stable bool, err error) {
	st, err := stat(f)
	if err != nil {
		return 0, false, err
	}
	fsType, err := filesystemType(f)
	if err != nil {
		return 0, false, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || fsType != unix.XFS_SUPER_MAGIC && fsType != unix.BTRFS_SUPER_MAGIC {
		return st.Dev, false, nil
	}
	a, err := sys.GetAttributes(f)
	return st.Dev, a.Flags&(sys.AttrImmutable|sys.AttrRealtime) == sys.AttrImmutable, err
}

// differences yields the ranges of Delta, which may touch.
func (p *pair) differences(ctx context.Context, from int64) iter.Seq2[Range, error] {
	return func(yield func(Range, error) bool) {
		for _, ranges := range []iter.Seq2[Range, error]{
			p.changed(ctx, from),
			data(ctx, p.newer, max(from, p.common), p.size),
		} {
			for r, err := range ranges {
				if !yield(r, err) || err != nil {
					return
				}
			}
		}
	}
}

// changed yields the differences from an offset to the end of the smaller image.
func (p *pair) changed(ctx context.Context, from int64) iter.Seq2[Range, error] {
	if p.byAddress {
		return p.changedAddresses(ctx, from)
	}
	return p.changedContent(ctx, from, p.common)
}

// changedAddresses yields the ranges whose addresses differ, from an offset to the end of the smaller image. If
// the addresses change while it reads them, it compares the content instead.
func (p *pair) changedAddresses(ctx context.Context, from int64) iter.Seq2[Range, error] {
	return func(yield func(Range, error) bool) {
		var older, newer sys.ExtentMap
		for from < p.common {
			oldRuns, newRuns, upTo, err := p.window(&older, &newer, from)
			if err = errors.Join(err, ctx.Err()); err != nil {
				yield(Range{}, err)
				return
			}
			ranges := differing(oldRuns, newRuns, from, upTo)
			stable, err := p.sameAddresses(&older, oldRuns, from, upTo)
			if err != nil || !stable || p.readUnaddressable && (anyUnaddressable(oldRuns) || anyUnaddressable(newRuns)) {
				ranges = p.changedContent(ctx, from, upTo)
			}
			for r, err := range ranges {
				if !yield(r, err) || err != nil {
					return
				}
			}
			from = upTo
		}
	}
}

// window reads the runs of both images from an offset up to upTo. An extent map has a limited size, and upTo
// is the offset up to which both are complete.
func (p *pair) window(older, newer *sys.ExtentMap, from int64) (oldRuns, newRuns []run, upTo int64, err error) {
	oldExtents, upTo, err := readExtents(older, p.older, from, p.common)
	if err != nil {
		return nil, nil, 0, err
	}
	newExtents, upTo, err := readExtents(newer, p.newer, from, upTo)
	return runs(oldExtents, from, upTo), runs(newExtents, from, upTo), upTo, err
}

// sameAddresses reports whether older still has the addresses that it had before those of newer were read. It
// is necessary because btrfs also moves the blocks of immutable files (btrfs-balance(8)), so that newer may
// have a former address of older.
func (p *pair) sameAddresses(older *sys.ExtentMap, before []run, from, upTo int64) (bool, error) {
	extents, _, err := readExtents(older, p.older, from, upTo)
	return err == nil && slices.Equal(before, runs(extents, from, upTo)), err
}

func anyUnaddressable(runs []run) bool {
	return slices.ContainsFunc(runs, func(r run) bool { return r.unaddressable })
}

// differing yields the ranges in which the runs of two files differ.
func differing(older, newer []run, from, end int64) iter.Seq2[Range, error] {
	return func(yield func(Range, error) bool) {
		for from < end {
			var a, b run
			older, a = runAt(older, from, end)
			newer, b = runAt(newer, from, end)
			upTo := min(a.end, b.end)
			if !sameContent(a, b) && !yield(Range{from, upTo - from}, nil) {
				return
			}
			from = upTo
		}
	}
}

// noAddress is the shift of a run without data.
const noAddress = math.MinInt64

// runAt returns the runs that end behind the offset at, and the run at this offset. The run has the shift
// noAddress if the file has no data there. end is the end of the comparison.
func runAt(runs []run, at, end int64) (rest []run, current run) {
	for len(runs) > 0 && runs[0].end <= at {
		runs = runs[1:]
	}
	switch {
	case len(runs) == 0:
		return runs, run{from: at, end: end, shift: noAddress}
	case runs[0].from > at:
		return runs, run{from: at, end: runs[0].from, shift: noAddress}
	}
	return runs, runs[0]
}

// sameContent reports whether two runs are the same blocks on the disk.
func sameContent(a, b run) bool { return a.shift == b.shift && !a.unaddressable && !b.unaddressable }

// changedContent yields the blocks between two offsets whose content differs. It reads only ranges with data
// in at least one of the images.
func (p *pair) changedContent(ctx context.Context, from, end int64) iter.Seq2[Range, error] {
	return func(yield func(Range, error) bool) {
		if err := errors.Join(sys.WriteBack(p.older), sys.WriteBack(p.newer)); err != nil {
			yield(Range{}, err)
			return
		}
		older, newer := make([]byte, compareBuffer), make([]byte, compareBuffer)
		for from < end {
			r, err := p.nextData(from, end)
			if err = errors.Join(err, ctx.Err()); err != nil {
				yield(Range{}, err)
				return
			}
			r.Length = min(r.Length, compareBuffer)
			err = errors.Join(p.readFull(ctx, p.older, older[:r.Length], r.Offset), p.readFull(ctx, p.newer, newer[:r.Length], r.Offset))
			if err != nil {
				yield(Range{}, err)
				return
			}
			for off := int64(0); off < r.Length; off += compareBlock {
				stop := min(off+compareBlock, r.Length)
				if !bytes.Equal(older[off:stop], newer[off:stop]) && !yield(Range{r.Offset + off, stop - off}, nil) {
					return
				}
			}
			from = r.end()
		}
	}
}

// nextData returns the first range between two offsets with data in at least one of the images. If there is no
// data, the range is empty and begins at end.
func (p *pair) nextData(from, end int64) (Range, error) {
	a, err := nextData(p.older, from, end)
	if err != nil {
		return a, err
	}
	b, err := nextData(p.newer, from, end)
	if b.Offset < a.Offset || b.Offset == a.Offset && b.Length > a.Length {
		a = b
	}
	return a, err
}

// readFull fills b. The range must be within the file.
func (p *pair) readFull(ctx context.Context, f *os.File, b []byte, at int64) error {
	_, err := p.budget.ReadAt(ctx, f, b, at)
	if errors.Is(err, io.EOF) {
		return fail("read", f, io.ErrUnexpectedEOF)
	}
	return err
}
