package blockdev

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// TestZeroMethods: a method that fails, or that leaves data although it reports success, is replaced by the next one.
// A failed write is an error.
func TestZeroMethods(t *testing.T) {
	noOp := func(*os.File, span) error { return nil }
	fails := func(errno error) zeroMethod {
		return func(*os.File, span) error { return fmt.Errorf("fake: %w", errno) }
	}
	for name, tc := range map[string]struct {
		methods []zeroMethod
		want    error
		left    int // number of remaining methods after the first step
	}{
		"first method works":                  {[]zeroMethod{punchOut, zeroOut, overwrite}, nil, 3},
		"first method has no effect":          {[]zeroMethod{noOp, overwrite}, nil, 1},
		"no method has an effect":             {[]zeroMethod{noOp, noOp}, ErrNotBlank, 1},
		"first method unsupported":            {[]zeroMethod{fails(unix.EOPNOTSUPP), zeroOut}, nil, 1},
		"first method rejected by the device": {[]zeroMethod{fails(unix.EREMOTEIO), zeroOut}, nil, 1},
		"no method supported":                 {[]zeroMethod{fails(unix.EOPNOTSUPP)}, unix.EOPNOTSUPP, 1},
		"first method fails":                  {[]zeroMethod{fails(unix.EIO), zeroOut}, nil, 1},
		"all methods fail":                    {[]zeroMethod{fails(unix.EOPNOTSUPP), fails(unix.EIO)}, unix.EIO, 1},
		"unsupported, then no effect":         {[]zeroMethod{fails(unix.EOPNOTSUPP), noOp, overwrite}, nil, 1},
	} {
		t.Run(name, func(t *testing.T) {
			device, image, _ := testenv.Disk(t, 4*mib)
			f, err := os.OpenFile(device, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			z, err := newZeroing(f, tc.methods)
			if err != nil {
				t.Fatal(err)
			}
			defer z.close()
			all := span{512, 4*mib - 512}
			if err := z.step(all); !errors.Is(err, tc.want) || len(z.methods) != tc.left {
				t.Errorf("got %v and %d remaining methods, want %v and %d", err, len(z.methods), tc.want, tc.left)
			}
			content, err := os.ReadFile(image)
			if err != nil {
				t.Fatal(err)
			}
			if blank := !slices.ContainsFunc(content, func(b byte) bool { return b != 0 }); tc.want == nil && !blank {
				t.Error("the disk after the step: got data, want only zeros")
			}
		})
	}
}

// TestSamples: for all lengths of a range, the samples are within the range, at both ends, and aligned to sectors.
func TestSamples(t *testing.T) {
	z := &zeroing{sample: make([]byte, 4096)}
	for _, length := range []int64{512, 4096, 4608, 8192, 9728, 64 * mib} {
		s := span{17408, 17408 + length}
		all := z.samples(s)
		if all[0].start != s.start || all[len(all)-1].end != s.end {
			t.Errorf("a range of %d bytes: got samples %v, want one at each end of %v", length, all, s)
		}
		for _, p := range all {
			if p.start%512 != 0 || p.end%512 != 0 || p.start < s.start || p.end > s.end || p.end-p.start > 4096 {
				t.Errorf("a range of %d bytes: got sample %v, want an aligned one within %v", length, p, s)
			}
		}
	}
}
