package router_test

import (
	"bytes"
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/cluster/router"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/volume"
)

// raw requests a raw device.
func raw(req *csi.CreateVolumeRequest) {
	req.VolumeCapabilities = []*csi.VolumeCapability{{
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
		AccessMode: capability().GetAccessMode(),
	}}
}

// image returns the path of the image of a volume in the pool of a node.
func (w *testCluster) image(node, name string) string {
	return filepath.Join(w.dir, node, "volumes", name, "image")
}

// fill writes random content at some offsets of an image, and leaves holes between them.
func fill(t *testing.T, image string, length int, offsets ...int64) {
	t.Helper()
	f, err := os.OpenFile(image, os.O_WRONLY, 0)
	must(t, err)
	defer f.Close()
	for _, at := range offsets {
		b := make([]byte, length)
		source := rand.NewChaCha8([32]byte{byte(at >> 20), byte(at >> 12)})
		_, _ = source.Read(b)
		_, err := f.WriteAt(b, at)
		must(t, err)
	}
	must(t, f.Sync())
}

// wantSameContent fails the test unless an image has the content of another, followed by zeros.
func wantSameContent(t *testing.T, got, want string) {
	t.Helper()
	gotContent, err := os.ReadFile(got)
	must(t, err)
	wantContent, err := os.ReadFile(want)
	must(t, err)
	rest, same := bytes.CutPrefix(gotContent, wantContent)
	if !same || len(bytes.TrimRight(rest, "\x00")) > 0 {
		t.Errorf("%s (%d bytes) differs from %s (%d bytes)", got, len(gotContent), want, len(wantContent))
	}
}

// allocatedBytes returns the disk space of a file.
func allocatedBytes(t *testing.T, path string) int64 {
	t.Helper()
	var st syscall.Stat_t
	must(t, syscall.Stat(path, &st))
	return st.Blocks * 512
}

// TestTransferRaw: a raw volume is restored on another node, byte by byte, with its holes, and may be larger.
func TestTransferRaw(t *testing.T) {
	w := newCluster(t, "a", "b")
	v := w.mustCreateOn("a", "v", raw)
	fill(t, w.image("a", "v"), 5<<19, 0, 8<<20, 20<<20)
	s := w.snapshot("s", v)
	for _, source := range []struct {
		name string
		change
	}{{"from-snapshot", fromSnapshot(s)}, {"from-volume", fromVolume(v)}} {
		for name, size := range map[string]int64{source.name: 32 * mib, source.name + "-larger": 64 * mib} {
			got := w.mustCreate(name, raw, source.change, preferring("b", "a"), sized(size))
			if nodeOf(got) != "b" || got.GetCapacityBytes() != size || got.GetContentSource() == nil {
				t.Errorf("%s: got %v, want %d bytes on node b with a source", name, got, size)
			}
			wantSameContent(t, w.image("b", name), w.image("a", "v"))
			if n := allocatedBytes(t, w.image("b", name)); n > 9*mib {
				t.Errorf("%s: got %d bytes allocated, want the holes of the source", name, n)
			}
			if again := w.mustCreate(name, raw, source.change, preferring("b", "a"), sized(size)); again.GetVolumeId() != got.GetVolumeId() {
				t.Errorf("%s: a retry returned %s, want %s", name, again.GetVolumeId(), got.GetVolumeId())
			}
		}
	}
	w.wantVolumes(map[string]int{"a": 1, "b": 4})
	w.wantNothingReceived()
}

// wantNothingReceived waits until no incomplete image is in the pool of node b.
func (w *testCluster) wantNothingReceived() {
	w.t.Helper()
	for _, dir := range []string{"received", "tmp", "trash"} {
		await(w.t, "an empty "+dir, func() bool {
			entries, err := os.ReadDir(filepath.Join(w.dir, "b", ".trivet", dir))
			return err == nil && len(entries) == 0 || os.IsNotExist(err)
		})
	}
}

