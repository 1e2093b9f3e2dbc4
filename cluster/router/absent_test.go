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

// TestAbsentNode: calls for an absent node, its volumes and their snapshots fail with the reason, calls
// for other nodes succeed, and when the node answers again, its volumes are served as before.
func TestAbsentNode(t *testing.T) {
	for name, tc := range map[string]struct {
		leave  func(*testCluster)
		code   codes.Code
		says   []string
		create codes.Code // of a volume that prefers the node
		lists  codes.Code
	}{
		"dead": {
			func(w *testCluster) { w.stopDriver("a") },
			codes.Unavailable,
			[]string{`node "a" cannot be reached`},
			codes.Unavailable, codes.Unavailable,
		},
		"no driver": {
			func(w *testCluster) {
				w.drivers["a"].Stop(w.t)
				w.setHost("a", "")
				w.awaitDisconnect("a")
			},
			codes.Unavailable,
			[]string{`node "a": its driver is not running`},
			codes.Unavailable, codes.Unavailable,
		},
		"removed": {
			func(w *testCluster) {
				w.removeHosts("a")
				w.drivers["a"].Stop(w.t)
			},
			codes.FailedPrecondition,
			[]string{`its node "a" no longer exists`, "docs/kubernetes.md"},
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
			w.wantRefused("a", onA, tc.code, tc.says...)
			w.wantAllRefused(slices.Concat(deletions(s, g), reads(s, g), creations), tc.code, tc.says...)
			wantCode(t, w.send(restore), codes.Unavailable, tc.says...) // the volume may exist already
			wantCode(t, w.create("w", preferring("a", "b")), tc.create, `"a"`)
			w.wantAllRefused(lists, tc.lists, "incomplete", `"a"`)
			for _, req := range append(volumeRequests(onB)[1:], getSnapshot(onBSnapshot)) {
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

// TestUnknownPool: a pool that no node has may be on a node that does not answer. A closed pool has no
// capacity, so that the scheduler places no pod there.
func TestUnknownPool(t *testing.T) {
	w := newEmptyCluster(t)
	w.start("a")
	w.start("b", w.closedPool("closed", "closed"))
	w.updateHosts()
	w.awaitNode("a")
	await(t, "an answer of b", func() bool { return code(w.get("loop:other.01234567:v")) == codes.FailedPrecondition })
	w.wantRefused("b", "loop:closed.01234567:v", codes.Unavailable, `pool "closed" is closed on "b"`)
	wantCode(t, w.listError(), codes.Unavailable, "incomplete", `not open on "b"`)
	w.wantNoCapacity("b")
	w.setHost("c", backendtest.FreeAddress(t))
	w.wantRefused("c", unknownVolume, codes.Unavailable, `those that do not answer are "c"`)
	must(t, w.get(w.mustCreateOn("a", "v")))
}

// TestRestartedController: a new controller reads from the record which node had a pool, also if that node no
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
		t.Error("the router is ready")
	}
	const says = "not known yet"
	w.wantRefused("a", unknownVolume, codes.Unavailable, says)
	wantCode(t, w.create("v", preferring("a")), codes.Unavailable, says)
	_, err := w.capacity("a")
	wantCode(t, err, codes.Unavailable, says)
	wantCode(t, w.listError(), codes.Unavailable, says)
	w.updateHosts() // no nodes
	if !w.Ready() {
		t.Error("the router is not ready")
	}
	w.wantRefused("a", unknownVolume, codes.FailedPrecondition, "no node has pool default.01234567")
	wantCode(t, w.create("v"), codes.ResourceExhausted)
	w.wantListed(0)
}

// TestNodesNotReportedYet: a new controller creates no volume before it has requested the pools of all nodes, with
// or without an answer.
func TestNodesNotReportedYet(t *testing.T) {
	w := newEmptyCluster(t)
	silent, err := net.Listen("tcp", "127.0.0.1:0") // accepts connections, and answers nothing
	must(t, err)
	defer func() { _ = silent.Close() }()
	var hosts []router.Host
	for i := range 200 {
		hosts = append(hosts, router.Host{Name: fmt.Sprintf("n%d", i), Address: silent.Addr().String()})
	}
	w.SetHosts(hosts)
	wantCode(t, w.create("v"), codes.Unavailable, " more have not reported yet")
}

// TestNodeNotReportedYet: a volume is not created again because the node that has it has not
// reported its pools yet.
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
		t.Errorf("created %s, want %s", got, id)
	}
}
