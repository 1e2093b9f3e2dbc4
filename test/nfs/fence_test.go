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

// testDeclaredDead: the orchestrator declares the first node dead, but the node still runs. As long as
// it reaches the server, the second node cannot stage its volume.
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
		t.Errorf("got health reasons %q on the first node, want LockLost", found)
	}
	p.first.awaitExamined(t, v, "LockLost", true)
	w.finish(t)
	must(t, p.first.unpublish(t, v))
	wantCode(t, p.first.stage(t, v), codes.FailedPrecondition, "node-2")
	wantCode(t, p.first.publish(t, v), codes.FailedPrecondition, "node-2")
	must(t, p.first.unstage(t, v))
	p.first.awaitExamined(t, v, "LockLost", false)
	wantCode(t, p.first.stage(t, v), codes.FailedPrecondition, "node-2")
	p.second.mount(t, v)
	w.wantRecords(t, p.second.file(v, "log"))
	p.second.remove(t, v)
}

// testCutOff: the first node is cut off from the server while it writes. When its lease has expired,
// the second node can use the volume, and later writes of the first node do not reach the image.
func testCutOff(t *testing.T, p pair) {
	v := p.first.image(t, pool, "cut", "ext4", 64*mib)
	p.first.up(t, v)
	w := startWriter(t, p.first.file(v, "log"))
	w.awaitProgress(t)
	device := p.first.device(t)

	p.first.Cut(t)
	cut := time.Now()
	p.takeOver(t, v)
	// With Linux 7.3 on the server, the takeover itself waits for the end of the lease.
	if err := p.second.stage(t, v); err != nil || time.Since(cut) < lease {
		wantCode(t, err, codes.Unavailable, "locked by another node")
	}
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

// testExpired: the server's administrator expires the client of the first node, although the node
// reaches the server. The node does not acquire the lock again.
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

// testUsedElsewhere: while the first node is cut off from the server, the second node uses its volume.
// When the volume is published to the first node again, it contains the second node's data.
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
	eventually(t, func() error { return p.first.controllerPublish(t, v) })
	for name, call := range map[string]func(*testing.T, *vol) error{"stage": p.first.stage, "publish": p.first.publish} {
		if err := call(t, v); status.Code(err) != codes.FailedPrecondition {
			t.Errorf("%s of a volume that another node has changed: got error %v, want %v", name, err, codes.FailedPrecondition)
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

// wantBroken fails unless the writer ends because one of its writes failed.
func (w *writer) wantBroken(t *testing.T) {
	t.Helper()
	select {
	case <-w.ended:
	case <-time.After(waitTimeout):
		t.Fatal("the writer did not end")
	}
	if w.err == nil || !strings.Contains(w.err.Error(), "input/output error") && !strings.Contains(w.err.Error(), "read-only") {
		t.Errorf("got error %v from the writer, want an I/O error or a read-only filesystem", w.err)
	}
}

// image returns the path of a volume's image on the server.
func (p pair) image(v *vol) string {
	return filepath.Join(p.server.Dir(p.export), "volumes", v.id[strings.LastIndex(v.id, ":")+1:], "image")
}

// awaitLockLost waits until the node reports that it has lost the lock of a volume. Before that, the
// node's driver must detect that the server answers again.
func (m *machine) awaitLockLost(t *testing.T, v *vol) {
	t.Helper()
	var found []string
	for end := time.Now().Add(waitTimeout); time.Now().Before(end); {
		if found = m.health(t, v); slices.Contains(found, "LockLost") {
			return
		}
	}
	t.Errorf("got health reasons %q on %s, want LockLost", found, m.name)
}

// device returns the loop device of the image that is staged on the node.
func (m *machine) device(t *testing.T) string {
	t.Helper()
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	must(t, err)
	for _, f := range files {
		if at, _ := os.ReadFile(f); strings.HasPrefix(string(at), m.path("nfs/")) {
			return "/dev/" + strings.Split(f, "/")[3]
		}
	}
	t.Fatalf("got no loop device of an image staged on %s, want one", m.name)
	return ""
}

// late is a write to a device that blocks until the server answers.
type late struct {
	cmd    *exec.Cmd
	stderr bytes.Buffer
}

// lateText is repeated in the data of a late write.
const lateText = "written too late "

// lateWrite starts to write 64 KiB of lateText at offset 48 MiB of a device, without the page cache.
func lateWrite(t *testing.T, device string) *late {
	t.Helper()
	file := filepath.Join(t.TempDir(), "late")
	must(t, os.WriteFile(file, []byte(strings.Repeat(lateText, 4096)[:16*4096]), 0o600))
	l := &late{cmd: exec.Command("dd", "if="+file, "of="+device, "bs=4096", "seek=12288", "oflag=direct", "conv=notrunc,nocreat", "status=none")}
	l.cmd.Stderr = &l.stderr
	must(t, l.cmd.Start())
	return l
}

// wantFailed fails unless the write ends with an I/O error.
func (l *late) wantFailed(t *testing.T) {
	t.Helper()
	ended := make(chan error, 1)
	go func() { ended <- l.cmd.Wait() }()
	select {
	case err := <-ended:
		if err == nil || !strings.Contains(l.stderr.String(), "Input/output error") {
			t.Errorf("got error %v and output %q of the late write, want an I/O error", err, &l.stderr)
		}
	case <-time.After(waitTimeout):
		t.Fatal("the late write did not end")
	}
}

// wantIntact fails unless the image has the data of the second node, lacks the late write, and has an
// intact filesystem.
func wantIntact(t *testing.T, image string) {
	t.Helper()
	b, err := os.ReadFile(image)
	must(t, err)
	if at := bytes.Index(b, []byte(lateText)); at >= 0 {
		t.Errorf("got the data of the late write at offset %d of the image, want none", at)
	}
	if !bytes.Contains(b, []byte("of the second node")) {
		t.Error("the image lacks the data of the second node")
	}
	run(t, "e2fsck", "-f", "-n", image)
}

// TestSameIdentity: two nodes have the same NFS client identity. The driver reports this before the
// second node uses a volume.
func TestSameIdentity(t *testing.T) {
	s := nfsd.Start(t, nfsd.Options{Lease: lease})
	export := s.Export(t, "volumes")
	first := start(t, s.Node(t, "same"), "node-1", nfsPool(pool, s, export))
	v := first.image(t, pool, "v", "ext4", 64*mib)
	first.up(t, v)
	write(t, first.file(v, "text"), "of the first")
	first.down(t, v)

	second := start(t, s.Node(t, "same"), "node-2", nfsPool(pool, s, export))
	eventually(t, func() error { return second.controllerPublish(t, v) })
	wantCode(t, second.stage(t, v), codes.FailedPrecondition, "node-1", "nfs_client/identifier")
	must(t, second.controllerUnpublish(t, v, "node-2"))

	// The fix is the one that the error suggests.
	second.stop(t)
	second.Identify(t, "another")
	second.run(t)
	eventually(t, func() error { return second.controllerPublish(t, v) })
	second.up(t, v)
	wantText(t, second.file(v, "text"), "of the first")
	second.remove(t, v)
	wantEmpty(t, s, export)
}

// TestSameIdentityLosesLocks: a second node has the NFS client identity of the first. The server takes
// it for the restarted first node and drops the first node's locks. Writes to volumes on the first node
// fail, but all synced data is kept.
func TestSameIdentityLosesLocks(t *testing.T) {
	s := nfsd.Start(t, nfsd.Options{Lease: lease})
	export := s.Export(t, "volumes")
	first := start(t, s.Node(t, "same"), "node-1", nfsPool(pool, s, export))
	v := first.image(t, pool, "v", "ext4", 64*mib)
	first.up(t, v)
	w := startWriter(t, first.file(v, "log"))
	w.awaitProgress(t)

	second := start(t, s.Node(t, "same"), "node-2", nfsPool(pool, s, export))
	eventually(t, func() error { return second.controllerUnpublish(t, v, "node-1") })
	eventually(t, func() error { return second.controllerPublish(t, v) })
	wantCode(t, second.stage(t, v), codes.FailedPrecondition, "node-1", "nfs_client/identifier")
	w.wantBroken(t)
	must(t, second.controllerUnpublish(t, v, "node-2"))
	second.stop(t)

	must(t, first.controllerPublish(t, v))
	first.awaitLockLost(t, v)
	first.unmount(t, v)
	first.up(t, v)
	w.wantRecords(t, first.file(v, "log"))
	first.remove(t, v)
	wantEmpty(t, s, export)
}
