package verify

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
)

// totals counts what the histories of a pool have compared. changed and allocated are bytes.
type totals struct{ comparisons, pairs, changed, allocated atomic.Int64 }

// snapshotImage returns the path of a snapshot's image.
func (g *testDriver) snapshotImage(id string) string {
	return filepath.Join(g.medium.Dir, "snapshots", id[strings.LastIndex(id, ":")+1:], "0", "image")
}

// span is a part of an image, in bytes.
type span struct{ from, end int64 }

// readSpans reads the ranges of a stream. It fails if they overlap or are not in ascending order.
func readSpans[M interface{ GetBlockMetadata() []*csi.BlockMetadata }](stream interface{ Recv() (M, error) }, err error) ([]span, error) {
	if err != nil {
		return nil, err
	}
	var out []span
	for {
		message, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return out, nil
		}
		if err != nil {
			return nil, err
		}
		for _, b := range message.GetBlockMetadata() {
			s := span{b.GetByteOffset(), b.GetByteOffset() + b.GetSizeBytes()}
			if s.from >= s.end || len(out) > 0 && s.from < out[len(out)-1].end {
				return nil, fmt.Errorf("got range %v after the ranges %v, want a non-empty range after the last one", s, out)
			}
			out = append(out, s)
		}
	}
}

// checkAllocated checks that a snapshot's image has data only in the ranges that the driver reports
// as allocated, from an offset on.
func (h *history) checkAllocated(t *testing.T, s *capture, from int64) {
	t.Helper()
	request := &csi.GetMetadataAllocatedRequest{SnapshotId: s.id, StartingOffset: from, MaxResults: int32(1 + h.rand.IntN(100))}
	var spans []span
	must(t, insist(t.Context(), func() (err error) {
		spans, err = readSpans(h.changes.GetMetadataAllocated(t.Context(), request))
		return err
	}))
	must(t, h.compareImages("", h.snapshotImage(s.id), from, spans))
}

// checkDelta checks that the images of two snapshots differ only in the ranges that the driver
// reports as changed, from an offset on.
func (h *history) checkDelta(t *testing.T, older, newer *capture, from int64) {
	t.Helper()
	request := &csi.GetMetadataDeltaRequest{BaseSnapshotId: older.id, TargetSnapshotId: newer.id, StartingOffset: from, MaxResults: int32(1 + h.rand.IntN(100))}
	var spans []span
	must(t, insist(t.Context(), func() (err error) {
		spans, err = readSpans(h.changes.GetMetadataDelta(t.Context(), request))
		return err
	}))
	must(t, h.compareImages(h.snapshotImage(older.id), h.snapshotImage(newer.id), from, spans))
	if from > 0 { // totals counts only the call that covers the whole images
		return
	}
	var st unix.Stat_t
	must(t, unix.Stat(h.snapshotImage(newer.id), &st))
	h.totals.pairs.Add(1)
	h.totals.allocated.Add(st.Blocks * 512)
	for _, s := range spans {
		h.totals.changed.Add(s.end - s.from)
	}
}

// compareImages is compareOutside for images. The offsets are those in the volume: the image of an encrypted volume begins
// with a header.
func (h *history) compareImages(older, newer string, from int64, spans []span) error {
	header := h.kind.Overhead()
	var inImage []span
	for _, s := range spans {
		inImage = append(inImage, span{header + s.from, header + s.end})
	}
	return compareOutside(older, newer, header+from, inImage)
}

// compareOutside fails if two files differ outside the spans and after the offset from. It compares
// up to the size of newer. If older is empty, it compares newer with zeros.
func compareOutside(older, newer string, from int64, spans []span) error {
	to, err := os.Open(newer)
	if err != nil {
		return err
	}
	defer to.Close()
	size, err := to.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	in, err := openOrEmpty(older)
	if err != nil {
		return err
	}
	defer in.Close()
	for _, s := range append(spans, span{size, size}) {
		if err := compareRange(in, to, from, min(s.from, size)); err != nil {
			return fmt.Errorf("%q and %s must not differ outside %v: %w", older, newer, spans, err)
		}
		from = max(from, s.end)
	}
	return nil
}

// openOrEmpty opens a file for reading. It opens an empty temporary file if the name is empty.
func openOrEmpty(name string) (*os.File, error) {
	if name != "" {
		return os.Open(name)
	}
	f, err := os.CreateTemp("", "empty-")
	if err == nil {
		err = os.Remove(f.Name())
	}
	return f, err
}

// compareRange fails if two files differ in a range. Bytes after the end of a file are zeros.
func compareRange(a, b *os.File, from, end int64) error {
	left, right := make([]byte, 1<<20), make([]byte, 1<<20)
	for from < end {
		from = min(end, nextData(a, from), nextData(b, from))
		n := min(int64(len(left)), end-from)
		if err := errors.Join(readZeros(a, left[:n], from), readZeros(b, right[:n], from)); err != nil {
			return err
		}
		if !bytes.Equal(left[:n], right[:n]) {
			at := 0
			for left[at] == right[at] {
				at++
			}
			return fmt.Errorf("the first difference is at offset %d", from+int64(at))
		}
		from += n
	}
	return nil
}

// nextData returns the first offset, not before from, at which a file may have data.
func nextData(f *os.File, from int64) int64 {
	at, err := f.Seek(from, unix.SEEK_DATA)
	if errors.Is(err, unix.ENXIO) {
		return 1<<63 - 1
	}
	if err != nil { // the file does not support SEEK_DATA
		return from
	}
	return at
}

// readZeros fills b from the file, with zeros after the end of the file.
func readZeros(f *os.File, b []byte, at int64) error {
	n, err := f.ReadAt(b, at)
	clear(b[n:])
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}
