package pool

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/background"
	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/volume"
)

// contentSize is the size of the content that the tests receive, in bytes.
const contentSize = 4 << 20

// snapshotted is the time of the snapshot that the tests receive.
var snapshotted = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// receiveSome begins to receive an image with some verified bytes, and ends.
func receiveSome(t *testing.T, p *Pool, name string, verified int64) {
	t.Helper()
	x := mustReceive(t, p, name, "identity")
	must(t, x.Begin(t.Context(), "", func() {}))
	_, err := x.Image.WriteAt([]byte("content"), 0)
	must(t, err)
	must(t, x.SetVerified(verified, verified))
	_, err = x.Image.WriteAt([]byte("not verified"), verified)
	must(t, err)
	x.Close()
}

func mustReceive(t *testing.T, p *Pool, name, identity string) *Partial {
	t.Helper()
	v := volume.Volume{
		Version: volume.RecordVersion, ID: p.ID("loop", name), CoName: name, Capacity: contentSize, Block: true, SectorSize: 512,
		Created: time.Now().UTC(), Source: &volume.Source{Snapshot: true, ID: p.ID("loop", "s")},
	}
	x, err := p.Receive(t.Context(), v, volume.Manifest{Identity: identity, Lineage: p.ID("loop", "lineage"), Created: snapshotted, Size: contentSize})
	must(t, err)
	return x
}

// TestReceivedExpires: an image that no call receives stays for receivedLifetime, also after a restart, and counts as promised.
func TestReceivedExpires(t *testing.T) {
	dir := t.TempDir()
	place := newPlace(t, dir)
	p := place.open(t)
	receiveSome(t, p, "a", 4096)
	running := mustReceive(t, p, "b", "identity")
	entries, err := p.Entries()
	if err != nil || len(entries) != 2 || entries[0].Progress() != Receiving || entries[0].Used < 4096 || entries[0].Volume.ID.Name != "a" {
		t.Errorf("got entries %+v, %v, want 2 that are being received", entries, err)
	}
	for _, at := range []time.Time{time.Now(), time.Now().Add(receivedLifetime - time.Minute)} {
		must(t, p.discardExpired(at))
		wantReceived(t, dir, 2)
	}
	must(t, p.discardExpired(time.Now().Add(receivedLifetime+time.Minute)))
	wantReceived(t, dir, 1)
	running.Close()
	p.Close()

	p = place.open(t)
	if u, err := p.Usage(); err != nil || u.Promised < contentSize {
		t.Errorf("after a restart: got %d promised bytes, %v, want those of the image", u.Promised, err)
	}
	must(t, p.discardExpired(time.Now().Add(receivedLifetime-time.Minute)))
	wantReceived(t, dir, 1)
	must(t, p.DiscardReceived("b"))
	wantReceived(t, dir, 0)
	p.Trash.AwaitEmpty()
	if u, err := p.Usage(); err != nil || u.Promised != 0 {
		t.Errorf("got %d promised bytes, %v, want none", u.Promised, err)
	}
}

// TestReceiveAgain: what was verified of the same content stays, and everything else is removed.
func TestReceiveAgain(t *testing.T) {
	p, _ := openPlain(t)
	receiveSome(t, p, "a", 4096)
	x := mustReceive(t, p, "a", "identity")
	must(t, x.Begin(t.Context(), "", func() {}))
	b := make([]byte, 8192)
	_, err := x.Image.ReadAt(b, 0)
	must(t, err)
	if string(b[:7]) != "content" || b[4096] != 0 || x.Verified != 4096 || x.Bytes != 4096 {
		t.Errorf("got %q, %d after the verified part, verified %d: want the verified part, and zeros", b[:7], b[4096], x.Verified)
	}
	x.Close()
	x = mustReceive(t, p, "a", "another identity")
	must(t, x.Begin(t.Context(), "", func() {}))
	_, err = x.Image.ReadAt(b, 0)
	must(t, err)
	if b[0] != 0 || x.Verified != 0 {
		t.Errorf("another content: got %q, verified %d, want zeros", b[:7], x.Verified)
	}
	failed := errors.New("the image is not complete")
	if err := x.Commit(t.Context(), func(*os.Root, *os.File) error { return failed }); !errors.Is(err, failed) {
		t.Errorf("got %v, want %v", err, failed)
	}
	x.Close()
	if _, err := beneath.Stat(p.volumes, "a"); !beneath.IsNotExist(err) {
		t.Errorf("got %v for a volume that was not completed, want that it does not exist", err)
	}
	p.Trash.AwaitEmpty()
	if u, err := p.Usage(); err != nil || u.Promised != 0 {
		t.Errorf("got %d promised bytes, %v, want none", u.Promised, err)
	}
}

