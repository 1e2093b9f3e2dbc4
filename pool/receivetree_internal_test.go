package pool

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/volume"
)

// packFiles packs a directory with a file of some bytes and another name of it.
func packFiles(t *testing.T, size int) (*clone.Packed, volume.Manifest) {
	t.Helper()
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "file"), bytes.Repeat([]byte("a"), size), 0o640))
	must(t, os.Link(filepath.Join(dir, "file"), filepath.Join(dir, "link")))
	return packDir(t, dir)
}

// packDir packs a directory.
func packDir(t *testing.T, dir string) (*clone.Packed, volume.Manifest) {
	t.Helper()
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
	_, err = x.WriteAt(t.Context(), b, from)
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
	if err := x.Complete(size); !errors.Is(err, interrupted) {
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
	if x.Completes(half) {
		t.Error("the entries of the directory must be made again")
	}
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
	_, err := x.WriteAt(t.Context(), []byte{0xff}, size/2-1) // all entries precede the last record
	must(t, err)
	if err := x.Complete(size); !errors.Is(err, volume.ErrDamaged) {
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
	must(t, x.Complete(size))
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
	must(t, x.Complete(size))
	if err := writePacked(t, x, packed, size, packed.Size); !errors.Is(err, volume.ErrOutOfRange) {
		t.Errorf("more content than the capacity: got %v, want ErrOutOfRange", err)
	}
}

// receiveBase receives a volume "base" with a file that contains only the letter a, and packs the differences of one with a later
// content of the same size.
func receiveBase(t *testing.T, p *Pool, later []byte) (newer *clone.Packed, changed volume.Manifest) {
	t.Helper()
	src, before := t.TempDir(), t.TempDir()
	must(t, os.WriteFile(filepath.Join(before, "file"), bytes.Repeat([]byte("a"), len(later)), 0o600))
	must(t, os.Chtimes(filepath.Join(before, "file"), time.Unix(1, 0), time.Unix(1, 0)))
	older, m := packDir(t, before)
	m.Identity, m.Lineage = "older", p.ID("local", "source")
	x, err := p.Receive(t.Context(), directoryVolume(p, "base", contentSize), m)
	must(t, err)
	defer x.Close()
	must(t, x.Begin(t.Context(), "", func() {}))
	must(t, writePacked(t, x, older, 0, older.IndexSize))
	must(t, x.Complete(older.Size))
	must(t, writePacked(t, x, older, older.IndexSize, older.Size))
	must(t, x.CommitDirectory(t.Context(), func(*os.File, bool) error { return nil }))

	must(t, os.WriteFile(filepath.Join(src, "file"), later, 0o600))
	newer, changed = packDir(t, src)
	changed.Identity, changed.Lineage = "newer", m.Lineage
	root, err := os.Open(before)
	must(t, err)
	must(t, newer.Since(root, func() error { return nil }))
	return newer, changed
}

// TestReceiveTreeCapacity: a content with the size of the capacity is received, also after interruptions.
func TestReceiveTreeCapacity(t *testing.T) {
	p := newPlace(t, testenv.Filesystem(t, "xfs", "512M")).open(t)
	newer, changed := receiveBase(t, p, bytes.Repeat([]byte("b"), contentSize))
	at := newer.IndexSize
	x := receiveTree(t, p, changed)
	must(t, x.Begin(t.Context(), "older", func() {}))
	must(t, writePacked(t, x, newer, 0, at))
	must(t, x.Complete(at))
	for received := at; at < newer.Size; at = x.Verified {
		end := min(newer.Size, at+3<<19)
		must(t, writePacked(t, x, newer, at, end))
		received += end - at
		must(t, x.SetVerified(end, received))
		if end == newer.Size {
			break
		}
		x.Close()
		x = receiveTree(t, p, changed)
		received = x.Bytes
		must(t, x.Begin(t.Context(), "older", func() {}))
	}
	must(t, x.CommitDirectory(t.Context(), func(*os.File, bool) error { return nil }))
	x.Close()
}

// TestReceiveTreeOwners: the limit of a volume is raised as soon as another directory shares its data, and set again when that is
// discarded.
func TestReceiveTreeOwners(t *testing.T) {
	const size = 3 << 20
	p := newPlace(t, testenv.SimpleQuotas(t, "512M")).open(t)
	newer, changed := receiveBase(t, p, bytes.Repeat([]byte("b"), size))
	limit := func() int64 {
		t.Helper()
		base, err := p.Lookup("base")
		must(t, err)
		u, _, err := p.Quotas.Usage(base)
		must(t, err)
		return u.Limit.Bytes
	}
	receive := func() *Partial {
		t.Helper()
		v := directoryVolume(p, "v", contentSize)
		v.Source = &volume.Source{Snapshot: true, ID: p.ID("local", "snapshot")}
		x, err := p.Receive(t.Context(), v, changed)
		must(t, err)
		return x
	}
	x := receive()
	must(t, x.Begin(t.Context(), "older", func() {}))
	must(t, writePacked(t, x, newer, 0, newer.IndexSize))
	must(t, x.Complete(newer.IndexSize))
	if got := limit(); got != contentSize+size {
		t.Errorf("got a limit of %d bytes while the data is shared, want %d", got, contentSize+size)
	}
	x.Close() // before progress.json says that all entries were made

	x = receive()
	defer x.Close()
	await(t, "the limit of the base to be set again", func() bool { return limit() == contentSize })
}

// TestReceiveTreeDifferences: after an interruption, the content behind the last checksum is again that of the base. A base that was
// used is lost, and the next call begins again.
func TestReceiveTreeDifferences(t *testing.T) {
	const size = 3 << 20
	p := newPlace(t, testenv.Filesystem(t, "xfs", "512M")).open(t)
	content := bytes.Repeat([]byte("a"), size)
	content[1<<20], content[size-1] = 'b', 'b'
	newer, changed := receiveBase(t, p, content)
	begin := func(want int64) *Partial {
		t.Helper()
		x := receiveTree(t, p, changed)
		bases, err := x.Bases()
		if err != nil || len(bases) != 1 || bases[0] != "older" || x.Verified != want {
			t.Fatalf("got offset %d and bases %q, %v, want %d and the older content", x.Verified, bases, err, want)
		}
		return x
	}
	data := filepath.Join(p.Dir().Name(), receivedPath("v"), DataDir, "file")
	wantFile := func(want []byte) {
		t.Helper()
		if got, err := os.ReadFile(data); err != nil || !bytes.Equal(got, want) {
			t.Errorf("got another file of %d bytes, %v", len(got), err)
		}
	}
	middle := newer.IndexSize + 3<<19

	x := begin(0)
	must(t, x.Begin(t.Context(), "older", func() {}))
	must(t, writePacked(t, x, newer, 0, newer.IndexSize))
	must(t, x.Complete(middle))
	must(t, writePacked(t, x, newer, newer.IndexSize, middle))
	must(t, x.SetVerified(middle, middle))
	must(t, writePacked(t, x, newer, middle, newer.Size))
	must(t, x.PunchHole(clone.Range{Offset: middle, Length: 1 << 20}))
	wantFile(append(bytes.Clone(content[:3<<19]), append(make([]byte, 1<<20), content[5<<19:]...)...))
	x.Close()

	x = begin(newer.IndexSize + 1<<20)
	must(t, x.Begin(t.Context(), "older", func() {}))
	wantFile(bytes.Repeat([]byte("a"), size))
	must(t, x.SetVerified(x.Verified, x.Bytes))
	x.Close()

	x = begin(newer.IndexSize + 1<<20)
	must(t, p.Images.BeginChange("base"))
	if err := x.Begin(t.Context(), "older", func() {}); !errors.Is(err, volume.ErrUnavailable) {
		t.Errorf("with a base that was used: got %v, want ErrUnavailable", err)
	}
	x.Close()
	x = receiveTree(t, p, changed)
	defer x.Close()
	if bases, err := x.Bases(); err != nil || len(bases) > 0 || x.Verified != 0 {
		t.Errorf("got offset %d and bases %q, %v, want 0 and none", x.Verified, bases, err)
	}
}
