package router_test

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/internal/translate"
)

// TestDeadNode: what concerns a dead node says so, and what does not goes on; when it
// is back all is as before.
func TestDeadNode(t *testing.T) {
	w := newWorld(t)
	a := w.start("a", w.pool("default", "a", "1Gi"))
	w.start("b", w.pool("default", "b", "1Gi"))
	w.know()
	onA, onB := w.make("a", "v"), w.make("b", "v")
	must(t, w.publish("a", onA))
	a.Stop(t)
	w.down("a")
	w.refused("a", onA, codes.Unavailable, `node "a" cannot be reached`)
	_, err := w.CreateVolume(t.Context(), request("w", preferring("a", "b")))
	wantCode(t, err, codes.Unavailable, `node "a"`)
	for name, call := range w.calls(t.Context(), onB) {
		if name != "delete" {
			must(t, call())
		}
	}
	must(t, w.publish("b", onB))
	a.Restart(t)
	w.up()
	must(t, w.get(onA))
	if ids, err := w.list(0); err != nil || len(ids) != 2 {
		t.Errorf("%v, %v", ids, err)
	}
}

// TestNoDriver: a node that there is, with no driver running on it.
func TestNoDriver(t *testing.T) {
	w := newWorld(t)
	a := w.start("a", w.pool("default", "a", "1Gi"))
	w.know()
	id, address := w.make("a", "v"), w.hosts["a"]
	a.Stop(t)
	w.hosts["a"] = ""
	w.tell()
	w.down("a")
	w.refused("a", id, codes.Unavailable, `node "a": its driver is not running`)
	a.Restart(t)
	w.hosts["a"] = address
	w.tell()
	w.up()
	must(t, w.get(id))
}

// TestRemovedNode: what was on a node that is no more is said to be gone, and can be
// detached; when it is there again all is as before.
func TestRemovedNode(t *testing.T) {
	w := newWorld(t)
	w.start("a", w.pool("default", "a", "1Gi"))
	w.start("b", w.pool("default", "b", "1Gi"))
	w.know()
	id, address := w.make("a", "v"), w.hosts["a"]
	w.forget("a")
	w.refused("a", id, codes.FailedPrecondition, `its node "a" is gone`, "docs/kubernetes.md")
	_, err := w.CreateVolume(t.Context(), request("w", preferring("a", "b")))
	wantCode(t, err, codes.ResourceExhausted, `"a", which is gone`)
	if ids, err := w.list(0); err != nil || len(ids) != 0 {
		t.Errorf("what is left: %v, %v", ids, err)
	}
	w.hosts["a"] = address
	w.know()
	must(t, w.get(id))
}

// TestUnknownPool: a pool that no node has may be one of a node that does not answer.
func TestUnknownPool(t *testing.T) {
	w := newWorld(t)
	w.start("a", w.pool("default", "a", "1Gi"))
	closed := w.pool("closed", "closed", "1Gi")
	closed.RequireMount = true
	w.start("b", closed)
	w.tell()
	w.up()
	await(t, "node b", func() bool { return code(w.get("loop:other.01234567:v")) == codes.FailedPrecondition })
	w.refused("b", "loop:closed.01234567:v", codes.Unavailable, `pool "closed" is closed on "b"`)
	_, err := w.list(0)
	wantCode(t, err, codes.Unavailable, "incomplete", `not open on "b"`)
	w.hosts["c"] = backendtest.FreeAddress(t)
	w.tell()
	w.refused("c", "loop:default.01234567:v", codes.Unavailable, `those that do not answer are "c"`)
	must(t, w.get(w.make("a", "v")))
}