// TestReceiveDifferences: an image begins with the content of a volume that was not changed, and continues with it after an
// interruption. If the base was changed or the other node has it no longer, the image begins again.
func TestReceiveDifferences(t *testing.T) {
	p := newPlace(t, testenv.Filesystem(t, "xfs", "512M")).open(t)
	base := mustReceive(t, p, "base", "S1")
	must(t, base.Begin(t.Context(), "", func() {}))
	_, err := base.Image.WriteAt(bytes.Repeat([]byte("base"), contentSize/4), 0)
	must(t, err)
	must(t, base.Commit(t.Context(), func(dir *os.Root, image *os.File) error { return MarkReceived(dir, image, base.content) }))
	base.Close()

	begin := func(verified int64, bases []string) *Partial {
		t.Helper()
		x := mustReceive(t, p, "a", "S2")
		if got, err := x.Bases(); err != nil || !slices.Equal(got, bases) || x.Verified != verified {
			t.Fatalf("got bases %q, %v, verified %d, want %q and %d", got, err, x.Verified, bases, verified)
		}
		return x
	}
	x := begin(0, []string{"S1"})
	must(t, x.Begin(t.Context(), "S1", func() {}))
	_, err = x.Image.WriteAt([]byte("newer"), 0)
	must(t, err)
	must(t, x.SetVerified(baseAlignment+512, 5))
	_, err = x.Image.WriteAt([]byte("not verified"), 2<<20)
	must(t, err)
	x.Close()

	x = begin(baseAlignment, []string{"S1"})
	must(t, x.Begin(t.Context(), "S1", func() {}))
	got := make([]byte, contentSize)
	_, err = x.Image.ReadAt(got, 0)
	must(t, err)
	if want := append([]byte("newer"), bytes.Repeat([]byte("base"), contentSize/4)[5:]...); !bytes.Equal(got, want) {
		t.Error("the image that continues is not the verified part, and the base behind it")
	}
	must(t, x.SetVerified(baseAlignment, 5))
	x.Close()

	x = begin(baseAlignment, []string{"S1"})
	if err := x.Begin(t.Context(), "", func() {}); !errors.Is(err, volume.ErrUnavailable) {
		t.Errorf("the other node has lost the base: got %v, want ErrUnavailable", err)
	}
	x.Close()
	x = begin(0, []string{"S1"})
	must(t, x.Begin(t.Context(), "S1", func() {}))
	must(t, x.SetVerified(baseAlignment, 5))
	x.Close()
	lock, err := p.LockVolume(t.Context(), "base")
	must(t, err)
	x = begin(baseAlignment, []string{"S1"})
	if err := x.Begin(t.Context(), "S1", func() {}); !errors.Is(err, volume.ErrPending) {
		t.Errorf("the base is locked: got %v, want ErrPending", err)
	}
	x.Close()
	must(t, lock.Close())
	must(t, p.Images.BeginChange("base"))
	must(t, p.Images.BeginChange("base"))
	x = begin(baseAlignment, []string{"S1"})
	if err := x.Begin(t.Context(), "S1", func() {}); !errors.Is(err, volume.ErrUnavailable) {
		t.Errorf("the base was changed: got %v, want ErrUnavailable", err)
	}
	x.Close()
	begin(0, nil).Close()
	if err := p.useUnchanged(t.Context(), p.ID("loop", "another"), "S1", errors.New); !errors.Is(err, volume.ErrUnavailable) {
		t.Errorf("a base of another lineage: got %v, want ErrUnavailable", err)
	}
}

// TestCopies: a received volume is a copy of the other node's volume, with the time of the snapshot, until it is changed.
func TestCopies(t *testing.T) {
	p, _ := openPlain(t)
	commitReceived(t, mustReceive(t, p, "a", "S1"))
	source := p.ID("loop", "lineage")
	wantCopies(t, p, map[volume.ID]time.Time{source: snapshotted}, source)
	must(t, p.Images.BeginChange("a"))
	wantCopies(t, p, nil, volume.ID{})
}

// TestCopiesOnStorage is TestCopies for volumes whose data is on the storage of the pool. It also ends when they grow.
func TestCopiesOnStorage(t *testing.T) {
	forms := volume.Forms{{Name: "mounted", Section: func() volume.Section { return new(idSection) }}}
	p, err := Open(t.Context(), forms, Config{Name: "p", Section: &mounted{at: t.TempDir()}}, stateRoot(t), nil)
	must(t, err)
	t.Cleanup(p.Close)
	source := p.ID("mounted", "lineage")
	for name, change := range map[string]func(v volume.Volume) error{
		"staged":   func(v volume.Volume) error { return p.Images.BeginChange(v.ID.Name) },
		"expanded": func(v volume.Volume) error { return p.Grow(t.Context(), v, 2*contentSize, func() error { return nil }) },
	} {
		v := volume.Volume{Version: volume.RecordVersion, ID: p.ID("mounted", name), CoName: name, Capacity: contentSize, Block: true, SectorSize: 512, Section: &idSection{ID: name}}
		content := volume.Manifest{Identity: "S1", Lineage: source, Created: snapshotted, Size: contentSize}
		x, err := p.ReceiveOnStorage(t.Context(), name, content, &deviceData{v: v})
		must(t, err)
		commitReceived(t, x)
		wantCopies(t, p, map[volume.ID]time.Time{source: snapshotted}, source)
		must(t, change(v))
		wantCopies(t, p, nil, volume.ID{})
		must(t, p.Remove(t.Context(), v))
	}
}

