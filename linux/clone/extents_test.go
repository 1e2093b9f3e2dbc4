package clone_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"io"
	"iter"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/clone"
)

// collect returns all ranges, and requires that they are in order, do not touch, and are between from and end.
func collect(tb testing.TB, ranges iter.Seq2[clone.Range, error], from, end int64) []clone.Range {
	tb.Helper()
	var all []clone.Range
	for r, err := range ranges {
		must(tb, err)
		if len(all) > 0 && r.Offset <= from || r.Offset < from || r.Length <= 0 || r.Offset+r.Length > end {
			tb.Fatalf("got range %+v, want one behind %d and before %d", r, from, end)
		}
		from = r.Offset + r.Length
		all = append(all, r)
	}
	return all
}

// total returns the sum of the lengths of ranges.
func total(ranges []clone.Range) (bytes int64) {
	for _, r := range ranges {
		bytes += r.Length
	}
	return bytes
}

// history makes random changes to an image, such as those of a tenant.
type history struct {
	*rand.Rand
	image *os.File
	// size is the size of the image in bytes.
	size int64
	// seed is the seed of the last random bytes that were written.
	seed [32]byte
}

// historyBlock is the unit of most changes, in bytes.
const historyBlock = 4 * kib

// step makes one random change.
func (h *history) step() error {
	at := h.Int64N(h.size/historyBlock) * historyBlock
	length := min((1+h.Int64N(1+h.Int64N(40)))*historyBlock, h.size-at)
	fd := int(h.image.Fd())
	switch h.IntN(10) {
	case 0, 1:
		return unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, at, length)
	case 2:
		return unix.Fallocate(fd, unix.FALLOC_FL_ZERO_RANGE, at, length)
	case 3:
		return unix.Fallocate(fd, 0, at, length)
	case 4:
		h.size += h.Int64N(50) * 1000
		return h.image.Truncate(h.size)
	case 5:
		_, err := h.image.WriteAt(make([]byte, length), at)
		return err
	case 6: // a write that is not aligned to blocks
		_, err := h.image.WriteAt(h.bytes(1+h.IntN(3000)), h.Int64N(h.size-3000))
		return err
	case 7:
		return h.image.Sync()
	}
	_, err := h.image.WriteAt(h.bytes(int(length)), at)
	return err
}

// bytes returns n bytes, which are random or can be compressed.
func (h *history) bytes(n int) []byte {
	b := bytes.Repeat([]byte{byte(h.Uint32())}, n)
	if h.IntN(2) == 0 {
		binary.NativeEndian.PutUint64(h.seed[:], h.Uint64())
		_, _ = rand.NewChaCha8(h.seed).Read(b)
	}
	return b
}

// snapshot creates an immutable copy of the image at a path.
func (h *history) snapshot(tb testing.TB, path string) *os.File {
	tb.Helper()
	f := create(tb, path)
	_, err := clone.File(tb.Context(), f, h.image, clone.Options{})
	must(tb, err)
	_, err = clone.SetImmutable(f, true)
	must(tb, err)
	return f
}

// content reads a whole file.
func content(tb testing.TB, f *os.File) []byte {
	tb.Helper()
	size, err := f.Seek(0, io.SeekEnd)
	must(tb, err)
	b := make([]byte, size)
	_, err = f.ReadAt(b, 0)
	if !errors.Is(err, io.EOF) {
		must(tb, err)
	}
	return b
}

// apply returns older with the size of newer, and with the content of newer in the ranges.
func apply(older, newer []byte, ranges []clone.Range) []byte {
	out := make([]byte, len(newer))
	copy(out, older)
	for _, r := range ranges {
		copy(out[r.Offset:r.Offset+r.Length], newer[r.Offset:])
	}
	return out
}

// histories returns the number of random histories that TestDelta tests on each filesystem.
func histories(tb testing.TB) int {
	tb.Helper()
	if n, err := strconv.Atoi(os.Getenv("TRIVET_TEST_HISTORIES")); err == nil {
		return n
	}
	if testing.Short() {
		return 10
	}
	return 40
}

// TestDelta: after random changes of an image, older with the delta applied equals newer, and bytes outside of
// the allocated ranges are zeros. The delta is small unless data is compressed.
func TestDelta(t *testing.T) {
	eachFilesystem(t, "1G", func(t *testing.T, fsys testFS, dir string) {
		var changed, all int64
		for seed := range histories(t) {
			c, a := fsys.testHistory(t, dir, uint64(seed))
			changed, all = changed+c, all+a
		}
		if changed == 0 || !fsys.compress && changed > all/2 {
			t.Errorf("all deltas have %d bytes of %d, want more than 0 and at most a half unless data is compressed", changed, all)
		}
	})
}

