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
	refuses := func(errno error) zeroMethod {
		return func(*os.File, span) error { return fmt.Errorf("fake: %w", errno) }
	}
	for name, tc := range map[string]struct {
		methods []zeroMethod
		want    error
		left    int // number of methods after the first step
	}{
		"released":            {[]zeroMethod{punchOut, zeroOut, overwrite}, nil, 3},
		"no effect":           {[]zeroMethod{noOp, overwrite}, nil, 1},
		"no effect of all":    {[]zeroMethod{noOp, noOp}, ErrNotBlank, 1},
		"unsupported":         {[]zeroMethod{refuses(unix.EOPNOTSUPP), zeroOut}, nil, 1},
		"reported, refused":   {[]zeroMethod{refuses(unix.EREMOTEIO), zeroOut}, nil, 1},
		"unsupported by all":  {[]zeroMethod{refuses(unix.EOPNOTSUPP)}, unix.EOPNOTSUPP, 1},
		"broken":              {[]zeroMethod{refuses(unix.EIO), zeroOut}, nil, 1},
		"all broken":          {[]zeroMethod{refuses(unix.EOPNOTSUPP), refuses(unix.EIO)}, unix.EIO, 1},
		"released by nothing": {[]zeroMethod{refuses(unix.EOPNOTSUPP), noOp, overwrite}, nil, 1},
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
			whole := span{512, 4*mib - 512}
			if err := z.step(whole); !errors.Is(err, tc.want) || len(z.methods) != tc.left {
				t.Errorf("%v with %d methods left, want %v with %d", err, len(z.methods), tc.want, tc.left)
			}
			content, err := os.ReadFile(image)
			if err != nil {
				t.Fatal(err)
			}
			if blank := !slices.ContainsFunc(content, func(b byte) bool { return b != 0 }); tc.want == nil && !blank {
				t.Error("data is left")
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
			t.Errorf("%d bytes: %v", length, all)
		}
		for _, p := range all {
			if p.start%512 != 0 || p.end%512 != 0 || p.start < s.start || p.end > s.end || p.end-p.start > 4096 {
				t.Errorf("%d bytes: %v in %v", length, p, s)
			}
		}
	}
}
