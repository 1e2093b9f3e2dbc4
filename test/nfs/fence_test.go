//go:build vm

package nfs

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
)

// The first node is declared dead and lives: as long as it reaches the server, the
// second does not get its volume.
func testDeclaredDead(t *testing.T, p pair) {
	v := p.first.image(t, pool, "declared", "ext4", 64*mib)
	p.first.up(t, v)
	w := startWriter(t, p.first.file(v, "log"))
	must(t, p.second.detach(t, v, p.first.name))
	must(t, p.second.attach(t, v))
	for end := time.Now().Add(lease * 3 / 2); time.Now().Before(end); {
		wantCode(t, p.second.stage(t, v), codes.Unavailable, "locked by another node")
		w.awaitProgress(t)
	}
	if found := p.first.health(t, v); !slices.Contains(found, "LockLost") {
		t.Errorf("the first node's health has %q, not that the volume is another's", found)
	}
	w.finish(t)
	must(t, p.first.unpublish(t, v))
	wantCode(t, p.first.stage(t, v), codes.FailedPrecondition, "node-2")
	wantCode(t, p.first.publish(t, v), codes.FailedPrecondition, "node-2")
	must(t, p.first.unstage(t, v))
	wantCode(t, p.first.stage(t, v), codes.FailedPrecondition, "node-2")
	eventually(t, func() error { return p.second.stage(t, v) })
	must(t, p.second.publish(t, v))
	w.wantRecords(t, p.second.file(v, "log"))
	p.second.down(t, v)
	must(t, p.second.delete(t, v))
}

// The first node is cut off while it writes. When its lease is over the second gets
// the volume, and nothing that the first still writes arrives.
func testCutOff(t *testing.T, p pair) {
	v := p.first.image(t, pool, "cut", "ext4", 64*mib)
	p.first.up(t, v)
	w := startWriter(t, p.first.file(v, "log"))
	w.awaitProgress(t)
	device := p.first.device(t)

	p.first.Cut(t)
	must(t, p.second.detach(t, v, p.first.name))
	must(t, p.second.attach(t, v))
	wantCode(t, p.second.stage(t, v), codes.Unavailable, "locked by another node")
	eventually(t, func() error { return p.second.stage(t, v) })
	must(t, p.second.publish(t, v))
	w.wantRecords(t, p.second.file(v, "log"))
	write(t, p.second.file(v, "second"), "of the second node")
	late := lateWrite(t, device)

	p.first.Restore(t)
	late.wantFailed(t)
	w.wantBroken(t)
	p.first.awaitLockLost(t, v)
	write(t, p.second.file(v, "third"), "after the first is back")
	must(t, p.first.unpublish(t, v))
	must(t, p.first.unstage(t, v))
	wantText(t, p.second.file(v, "second"), "of the second node")
	wantText(t, p.second.file(v, "third"), "after the first is back")
	w.wantRecords(t, p.second.file(v, "log"))
	p.second.down(t, v)

	wantIntact(t, p.image(v))
	must(t, p.second.delete(t, v))
}

// The server's administrator has it forget the first node, which reaches it all the
// time: that one does not take its lock again.
func testExpired(t *testing.T, p pair) {
	v := p.first.image(t, pool, "expired", "ext4", 64*mib)
	p.first.up(t, v)
	w := startWriter(t, p.first.file(v, "log"))
	w.awaitProgress(t)
	must(t, p.second.detach(t, v, p.first.name))
	must(t, p.second.attach(t, v))
	wantCode(t, p.second.stage(t, v), codes.Unavailable, "locked by another node")
	p.server.Expire(t, p.first.Link)
	w.wantBroken(t)
	eventually(t, func() error { return p.second.stage(t, v) })
	must(t, p.second.publish(t, v))
	w.wantRecords(t, p.second.file(v, "log"))
	p.first.awaitLockLost(t, v)
	must(t, p.first.unpublish(t, v))
	must(t, p.first.unstage(t, v))
	p.second.down(t, v)
	run(t, "e2fsck", "-f", "-n", p.image(v))
	must(t, p.first.delete(t, v))
}

// The first node is cut off, and the second has its volume for a while. When the
// first gets it back it has to take it as it is now.
func testHadByAnother(t *testing.T, p pair) {
	v := p.first.image(t, pool, "had", "ext4", 64*mib)
	p.first.up(t, v)
	write(t, p.first.file(v, "text"), "old")
	p.first.Cut(t)
	must(t, p.second.detach(t, v, p.first.name))
	must(t, p.second.attach(t, v))
	eventually(t, func() error { return p.second.stage(t, v) })
	must(t, p.second.publish(t, v))
	wantText(t, p.second.file(v, "text"), "old")
	write(t, p.second.file(v, "text"), "new")
	p.second.down(t, v)

	p.first.Restore(t)
	eventually(t, func() error { return p.first.attach(t, v) })
	for name, call := range map[string]func(*testing.T, *vol) error{"stage": p.first.stage, "publish": p.first.publish} {
		if err := call(t, v); status.Code(err) != codes.FailedPrecondition {
			t.Errorf("%s of what has changed meanwhile: %v, want %v", name, err, codes.FailedPrecondition)
		}
	}
	p.first.awaitLockLost(t, v)
	must(t, p.first.unpublish(t, v))
	must(t, p.first.unstage(t, v))
	run(t, "e2fsck", "-f", "-n", p.image(v))
	must(t, p.first.stage(t, v))
	must(t, p.first.publish(t, v))
	wantText(t, p.first.file(v, "text"), "new")
	p.first.down(t, v)
	must(t, p.first.delete(t, v))
}

