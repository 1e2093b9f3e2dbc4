package controllerserver

import (
	"errors"
	"iter"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/linux/clone"
)

// TestSend: ranges are rounded outwards to whole blocks of the volume, and overlapping ranges are
// merged.
func TestSend(t *testing.T) {
	const size = 10*granule + 512
	broken := errors.New("broken")
	for name, tc := range map[string]struct {
		ranges []clone.Range
		limit  int
		want   []clone.Range
		sizes  []int // numbers of ranges in the messages
	}{
		"no ranges":     {nil, 2, nil, nil},
		"unchanged":     {[]clone.Range{{Offset: granule, Length: granule}}, 2, []clone.Range{{Offset: granule, Length: granule}}, []int{1}},
		"rounded":       {[]clone.Range{{Offset: granule + 512, Length: 1}}, 2, []clone.Range{{Offset: granule, Length: granule}}, []int{1}},
		"merged":        {[]clone.Range{{Offset: 0, Length: 1}, {Offset: 2, Length: granule}, {Offset: 2 * granule, Length: 1}}, 2, []clone.Range{{Offset: 0, Length: 3 * granule}}, []int{1}},
		"end of volume": {[]clone.Range{{Offset: 10 * granule, Length: 100 * granule}, {Offset: 11 * granule, Length: 1}}, 2, []clone.Range{{Offset: 10 * granule, Length: 512}}, []int{1}},
		"two messages": {
			[]clone.Range{{Offset: 0, Length: 1}, {Offset: 2 * granule, Length: 1}, {Offset: 2*granule + 512, Length: 1}, {Offset: 4 * granule, Length: 1}, {Offset: 5 * granule, Length: 1}},
			2,
			[]clone.Range{{Offset: 0, Length: granule}, {Offset: 2 * granule, Length: granule}, {Offset: 4 * granule, Length: 2 * granule}},
			[]int{2, 1},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var got []clone.Range
			var sizes []int
			collect := func(blocks []*csi.BlockMetadata) error {
				sizes = append(sizes, len(blocks))
				for _, b := range blocks {
					got = append(got, clone.Range{Offset: b.GetByteOffset(), Length: b.GetSizeBytes()})
				}
				return nil
			}
			if err := send(all(tc.ranges, nil), size, tc.limit, collect); err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(got, tc.want) || !slices.Equal(sizes, tc.sizes) {
				t.Errorf("got ranges %v in messages of %v ranges, want %v in messages of %v", got, sizes, tc.want, tc.sizes)
			}
			if err := send(all(tc.ranges, broken), size, tc.limit, func([]*csi.BlockMetadata) error { return nil }); !errors.Is(err, broken) {
				t.Errorf("after an error of the ranges: got %v, want %v", err, broken)
			}
			if len(tc.want) > 0 {
				if err := send(all(tc.ranges, nil), size, tc.limit, func([]*csi.BlockMetadata) error { return broken }); !errors.Is(err, broken) {
					t.Errorf("after an error of the receiver: got %v, want %v", err, broken)
				}
			}
		})
	}
}

// all yields ranges, and then an error if it is not nil.
func all(ranges []clone.Range, err error) iter.Seq2[clone.Range, error] {
	return func(yield func(clone.Range, error) bool) {
		for _, r := range ranges {
			if !yield(r, nil) {
				return
			}
		}
		if err != nil {
			yield(clone.Range{}, err)
		}
	}
}