// TestTransferFilesystems: a filesystem that is restored or cloned on another node has the content of its source, and another
// identity.
func TestTransferFilesystems(t *testing.T) {
	w := newCluster(t, "a:8Gi", "b:8Gi")
	for fs, size := range map[string]int64{"ext4": 320 * mib, "xfs": 512 * mib} { // a mounted ext4 grows only with CAP_SYS_RESOURCE
		t.Run(fs, func(t *testing.T) {
			w.t = t
			c := backendtest.Kind{FSType: fs}.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)
			as := func(req *csi.CreateVolumeRequest) { req.VolumeCapabilities = []*csi.VolumeCapability{c} }
			v := w.mustCreateOn("a", fs, as, sized(320*mib))
			path := w.stage("a", v, c)
			content := make([]byte, 10<<20)
			_, _ = rand.NewChaCha8([32]byte{}).Read(content)
			must(t, os.WriteFile(filepath.Join(path, "file"), content, 0o640))
			s := w.snapshot(fs, v) // while it is staged
			for name, source := range map[string]change{fs + "-restored": fromSnapshot(s), fs + "-cloned": fromVolume(v)} {
				got := w.mustCreate(name, as, source, preferring("b"), sized(size)).GetVolumeId()
				restored := w.stage("b", got, c)
				b, err := os.ReadFile(filepath.Join(restored, "file"))
				if err != nil || !bytes.Equal(b, content) {
					t.Errorf("%s: got %d bytes, %v, want the content of the source", name, len(b), err)
				}
				var stat syscall.Statfs_t
				must(t, syscall.Statfs(restored, &stat))
				if got := int64(stat.Blocks) * stat.Bsize; got < size*8/10 {
					t.Errorf("%s: the filesystem has %d bytes, want that it has grown to %d", name, got, size)
				}
			}
		})
	}
}

// TestTransferUnformatted: what an interrupted mkfs wrote is not transferred, so that the new volume can be formatted.
func TestTransferUnformatted(t *testing.T) {
	w := newCluster(t, "a:8Gi", "b:8Gi")
	v := w.mustCreateOn("a", "v")
	fill(t, w.image("a", "v"), 1<<20, 0)
	folder := filepath.Dir(w.image("a", "v"))
	must(t, os.Rename(filepath.Join(folder, "formatted"), filepath.Join(folder, "formatting")))
	for name, source := range map[string]change{"from-volume": fromVolume(v), "from-snapshot": fromSnapshot(w.snapshot("s", v))} {
		got := w.mustCreate(name, source, preferring("b")).GetVolumeId()
		if n := allocatedBytes(t, w.image("b", name)); n > 0 {
			t.Errorf("%s: got %d bytes, want none", name, n)
		}
		w.stage("b", got, capability())
	}
}

// TestTransferLocks: a volume that is not staged cannot be staged or deleted while it is sent, and can be afterwards.
func TestTransferLocks(t *testing.T) {
	w, _ := newSlowCluster(t)
	v := "loop:" + w.poolID("a", "default") + ":v"
	clone := []change{raw, fromVolume(v), preferring("b")}
	wantCode(t, w.createBriefly("n", clone...), codes.Aborted)
	wantCode(t, w.delete(v), codes.FailedPrecondition, "in use")
	w.mustCreate("n", clone...)
	wantSameContent(t, w.image("b", "n"), w.image("a", "v"))
	await(t, "the deletion of the source", func() bool { return w.delete(v) == nil })
}

// stage stages a volume on its node until the test ends, and returns the path.
func (w *testCluster) stage(node, id string, c *csi.VolumeCapability) string {
	w.t.Helper()
	path := w.t.TempDir()
	n := w.drivers[node].Node
	_, err := n.NodeStageVolume(w.t.Context(), &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: path, VolumeCapability: c})
	must(w.t, err)
	w.t.Cleanup(func() {
		_, err := n.NodeUnstageVolume(context.Background(), &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: path})
		if err != nil {
			w.t.Error(err)
		}
	})
	return path
}

// startSlowly starts the driver of a node that sends 1 MiB per second.
func (w *testCluster) startSlowly(name string) {
	w.t.Helper()
	w.startChanged(name, loop.Kind, func(o *driver.Options) { o.Config.TransferLimit.BytesPerSecond = "1Mi" })
}

// newSlowCluster returns a cluster with the nodes a and b, and a snapshot on node a whose transfer takes some seconds.
func newSlowCluster(t *testing.T) (w *testCluster, s string) {
	t.Helper()
	w = newEmptyCluster(t)
	w.startSlowly("a")
	w.start("b")
	w.updateHostsAndWait()
	v := w.mustCreateOn("a", "v", raw)
	fill(t, w.image("a", "v"), 1<<20, 0, 8<<20, 16<<20, 24<<20)
	return w, w.snapshot("s", v)
}

// createBriefly makes a CreateVolume call that lasts up to a second.
func (w *testCluster) createBriefly(name string, changes ...change) error {
	ctx, cancel := context.WithTimeout(w.t.Context(), time.Second)
	defer cancel()
	return w.sendWith(ctx, request(name, changes...))
}

// received returns the path of the incomplete image of a volume in the pool of a node.
func (w *testCluster) received(node, name string) string {
	return filepath.Join(w.dir, node, ".trivet", "received", name, "image")
}

