package router_test

import (
	"fmt"
	"net"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/cluster/router"
)

// TestAbsentNode: calls for an absent node, its volumes and their snapshots fail with the reason, and calls
// for other nodes succeed. When the node answers again, its volumes are served again.
func TestAbsentNode(t *testing.T) {
	for name, tc := range map[string]struct {
		leave  func(*testCluster)
		code   codes.Code // of calls for the node's volumes and snapshots
		texts  []string   // of the same errors
		create codes.Code // of CreateVolume on the node
		lists  codes.Code // of ListVolumes and ListSnapshots
	}{
		"driver does not answer": {
			func(w *testCluster) { w.stopDriver("a") },
			codes.Unavailable,
			[]string{`node "a" cannot be reached`},
			codes.Unavailable, codes.Unavailable,
		},
		"driver is not running": {
			func(w *testCluster) {
				w.drivers["a"].Stop(w.t)
				w.setHost("a", "")
				w.awaitDisconnect("a")
			},
			codes.Unavailable,
			[]string{`node "a": its driver is not running`},
			codes.Unavailable, codes.Unavailable,
		},
		"node is removed": {
			func(w *testCluster) {
				w.removeHosts("a")
				w.drivers["a"].Stop(w.t)
			},
			codes.FailedPrecondition,
			[]string{`its node "a" no longer exists`, "docs/operations/nodes.md"},
			codes.ResourceExhausted, codes.OK,
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newCluster(t, "a", "b")
			onA, onB := w.mustCreateOn("a", "v"), w.mustCreateOn("b", "v")
			s, onBSnapshot, g := w.snapshot("s", onA), w.snapshot("s", onB), w.group("g", onA).GetGroupSnapshotId()
			must(t, w.publish("a", onA))
			creations := []proto.Message{&csi.CreateSnapshotRequest{Name: "t", SourceVolumeId: onA}, groupRequest("t", onA)}
			restore := request("copy", fromSnapshot(s), preferring("b", "a"))
			lists := []proto.Message{&csi.ListVolumesRequest{}, &csi.ListSnapshotsRequest{}}
			tc.leave(w)
			w.wantRefused("a", onA, tc.code, tc.texts...)
			w.wantAllRefused(slices.Concat(deletions(s, g), reads(s, g), creations), tc.code, tc.texts...)
			wantCode(t, w.send(restore), codes.Unavailable, tc.texts...) // the volume may exist already
			wantCode(t, w.create("w", preferring("a", "b")), tc.create, `"a"`)
			w.wantAllRefused(lists, tc.lists, "incomplete", `"a"`)
			for _, req := range append(volumeRequests(onB)[1:], getSnapshot(onBSnapshot)) { // without DeleteVolume
				must(t, w.send(req))
			}
			must(t, w.publish("b", onB))
			if tc.lists == codes.OK {
				w.wantListed(1)
			}
			w.addHost("a")
			wantCode(t, w.delete(onA), codes.Unavailable, `"a"`)
			w.drivers["a"].Restart(t)
			w.awaitNode("a")
			must(t, w.get(onA))
			w.wantListed(2)
			for _, req := range append(creations, restore, deletions(s, g)[0]) {
				must(t, w.send(req))
			}
		})
	}
}

// TestUnknownPool: while a node does not answer or has a closed pool, calls for a pool that no node announces fail
// with UNAVAILABLE. A closed pool has capacity 0.
func TestUnknownPool(t *testing.T) {
	w := newEmptyCluster(t)
	w.start("a")
	w.start("b", w.closedPool("closed", "closed"))
	w.updateHosts()
	w.awaitNode("a")
	await(t, "the answer of node b", func() bool { return code(w.get("loop:other.01234567:v")) == codes.FailedPrecondition })
	w.wantRefused("b", "loop:closed.01234567:v", codes.Unavailable, `pool "closed" is closed on "b"`)
	wantCode(t, w.listError(), codes.Unavailable, "incomplete", `not open on "b"`)
	w.wantNoCapacity("b")
	w.setHost("c", backendtest.FreeAddress(t))
	w.wantRefused("c", unknownVolume, codes.Unavailable, `those that do not answer are "c"`)
	must(t, w.get(w.mustCreateOn("a", "v")))
}

// TestRestartedController: a restarted controller reads the owners of pools from the record, also if the owner no
// longer exists.
func TestRestartedController(t *testing.T) {
	w := newCluster(t, "a")
	id := w.mustCreateOn("a", "v")
	w.removeHosts("a")
	w.restart()
	w.updateHosts()
	w.wantRefused("a", id, codes.FailedPrecondition, `its node "a" no longer exists`)
	w.restartWith("a", w.pool("fresh", "fresh", "1Gi"))
	w.addHost("a")
	w.updateHostsAndWait()
	w.wantRefused("a", id, codes.FailedPrecondition, "no node has pool default.")
	must(t, w.get(w.mustCreateOn("a", "w", inPool("fresh"))))
}

// TestNodesUnknown: before SetHosts was called, the router reports no pool as missing, and volumes can be
// detached.
func TestNodesUnknown(t *testing.T) {
	w := newEmptyCluster(t)
	if w.Ready() {
		t.Error("the router is ready before SetHosts was called")
	}
	const unknown = "not known yet"
	w.wantRefused("a", unknownVolume, codes.Unavailable, unknown)
	wantCode(t, w.create("v", preferring("a")), codes.Unavailable, unknown)
	_, err := w.capacity("a")
	wantCode(t, err, codes.Unavailable, unknown)
	wantCode(t, w.listError(), codes.Unavailable, unknown)
	w.updateHosts() // no nodes
	if !w.Ready() {
		t.Error("the router is not ready after SetHosts was called")
	}
	w.wantRefused("a", unknownVolume, codes.FailedPrecondition, "no node has pool default.01234567")
	wantCode(t, w.create("v"), codes.ResourceExhausted)
	w.wantListed(0)
}

// TestNodesNotReportedYet: a restarted controller creates no volume before it has requested the pools of all nodes.
func TestNodesNotReportedYet(t *testing.T) {
	w := newEmptyCluster(t)
	unanswering, err := net.Listen("tcp", "127.0.0.1:0") // accepts connections and never answers
	must(t, err)
	defer func() { _ = unanswering.Close() }()
	var hosts []router.Host
	for i := range 200 {
		hosts = append(hosts, router.Host{Name: fmt.Sprintf("n%d", i), Address: unanswering.Addr().String()})
	}
	w.SetHosts(hosts)
	wantCode(t, w.create("v"), codes.Unavailable, " more have not reported yet")
}

// TestNodeNotReportedYet: while the node that has a volume has not reported its pools, the volume is not created
// on another node.
func TestNodeNotReportedYet(t *testing.T) {
	w := newCluster(t, "a:4Gi", "b")
	id := w.mustCreateOn("b", "v")
	w.removeHosts("b")
	p := w.proxy("b")
	p.gate.Lock()
	w.updateHosts()
	wantCode(t, w.create("v"), codes.Unavailable, `nodes "b" have not reported yet`)
	p.gate.Unlock()
	w.updateHostsAndWait()
	if got := w.mustCreate("v").GetVolumeId(); got != id {
		t.Errorf("got %s, want %s", got, id)
	}
}