// TestMovedPool: a pool that was moved to another node is served there when an
// administrator has recorded it, and not before.
func TestMovedPool(t *testing.T) {
	w := newWorld(t)
	a := w.start("a", w.pool("disk", "disk", "1Gi"))
	w.start("b", w.pool("default", "b", "1Gi"))
	w.know()
	id := w.make("a", "v", inPool("disk"))
	pool := "disk." + uuid(t, a, "disk")
	a.Stop(t)
	w.start("b2", w.pool("disk", "disk", "1Gi"))
	w.tell()
	w.down("a")
	w.refused("a", id, codes.Unavailable, `node "a" cannot be reached`)
	w.forget("a")
	await(t, "what b2 announces", func() bool { return strings.Contains(fmt.Sprint(w.get(id)), `"b2" announces it`) })
	w.refused("b2", id, codes.FailedPrecondition, "pool "+pool+` is recorded for node "a"`, `"b2" announces it`, "trivet doctor")
	_, err := w.CreateVolume(t.Context(), request("w", preferring("b2"), inPool("disk")))
	wantCode(t, err, codes.Unavailable, `"a"`, `"b2"`)
	room, err := w.GetCapacity(t.Context(), &csi.GetCapacityRequest{AccessibleTopology: translate.Topology("b2")})
	if err != nil || room.GetAvailableCapacity() != 0 {
		t.Errorf("capacity of b2: %v, %v", room, err)
	}
	_, err = w.list(0)
	wantCode(t, err, codes.Unavailable, "incomplete", `"a"`, "Only if the disk was moved", `set "`+pool+`" to "b2"`)
	w.move("a", "b2")
	w.know()
	must(t, w.publish("b2", id))
	wantCode(t, w.publish("a", id), codes.NotFound, `on node "b2"`)
	got, err := w.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: id})
	must(t, err)
	if got.GetVolume().GetAccessibleTopology()[0].String() != translate.Topology("b2").String() {
		t.Errorf("it is at %v", got)
	}
	_, err = w.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
	must(t, err)
	if left := w.folders("disk"); len(left) > 0 {
		t.Errorf("left is %v", left)
	}
}

// TestNewController: a controller that has just started knows who had the pools of a node
// that is gone, or answers without them.
func TestNewController(t *testing.T) {
	w := newWorld(t)
	a := w.start("a", w.pool("default", "a", "1Gi"))
	w.know()
	id, address := w.make("a", "v"), w.hosts["a"]
	w.forget("a")
	w.restart()
	w.tell()
	w.refused("a", id, codes.FailedPrecondition, `its node "a" is gone`)
	a.Stop(t)
	a.Options.Config.Pools[0] = w.pool("fresh", "fresh", "1Gi")
	a.Restart(t)
	w.hosts["a"] = address
	w.know()
	w.refused("a", id, codes.FailedPrecondition, "no node has pool default.")
	must(t, w.get(w.make("a", "w", inPool("fresh")))) // its new pool is its own
}

// copied starts node a with a volume in its pool, which it returns, and node c with a pool
// of its own. A copy of the pool of a is where node b expects its pool.
func (w *world) copied() (a *backendtest.Driver, id string) {
	w.t.Helper()
	a = w.start("a", w.pool("default", "a", "4Gi"))
	w.start("c", w.pool("default", "c", "1Gi"))
	w.know()
	id = w.make("a", "v")
	a.Stop(w.t)
	testenv.Run(w.t, "cp", "-a", filepath.Join(w.dir, "a"), filepath.Join(w.dir, "b"))
	a.Restart(w.t)
	return a, id
}

// TestCopiedDisk: a copy of a pool is not served, and harms neither the pool that it is a
// copy of nor others.
func TestCopiedDisk(t *testing.T) {
	w := newWorld(t)
	_, id := w.copied()
	w.up()
	b := w.start("b", w.pool("default", "b", "5Gi"))
	w.know()
	await(t, "the log", func() bool { return strings.Contains(backendtest.Log(), "A node announces a pool that is another's") })
	must(t, w.publish("a", id))
	_, err := w.CreateVolume(t.Context(), request("w", preferring("b")))
	wantCode(t, err, codes.Unavailable, `recorded for node "a", and "b" announces it`)
	room, err := w.GetCapacity(t.Context(), &csi.GetCapacityRequest{AccessibleTopology: translate.Topology("b")})
	if err != nil || room.GetAvailableCapacity() != 0 {
		t.Errorf("capacity of b: %v, %v", room, err)
	}
	resp, err := w.CreateVolume(t.Context(), request("w")) // b has most room
	must(t, err)
	if got := resp.GetVolume().GetAccessibleTopology()[0].GetSegments()[translate.TopologyKey]; got != "a" {
		t.Errorf("made on %s", got)
	}
	if ids, err := w.list(0); err != nil || len(ids) != 2 {
		t.Errorf("%v, %v", ids, err)
	}
	_, err = w.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
	must(t, err)
	if len(w.folders("a")) != 1 || len(w.folders("b")) != 1 {
		t.Errorf("there are %v and %v", w.folders("a"), w.folders("b"))
	}
	b.Stop(t)
	b.Options.Config.Pools[0] = w.pool("fresh", "fresh", "1Gi")
	b.Restart(t)
	await(t, "the pool that b has instead", func() bool {
		_, err := w.CreateVolume(t.Context(), request("x", preferring("b"), inPool("fresh")))
		return err == nil
	})
}

