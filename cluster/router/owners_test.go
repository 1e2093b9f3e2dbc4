package router_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// bothAnnounce is part of the error for a pool without an owner that nodes a and b announce.
const bothAnnounce = `nodes "a", "b"`

// TestMovedPool: a pool that was moved to another node is not served before an administrator records the new
// node as its owner.
func TestMovedPool(t *testing.T) {
	w := newEmptyCluster(t)
	w.start("a", w.pool("disk", "disk", "1Gi"))
	w.start("b")
	w.updateHostsAndWait()
	id, pool := w.mustCreateOn("a", "v", inPool("disk")), w.poolID("a", "disk")
	w.drivers["a"].Stop(t)
	w.start("b2", w.pool("disk", "disk", "1Gi"))
	w.updateHosts()
	w.awaitDisconnect("a")
	w.wantRefused("a", id, codes.Unavailable, `node "a" cannot be reached`)
	w.removeHosts("a")
	awaitError(t, `"b2" announces it`, func() error { return w.get(id) })
	w.wantRefused("b2", id, codes.FailedPrecondition, "pool "+pool+` is recorded for node "a"`, `"b2" announces it`, "trivet doctor")
	wantCode(t, w.create("w", preferring("b2"), inPool("disk")), codes.Unavailable, `"a"`, `"b2"`)
	w.wantNoCapacity("b2")
	wantCode(t, w.listError(), codes.Unavailable, "incomplete", `"a"`, "Only if the disk was moved", `set "`+pool+`" to "b2"`)
	w.replaceOwner("a", "b2")
	w.updateHostsAndWait()
	must(t, w.publish("b2", id))
	wantCode(t, w.publish("a", id), codes.NotFound, `on node "b2"`)
	got, err := w.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: id})
	must(t, err)
	if nodeOf(got.GetVolume()) != "b2" {
		t.Errorf("got %v, want a volume on node b2", got)
	}
	must(t, w.delete(id))
	w.wantVolumes(map[string]int{"disk": 0})
}

// copyPool stops node a, copies its pool to the directory of node b, and returns the ID of a
// volume in it.
func (w *testCluster) copyPool() (id string) {
	w.t.Helper()
	id = w.mustCreateOn("a", "v")
	w.drivers["a"].Stop(w.t)
	testenv.Run(w.t, "cp", "-a", filepath.Join(w.dir, "a"), filepath.Join(w.dir, "b"))
	return id
}

// TestCopiedPool: a copy of a pool is not served, and affects neither its original nor
// other pools.
func TestCopiedPool(t *testing.T) {
	w := newCluster(t, "a:4Gi", "c")
	id := w.copyPool()
	w.drivers["a"].Restart(t)
	w.awaitNode("a")
	w.start("b", w.pool("default", "b", "5Gi"))
	w.updateHostsAndWait()
	await(t, "the log entry about the copied pool", func() bool {
		return strings.Contains(backendtest.Log(), "A node announces a pool that is recorded for another node")
	})
	must(t, w.publish("a", id))
	wantCode(t, w.create("w", preferring("b")), codes.Unavailable, `recorded for node "a", and "b" announces it`)
	w.wantNoCapacity("b")
	if got := nodeOf(w.mustCreate("w")); got != "a" { // the copy on b has more capacity
		t.Errorf("created on %s, want a", got)
	}
	w.wantListed(2)
	must(t, w.delete(id))
	w.wantVolumes(map[string]int{"a": 1, "b": 1})
	w.restartWith("b", w.pool("fresh", "fresh", "1Gi"))
	await(t, "a volume in the other pool of node b", func() bool { return w.create("x", preferring("b"), inPool("fresh")) == nil })
}

// TestPoolOnTwoNodes: a pool without an owner that two nodes announce is served by no node until one of them no
// longer announces the pool. Other pools are served.
func TestPoolOnTwoNodes(t *testing.T) {
	w := newCluster(t, "a:4Gi", "c")
	id := w.copyPool()
	w.drivers["a"].Restart(t)
	w.start("b", w.pool("default", "b", "4Gi"))
	w.removeOwners()
	awaitError(t, bothAnnounce, func() error {
		err := w.get(id)
		if err == nil {
			t.Fatal("a node was recorded although two nodes announce the pool")
		}
		return err
	})
	if !strings.Contains(backendtest.Log(), "A pool is served by no node") {
		t.Error("the log does not report the pool on two nodes")
	}
	w.wantRefused("a", id, codes.FailedPrecondition, bothAnnounce)
	for _, node := range []string{"a", "b"} {
		wantCode(t, w.create("w", preferring(node)), codes.Unavailable, bothAnnounce)
		w.wantNoCapacity(node)
	}
	wantCode(t, w.create("w", within("a", "b")), codes.Unavailable, bothAnnounce)
	wantCode(t, w.listError(), codes.Unavailable, bothAnnounce, `Only if "NODE" has the original disk`, w.poolID("a", "default"), `to "NODE"`)
	w.wantVolumes(map[string]int{"a": 1, "b": 1})
	must(t, w.get(w.mustCreateOn("c", "w")))
	w.stopDriver("b") // it may announce the pool again
	w.wantRefused("a", id, codes.FailedPrecondition, bothAnnounce)
	w.restartWith("b", w.pool("fresh", "fresh", "1Gi"))
	await(t, "node a to serve the pool", func() bool { return w.get(id) == nil })
	must(t, w.publish("a", id))
	await(t, "a complete list", func() bool { return w.listError() == nil })
}

