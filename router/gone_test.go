package router_test

import (
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

// TestMovedPool: calls follow a pool to another node, and to the same one by another
// name.
func TestMovedPool(t *testing.T) {
	w := newWorld(t)
	a := w.start("a", w.pool("disk", "disk", "1Gi"))
	w.start("b", w.pool("default", "b", "1Gi"))
	w.know()
	id := w.make("a", "v", inPool("disk"))
	a.Stop(t)
	b2 := w.start("b2", w.pool("disk", "disk", "1Gi"))
	w.tell()
	await(t, "the conflict", func() bool { return code(w.get(id)) == codes.FailedPrecondition })
	w.refused("b2", id, codes.FailedPrecondition, `nodes "a", "b2"`, `"a" does not answer`, "delete its Node object")
	w.forget("a")
	must(t, w.publish("b2", id))
	wantCode(t, w.publish("a", id), codes.NotFound, `on node "b2"`)
	got, err := w.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: id})
	must(t, err)
	if got.GetVolume().GetAccessibleTopology()[0].String() != translate.Topology("b2").String() {
		t.Errorf("it is at %v", got)
	}
	// Back to a driver that had it before, and was started without it in between.
	b2.Stop(t)
	b2.Options.Config.Pools[0] = w.pool("fresh", "fresh", "1Gi")
	b2.Restart(t)
	await(t, "its loss", func() bool {
		err := w.get(id)
		if code(err) == codes.FailedPrecondition && strings.Contains(err.Error(), `"a" is gone`) {
			t.Fatalf("it was on b2 since: %v", err)
		}
		return code(err) == codes.FailedPrecondition
	})
	w.start("a", w.pool("disk", "disk", "1Gi"))
	w.tell()
	await(t, "the pool's move", func() bool { return w.publish("a", id) == nil })
	_, err = w.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
	must(t, err)
	if left := w.folders("disk"); len(left) > 0 {
		t.Errorf("left is %v", left)
	}
}

// TestCopiedDisk: of two nodes with one pool none is served, until one has it no more.
// Everybody else's pools are.
func TestCopiedDisk(t *testing.T) {
	w := newWorld(t)
	a := w.start("a", w.pool("default", "a", "4Gi"))
	w.start("c", w.pool("default", "c", "1Gi"))
	w.know()
	id := w.make("a", "v")
	a.Stop(t)
	testenv.Run(t, "cp", "-a", filepath.Join(w.dir, "a"), filepath.Join(w.dir, "b"))
	a.Restart(t)
	w.up()
	b := w.start("b", w.pool("default", "b", "4Gi"))
	w.tell()
	await(t, "the conflict", func() bool { return code(w.get(id)) == codes.FailedPrecondition })
	both := `nodes "a", "b"`
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
	wantCode(t, err, codes.Unavailable, both)
	if len(w.folders("a")) != 1 || len(w.folders("b")) != 1 {
		t.Errorf("there are %v and %v", w.folders("a"), w.folders("b"))
	}
	resp, err := w.CreateVolume(t.Context(), request("w")) // a and b have more room
	must(t, err)
	if got := resp.GetVolume().GetAccessibleTopology()[0].GetSegments()[translate.TopologyKey]; got != "c" {
		t.Errorf("made on %s", got)
	}
	must(t, w.get(resp.GetVolume().GetVolumeId()))
	b.Stop(t) // nobody knows yet whether it is only away
	w.down("b")
	w.refused("a", id, codes.FailedPrecondition, both)
	b.Options.Config.Pools[0] = w.pool("fresh", "fresh", "1Gi")
	b.Restart(t)
	await(t, "the end of the conflict", func() bool { return w.get(id) == nil })
	must(t, w.publish("a", id))
	await(t, "the list", func() bool { _, err := w.list(0); return err == nil })
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
