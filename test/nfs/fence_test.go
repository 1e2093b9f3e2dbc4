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

// testDeclaredDead: the first node is declared dead and still runs. While it reaches the server,
// the second node cannot stage its volume.
func testDeclaredDead(t *testing.T, p pair) {
	v := p.first.image(t, pool, "declared", "ext4", 64*mib)
	p.first.up(t, v)
	w := startWriter(t, p.first.file(v, "log"))
	p.takeOver(t, v)
	for end := time.Now().Add(lease * 3 / 2); time.Now().Before(end); {
		wantCode(t, p.second.stage(t, v), codes.Unavailable, "locked by another node")
		w.awaitProgress(t)
	}
	if found := p.first.health(t, v); !slices.Contains(found, "LockLost") {
		t.Errorf("health on the first node: got %q, want LockLost", found)
	}
	w.finish(t)
	must(t, p.first.unpublish(t, v))
	wantCode(t, p.first.stage(t, v), codes.FailedPrecondition, "node-2")
	wantCode(t, p.first.publish(t, v), codes.FailedPrecondition, "node-2")
	must(t, p.first.unstage(t, v))
	wantCode(t, p.first.stage(t, v), codes.FailedPrecondition, "node-2")
	p.second.mount(t, v)
	w.wantRecords(t, p.second.file(v, "log"))
	p.second.remove(t, v)
}

// testCutOff: the link of the first node is cut while it writes. When its lease has expired, the
// second node gets the volume, and later writes of the first do not reach the image.
func testCutOff(t *testing.T, p pair) {
	v := p.first.image(t, pool, "cut", "ext4", 64*mib)
	p.first.up(t, v)
	w := startWriter(t, p.first.file(v, "log"))
	w.awaitProgress(t)
	device := p.first.device(t)

	p.first.Cut(t)
	p.takeOver(t, v)
	wantCode(t, p.second.stage(t, v), codes.Unavailable, "locked by another node")
	p.second.mount(t, v)
	w.wantRecords(t, p.second.file(v, "log"))
	write(t, p.second.file(v, "second"), "of the second node")
	late := lateWrite(t, device)

	p.first.Restore(t)
	late.wantFailed(t)
	w.wantBroken(t)
	p.first.awaitLockLost(t, v)
	write(t, p.second.file(v, "third"), "after the first is back")
	p.first.unmount(t, v)
	wantText(t, p.second.file(v, "second"), "of the second node")
	wantText(t, p.second.file(v, "third"), "after the first is back")
	w.wantRecords(t, p.second.file(v, "log"))
	p.second.down(t, v)

	wantIntact(t, p.image(v))
	must(t, p.second.delete(t, v))
}

// testExpired: the server's administrator expires the first node, which always reaches the
// server. The node does not take its lock again.
func testExpired(t *testing.T, p pair) {
	v := p.first.image(t, pool, "expired", "ext4", 64*mib)
	p.first.up(t, v)
	w := startWriter(t, p.first.file(v, "log"))
	w.awaitProgress(t)
	p.takeOver(t, v)
	wantCode(t, p.second.stage(t, v), codes.Unavailable, "locked by another node")
	p.server.Expire(t, p.first.Link)
	w.wantBroken(t)
	p.second.mount(t, v)
	w.wantRecords(t, p.second.file(v, "log"))
	p.first.awaitLockLost(t, v)
	p.first.unmount(t, v)
	p.second.down(t, v)
	run(t, "e2fsck", "-f", "-n", p.image(v))
	must(t, p.first.delete(t, v))
}

// testUsedElsewhere: the link of the first node is cut, and the second node uses its volume for a
// while. When the volume is attached to the first node again, it has the second node's data.
func testUsedElsewhere(t *testing.T, p pair) {
	v := p.first.image(t, pool, "had", "ext4", 64*mib)
	p.first.up(t, v)
	write(t, p.first.file(v, "text"), "old")
	p.first.Cut(t)
	p.takeOver(t, v)
	p.second.mount(t, v)
	wantText(t, p.second.file(v, "text"), "old")
	write(t, p.second.file(v, "text"), "new")
	p.second.down(t, v)

	p.first.Restore(t)
	eventually(t, func() error { return p.first.attach(t, v) })
	for name, call := range map[string]func(*testing.T, *vol) error{"stage": p.first.stage, "publish": p.first.publish} {
		if err := call(t, v); status.Code(err) != codes.FailedPrecondition {
			t.Errorf("%s of a volume that another node has changed: got %v, want %v", name, err, codes.FailedPrecondition)
		}
	}
	p.first.awaitLockLost(t, v)
	p.first.unmount(t, v)
	run(t, "e2fsck", "-f", "-n", p.image(v))
	must(t, p.first.stage(t, v))
	must(t, p.first.publish(t, v))
	wantText(t, p.first.file(v, "text"), "new")
	p.first.remove(t, v)
}

// wantBroken fails unless a writer ends because a write failed.
func (w *writer) wantBroken(t *testing.T) {
	t.Helper()
	select {
	case <-w.ended:
	case <-time.After(patience):
		t.Fatal("the writer did not end")
	}
	if w.err == nil || !strings.Contains(w.err.Error(), "input/output error") && !strings.Contains(w.err.Error(), "read-only") {
		t.Errorf("the writer ended with %v, want an error of its file", w.err)
	}
}

// image is the path of a volume's image on the server.
func (p pair) image(v *vol) string {
	return filepath.Join(p.server.Dir(p.export), "volumes", v.id[strings.LastIndex(v.id, ":")+1:], "image")
}

// awaitLockLost waits until the node reports that it has lost the lock of a volume. Its driver may
// first detect that the server is back.
func (m *machine) awaitLockLost(t *testing.T, v *vol) {
	t.Helper()
	var found []string
	for end := time.Now().Add(patience); time.Now().Before(end); {
		if found = m.health(t, v); slices.Contains(found, "LockLost") {
			return
		}
	}
	t.Errorf("health on %s: got %q, want LockLost", m.name, found)
}

// device is the loop device of the only image that is staged on the node.
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

// late is a write to a device that blocks until the server responds.
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
		t.Fatal("the late write did not end")
	}
}

// wantIntact fails unless an image has the data of the second node and not the late write.
func wantIntact(t *testing.T, image string) {
	t.Helper()
	b, err := os.ReadFile(image)
	must(t, err)
	if at := bytes.Index(b, []byte(lateText)); at >= 0 {
		t.Errorf("the late write is in the image at %d", at)
	}
	if !bytes.Contains(b, []byte("of the second node")) {
		t.Error("the image lacks the data of the second node")
	}
	run(t, "e2fsck", "-f", "-n", image)
}

// TestTwins: two nodes have the same client identity. The driver reports that before the second
// node uses a volume.
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

	// The fix is the one that the error suggests.
	second.stop(t)
	second.Identify(t, "another")
	second.run(t)
	eventually(t, func() error { return second.attach(t, v) })
	second.up(t, v)
	wantText(t, second.file(v, "text"), "of the first")
	second.remove(t, v)
	wantEmpty(t, s, export)
}

// TestTwinDisturbs: a second node has the client identity of the first. The server treats it as
// the first after a restart, and drops the first's locks. Volumes of the first fail and keep all
// data that was on the disk.
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
	first.unmount(t, v)
	first.up(t, v)
	w.wantRecords(t, first.file(v, "log"))
	first.remove(t, v)
	wantEmpty(t, s, export)
}
