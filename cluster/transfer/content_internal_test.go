package transfer

import (
	"bytes"
	"context"
	"errors"
	"iter"
	"slices"
	"testing"

	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/volume"
)

// packed is a directory with an index of some bytes.
type packed struct {
	*memory
	index int64
}

func (p packed) Manifest() volume.Manifest {
	size := int64(len(p.content))
	return volume.Manifest{Size: size, Tree: &volume.PackedTree{IndexSize: p.index, Size: size, Layout: "x"}}
}

func (p packed) Ranges(_ context.Context, from int64) iter.Seq2[clone.Range, error] {
	return func(yield func(clone.Range, error) bool) {
		if from >= p.index || yield(clone.Range{Offset: from, Length: p.index - from}, nil) {
			yield(clone.Range{Offset: max(from, p.index), Length: int64(len(p.content)) - max(from, p.index)}, nil)
		}
	}
}

// TestIndexChecked: the checksum of the index of a directory precedes the content of its files.
func TestIndexChecked(t *testing.T) {
	small := packed{&memory{content: make([]byte, 1<<20)}, 1000}
	large := packed{&memory{content: make([]byte, checkedSize+3<<20)}, checkedSize + 1<<20}
	for _, row := range []struct {
		source packed
		from   int64
		want   []int64
	}{
		{small, 0, []int64{1000, 1 << 20}},
		{small, 1000, []int64{1 << 20}},
		{small, 5000, []int64{1 << 20}},
		{large, 0, []int64{checkedSize, checkedSize + 1<<20, checkedSize + 3<<20}},
	} {
		var b bytes.Buffer
		o := &outgoing{source: row.source, to: &b, limit: NewLimit(0, 1)}
		if err := o.send(t.Context(), row.from); err != nil {
			t.Fatal(err)
		}
		var got []int64
		for buf := make([]byte, chunkSize); b.Len() > 0; {
			f, err := readFrame(&b, buf)
			if err != nil {
				t.Fatal(err)
			}
			if f.kind == kindChecked || f.kind == kindEnd {
				got = append(got, f.offset)
			}
		}
		if !slices.Equal(got, row.want) {
			t.Errorf("an index of %d bytes, from %d: got checksums at %d, want them at %d", row.source.index, row.from, got, row.want)
		}
	}
}

// interrupted is content whose first read ends the context of the transfer.
type interrupted struct {
	packed
	end context.CancelFunc
}

func (s interrupted) ReadAt(b []byte, at int64) (int, error) {
	s.end()
	return s.packed.ReadAt(b, at)
}

// TestNoEndAfterCancel: a sender whose context ends does not send the end of the content, which would make the receiver use a part.
func TestNoEndAfterCancel(t *testing.T) {
	for range 200 { // a select takes either of two cases that are ready
		ctx, cancel := context.WithCancel(t.Context())
		source := interrupted{packed{&memory{content: make([]byte, 8<<20)}, 1000}, cancel}
		var b bytes.Buffer
		o := &outgoing{source: source, to: &b, limit: NewLimit(0, 1)}
		if err := o.send(ctx, 0); !errors.Is(err, context.Canceled) {
			t.Fatalf("got %v, want context.Canceled", err)
		}
		for buf := make([]byte, chunkSize); b.Len() > 0; {
			f, err := readFrame(&b, buf)
			if err != nil {
				t.Fatal(err)
			}
			if f.kind == kindEnd {
				t.Fatal("got the end of the content")
			}
		}
	}
}
