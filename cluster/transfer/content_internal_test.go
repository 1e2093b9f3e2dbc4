package transfer

import (
	"bytes"
	"context"
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
	source := packed{&memory{content: bytes.Repeat([]byte{1}, 1<<20)}, 1000}
	for from, want := range map[int64][]int64{0: {1000, 1 << 20}, 1000: {1 << 20}, 5000: {1 << 20}} {
		var b bytes.Buffer
		o := &outgoing{source: source, to: &b, limit: NewLimit(0, 1)}
		if err := o.send(t.Context(), from); err != nil {
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
		if !slices.Equal(got, want) {
			t.Errorf("from %d: got checksums at %d, want them at %d", from, got, want)
		}
	}
}
