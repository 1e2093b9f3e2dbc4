package pool

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/volume"
)

// receiveSome begins to receive an image with some verified bytes, and ends.
func receiveSome(t *testing.T, p *Pool, name string, verified int64) {
	t.Helper()
	x := mustReceive(t, p, name, "identity")
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
		Version: volume.RecordVersion, ID: p.ID("loop", name), CoName: name, Capacity: 1 << 20, Block: true, SectorSize: 512,
		Created: time.Now().UTC(), Source: &volume.Source{Snapshot: true, ID: p.ID("loop", "s")},
	}
	x, err := p.Receive(v, identity, 1<<20)
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
	if u, err := p.Usage(); err != nil || u.Promised < 1<<20 {
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
	b := make([]byte, 8192)
	_, err := x.Image.ReadAt(b, 0)
	must(t, err)
	if string(b[:7]) != "content" || b[4096] != 0 || x.Verified != 4096 || x.Bytes != 4096 {
		t.Errorf("got %q, %d after the verified part, verified %d: want the verified part, and zeros", b[:7], b[4096], x.Verified)
	}
	x.Close()
	x = mustReceive(t, p, "a", "another identity")
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

func wantReceived(t *testing.T, dir string, n int) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(dir, "pool", receivedDir))
	if err != nil || len(entries) != n {
		t.Errorf("got images %v, %v, want %d", entries, err, n)
	}
}