// testHistory tests one random history, and returns the sizes of the delta and of the image.
func (fsys testFS) testHistory(t *testing.T, dir string, seed uint64) (changed, all int64) {
	t.Helper()
	h := &history{Rand: rand.New(rand.NewPCG(seed, 0)), size: 2*mib + int64(seed%2)*500}
	h.image = fsys.image(t, filepath.Join(dir, "image"))
	defer h.image.Close()
	must(t, h.image.Truncate(h.size))
	for range 40 {
		must(t, h.step())
	}
	older := h.snapshot(t, filepath.Join(dir, "older"))
	for range h.IntN(15) {
		must(t, h.step())
	}
	if h.IntN(4) == 0 {
		h.size -= h.Int64N(h.size / 2)
		must(t, h.image.Truncate(h.size))
	}
	newer := h.snapshot(t, filepath.Join(dir, "newer"))
	defer remove(t, older, newer)
	fsys.compare(t, seed, older, newer)
	fsys.compare(t, seed, newer, older)

	from := h.Int64N(h.size)
	rest := collect(t, clone.Delta(t.Context(), older, newer, from, nil), from, h.size)
	oldBytes, newBytes := content(t, older), content(t, newer)
	got := apply(oldBytes, newBytes, rest)
	if !bytes.Equal(got[from:], newBytes[from:]) {
		t.Errorf("history %d: the delta from offset %d is incomplete", seed, from)
	}
	return total(collect(t, clone.Delta(t.Context(), older, newer, 0, nil), 0, h.size)), h.size
}

// compare checks the delta and the allocated ranges of newer against the content of both files.
func (fsys testFS) compare(t *testing.T, seed uint64, older, newer *os.File) {
	t.Helper()
	oldBytes, newBytes := content(t, older), content(t, newer)
	size := int64(len(newBytes))
	delta := collect(t, clone.Delta(t.Context(), older, newer, 0, nil), 0, size)
	if got := apply(oldBytes, newBytes, delta); sha256.Sum256(got) != sha256.Sum256(newBytes) {
		t.Errorf("history %d: the delta from %s to %s is incomplete", seed, older.Name(), newer.Name())
	}
	if got := apply(nil, newBytes, collect(t, clone.Allocated(t.Context(), newer, 0, size), 0, size)); !bytes.Equal(got, newBytes) {
		t.Errorf("history %d: the allocated ranges of %s are incomplete", seed, newer.Name())
	}
}

// remove closes and removes immutable files.
func remove(t *testing.T, files ...*os.File) {
	t.Helper()
	for _, f := range files {
		_, err := clone.SetImmutable(f, false)
		must(t, errors.Join(err, f.Close(), os.Remove(f.Name())))
	}
}

// TestDeltaSame: Delta does not yield equal content, whether it compares addresses or content.
func TestDeltaSame(t *testing.T) {
	eachFilesystem(t, "1G", func(t *testing.T, fsys testFS, dir string) {
		h := &history{Rand: rand.New(rand.NewPCG(1, 1)), size: 8 * mib, image: fsys.image(t, filepath.Join(dir, "image"))}
		must(t, h.image.Truncate(h.size))
		write(t, h.image, mib, random(mib))
		older := h.snapshot(t, filepath.Join(dir, "older"))
		write(t, h.image, mib+64*kib, random(4 * kib)[:100])
		newer := h.snapshot(t, filepath.Join(dir, "newer"))
		for name, tc := range map[string]struct{ older, newer *os.File }{"same": {older, older}, "older to newer": {older, newer}, "newer to older": {newer, older}} {
			n := total(collect(t, clone.Delta(t.Context(), tc.older, tc.newer, 0, nil), 0, h.size))
			if name == "same" && n != 0 && !fsys.compress || name != "same" && n == 0 || !fsys.compress && n > 64*kib {
				t.Errorf("%s: got a delta of %d bytes, want 0 for the same file and at most %d otherwise", name, n, 64*kib)
			}
		}
		// If one of the files is not immutable, Delta compares the content.
		_, err := clone.SetImmutable(newer, false)
		must(t, err)
		if n := total(collect(t, clone.Delta(t.Context(), older, newer, 0, nil), 0, h.size)); n == 0 || n > 64*kib {
			t.Errorf("older to newer, by content: got a delta of %d bytes, want 1 to %d", n, 64*kib)
		}
		remove(t, older, newer)
	})
}

// TestDeltaAcross: Delta does not take equal addresses on different filesystems for equal content.
func TestDeltaAcross(t *testing.T) {
	for _, fsType := range []string{"xfs", "btrfs"} {
		var files []*os.File
		for i := range 2 {
			f := create(t, filepath.Join(filesystem(t, fsType, "512M"), "image"))
			write(t, f, 0, bytes.Repeat([]byte{byte(i + 1)}, int(mib)))
			must(t, f.Sync())
			_, err := clone.SetImmutable(f, true)
			must(t, err)
			files = append(files, f)
		}
		if n := total(collect(t, clone.Delta(t.Context(), files[0], files[1], 0, nil), 0, mib)); n != mib {
			t.Errorf("%s: got a delta of %d bytes, want %d", fsType, n, mib)
		}
	}
}

