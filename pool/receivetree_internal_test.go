package pool

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/volume"
)

// packFiles packs a directory with a file of some bytes and another name of it.
func packFiles(t *testing.T, size int) (*clone.Packed, volume.Manifest) {
	t.Helper()
	dir := t.TempDir()
	content := make([]byte, size)
	for i := range content {
		content[i] = 'a'
	}
	must(t, os.WriteFile(filepath.Join(dir, "file"), content, 0o640))
	must(t, os.Link(filepath.Join(dir, "file"), filepath.Join(dir, "link")))
	root, err := os.Open(dir)
	must(t, err)
	packed, err := clone.Pack(t.Context(), root, func() (*os.File, error) {
		fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
		return os.NewFile(uintptr(fd), dir), err
	})
	must(t, err)
	t.Cleanup(func() { must(t, packed.Close()) })
	return packed, volume.Manifest{
		Identity: "identity", Size: contentSize, Bytes: packed.Bytes,
		Tree: &volume.PackedTree{IndexSize: packed.IndexSize, Size: packed.Size, Layout: packed.Layout},
	}
}

// receiveTree begins or continues to receive a directory.
func receiveTree(t *testing.T, p *Pool, m volume.Manifest) *Partial {
	t.Helper()
	x, err := p.Receive(t.Context(), directoryVolume(p, "v", contentSize), m)
	must(t, err)
	return x
}

// writePacked writes a part of a packed tree.
func writePacked(t *testing.T, x *Partial, packed *clone.Packed, from, to int64) error {
	t.Helper()
	b := make([]byte, to-from)
	_, err := packed.ReadAt(b, from)
	must(t, err)
	_, err = x.WriteAt(b, from)
	return err
}

// TestReceiveTree: a directory continues with its index after an interruption while its entries are made, and with its content
// after that.
func TestReceiveTree(t *testing.T) {
	p, _ := openPlain(t)
	packed, m := packFiles(t, 1<<20)
	size := packed.IndexSize
	interrupted := errors.New("interrupted")

	x := receiveTree(t, p, m)
	must(t, x.Begin(t.Context(), "", func() {}))
	if u, err := p.Usage(); err != nil || u.Promised != contentSize+size {
		t.Errorf("got %d promised bytes, %v, want the capacity and the index: %d", u.Promised, err, contentSize+size)
	}
	must(t, writePacked(t, x, packed, 0, size))
	made := 0
	x.each = func() error {
		if made++; made > 1 {
			return interrupted
		}
		return nil
	}
	if err := x.Complete(size, size); !errors.Is(err, interrupted) {
		t.Fatalf("got %v, want %v", err, interrupted)
	}
	x.Close()

	x = receiveTree(t, p, m)
	if x.Verified != size {
		t.Errorf("after the interruption: got offset %d, want %d behind the index", x.Verified, size)
	}
	must(t, x.Begin(t.Context(), "", func() {}))
	half := size + 1<<19
	must(t, writePacked(t, x, packed, size, half))
	must(t, x.Complete(half, half))
	must(t, x.SetVerified(half, half))
	must(t, writePacked(t, x, packed, half, half+1))
	x.Close()

	x = receiveTree(t, p, m)
	defer x.Close()
	must(t, x.Begin(t.Context(), "", func() {}))
	data := filepath.Join(p.Dir().Name(), receivedPath("v"), DataDir, "file")
	b, err := os.ReadFile(data)
	if must(t, err); x.Verified != half || len(b) != 1<<20 || b[1<<19-1] != 'a' || b[1<<19] != 0 {
		t.Errorf("got offset %d and a file with %d bytes, want offset %d and no content behind it", x.Verified, len(b), half)
	}
	must(t, writePacked(t, x, packed, half, packed.Size))
	must(t, x.SetVerified(packed.Size, packed.Size))
	must(t, x.CommitDirectory(t.Context(), func(*os.File, bool) error { return nil }))
	p.Trash.AwaitEmpty()
	if u, err := p.Usage(); err != nil || u.Promised != contentSize {
		t.Errorf("got %d promised bytes, %v, want %d", u.Promised, err, contentSize)
	}
}

// TestReceiveInvalidIndex: after an index that is invalid, the index is received again.
func TestReceiveInvalidIndex(t *testing.T) {
	p, _ := openPlain(t)
	packed, m := packFiles(t, 1<<20)
	size := packed.IndexSize
	x := receiveTree(t, p, m)
	must(t, x.Begin(t.Context(), "", func() {}))
	must(t, writePacked(t, x, packed, 0, size))
	_, err := x.WriteAt([]byte{0xff}, size-1) // all entries precede the last record
	must(t, err)
	if err := x.Complete(size, size); !errors.Is(err, volume.ErrDamaged) {
		t.Errorf("an invalid index: got %v, want ErrDamaged", err)
	}
	x.Close()

	x = receiveTree(t, p, m)
	defer x.Close()
	if x.Verified != 0 || x.Bytes != 0 {
		t.Errorf("after an invalid index: got offset %d after %d bytes, want 0", x.Verified, x.Bytes)
	}
	must(t, x.Begin(t.Context(), "", func() {}))
	must(t, writePacked(t, x, packed, 0, size))
	must(t, x.Complete(size, size))
}

// TestReceiveHostileTree: content whose index was not verified, and more than the capacity are refused.
func TestReceiveHostileTree(t *testing.T) {
	p, _ := openPlain(t)
	packed, m := packFiles(t, contentSize+1)
	size := packed.IndexSize
	x := receiveTree(t, p, m)
	defer x.Close()
	must(t, x.Begin(t.Context(), "", func() {}))
	must(t, writePacked(t, x, packed, 0, size))
	if err := writePacked(t, x, packed, size, size+1); !errors.Is(err, volume.ErrDamaged) {
		t.Errorf("content before the checksum of the index: got %v, want ErrDamaged", err)
	}
	must(t, x.Complete(size, size))
	if err := writePacked(t, x, packed, size, packed.Size); !errors.Is(err, volume.ErrOutOfRange) {
		t.Errorf("more content than the capacity: got %v, want ErrOutOfRange", err)
	}
}