// TestTwoOfOne: of two nodes with one pool that is not on record none is served, until one
// has it no more. Everybody else's pools are.
func TestTwoOfOne(t *testing.T) {
	w := newWorld(t)
	a, id := w.copied()
	b := w.start("b", w.pool("default", "b", "4Gi"))
	w.stop()
	must(t, w.state.Remove("pool-owners.json"))
	w.restart()
	both := `nodes "a", "b"`
	await(t, "the conflict", func() bool {
		err := w.get(id)
		if err == nil {
			t.Fatal("the first node to answer was recorded")
		}
		return strings.Contains(err.Error(), both)
	})
	if !strings.Contains(backendtest.Log(), "A pool is served to nobody") {
		t.Error("nothing was logged")
	}
	w.refused("a", id, codes.FailedPrecondition, both)
	for _, node := range []string{"a", "b"} {
		_, err := w.CreateVolume(t.Context(), request("w", preferring(node)))
		wantCode(t, err, codes.Unavailable, both)
		room, err := w.GetCapacity(t.Context(), &csi.GetCapacityRequest{AccessibleTopology: translate.Topology(node)})
		if err != nil || room.GetAvailableCapacity() != 0 {
			t.Errorf("capacity of %s: %v, %v", node, room, err)
		}
	}
	_, err := w.CreateVolume(t.Context(), request("w", within("a", "b")))
	wantCode(t, err, codes.Unavailable, both)
	_, err = w.list(0)
	wantCode(t, err, codes.Unavailable, both, `Only if "NODE" has the original disk`, "default."+uuid(t, a, "default"), `to "NODE"`)
	if len(w.folders("a")) != 1 || len(w.folders("b")) != 1 {
		t.Errorf("there are %v and %v", w.folders("a"), w.folders("b"))
	}
	must(t, w.get(w.make("c", "w")))
	b.Stop(t) // nobody knows yet whether it is only away
	w.down("b")
	w.refused("a", id, codes.FailedPrecondition, both)
	b.Options.Config.Pools[0] = w.pool("fresh", "fresh", "1Gi")
	b.Restart(t)
	await(t, "the end of the conflict", func() bool { return w.get(id) == nil })
	must(t, w.publish("a", id))
	await(t, "the list", func() bool { _, err := w.list(0); return err == nil })
}

// TestSilentOriginal: while the node with the original of a pool does not answer, and the
// record is lost, a copy does not become the owner.
func TestSilentOriginal(t *testing.T) {
	w := newWorld(t)
	a := w.start("a", w.pool("default", "a", "4Gi"))
	w.know()
	id := w.make("a", "v")
	a.Stop(t)
	testenv.Run(t, "cp", "-a", filepath.Join(w.dir, "a"), filepath.Join(w.dir, "b"))
	b := w.start("b", w.pool("default", "b", "4Gi"))
	pool := "default." + uuid(t, b, "default")
	w.stop()
	must(t, w.state.Remove("pool-owners.json"))
	w.restart()
	await(t, "what b announces", func() bool {
		_, err := w.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
		if err == nil {
			t.Fatal("a node with a copy deleted the volume")
		}
		return strings.Contains(err.Error(), `not recorded yet for node "b"`)
	})
	w.refused("b", id, codes.Unavailable, "pool "+pool+" is not recorded yet", `node "a" has not answered`, "delete its Node object", `set "`+pool+`" to "b"`)
	_, err := w.CreateVolume(t.Context(), request("w", preferring("b")))
	wantCode(t, err, codes.Unavailable, "not recorded yet", `node "a" has not answered`)
	if len(w.owners.Known()) > 0 {
		t.Errorf("recorded: %v", w.owners.Known())
	}
	a.Restart(t)
	await(t, "the conflict", func() bool { return strings.Contains(fmt.Sprint(w.get(id)), `nodes "a", "b"`) })
	w.record(pool, "a")
	must(t, w.get(id))
	_, err = w.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
	must(t, err)
	if len(w.folders("a")) != 0 || len(w.folders("b")) != 1 {
		t.Errorf("there are %v and %v", w.folders("a"), w.folders("b"))
	}
}