// TestManyExtents: Delta and Allocated work for files with more extents than an ExtentMap holds. The caller can end
// the iteration early. If the context has ended, the iteration ends with its error.
func TestManyExtents(t *testing.T) {
	eachFilesystem(t, "1G", func(t *testing.T, fsys testFS, dir string) {
		const pieces = 3000
		h := &history{image: fsys.image(t, filepath.Join(dir, "image")), size: gib}
		must(t, h.image.Truncate(h.size))
		for i := range int64(pieces) {
			write(t, h.image, i*64*kib, random(4*kib))
		}
		older := h.snapshot(t, filepath.Join(dir, "older"))
		for i := range int64(pieces / 3) {
			write(t, h.image, i*192*kib, random(4 * kib)[:1+i%3])
			write(t, h.image, i*192*kib+4*kib, random(4*kib))
		}
		newer := h.snapshot(t, filepath.Join(dir, "newer"))
		fsys.requireDelta(t, older, newer, pieces)

		ctx, cancel := context.WithCancel(t.Context())
		for _, ranges := range []iter.Seq2[clone.Range, error]{clone.Delta(ctx, older, newer, 0, nil), clone.Allocated(ctx, newer, 0, gib)} {
			for _, err := range ranges {
				must(t, err)
				break
			}
		}
		cancel()
		for _, ranges := range []iter.Seq2[clone.Range, error]{clone.Delta(ctx, older, newer, 0, nil), clone.Allocated(ctx, newer, 0, gib)} {
			var last error
			for _, err := range ranges {
				last = err
			}
			if !errors.Is(last, context.Canceled) {
				t.Errorf("with an ended context: got %v, want %v", last, context.Canceled)
			}
		}
		remove(t, older, newer)
	})
}

// requireDelta checks the delta of TestManyExtents.
func (fsys testFS) requireDelta(t *testing.T, older, newer *os.File, pieces int64) {
	t.Helper()
	allocated := collect(t, clone.Allocated(t.Context(), newer, 0, gib), 0, gib)
	if int64(len(allocated)) != pieces {
		t.Errorf("got %d allocated ranges, want %d", len(allocated), pieces)
	}
	delta := collect(t, clone.Delta(t.Context(), older, newer, 0, nil), 0, gib)
	seen := map[int64]bool{}
	for _, r := range delta {
		seen[r.Offset] = true
	}
	for i := range pieces / 3 {
		if !seen[i*192*kib] && !seen[i*192*kib+4*kib] {
			t.Fatalf("the delta does not contain the write at %d", i*192*kib)
		}
	}
	if !fsys.compress && int64(len(delta)) != pieces/3 {
		t.Errorf("got a delta of %d ranges, want %d", len(delta), pieces/3)
	}
}

// TestUnshared: Unshared counts the blocks that no other file shares.
func TestUnshared(t *testing.T) {
	eachFilesystem(t, "512M", func(t *testing.T, fsys testFS, dir string) {
		f := fsys.image(t, filepath.Join(dir, "image"))
		write(t, f, 0, random(4*mib))
		must(t, f.Sync())
		requireUnshared := func(f *os.File, want int64) {
			t.Helper()
			got, ok, err := clone.Unshared(f)
			if err != nil || !ok || got != want {
				t.Errorf("%s: got %d unshared bytes, %t, %v, want %d", f.Name(), got, ok, err, want)
			}
		}
		requireUnshared(f, 4*mib)
		if !fsys.reflink {
			return
		}
		c := create(t, filepath.Join(dir, "copy"))
		_, err := clone.File(t.Context(), c, f, clone.Options{})
		must(t, err)
		requireUnshared(f, 0)
		requireUnshared(c, 0)
		write(t, c, 3*mib, random(mib))
		must(t, c.Sync())
		requireUnshared(c, mib)
	})
	if _, ok, err := clone.Unshared(open(t, "/proc/self/status")); ok || err != nil {
		t.Errorf("a filesystem that reports no extents: got %t, %v, want false", ok, err)
	}
}

// BenchmarkDelta compares two snapshots of an image of 1 TiB with 10,000 changed extents, on xfs and on btrfs.
func BenchmarkDelta(b *testing.B) {
	for _, fsys := range testFilesystems[:2] {
		b.Run(fsys.name, func(b *testing.B) {
			dir := fsys.mount(b, "4G")
			h := &history{image: fsys.image(b, filepath.Join(dir, "image")), size: 1 << 40}
			must(b, h.image.Truncate(h.size))
			const extents = 10_000
			for i := range int64(2 * extents) {
				write(b, h.image, i*h.size/(2*extents)&^0xfff, []byte("older"))
			}
			older := h.snapshot(b, filepath.Join(dir, "older"))
			for i := range int64(extents) {
				write(b, h.image, i*h.size/extents&^0xfff, []byte("newer"))
			}
			newer := h.snapshot(b, filepath.Join(dir, "newer"))
			for b.Loop() {
				if n := len(collect(b, clone.Delta(b.Context(), older, newer, 0, nil), 0, h.size)); n != extents {
					b.Fatalf("got a delta of %d ranges, want %d", n, extents)
				}
			}
		})
	}
}
