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

// tally counts the comparisons of histories.
type tally struct{ volumes, pairs, changed, allocated atomic.Int64 }

// snapshotImage is the path of the image of a snapshot.
func (g *ground) snapshotImage(id string) string {
	return filepath.Join(g.pool, "snapshots", id[strings.LastIndex(id, ":")+1:], "0", "image")
}

// span is a part of an image, in bytes.
type span struct{ from, end int64 }

// streamed reads the ranges of a stream, and fails unless they are in order.
func streamed[M interface{ GetBlockMetadata() []*csi.BlockMetadata }](stream interface{ Recv() (M, error) }, err error) ([]span, error) {
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
				return nil, fmt.Errorf("range %v comes after %v", s, out)
			}
			out = append(out, s)
		}
	}
}

// checkAllocated rebuilds the image of a snapshot from the ranges that the driver reports as
// allocated after an offset, and compares it.
func (h *history) checkAllocated(t *testing.T, s *cut, from int64) {
	t.Helper()
	spans, err := streamed(h.changes.GetMetadataAllocated(t.Context(), &csi.GetMetadataAllocatedRequest{
		SnapshotId: s.id, StartingOffset: from, MaxResults: int32(1 + h.rand.IntN(100)),
	}))
	must(t, err)
	must(t, applied("", h.snapshotImage(s.id), from, spans))
}

// checkDelta rebuilds the newer image from the older one and the reported changes, and
// compares it.
func (h *history) checkDelta(t *testing.T, older, newer *cut, from int64) {
	t.Helper()
	spans, err := streamed(h.changes.GetMetadataDelta(t.Context(), &csi.GetMetadataDeltaRequest{
		BaseSnapshotId: older.id, TargetSnapshotId: newer.id, StartingOffset: from, MaxResults: int32(1 + h.rand.IntN(100)),
	}))
	must(t, err)
	must(t, applied(h.snapshotImage(older.id), h.snapshotImage(newer.id), from, spans))
	if from > 0 {
		return
	}
	var st unix.Stat_t
	must(t, unix.Stat(h.snapshotImage(newer.id), &st))
	h.tally.pairs.Add(1)
	h.tally.allocated.Add(st.Blocks * 512)
	for _, s := range spans {
		h.tally.changed.Add(s.end - s.from)
	}
}

// applied compares newer with older, which gets newer's size and the spans of newer. An empty
// name stands for a file without data. Bytes before from are not compared.
func applied(older, newer string, from int64, spans []span) error {
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
		if err := alike(in, to, from, min(s.from, size)); err != nil {
			return fmt.Errorf("%q and the changes in %v are not %s: %w", older, spans, newer, err)
		}
		from = max(from, s.end)
	}
	return nil
}

// openOrEmpty opens a file for reading; an empty name stands for an empty file.
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

// alike compares a range of two files. Bytes after the end of a file are zeros.
func alike(a, b *os.File, from, end int64) error {
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
			return fmt.Errorf("they differ at %d", from+int64(at))
		}
		from += n
	}
	return nil
}

// nextData is the offset from which a file may have data.
func nextData(f *os.File, from int64) int64 {
	at, err := f.Seek(from, unix.SEEK_DATA)
	if errors.Is(err, unix.ENXIO) {
		return 1<<63 - 1
	}
	if err != nil { // it knows no holes
		return from
	}
	return at
}

func readZeros(f *os.File, b []byte, at int64) error {
	n, err := f.ReadAt(b, at)
	clear(b[n:])
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}
