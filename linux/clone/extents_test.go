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

// collect reads all ranges, and requires that they are in order and within the limits.
func collect(tb testing.TB, ranges iter.Seq2[clone.Range, error], from, end int64) []clone.Range {
	tb.Helper()
	var all []clone.Range
	for r, err := range ranges {
		must(tb, err)
		if len(all) > 0 && r.Offset <= from || r.Offset < from || r.Length <= 0 || r.Offset+r.Length > end {
			tb.Fatalf("range %+v after %d, before %d", r, from, end)
		}
		from = r.Offset + r.Length
		all = append(all, r)
	}
	return all
}

func total(ranges []clone.Range) (bytes int64) {
	for _, r := range ranges {
		bytes += r.Length
	}
	return bytes
}

// history changes an image as a tenant does.
type history struct {
	*rand.Rand
	image *os.File
	size  int64
	seed  [32]byte
}

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
	case 6: // not aligned to blocks
		_, err := h.image.WriteAt(h.bytes(1+h.IntN(3000)), h.Int64N(h.size-3000))
		return err
	case 7:
		return h.image.Sync()
	}
	_, err := h.image.WriteAt(h.bytes(int(length)), at)
	return err
}

// bytes returns data, of which some can be compressed.
func (h *history) bytes(n int) []byte {
	b := bytes.Repeat([]byte{byte(h.Uint32())}, n)
	if h.IntN(2) == 0 {
		binary.NativeEndian.PutUint64(h.seed[:], h.Uint64())
		_, _ = rand.NewChaCha8(h.seed).Read(b)
	}
	return b
}

func (h *history) snapshot(tb testing.TB, path string) *os.File {
	tb.Helper()
	f := create(tb, path)
	_, err := clone.File(tb.Context(), f, h.image, clone.Options{})
	must(tb, err)
	_, err = clone.SetImmutable(f, true)
	must(tb, err)
	return f
}

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

// apply returns the content of older, with the content of newer in the ranges.
func apply(older, newer []byte, ranges []clone.Range) []byte {
	out := make([]byte, len(newer))
	copy(out, older)
	for _, r := range ranges {
		copy(out[r.Offset:r.Offset+r.Length], newer[r.Offset:])
	}
	return out
}

// histories returns the number of random histories on each filesystem.
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

// TestDelta: for random changes of an image, older with the delta equals newer, and bytes that are not allocated are
// zeros. The delta is small unless data is compressed.
func TestDelta(t *testing.T) {
	eachGround(t, "1G", func(t *testing.T, g ground, dir string) {
		var changed, all int64
		for seed := range histories(t) {
			c, a := g.history(t, dir, uint64(seed))
			changed, all = changed+c, all+a
		}
		if changed == 0 || !g.compress && changed > all/2 {
			t.Errorf("%d of %d bytes changed", changed, all)
		}
	})
}

// history tests one random history, and returns the size of the delta and of the image.
func (g ground) history(t *testing.T, dir string, seed uint64) (changed, all int64) {
	t.Helper()
	h := &history{Rand: rand.New(rand.NewPCG(seed, 0)), size: 2*mib + int64(seed%2)*500}
	h.image = g.image(t, filepath.Join(dir, "image"))
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
	g.compare(t, seed, older, newer)
	g.compare(t, seed, newer, older)

	from := h.Int64N(h.size)
	rest := collect(t, clone.Delta(t.Context(), older, newer, from), from, h.size)
	oldBytes, newBytes := content(t, older), content(t, newer)
	got := apply(oldBytes, newBytes, rest)
	if !bytes.Equal(got[from:], newBytes[from:]) {
		t.Errorf("history %d: the delta from %d is not complete", seed, from)
	}
	return total(collect(t, clone.Delta(t.Context(), older, newer, 0), 0, h.size)), h.size
}

// compare checks one delta and the allocated ranges of newer against the content of both.
func (g ground) compare(t *testing.T, seed uint64, older, newer *os.File) {
	t.Helper()
	oldBytes, newBytes := content(t, older), content(t, newer)
	size := int64(len(newBytes))
	delta := collect(t, clone.Delta(t.Context(), older, newer, 0), 0, size)
	if got := apply(oldBytes, newBytes, delta); sha256.Sum256(got) != sha256.Sum256(newBytes) {
		t.Errorf("history %d: the delta from %s to %s is not complete", seed, older.Name(), newer.Name())
	}
	if got := apply(nil, newBytes, collect(t, clone.Allocated(t.Context(), newer, 0, size), 0, size)); !bytes.Equal(got, newBytes) {
		t.Errorf("history %d: the allocated ranges of %s are not complete", seed, newer.Name())
	}
}

func remove(t *testing.T, files ...*os.File) {
	t.Helper()
	for _, f := range files {
		_, err := clone.SetImmutable(f, false)
		must(t, errors.Join(err, f.Close(), os.Remove(f.Name())))
	}
}

