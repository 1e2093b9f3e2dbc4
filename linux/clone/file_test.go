package clone_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/clone"
)

func random(n int64) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{})
	_, _ = r.Read(b)
	return b
}

// sparse writes an image of 3 GiB with little data, and a hole at its end.
func sparse(tb testing.TB, f *os.File) {
	tb.Helper()
	for _, at := range []int64{0, 10 * mib, gib + 5000, 2 * gib} {
		write(tb, f, at, random(300*kib))
	}
	must(tb, unix.Fallocate(int(f.Fd()), 0, 20*mib, mib))
	must(tb, f.Truncate(3*gib+7))
	must(tb, f.Sync())
}

// dataOf returns the size of a file, the ranges with data, and the hash of the data.
func dataOf(tb testing.TB, f *os.File) (size int64, at []int64, sum [32]byte) {
	tb.Helper()
	size, err := f.Seek(0, io.SeekEnd)
	must(tb, err)
	h := sha256.New()
	for off := int64(0); ; {
		start, err := f.Seek(off, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return size, at, [32]byte(h.Sum(nil))
		}
		must(tb, err)
		off, err = f.Seek(start, unix.SEEK_HOLE)
		must(tb, err)
		_, err = io.Copy(h, io.NewSectionReader(f, start, off-start))
		must(tb, err)
		at = append(at, start, off)
	}
}

func requireSame(tb testing.TB, a, b *os.File) {
	tb.Helper()
	aSize, aData, aSum := dataOf(tb, a)
	bSize, bData, bSum := dataOf(tb, b)
	if aSize != bSize || !slices.Equal(aData, bData) || aSum != bSum {
		tb.Errorf("%s has %d bytes, data at %v; %s %d, %v; same content: %t", a.Name(), aSize, aData, b.Name(), bSize, bData, aSum == bSum)
	}
}

// TestFile: a copy has the content, size and holes of its source. It shares its blocks if the filesystem supports
// that, unless the options forbid it.
func TestFile(t *testing.T) {
	eachGround(t, "512M", func(t *testing.T, g ground, dir string) {
		src := g.image(t, filepath.Join(dir, "src"))
		sparse(t, src)
		for name, o := range map[string]clone.Options{"shared": {}, "unshared": {Unshared: true}} {
			var reported int64
			o.Progress = increasing(t, &reported)
			dst := create(t, filepath.Join(dir, name))
			got, err := clone.File(t.Context(), dst, open(t, src.Name()), o)
			must(t, err)
			requireSame(t, src, dst)
			want := g.reflink && !o.Unshared
			if got.Shared != want || got.Bytes != blocks(t, dst) || reported == 0 {
				t.Errorf("%s: %+v, %d bytes allocated, %d reported", name, got, blocks(t, dst), reported)
			}
			if shared, all := sharedExtents(t, dst.Name()); all == 0 || want && shared != all || !want && shared != 0 {
				t.Errorf("%s: %d of %d extents are shared", name, shared, all)
			}
			if flags := testenv.Run(t, "lsattr", dst.Name()); strings.Contains(strings.Fields(flags)[0], "C") != g.nocow {
				t.Errorf("%s: NOCOW is wrong: %s", name, flags)
			}
		}
	})
}

// increasing is a Progress that stores each report, and requires that it does not decrease.
func increasing(t *testing.T, reported *int64) func(bytes int64) {
	return func(bytes int64) {
		if bytes < *reported {
			t.Errorf("progress from %d to %d", *reported, bytes)
		}
		*reported = bytes
	}
}

// TestFileNoCOW: copies share blocks also in a directory whose files inherit other flags.
func TestFileNoCOW(t *testing.T) {
	dir := filesystem(t, "btrfs", "256M")
	for attribute, to := range map[string]string{"+C": "nocow", "+c": "compressed"} {
		testenv.Run(t, "chattr", attribute, mkdir(t, dir, to))
	}
	mkdir(t, dir, "plain")
	for _, from := range []string{"plain", "nocow"} {
		src := create(t, filepath.Join(dir, from, "src"))
		sparse(t, src)
		for _, to := range []string{"plain", "nocow", "compressed"} {
			got, err := clone.File(t.Context(), create(t, filepath.Join(dir, to, "from-"+from)), src, clone.Options{})
			if err != nil || !got.Shared {
				t.Errorf("%s to %s: %+v, %v", from, to, got, err)
			}
		}
	}
}