// TestSilentOriginal: if the record of owners is lost, a node with a copy of a pool does not become its owner
// while the node with the original does not answer.
func TestSilentOriginal(t *testing.T) {
	w := newCluster(t, "a:4Gi")
	id := w.copyPool()
	w.start("b", w.pool("default", "b", "4Gi"))
	pool := w.poolID("b", "default")
	w.removeOwners()
	awaitError(t, `not recorded yet for node "b"`, func() error {
		err := w.delete(id)
		if err == nil {
			t.Fatal("a node with a copy deleted the volume")
		}
		return err
	})
	w.wantRefused("b", id, codes.Unavailable, "pool "+pool+" is not recorded yet", `node "a" has not answered`, "delete its Node object", `set "`+pool+`" to "b"`)
	wantCode(t, w.create("w", preferring("b")), codes.Unavailable, "not recorded yet", `node "a" has not answered`)
	if known := w.owners.Known(); len(known) > 0 {
		t.Errorf("got recorded owners %v, want none", known)
	}
	w.drivers["a"].Restart(t)
	awaitError(t, bothAnnounce, func() error { return w.get(id) })
	w.recordOwner(pool, "a")
	must(t, w.get(id))
	must(t, w.delete(id))
	w.wantVolumes(map[string]int{"a": 0, "b": 1})
}

// TestClosedOriginal: if the record of owners is lost, a node with a copy of a pool does not become its owner
// while the original is closed on its node.
func TestClosedOriginal(t *testing.T) {
	w := newCluster(t, "a:4Gi")
	id := w.copyPool()
	pool := w.pool("default", "a", "4Gi")
	testenv.Run(t, "mv", pool.Directory.Path, pool.Directory.Path+".unmounted")
	w.drivers["a"].Restart(t)
	w.start("b", w.pool("default", "b", "4Gi"))
	key := w.poolID("b", "default")
	w.removeOwners()
	awaitError(t, `not recorded yet for node "b"`, func() error {
		err := w.delete(id)
		if err == nil {
			t.Fatal("a node with a copy deleted the volume")
		}
		return err
	})
	awaitError(t, `is closed on "a"`, func() error { return w.delete(id) })
	w.wantRefused("b", id, codes.Unavailable, "pool "+key+" is not recorded yet", `is closed on "a"`, `set "`+key+`" to "b"`)
	wantCode(t, w.create("w", preferring("b")), codes.Unavailable, "not recorded yet", `is closed on "a"`)
	if known := w.owners.Known(); len(known) > 0 {
		t.Errorf("got recorded owners %v, want none", known)
	}
	must(t, os.Remove(pool.Directory.Path))
	testenv.Run(t, "mv", pool.Directory.Path+".unmounted", pool.Directory.Path)
	awaitError(t, bothAnnounce, func() error { return w.get(id) })
	w.recordOwner(key, "a")
	must(t, w.delete(id))
	w.wantVolumes(map[string]int{"a": 0, "b": 1})
}

// TestClosedElsewhere: a closed pool that a node never had open, or that had another UUID, does not delay the
// record of a pool with the same name on another node.
func TestClosedElsewhere(t *testing.T) {
	w := newEmptyCluster(t)
	w.start("a")
	b := w.fake()
	b.answer(&csi.GetPluginInfoResponse{Manifest: map[string]string{"pool.default": "", "expected.default": "01234567"}})
	w.start("c", w.closedPool("default", "c"))
	w.updateHosts()
	await(t, "a volume on node a", func() bool { return w.create("v", preferring("a")) == nil })
}

