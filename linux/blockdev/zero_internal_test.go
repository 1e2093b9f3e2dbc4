package blockdev

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/background"
)

// TestZeroMethods: a method that fails, or that leaves data although it reports success, is replaced by the next one.
// A failed write is an error.
func TestZeroMethods(t *testing.T) {
	noOp := zeroMethod{zero: func(*background.Writer, span) error { return nil }}
	fails := func(errno error) zeroMethod {
		return zeroMethod{zero: func(*background.Writer, span) error { return fmt.Errorf("fake: %w", errno) }}
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
			z, err := newZeroing(f, tc.methods, ZeroOptions{})
			if err != nil {
				t.Fatal(err)
			}
			defer z.close()
			all := span{512, 4*mib - 512}
			if err := z.step(t.Context(), all); !errors.Is(err, tc.want) || len(z.methods) != tc.left {
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

// flushes returns the number of flushes of a device (field 16 in Documentation/block/stat.rst of Linux).
func flushes(t *testing.T, device *os.File) (n int) {
	t.Helper()
	b, err := os.ReadFile("/sys/class/block/" + filepath.Base(device.Name()) + "/stat")
	if err == nil {
		n, err = strconv.Atoi(strings.Fields(string(b))[15])
	}
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestZeroBudget: within a budget, zeros are written in pieces, with one flush at the end of a step, and a call returns the error of its context when that ends.
func TestZeroBudget(t *testing.T) {
	device, _, _ := testenv.Disk(t, 16*mib)
	f, err := os.OpenFile(device, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	pieces := 0
	z, err := newZeroing(f, []zeroMethod{overwrite}, ZeroOptions{Budget: background.On(1<<40, f), Each: func() { pieces++ }})
	if err != nil {
		t.Fatal(err)
	}
	defer z.close()
	before := flushes(t, f)
	if err := z.step(t.Context(), span{0, 16 * mib}); err != nil || pieces <= 16 || pieces > 16*mib/background.Piece {
		t.Errorf("got %v after %d pieces, want pieces of 128 KiB at first, and of at most 1 MiB later", err, pieces)
	}
	if n := flushes(t, f) - before; n != 1 {
		t.Errorf("the device was flushed %d times, want once", n)
	}
	for name, budget := range map[string]*background.Budget{"a budget": z.options.Budget, "no budget": nil} {
		ctx, cancel := context.WithCancel(t.Context())
		err = ZeroRange(ctx, f, 0, 16*mib, ZeroOptions{Budget: budget, Each: cancel, Progress: func(int64) error {
			return errors.New("the call has continued")
		}})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("with %s: got %v, want the error of the context", name, err)
		}
	}
}