// TestTransferJoins: a call that ends before the transfer is ABORTED with the progress, and other calls join the transfer.
func TestTransferJoins(t *testing.T) {
	w, s := newSlowCluster(t)
	restore := []change{raw, fromSnapshot(s), preferring("b", "a")}
	wantCode(t, w.createBriefly("n", restore...), codes.Aborted, "MiB of 4 MiB so far", "joins")
	wantCode(t, w.createBriefly("n", raw, fromSnapshot(s), preferring("a", "b")), codes.Aborted, "so far") // prefers another node now
	calls := make(chan error, 3)
	for range cap(calls) {
		go func() {
			err := w.create("n", restore...)
			for code(err) == codes.Aborted { // one call for a volume at a time
				err = w.create("n", restore...)
			}
			calls <- err
		}()
	}
	for range cap(calls) {
		must(t, <-calls)
	}
	wantSameContent(t, w.image("b", "n"), w.image("a", "v"))
	w.wantVolumes(map[string]int{"a": 1, "b": 1})
	w.wantNothingReceived()
}

// TestTransferCancelled: DeleteVolume of the new volume ends the transfer, and releases the space.
func TestTransferCancelled(t *testing.T) {
	w, s := newSlowCluster(t)
	before, err := w.capacity("b")
	must(t, err)
	wantCode(t, w.createBriefly("n", raw, fromSnapshot(s), preferring("b")), codes.Aborted)
	during, err := w.capacity("b")
	must(t, err)
	if got := before.GetAvailableCapacity() - during.GetAvailableCapacity(); got < 32*mib {
		t.Errorf("a transfer reserves %d bytes, want 32 MiB", got)
	}
	must(t, w.delete("loop:"+w.poolID("b", "default")+":n"))
	w.wantNothingReceived()
	w.wantVolumes(map[string]int{"b": 0})
	await(t, "the capacity before the transfer", func() bool {
		after, err := w.capacity("b")
		must(t, err)
		return after.GetAvailableCapacity() >= before.GetAvailableCapacity()
	})
}

// TestTransferOfDeletedSource: a snapshot that is deleted during its transfer is received completely. A transfer that is
// interrupted after that fails.
func TestTransferOfDeletedSource(t *testing.T) {
	w, s := newSlowCluster(t)
	restore := []change{raw, fromSnapshot(s), preferring("b")}
	wantCode(t, w.createBriefly("n", restore...), codes.Aborted)
	wantCode(t, w.createBriefly("m", restore...), codes.Aborted)
	must(t, w.send(&csi.DeleteSnapshotRequest{SnapshotId: s}))
	w.mustCreate("n", restore...)
	wantSameContent(t, w.image("b", "n"), w.image("a", "v"))
	w.drivers["b"].Restart(t)
	w.awaitNode("b")
	if err := w.create("m", restore...); err != nil { // otherwise it was complete before the restart
		wantCode(t, err, codes.NotFound, "snapshot")
	}
	m := "loop:" + w.poolID("b", "default") + ":m"
	await(t, "DeleteVolume, while the node still opens its pool", func() bool { return w.delete(m) == nil })
	w.wantNothingReceived()
}

// TestTransferWithoutRoom: a node without room is RESOURCE_EXHAUSTED. Without a preferred node, the volume is created on another
// node if the node of the source has no room.
func TestTransferWithoutRoom(t *testing.T) {
	w := newCluster(t, "a:128Mi", "b:64Mi", "c:1Gi")
	s := w.snapshot("s", w.mustCreateOn("a", "v", raw))
	wantCode(t, w.create("n", raw, fromSnapshot(s), preferring("b"), sized(80*mib)), codes.ResourceExhausted, `node "b": `, "has room for")
	w.wantNothingReceived()
	for want, size := range map[string]int64{"a": 40 * mib, "c": 120 * mib} {
		if got := nodeOf(w.mustCreate("on-"+want, raw, fromSnapshot(s), sized(size))); got != want {
			t.Errorf("%d bytes: got node %s, want %s", size, got, want)
		}
	}
}