// TestDeltaSame: equal content is neither read nor yielded.
func TestDeltaSame(t *testing.T) {
	eachGround(t, "1G", func(t *testing.T, g ground, dir string) {
		h := &history{Rand: rand.New(rand.NewPCG(1, 1)), size: 8 * mib, image: g.image(t, filepath.Join(dir, "image"))}
		must(t, h.image.Truncate(h.size))
		write(t, h.image, mib, random(mib))
		older := h.snapshot(t, filepath.Join(dir, "older"))
		write(t, h.image, mib+64*kib, random(4 * kib)[:100])
		newer := h.snapshot(t, filepath.Join(dir, "newer"))
		for name, tc := range map[string]struct{ a, b *os.File }{"itself": {older, older}, "newer": {older, newer}, "older": {newer, older}} {
			n := total(collect(t, clone.Delta(t.Context(), tc.a, tc.b, 0), 0, h.size))
			if name == "itself" && n != 0 && !g.compress || name != "itself" && n == 0 || !g.compress && n > 64*kib {
				t.Errorf("%s: %d bytes differ", name, n)
			}
		}
		// Files that are not immutable are read.
		_, err := clone.SetImmutable(newer, false)
		must(t, err)
		if n := total(collect(t, clone.Delta(t.Context(), older, newer, 0), 0, h.size)); n == 0 || n > 64*kib {
			t.Errorf("compared: %d bytes differ", n)
		}
		remove(t, older, newer)
	})
}

// TestDeltaAcross: equal addresses on different filesystems do not mean equal content.
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
		if n := total(collect(t, clone.Delta(t.Context(), files[0], files[1], 0), 0, mib)); n != mib {
			t.Errorf("%s: %d bytes differ", fsType, n)
		}
	}
}

// TestWindows: files with more extents than an ExtentMap holds, and iterations that end early.
func TestWindows(t *testing.T) {
	eachGround(t, "1G", func(t *testing.T, g ground, dir string) {
		const pieces = 3000
		h := &history{image: g.image(t, filepath.Join(dir, "image")), size: gib}
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
		g.requireDelta(t, older, newer, pieces)

		ctx, cancel := context.WithCancel(t.Context())
		for _, ranges := range []iter.Seq2[clone.Range, error]{clone.Delta(ctx, older, newer, 0), clone.Allocated(ctx, newer, 0, gib)} {
			for _, err := range ranges { // the loop may end early
				must(t, err)
				break
			}
		}
		cancel()
		for _, ranges := range []iter.Seq2[clone.Range, error]{clone.Delta(ctx, older, newer, 0), clone.Allocated(ctx, newer, 0, gib)} {
			var last error
			for _, err := range ranges {
				last = err
			}
			if !errors.Is(last, context.Canceled) {
				t.Errorf("with an ended context: %v", last)
			}
		}
		remove(t, older, newer)
	})
}

func (g ground) requireDelta(t *testing.T, older, newer *os.File, pieces int64) {
	t.Helper()
	allocated := collect(t, clone.Allocated(t.Context(), newer, 0, gib), 0, gib)
	if int64(len(allocated)) != pieces {
		t.Errorf("%d ranges are allocated, want %d", len(allocated), pieces)
	}
	delta := collect(t, clone.Delta(t.Context(), older, newer, 0), 0, gib)
	seen := map[int64]bool{}
	for _, r := range delta {
		seen[r.Offset] = true
	}
	for i := range pieces / 3 {
		if !seen[i*192*kib] && !seen[i*192*kib+4*kib] {
			t.Fatalf("the write at %d is not in the delta", i*192*kib)
		}
	}
	if !g.compress && int64(len(delta)) != pieces/3 {
		t.Errorf("%d ranges differ, want %d", len(delta), pieces/3)
	}
}

// TestUnshared: Unshared counts the blocks that no other file shares.
func TestUnshared(t *testing.T) {
	eachGround(t, "512M", func(t *testing.T, g ground, dir string) {
		f := g.image(t, filepath.Join(dir, "image"))
		write(t, f, 0, random(4*mib))
		must(t, f.Sync())
		want := func(f *os.File, want int64) {
			t.Helper()
			got, ok, err := clone.Unshared(f)
			if err != nil || !ok || got != want {
				t.Errorf("%s: %d, %t, %v, want %d", f.Name(), got, ok, err, want)
			}
		}
		want(f, 4*mib)
		if !g.reflink {
			return
		}
		c := create(t, filepath.Join(dir, "copy"))
		_, err := clone.File(t.Context(), c, f, clone.Options{})
		must(t, err)
		want(f, 0)
		want(c, 0)
		write(t, c, 3*mib, random(mib))
		must(t, c.Sync())
		want(c, mib)
	})
	if _, ok, err := clone.Unshared(open(t, "/proc/self/status")); ok || err != nil {
		t.Errorf("a file without extents: %t, %v", ok, err)
	}
}

// BenchmarkDelta compares two snapshots of an image of 1 TiB with 10,000 changed extents.
func BenchmarkDelta(b *testing.B) {
	for _, g := range grounds[:2] {
		b.Run(g.name, func(b *testing.B) {
			dir := g.mount(b, "4G")
			h := &history{image: g.image(b, filepath.Join(dir, "image")), size: 1 << 40}
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
				if n := len(collect(b, clone.Delta(b.Context(), older, newer, 0), 0, h.size)); n != extents {
					b.Fatalf("%d ranges differ", n)
				}
			}
		})
	}
}
