package volume_test

import (
	"errors"
	"math"
	"testing"

	"github.com/trivet-csi/trivet/volume"
)

// TestChoose: the chosen size is in the range of the request and the bounds of the backend, or the request is
// refused.
func TestChoose(t *testing.T) {
	bounds := volume.Bounds{Min: 16 * volume.MiB, Granule: 4096}
	for _, tc := range []struct {
		name string
		in   volume.Range
		want int64
		err  error
	}{
		{"exact", volume.Range{Required: 64 * volume.MiB}, 64 * volume.MiB, nil},
		{"default", volume.Range{}, volume.DefaultSize, nil},
		{"default within limit", volume.Range{Limit: 100*volume.MiB + 1}, 100 * volume.MiB, nil},
		{"rounded up", volume.Range{Required: 16*volume.MiB + 1}, 16*volume.MiB + 4096, nil},
		{"rounded up to the limit", volume.Range{Required: 16*volume.MiB + 1, Limit: 16*volume.MiB + 4096}, 16*volume.MiB + 4096, nil},
		{"rounded past the limit", volume.Range{Required: 16*volume.MiB + 1, Limit: 16*volume.MiB + 2}, 0, volume.ErrOutOfRange},
		{"below the minimum", volume.Range{Required: 1}, 0, volume.ErrOutOfRange},
		{"limit below the minimum", volume.Range{Limit: 1}, 0, volume.ErrOutOfRange},
		{"largest", volume.Range{Required: math.MaxInt64}, 0, volume.ErrOutOfRange},
		{"negative", volume.Range{Required: -1}, 0, volume.ErrInvalid},
		{"negative limit", volume.Range{Limit: -1}, 0, volume.ErrInvalid},
		{"limit below required", volume.Range{Required: 2, Limit: 1}, 0, volume.ErrInvalid},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := tc.in.Choose(bounds)
			if got != tc.want || !errors.Is(err, tc.err) {
				t.Errorf("%+v: got %d, %v; want %d, %v", tc.in, got, err, tc.want, tc.err)
			}
		})
	}
}

// TestChooseWithOverhead: the size and the overhead together are a multiple of the granule.
func TestChooseWithOverhead(t *testing.T) {
	bounds := volume.Bounds{Min: 16 * volume.MiB, Granule: 64 * volume.MiB, Overhead: 16 * volume.MiB}
	for in, want := range map[volume.Range]int64{
		{Required: 16 * volume.MiB}: 48 * volume.MiB,
		{Required: 48 * volume.MiB}: 48 * volume.MiB,
		{Required: 49 * volume.MiB}: 112 * volume.MiB,
		{Limit: 100 * volume.MiB}:   48 * volume.MiB,
		{}:                          1072 * volume.MiB,
		{Required: math.MaxInt64 - 64*volume.MiB}: 0,
	} {
		if got, err := in.Choose(bounds); got != want || (err != nil) != (want == 0) {
			t.Errorf("%+v: got %d, %v; want %d", in, got, err, want)
		}
	}
}

// TestParseSize: only whole numbers of bytes or of binary units are accepted.
func TestParseSize(t *testing.T) {
	for in, want := range map[string]int64{"0": 0, "1": 1, "4Ki": 4096, "3Mi": 3 << 20, "2Gi": 2 << 30, "1Ti": 1 << 40, "9223372036854775807": math.MaxInt64} {
		if got, err := volume.ParseSize(in); got != want || err != nil {
			t.Errorf("ParseSize(%q) = %d, %v; want %d", in, got, err, want)
		}
	}
	for _, in := range []string{"", "-1", "1G", "1.5Gi", "Gi", " 1", "1 Gi", "9223372036854775808", "9007199254740992Ki"} {
		if got, err := volume.ParseSize(in); !errors.Is(err, volume.ErrInvalid) {
			t.Errorf("ParseSize(%q) = %d, %v; want ErrInvalid", in, got, err)
		}
	}
}

// TestFormatSize: a size has the largest unit that it reaches, and is rounded down to one decimal.
func TestFormatSize(t *testing.T) {
	for in, want := range map[int64]string{0: "0 B", 512: "512 B", 1536: "1.5 KiB", 1 << 30: "1 GiB", 5 << 40: "5 TiB", 1<<30 - 1: "1023.9 MiB", 2046 << 20: "1.9 GiB", 1023 << 20: "1023 MiB", 1023: "1023 B"} {
		if got := volume.FormatSize(in); got != want {
			t.Errorf("FormatSize(%d) = %q, want %q", in, got, want)
		}
	}
}

// TestExactSize: the bytes are added only if the size was rounded.
func TestExactSize(t *testing.T) {
	for in, want := range map[int64]string{
		0: "0 B", 1023: "1023 B", 1536: "1.5 KiB", 5 << 40: "5 TiB", 300<<20 + 1: "300 MiB (314572801 bytes)", 1<<30 - 1: "1023.9 MiB (1073741823 bytes)",
	} {
		if got := volume.ExactSize(in); got != want {
			t.Errorf("ExactSize(%d) = %q, want %q", in, got, want)
		}
	}
}

// FuzzChoose: a chosen size is in the range and the bounds.
func FuzzChoose(f *testing.F) {
	f.Add(int64(0), int64(0))
	f.Add(int64(1<<30), int64(1<<30))
	f.Add(int64(math.MaxInt64), int64(0))
	f.Fuzz(func(t *testing.T, required, limit int64) {
		r, b := volume.Range{Required: required, Limit: limit}, volume.Bounds{Min: 16 << 20, Granule: 4096}
		got, err := r.Choose(b)
		if err == nil && (!r.Holds(got) || got%b.Granule != 0 || got < b.Min) {
			t.Errorf("%+v: got size %d, want one in the range and the bounds %+v", r, got, b)
		}
	})
}
