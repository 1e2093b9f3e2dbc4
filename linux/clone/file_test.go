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

// random returns n random bytes, which are the same in each call.
func random(n int64) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{})
	_, _ = r.Read(b)
	return b
}

// sparse makes f an image of 3 GiB with little data and with a hole at its end.
func sparse(tb testing.TB, f *os.File) {
	tb.Helper()
	for _, at := range []int64{0, 10 * mib, gib + 5000, 2 * gib} {
		write(tb, f, at, random(300*kib))
	}
	must(tb, unix.Fallocate(int(f.Fd()), 0, 20*mib, mib))
	must(tb, f.Truncate(3*gib+7))
	must(tb, f.Sync())
}

// dataOf returns the size of a file, the start and end of each range with data, and the hash of the data.
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

// requireSame requires that b has the size, the holes and the content of a.
func requireSame(tb testing.TB, a, b *os.File) {
	tb.Helper()
	aSize, aData, aSum := dataOf(tb, a)
	bSize, bData, bSum := dataOf(tb, b)
	if aSize != bSize || !slices.Equal(aData, bData) || aSum != bSum {
		tb.Errorf("%s differs from %s: got size %d and data at %v, want %d and %v; equal content: %t", b.Name(), a.Name(), bSize, bData, aSize, aData, aSum == bSum)
	}
}

// TestFile: a copy has the content, size and holes of its source. It shares its blocks if the filesystem supports
// that, unless the options forbid it.
func TestFile(t *testing.T) {
	eachFilesystem(t, "512M", func(t *testing.T, fsys testFS, dir string) {
		src := fsys.image(t, filepath.Join(dir, "src"))
		sparse(t, src)
		for name, o := range map[string]clone.Options{"shared": {}, "unshared": {Unshared: true}} {
			var reported int64
			o.Progress = increasing(t, &reported)
			dst := create(t, filepath.Join(dir, name))
			got, err := clone.File(t.Context(), dst, open(t, src.Name()), o)
			must(t, err)
			requireSame(t, src, dst)
			want := fsys.reflink && !o.Unshared
			if got.Shared != want || got.Bytes != allocatedTo(t, dst) || reported == 0 {
				t.Errorf("%s: got %+v, last progress %d, want shared %t and %d bytes", name, got, reported, want, allocatedTo(t, dst))
			}
			if shared, all := sharedExtents(t, dst.Name()); all == 0 || want && shared != all || !want && shared != 0 {
				t.Errorf("%s: got %d shared extents of %d, want all or none: shared %t", name, shared, all, want)
			}
			if flags := testenv.Run(t, "lsattr", dst.Name()); strings.Contains(strings.Fields(flags)[0], "C") != fsys.nocow {
				t.Errorf("%s: got flags %s, want NOCOW %t", name, flags, fsys.nocow)
			}
		}
	})
}

// increasing returns a Progress that stores each report, and requires that the reports do not decrease.
func increasing(t *testing.T, reported *int64) func(bytes int64) {
	return func(bytes int64) {
		if bytes < *reported {
			t.Errorf("Progress was called with %d after %d, want no decrease", bytes, *reported)
		}
		*reported = bytes
	}
}

// TestFileNoCOW: a copy shares blocks even in a directory whose files inherit other flags.
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
				t.Errorf("copy from %s to %s: got %+v, %v, want shared blocks", from, to, got, err)
			}
		}
	}
}

// TestFileAcross copies files of several sizes between all pairs of filesystems.
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
					t.Errorf("%s file from %s to %s: got %+v, %v, want no shared blocks", size, from, to, got, err)
				}
				if back, err := os.ReadFile(dst.Name()); err != nil || !bytes.Equal(back, random(n)) {
					t.Errorf("%s file from %s to %s: got %d bytes, %v, want the %d bytes of the source", size, from, to, len(back), err, n)
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
		t.Errorf("got %v after %d bytes, want %v before %d", err, reported, context.Canceled, size/2)
	}
	if _, err := clone.File(ctx, create(t, filepath.Join(dir, "other")), src, o); !errors.Is(err, context.Canceled) {
		t.Errorf("with an ended context: got %v, want %v", err, context.Canceled)
	}
}

// TestFileDevice: if the source or the destination is a disk, all bytes are copied, and old content is overwritten.
// A disk that is smaller than the source is refused.
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
			t.Errorf("copy from %s to %s: got %+v or other content, want %d bytes", from.Name(), to.Name(), got, size)
		}
		from = to
	}
	got, err := clone.File(t.Context(), back, first, clone.Options{})
	must(t, err)
	if st, err := back.Stat(); err != nil || st.Size() != size || sum(back) != sum(image) || got.Bytes > size/2 {
		t.Errorf("copy from a disk to a file: got %+v, %v, want the same content with holes", got, err)
	}
	if _, err := clone.File(t.Context(), small, image, clone.Options{}); !errors.Is(err, clone.ErrTooSmall) {
		t.Errorf("copy to a disk that is too small: got %v, want %v", err, clone.ErrTooSmall)
	}
}

// TestFileRefuses: File refuses directories, character devices, and a destination that is not empty.
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
			t.Errorf("copy from %s to %s: got %v, want %q", tc.src.Name(), tc.dst.Name(), err, tc.want)
		}
	}
}

// TestSetImmutable: SetImmutable sets and clears the attribute, also if it is already set or cleared, and reports
// whether the filesystem supports the attribute.
func TestSetImmutable(t *testing.T) {
	eachFilesystem(t, "512M", func(t *testing.T, fsys testFS, dir string) {
		f := fsys.image(t, filepath.Join(dir, "image"))
		for _, on := range []bool{true, true, false, false} {
			ok, err := clone.SetImmutable(f, on)
			must(t, err)
			err = os.Truncate(f.Name(), 1)
			if !ok || errors.Is(err, unix.EPERM) != on {
				t.Errorf("SetImmutable %t: got %t, then truncating returned %v, want true, and EPERM only if the file is immutable", on, ok, err)
			}
		}
	})
	f := open(t, "/proc/self/status")
	if ok, err := clone.SetImmutable(f, true); ok || err != nil {
		t.Errorf("a filesystem without attributes: got %t, %v, want false", ok, err)
	}
}