// wantBroken wants a writer to end since it cannot write any more.
func (w *writer) wantBroken(t *testing.T) {
	t.Helper()
	select {
	case <-w.ended:
	case <-time.After(patience):
		t.Fatal("the writer does not end")
	}
	if w.err == nil || !strings.Contains(w.err.Error(), "input/output error") && !strings.Contains(w.err.Error(), "read-only") {
		t.Errorf("the writer ended with %v, want an error of its file", w.err)
	}
}

// image is the file of a volume on the server.
func (p pair) image(v *vol) string {
	return filepath.Join(p.server.Dir(p.export), "volumes", v.id[strings.LastIndex(v.id, ":")+1:], "image")
}

// awaitLockLost waits until the node says that it has lost its volume. Its driver may
// have to notice first that the server is back.
func (m *machine) awaitLockLost(t *testing.T, v *vol) {
	t.Helper()
	var found []string
	for end := time.Now().Add(patience); time.Now().Before(end); {
		if found = m.health(t, v); slices.Contains(found, "LockLost") {
			return
		}
	}
	t.Errorf("the volume's health on %s has %q, want LockLost", m.name, found)
}

// device is the loop device of the one volume with an image that the node has.
func (m *machine) device(t *testing.T) string {
	t.Helper()
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	must(t, err)
	for _, f := range files {
		if at, _ := os.ReadFile(f); strings.HasPrefix(string(at), m.path("nfs/")) {
			return "/dev/" + strings.Split(f, "/")[3]
		}
	}
	t.Fatalf("%s has no loop device", m.name)
	return ""
}

// late is a write to a device that waits for the server.
type late struct {
	cmd  *exec.Cmd
	said bytes.Buffer
}

const lateText = "written too late "

func lateWrite(t *testing.T, device string) *late {
	t.Helper()
	file := filepath.Join(t.TempDir(), "late")
	must(t, os.WriteFile(file, []byte(strings.Repeat(lateText, 4096)[:16*4096]), 0o600))
	l := &late{cmd: exec.Command("dd", "if="+file, "of="+device, "bs=4096", "seek=12288", "oflag=direct", "conv=notrunc,nocreat", "status=none")}
	l.cmd.Stderr = &l.said
	must(t, l.cmd.Start())
	return l
}

func (l *late) wantFailed(t *testing.T) {
	t.Helper()
	ended := make(chan error, 1)
	go func() { ended <- l.cmd.Wait() }()
	select {
	case err := <-ended:
		if err == nil || !strings.Contains(l.said.String(), "Input/output error") {
			t.Errorf("the late write ended with %v, %q; want an I/O error", err, &l.said)
		}
	case <-time.After(patience):
		t.Fatal("the late write does not end")
	}
}

// wantIntact wants what the second node wrote in an image, and nothing late.
func wantIntact(t *testing.T, image string) {
	t.Helper()
	b, err := os.ReadFile(image)
	must(t, err)
	if at := bytes.Index(b, []byte(lateText)); at >= 0 {
		t.Errorf("the late write is in the image at %d", at)
	}
	if !bytes.Contains(b, []byte("of the second node")) {
		t.Error("what the second node wrote is not in the image")
	}
	run(t, "e2fsck", "-f", "-n", image)
}

// Two nodes that the server takes for one are told, before the second has a volume.
func TestTwins(t *testing.T) {
	s := nfsd.Start(t, nfsd.Options{Lease: lease})
	export := s.Export(t, "volumes")
	t.Cleanup(func() { wantNoOwners(t, s, export) })
	first := start(t, s.Node(t, "twin"), "twin-1", nfsPool(pool, s, export))
	v := first.image(t, pool, "v", "ext4", 64*mib)
	first.up(t, v)
	write(t, first.file(v, "text"), "of the first")
	first.down(t, v)

	second := start(t, s.Node(t, "twin"), "twin-2", nfsPool(pool, s, export))
	eventually(t, func() error { return second.attach(t, v) })
	wantCode(t, second.stage(t, v), codes.FailedPrecondition, "twin-1", "nfs_client/identifier")
	must(t, second.detach(t, v, "twin-2"))

	// It is mended as the error says.
	second.stop(t)
	second.Identify(t, "another")
	second.run(t)
	eventually(t, func() error { return second.attach(t, v) })
	second.up(t, v)
	wantText(t, second.file(v, "text"), "of the first")
	second.down(t, v)
	must(t, second.delete(t, v))
	wantEmpty(t, s, export)
}

// A node that comes with the identity of another is taken for that one after a
// restart, and ends its locks: volumes of the other fail, and lose nothing that was
// on the disk.
func TestTwinDisturbs(t *testing.T) {
	s := nfsd.Start(t, nfsd.Options{Lease: lease})
	export := s.Export(t, "volumes")
	t.Cleanup(func() { wantNoOwners(t, s, export) })
	first := start(t, s.Node(t, "twin"), "twin-1", nfsPool(pool, s, export))
	v := first.image(t, pool, "v", "ext4", 64*mib)
	first.up(t, v)
	w := startWriter(t, first.file(v, "log"))
	w.awaitProgress(t)

	second := start(t, s.Node(t, "twin"), "twin-2", nfsPool(pool, s, export))
	eventually(t, func() error { return second.detach(t, v, "twin-1") })
	eventually(t, func() error { return second.attach(t, v) })
	wantCode(t, second.stage(t, v), codes.FailedPrecondition, "twin-1", "nfs_client/identifier")
	w.wantBroken(t)
	must(t, second.detach(t, v, "twin-2"))
	second.stop(t)

	must(t, first.attach(t, v))
	first.awaitLockLost(t, v)
	must(t, first.unpublish(t, v))
	must(t, first.unstage(t, v))
	first.up(t, v)
	w.wantRecords(t, first.file(v, "log"))
	first.down(t, v)
	must(t, first.delete(t, v))
	wantEmpty(t, s, export)
}