// TestNodeNeverAnswered: while a node has never answered, only an administrator can record a pool, except if
// that node already owns a pool with the same name.
func TestNodeNeverAnswered(t *testing.T) {
	w := newEmptyCluster(t)
	w.addresses["dead"] = backendtest.FreeAddress(t)
	w.start("a")
	w.start("b")
	w.addHost("dead")
	const unanswered = `node "dead" has not answered`
	for _, node := range []string{"a", "b"} {
		awaitError(t, unanswered, func() error { return w.create("v", preferring(node)) })
		wantCode(t, w.create("v", preferring(node)), codes.Unavailable, unanswered)
	}
	w.recordOwner(w.poolID("a", "default"), "a")
	must(t, w.get(w.mustCreateOn("a", "v")))
	wantCode(t, w.create("w", preferring("b")), codes.Unavailable, unanswered)
	w.removeHosts("dead")
	must(t, w.get(w.mustCreateOn("b", "w")))

	w.recordOwner("default.01234567", "dead")
	w.start("c")
	w.addHost("dead")
	await(t, "a volume on node c", func() bool { return w.create("x", preferring("c")) == nil })
}

// TestOwnersUnavailable: while no owner can be recorded, only pools with an owner are served.
func TestOwnersUnavailable(t *testing.T) {
	w := newCluster(t, "a")
	id := w.mustCreateOn("a", "v")
	w.owners.unavailable.Store(true)
	w.start("b")
	w.updateHosts()
	awaitError(t, "could not be recorded", func() error { return w.create("w", preferring("b")) })
	wantCode(t, w.create("w", preferring("b")), codes.Unavailable, "the API server is unavailable")
	must(t, w.get(id))
	must(t, w.get(w.mustCreateOn("a", "x")))
	w.wantVolumes(map[string]int{"b": 0})
	w.owners.unavailable.Store(false)
	must(t, w.get(w.mustCreateOn("b", "w")))
}

// TestManifests: a node that announces the pool of another node gets no calls for it, and invalid entries of a
// manifest are ignored.
func TestManifests(t *testing.T) {
	w := newCluster(t, "a")
	onA := w.mustCreateOn("a", "v")
	b := w.fake()
	b.answer(&csi.GetPluginInfoResponse{Manifest: map[string]string{
		"": "", "pool.": "", "pool.default": fakeVolume.PoolUUID, "pool.A": "01234567", "pool.x": "xxxxxxxx", "pool.y": strings.Repeat("0", 1<<20), "pool.z:": "01234567",
	}}, &csi.ControllerGetVolumeResponse{Volume: accessible(fakeVolume.String(), "b")})
	w.updateHostsAndWait()
	must(t, w.get(fakeVolume.String()))
	must(t, w.get(onA))
	w.removeHosts("b")
	_, uuid, _ := strings.Cut(w.poolID("a", "default"), ".")
	b.announce(map[string]string{"default": uuid})
	w.addHost("b")
	w.updateHostsAndWait()
	must(t, w.publish("a", onA))
	wantCode(t, w.create("w", preferring("b")), codes.Unavailable, `recorded for node "a", and "b" announces it`)
}

// TestImpostor: a node that announces the pool of a removed node gets no calls for the pool, and does not become
// its owner.
func TestImpostor(t *testing.T) {
	w := newCluster(t, "a")
	id := w.mustCreateOn("a", "v")
	_, uuid, _ := strings.Cut(w.poolID("a", "default"), ".")
	w.removeHosts("a")
	b := w.fake()
	b.announce(map[string]string{"default": uuid})
	b.answer(&csi.ControllerGetVolumeResponse{Volume: accessible(id, "b")})
	w.updateHosts()
	await(t, "the impostor's manifest", func() bool {
		_, manifests := b.called()
		return manifests > 0
	})
	wantCode(t, w.delete(id), codes.FailedPrecondition, `"a"`, `"b"`)
	if calls, _ := b.called(); len(calls) > 0 {
		t.Errorf("got calls %q of the impostor, want none", calls)
	}
	w.addHost("a")
	await(t, "a successful call to node a", func() bool { return w.get(id) == nil })
}

// TestManyPools: the record contains at most 100 pools of a node, and new pools of
// other nodes are recorded.
func TestManyPools(t *testing.T) {
	w := newEmptyCluster(t)
	pools := map[string]string{}
	for i := range 1000 {
		pools[fmt.Sprintf("pool-%d", i)] = fmt.Sprintf("%08x", i)
	}
	w.fake().announce(pools)
	w.updateHosts()
	await(t, "the first recorded owner", func() bool { return len(w.owners.Known()) > 0 })
	w.start("a")
	w.updateHostsAndWait()
	must(t, w.get(w.mustCreateOn("a", "v")))
	if n := len(w.owners.Known()); n != 101 {
		t.Errorf("got %d recorded pools, want 100 of node b and 1 of node a", n)
	}
}