// TestTransferResumes: an interrupted transfer continues with what was not received, also after a restart of either driver.
func TestTransferResumes(t *testing.T) {
	const content = 160 << 20
	for name, interrupt := range map[string]func(w *testCluster){
		"network":  func(*testCluster) {},
		"receiver": func(w *testCluster) { w.drivers["b"].Restart(t) },
		"sender":   func(w *testCluster) { w.drivers["a"].Restart(t) },
	} {
		t.Run(name, func(t *testing.T) {
			w := newCluster(t, "a", "b")
			link := w.proxy("a")
			w.updateHostsAndWait()
			v := w.mustCreateOn("a", "v", raw, sized(256*mib))
			fill(t, w.image("a", "v"), content, 32<<20)
			s := w.snapshot("s", v)
			restore := []change{raw, fromSnapshot(s), preferring("b"), sized(256 * mib)}
			link.cutAt.Store(link.received.Load() + 100<<20)
			wantCode(t, w.create("n", restore...), codes.Unavailable, `node "a"`)
			if n := allocatedBytes(t, w.received("b", "n")); n < 63*mib {
				t.Errorf("after the interruption: got %d bytes, want at least 63 MiB", n)
			}
			w.t = t
			interrupt(w)
			link.cutAt.Store(0)
			before := link.received.Load()
			await(t, "the transfer to continue", func() bool { return w.create("n", restore...) == nil })
			if n := link.received.Load() - before; n > content-60<<20 {
				t.Errorf("the second call transferred %d bytes, want only those that were not received", n)
			}
			wantSameContent(t, w.image("b", "n"), w.image("a", "v"))
			w.wantNothingReceived()
		})
	}
}

// TestTransferOfOtherContent: an image that was received from another snapshot of the same name is discarded.
func TestTransferOfOtherContent(t *testing.T) {
	w := newCluster(t, "a", "b")
	link := w.proxy("a")
	w.updateHostsAndWait()
	v := w.mustCreateOn("a", "v", raw, sized(256*mib))
	fill(t, w.image("a", "v"), 100<<20, 0)
	s := w.snapshot("s", v)
	restore := []change{raw, fromSnapshot(s), preferring("b"), sized(256 * mib)}
	link.cutAt.Store(link.received.Load() + 80<<20)
	wantCode(t, w.create("n", restore...), codes.Unavailable)
	link.cutAt.Store(0)
	await(t, "the deletion of the snapshot", func() bool { return w.send(&csi.DeleteSnapshotRequest{SnapshotId: s}) == nil })
	fill(t, w.image("a", "v"), 90<<20, 128<<20)
	must(t, os.Truncate(w.image("a", "v"), 128<<20)) // removes the part behind, and
	must(t, os.Truncate(w.image("a", "v"), 256<<20)) // makes it a hole
	fill(t, w.image("a", "v"), 1<<20, 4<<20)
	if again := w.snapshot("s", v); again != s {
		t.Fatalf("got snapshot %s, want %s again", again, s)
	}
	await(t, "the transfer", func() bool { return w.create("n", restore...) == nil })
	wantSameContent(t, w.image("b", "n"), w.image("a", "v"))
	w.wantNothingReceived()
}

// TestTransferReported: calls of a transfer are reported with the claim and both nodes, while they run and when they end. Calls without
// a transfer are not.
func TestTransferReported(t *testing.T) {
	reported := make(chan router.Transfer, 100)
	w := newEmptyCluster(t, func(o *router.Options) {
		o.OnTransfer = func(_ context.Context, t router.Transfer) { reported <- t }
	})
	w.startSlowly("a")
	w.start("b")
	w.updateHostsAndWait()
	v := w.mustCreateOn("a", "v", raw)
	fill(t, w.image("a", "v"), 1<<20, 0, 8<<20, 16<<20, 24<<20)
	s := w.snapshot("s", v)
	w.mustCreateOn("a", "local", raw, fromSnapshot(s))
	ofClaim := func(req *csi.CreateVolumeRequest) {
		req.Parameters = map[string]string{volume.ParamClaimNamespace: "ns", volume.ParamClaimName: "data"}
	}
	restore := []change{raw, fromSnapshot(s), preferring("b"), ofClaim, sized(64 * mib)}
	next := func(wantRunning bool, wantCode codes.Code) {
		t.Helper()
		got := <-reported
		if got.Running != wantRunning || code(got.Err) != wantCode || got.Namespace != "ns" || got.Claim != "data" || got.Volume != "n" ||
			got.From != "a" || got.To != "b" || got.Source.ID.String() != s || !got.Source.Snapshot || got.Size != 64*mib {
			t.Errorf("got %+v, want running %v with the code %v", got, wantRunning, wantCode)
		}
	}
	wantCode(t, w.createBriefly("n", restore...), codes.Aborted)
	next(false, codes.Aborted)
	w.mustCreate("n", restore...)
	next(true, codes.OK)
	next(false, codes.OK)
	w.mustCreate("n", restore...)
	next(false, codes.OK)
	if len(reported) > 0 {
		t.Errorf("got another report: %+v, want none", <-reported)
	}
}
