package clone_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/background"
	"github.com/trivet-csi/trivet/linux/clone"
)

// TestBudget: copies of files and directories keep to the rate of their budget while others use the disk, and end with their context.
func TestBudget(t *testing.T) {
	const size = 4 << 20
	dir := testenv.Filesystem(t, "ext4", "64M")
	content := make([]byte, size)
	_, _ = rand.Read(content)
	must(t, os.Mkdir(filepath.Join(dir, "from"), 0o700))
	must(t, os.WriteFile(filepath.Join(dir, "from/file"), content, 0o600))
	openAt := func(path string, flags int) *os.File {
		f, err := os.OpenFile(filepath.Join(dir, path), flags, 0o600)
		must(t, err)
		t.Cleanup(func() { _ = f.Close() })
		return f
	}
	type copier func(ctx context.Context, o clone.Options, to string) error
	copiers := map[string]copier{
		"tree": func(ctx context.Context, o clone.Options, to string) error {
			_, err := clone.Tree(ctx, openAt(to, os.O_RDONLY), openAt("from", os.O_RDONLY), o)
			return err
		},
		"file": func(ctx context.Context, o clone.Options, to string) error {
			_, err := clone.File(ctx, openAt(to+"/file", os.O_RDWR|os.O_CREATE), openAt("from/file", os.O_RDONLY), o)
			return err
		},
	}
	defer useDisk(t, openAt("other", os.O_RDWR|os.O_CREATE))()
	for name, copyOne := range copiers {
		must(t, os.Mkdir(filepath.Join(dir, name), 0o700))
		began := time.Now()
		must(t, copyOne(t.Context(), clone.Options{Budget: background.On(2*size, openAt("from", os.O_RDONLY))}, name))
		if took := time.Since(began); took < 500*time.Millisecond { // a second without the beginning and the last rest
			t.Errorf("%s: took %v, want about a second", name, took)
		}
		got, err := os.ReadFile(filepath.Join(dir, name, "file"))
		must(t, err)
		if !bytes.Equal(got, content) {
			t.Errorf("%s: the copy differs", name)
		}

		to := name + "-canceled"
		must(t, os.Mkdir(filepath.Join(dir, to), 0o700))
		ctx, cancel := context.WithCancel(t.Context())
		copied := int64(0)
		o := clone.Options{Budget: background.On(1<<40, openAt("from", os.O_RDONLY)), Progress: func(bytes int64) {
			copied = bytes
			cancel()
		}}
		if err := copyOne(ctx, o, to); !errors.Is(err, context.Canceled) || copied != background.Piece {
			t.Errorf("%s: got %v after %d bytes, want the end of the context after %d", name, err, copied, background.Piece)
		}
	}
}

// TestBudgetPieces: the size of the pieces does not depend on that of the first range with data.
func TestBudgetPieces(t *testing.T) {
	const first, rest = 4 << 10, 4 << 20
	dir := testenv.Filesystem(t, "ext4", "64M")
	content := make([]byte, rest)
	_, _ = rand.Read(content)
	src, err := os.Create(filepath.Join(dir, "from"))
	must(t, err)
	defer src.Close()
	dst, err := os.Create(filepath.Join(dir, "to"))
	must(t, err)
	defer dst.Close()
	_, err = src.WriteAt(content[:first], 0)
	must(t, err)
	_, err = src.WriteAt(content, 1<<20)
	must(t, err)
	pieces := 0
	o := clone.Options{Unshared: true, Budget: background.On(1<<40, src), Progress: func(int64) { pieces++ }}
	_, err = clone.File(t.Context(), dst, src, o)
	must(t, err)
	if pieces < 1+rest/(1<<20) || pieces > 1+rest/background.Piece {
		t.Errorf("got %d pieces, want one of %d bytes, and others of 128 KiB to 1 MiB", pieces, first)
	}
}

// TestBudgetZeros: zeros that are allocated stay allocated, and holes stay holes. Zeros of a device become holes.
func TestBudgetZeros(t *testing.T) {
	const data, size = 1 << 20, 4 << 20
	dir := testenv.Filesystem(t, "ext4", "64M")
	src, err := os.Create(filepath.Join(dir, "from"))
	must(t, err)
	defer src.Close()
	_, err = src.Write(make([]byte, data))
	must(t, errors.Join(err, src.Truncate(size), src.Sync()))
	device, err := os.Open(testenv.PlugIn(t, src.Name()))
	must(t, err)
	defer device.Close()
	for _, tc := range []struct {
		src  *os.File
		want int64
	}{{src, data}, {device, 0}} {
		dst, err := os.Create(filepath.Join(dir, "to"))
		must(t, err)
		defer dst.Close()
		_, err = clone.File(t.Context(), dst, tc.src, clone.Options{Unshared: true, Budget: background.On(1<<40, src)})
		must(t, errors.Join(err, dst.Sync()))
		if got := allocatedTo(t, dst); got != tc.want {
			t.Errorf("%s: got %d allocated bytes, want %d", tc.src.Name(), got, tc.want)
		}
	}
}

// useDisk writes to a file again and again until stop is called.
func useDisk(t *testing.T, f *os.File) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			_, err := f.WriteAt([]byte("other"), 0)
			if err = errors.Join(err, unix.Fdatasync(int(f.Fd()))); err != nil {
				t.Error(err)
				return
			}
		}
	}()
	return func() {
		cancel()
		<-done
	}
}