// TestReceiveOnStorageAgain: data of other content stays on the storage, and is overwritten from the beginning. Without progress, it
// may be about to be discarded, so it is not used.
func TestReceiveOnStorageAgain(t *testing.T) {
	forms := volume.Forms{{Name: "mounted", Section: func() volume.Section { return new(idSection) }}}
	p, err := Open(t.Context(), forms, Config{Name: "p", Section: &mounted{at: t.TempDir()}}, stateRoot(t), nil)
	must(t, err)
	t.Cleanup(p.Close)
	data := &deviceData{v: volume.Volume{Version: volume.RecordVersion, ID: p.ID("mounted", "v"), CoName: "v", Capacity: contentSize, Block: true, SectorSize: 512, Section: &idSection{ID: "v"}}}
	for _, tc := range []struct {
		identity        string
		verified, bytes int64
		begun           int
	}{{"A", 0, 0, 1}, {"A", 4096, 512, 1}, {"B", 0, 0, 1}, {"B", 4096, 512, 1}} {
		x, err := p.ReceiveOnStorage(t.Context(), "v", volume.Manifest{Identity: tc.identity, Size: contentSize}, data)
		must(t, err)
		if x.Verified != tc.verified || x.Bytes != tc.bytes || data.begun != tc.begun {
			t.Errorf("%s: got verified %d with %d bytes, begun %d times, want %+v", tc.identity, x.Verified, x.Bytes, data.begun, tc)
		}
		must(t, x.Begin(t.Context(), "", func() {}))
		must(t, x.SetVerified(4096, 512))
		x.Close()
	}
	must(t, p.root.Remove(receivedPath("v")+"/"+progressFile))
	x, err := p.ReceiveOnStorage(t.Context(), "v", volume.Manifest{Identity: "B", Size: contentSize}, data)
	must(t, err)
	if x.Verified != 0 || data.begun != 2 {
		t.Errorf("without progress: got verified %d, begun %d times, want 0 and 2", x.Verified, data.begun)
	}
	x.Close()
}

// TestContentID: the ID of a volume's content stays until the volume is changed.
func TestContentID(t *testing.T) {
	p, _ := openPlain(t)
	commitReceived(t, mustReceive(t, p, "a", "S1"))
	id := func() string {
		t.Helper()
		got, err := p.Images.ContentID("a")
		must(t, err)
		return got
	}
	first := id()
	if second := id(); second != first || first == "" {
		t.Errorf("got the IDs %q and %q, want the same", first, second)
	}
	must(t, p.Images.BeginChange("a"))
	if changed := id(); changed == first {
		t.Errorf("got the ID %q again after the volume was changed", changed)
	}
}

// deviceData is a device without content. It implements ReceivedData.
type deviceData struct {
	v     volume.Volume
	begun int
}

func (d *deviceData) Continue(volume.Volume, bool) (volume.Volume, bool) { return d.v, true }

func (d *deviceData) Begin(context.Context) (volume.Volume, error) {
	d.begun++
	return d.v, nil
}

func (d *deviceData) SharesDisk() bool { return true }

func (d *deviceData) Zero(context.Context, *background.Writer, clone.Range, func()) error { return nil }

func (d *deviceData) Close(_ volume.Volume, device *os.File) error { return device.Close() }

func (d *deviceData) Open(_ context.Context, _ *os.Root, _ volume.Volume, verified int64) (*os.File, int64, error) {
	device, err := os.CreateTemp("", "device-")
	if err == nil {
		err = os.Remove(device.Name())
	}
	return device, verified, err
}

// commitReceived makes the volume of a complete image.
func commitReceived(t *testing.T, x *Partial) {
	t.Helper()
	must(t, x.Begin(t.Context(), "", func() {}))
	must(t, x.Commit(t.Context(), func(dir *os.Root, image *os.File) error { return MarkReceived(dir, image, x.content) }))
	x.Close()
}

// wantCopies verifies which copies the pool reports, and that its only volume is a copy of another one.
func wantCopies(t *testing.T, p *Pool, want map[volume.ID]time.Time, of volume.ID) {
	t.Helper()
	copies, err := p.Images.Copies()
	if err != nil || !maps.EqualFunc(copies, want, time.Time.Equal) {
		t.Errorf("got the copies %v, %v, want %v", copies, err, want)
	}
	entries, err := p.Entries()
	if err != nil || len(entries) != 1 || entries[0].CopyOf != of {
		t.Errorf("got %+v, %v, want one volume that is a copy of %v", entries, err, of)
	}
}

func wantReceived(t *testing.T, dir string, n int) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(dir, "pool", receivedDir))
	if err != nil || len(entries) != n {
		t.Errorf("got images %v, %v, want %d", entries, err, n)
	}
}