// TestDeadFromTheStart: as long as a node has never answered, no pool is recorded, until the
// node is taken from the list or an administrator records a pool. A node on record for a
// pool of a name keeps no other pool of that name waiting.
func TestDeadFromTheStart(t *testing.T) {
	w := newWorld(t)
	w.hosts["dead"] = backendtest.FreeAddress(t)
	a := w.start("a", w.pool("default", "a", "1Gi"))
	w.start("b", w.pool("default", "b", "1Gi"))
	w.tell()
	for _, node := range []string{"a", "b"} {
		await(t, "node "+node, func() bool {
			_, err := w.CreateVolume(t.Context(), request("v", preferring(node)))
			return code(err) == codes.Unavailable && strings.Contains(err.Error(), `node "dead" has not answered`)
		})
	}
	w.record("default."+uuid(t, a, "default"), "a")
	must(t, w.get(w.make("a", "v")))
	_, err := w.CreateVolume(t.Context(), request("w", preferring("b")))
	wantCode(t, err, codes.Unavailable, `node "dead" has not answered`)
	address := w.hosts["dead"]
	w.forget("dead")
	must(t, w.get(w.make("b", "w")))

	w.record("default.01234567", "dead")
	w.hosts["dead"] = address
	w.start("c", w.pool("default", "c", "1Gi"))
	w.tell()
	await(t, "node c", func() bool {
		_, err := w.CreateVolume(t.Context(), request("x", preferring("c")))
		return err == nil
	})
}

// TestOwnersAway: while nothing can be recorded, pools on record are served, and others
// wait.
func TestOwnersAway(t *testing.T) {
	w := newWorld(t)
	w.start("a", w.pool("default", "a", "1Gi"))
	w.know()
	id := w.make("a", "v")
	w.owners.away.Store(true)
	w.start("b", w.pool("default", "b", "1Gi"))
	w.tell()
	await(t, "node b", func() bool {
		_, err := w.CreateVolume(t.Context(), request("w", preferring("b")))
		return strings.Contains(fmt.Sprint(err), "could not be recorded")
	})
	_, err := w.CreateVolume(t.Context(), request("w", preferring("b")))
	wantCode(t, err, codes.Unavailable, "the API server is away")
	must(t, w.get(id))
	must(t, w.get(w.make("a", "x")))
	if left := w.folders("b"); len(left) > 0 {
		t.Errorf("b has %v", left)
	}
	w.owners.away.Store(false)
	must(t, w.get(w.make("b", "w")))
}

// TestServedAloneBefore: a volume that a node published when it still served its
// volumes alone is unpublished on the node too, and can be deleted.
func TestServedAloneBefore(t *testing.T) {
	w := newWorld(t)
	a := w.start("a", w.pool("default", "a", "1Gi"))
	forwarded := a.Options
	a.Stop(t)
	a.Options.Services, a.Options.Config.Forwarding = []string{"controller", "node"}, nil
	a.Restart(t)
	v, err := a.Control.CreateVolume(t.Context(), request("v"))
	must(t, err)
	id := v.GetVolume().GetVolumeId()
	_, err = a.Control.ControllerPublishVolume(t.Context(), &csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: "a", VolumeCapability: capability()})
	must(t, err)
	a.Stop(t)
	a.Options = forwarded
	a.Restart(t)
	w.know()
	_, err = w.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
	wantCode(t, err, codes.FailedPrecondition, "published")
	must(t, w.unpublish("a", id))
	_, err = w.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
	must(t, err)
}