// TestFileAcross copies files of several sizes from each kind of filesystem to each.
func TestFileAcross(t *testing.T) {
	dirs := map[string]string{}
	for _, fsType := range []string{"xfs", "btrfs", "ext4"} {
		dirs[fsType] = filesystem(t, fsType, "512M")
	}
	for from, a := range dirs {
		for size, n := range map[string]int64{"empty": 0, "one": 1, "odd": 5001, "large": 20*mib + 3} {
			src := create(t, filepath.Join(a, "src-"+size))
			write(t, src, 0, random(n))
			for to, b := range dirs {
				dst := create(t, filepath.Join(b, "from-"+from+"-"+size))
				got, err := clone.File(t.Context(), dst, src, clone.Options{})
				if err != nil || from != to && n > 0 && got.Shared {
					t.Errorf("%s from %s to %s: %+v, %v", size, from, to, got, err)
				}
				if back, err := os.ReadFile(dst.Name()); err != nil || !bytes.Equal(back, random(n)) {
					t.Errorf("%s from %s to %s has %d bytes, %v", size, from, to, len(back), err)
				}
				must(t, os.Remove(dst.Name()))
			}
		}
	}
}

// TestFileCancel: a copy ends soon after its context ended.
func TestFileCancel(t *testing.T) {
	dir := filesystem(t, "ext4", "512M")
	src := create(t, filepath.Join(dir, "src"))
	const size = 100 * mib
	write(t, src, 0, random(size))
	ctx, cancel := context.WithCancel(t.Context())
	var reported int64
	o := clone.Options{Progress: func(bytes int64) { reported = bytes; cancel() }}
	_, err := clone.File(ctx, create(t, filepath.Join(dir, "dst")), src, o)
	if !errors.Is(err, context.Canceled) || reported == 0 || reported > size/2 {
		t.Errorf("after %d of %d bytes: %v", reported, size, err)
	}
	if _, err := clone.File(ctx, create(t, filepath.Join(dir, "other")), src, o); !errors.Is(err, context.Canceled) {
		t.Errorf("with an ended context: %v", err)
	}
}

// TestFileDevice: between images and disks all bytes are copied over the old content.
func TestFileDevice(t *testing.T) {
	const size = 64 * mib
	disk := func(fill byte, size int64) *os.File {
		device, _, _ := testenv.Disk(t, size)
		f, err := os.OpenFile(device, os.O_RDWR, 0)
		must(t, err)
		t.Cleanup(func() { f.Close() })
		write(t, f, 0, bytes.Repeat([]byte{fill}, int(size)))
		return f
	}
	sum := func(f *os.File) [32]byte {
		h := sha256.New()
		_, err := io.Copy(h, io.NewSectionReader(f, 0, size))
		must(t, err)
		return [32]byte(h.Sum(nil))
	}
	image := create(t, filepath.Join(filesystem(t, "xfs", "512M"), "image"))
	write(t, image, 5*mib, random(3*mib))
	must(t, image.Truncate(size))
	first, second, small := disk(1, size), disk(2, size+mib), disk(3, size/2)
	back := create(t, filepath.Join(filepath.Dir(image.Name()), "back"))
	from := image
	for _, to := range []*os.File{first, second} {
		got, err := clone.File(t.Context(), to, from, clone.Options{})
		must(t, err)
		if sum(to) != sum(image) || got.Shared || got.Bytes != size {
			t.Errorf("%s from %s differs: %+v", to.Name(), from.Name(), got)
		}
		from = to
	}
	got, err := clone.File(t.Context(), back, first, clone.Options{})
	must(t, err)
	if st, err := back.Stat(); err != nil || st.Size() != size || sum(back) != sum(image) || got.Bytes > size/2 {
		t.Errorf("from a disk to a file: %+v, %v", got, err)
	}
	if _, err := clone.File(t.Context(), small, image, clone.Options{}); !errors.Is(err, clone.ErrTooSmall) {
		t.Errorf("to a disk that is too small: %v", err)
	}
}

// TestFileRefuses: File refuses files that are not images, and a destination that is not empty.
func TestFileRefuses(t *testing.T) {
	dir := t.TempDir()
	src, full := create(t, filepath.Join(dir, "src")), create(t, filepath.Join(dir, "full"))
	write(t, full, 0, []byte("x"))
	const neither = "neither a file nor a block device"
	for _, tc := range []struct {
		dst, src *os.File
		want     string
	}{{full, src, "copy to an empty file"}, {open(t, dir), src, neither}, {src, open(t, dir), neither}, {src, open(t, "/dev/zero"), neither}} {
		if _, err := clone.File(t.Context(), tc.dst, tc.src, clone.Options{}); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s from %s: %v", tc.dst.Name(), tc.src.Name(), err)
		}
	}
}

func TestSetImmutable(t *testing.T) {
	eachGround(t, "512M", func(t *testing.T, g ground, dir string) {
		f := g.image(t, filepath.Join(dir, "image"))
		for _, on := range []bool{true, true, false, false} {
			ok, err := clone.SetImmutable(f, on)
			must(t, err)
			err = os.Truncate(f.Name(), 1)
			if !ok || errors.Is(err, unix.EPERM) != on {
				t.Errorf("immutable %t: %t, then truncate: %v", on, ok, err)
			}
		}
	})
	f := open(t, "/proc/self/status")
	if ok, err := clone.SetImmutable(f, true); ok || err != nil {
		t.Errorf("without flags: %t, %v", ok, err)
	}
}
