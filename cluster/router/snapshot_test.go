package router_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/internal/relay"
)

// snapshot creates a snapshot and returns its ID.
func (w *testCluster) snapshot(name, source string) string {
	w.t.Helper()
	resp, err := w.CreateSnapshot(w.t.Context(), &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: source})
	must(w.t, err)
	return resp.GetSnapshot().GetSnapshotId()
}

func groupRequest(name string, sources ...string) *csi.CreateVolumeGroupSnapshotRequest {
	return &csi.CreateVolumeGroupSnapshotRequest{Name: name, SourceVolumeIds: sources}
}

// group creates a group snapshot.
func (w *testCluster) group(name string, sources ...string) *csi.VolumeGroupSnapshot {
	w.t.Helper()
	resp, err := w.CreateVolumeGroupSnapshot(w.t.Context(), groupRequest(name, sources...))
	must(w.t, err)
	return resp.GetGroupSnapshot()
}

func getSnapshot(id string) proto.Message { return &csi.GetSnapshotRequest{SnapshotId: id} }

func listSnapshot(id string) proto.Message { return &csi.ListSnapshotsRequest{SnapshotId: id} }

func getGroup(id string) proto.Message {
	return &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: id}
}

func allocated(snapshot string) proto.Message {
	return &csi.GetMetadataAllocatedRequest{SnapshotId: snapshot}
}

// deletions returns the requests that delete a snapshot and a group.
func deletions(snapshot, group string) []proto.Message {
	return []proto.Message{&csi.DeleteSnapshotRequest{SnapshotId: snapshot}, &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: group}}
}

// reads returns the other requests for a snapshot and a group.
func reads(snapshot, group string) []proto.Message {
	return []proto.Message{
		getSnapshot(snapshot), listSnapshot(snapshot), &csi.ListSnapshotsRequest{SourceVolumeId: snapshot}, allocated(snapshot),
		&csi.GetMetadataDeltaRequest{BaseSnapshotId: snapshot, TargetSnapshotId: snapshot}, getGroup(group),
	}
}

// sourceFilter adds the filter source_volume_id to ListSnapshots requests.
type sourceFilter struct {
	relay.Service
	id string
}

func (o sourceFilter) Call(ctx context.Context, method string, req proto.Message) (proto.Message, error) {
	req.(*csi.ListSnapshotsRequest).SourceVolumeId = o.id
	return o.Service.Call(ctx, method, req)
}

// TestSnapshots makes all calls for snapshots of volumes on the second of two nodes.
func TestSnapshots(t *testing.T) {
	w := newEmptyCluster(t)
	w.start("a", w.pool("p", "p", "1Gi"))
	w.start("b", w.pool("q", "q", "1Gi"), w.pool("r", "r", "1Gi"))
	w.updateHostsAndWait()
	onA, onB := w.mustCreateOn("a", "v"), w.mustCreateOn("b", "v", inPool("q"))
	created, err := w.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: onB})
	must(t, err)
	s := created.GetSnapshot().GetSnapshotId()
	if s != strings.TrimSuffix(onB, ":v")+":s" {
		t.Errorf("got snapshot %v, want name s in the pool of %s", created, onB)
	}
	got, err := w.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: s})
	if err != nil || !proto.Equal(got.GetSnapshot(), created.GetSnapshot()) {
		t.Errorf("GetSnapshot: got %v, %v, want %v", got, err, created)
	}
	group := w.group("g", onB)
	for _, req := range reads(s, group.GetGroupSnapshotId()) {
		if err := w.send(req); err != nil {
			t.Errorf("%T: %v", req, err)
		}
	}
	wantCode(t, w.send(groupRequest("g", onA, onB)), codes.FailedPrecondition, onA, onB)
	wantCode(t, w.send(groupRequest("g", onB, onB)), codes.InvalidArgument, "twice")

	// A volume is created on the first preferred node, otherwise on that of its source if it has the pool.
	for name, source := range map[string]change{"from-snapshot": fromSnapshot(s), "from-volume": fromVolume(onB), "from-group": fromSnapshot(group.GetSnapshots()[0].GetSnapshotId())} {
		for i, topology := range []change{preferring("b", "a"), within("b"), anywhere, inPool("r"), within("a"), preferring("a"), inPool("p")} {
			node := "b"
			if i > 3 {
				node = "a"
			}
			if v := w.mustCreate(fmt.Sprintf("%s-%d", name, i), source, topology); nodeOf(v) != node || v.GetContentSource() == nil {
				t.Errorf("%s %d: got %v, want a volume on node %s with a source", name, i, v, node)
			}
		}
		local := with(map[string]string{"copies": "local"})
		if v := w.mustCreate(name+"-local", source, local, preferring("a", "b")); nodeOf(v) != "b" {
			t.Errorf("%s: got %v with copies: local, want a volume on node b", name, v)
		}
		wantCode(t, w.create("none", source, local, preferring("a")), codes.ResourceExhausted, "requisite", `"b"`)
		wantCode(t, w.create("none", source, within("c")), codes.ResourceExhausted, "requisite")
		wantCode(t, w.create("none", source, with(map[string]string{"server": "nas.lan", "share": "/e"})), codes.InvalidArgument, "volume_content_source")
		wantCode(t, w.create("none", source, with(map[string]string{"copies": "local", "pool": "p"})), codes.InvalidArgument, "pool")
	}
	wantCode(t, w.create("none", fromSnapshot("loop:nas:s")), codes.InvalidArgument, "volume_content_source")
	wantCode(t, w.create("none", fromSnapshot(s+"x")), codes.NotFound)
	wantCode(t, w.create("none", fromSnapshot("s")), codes.NotFound)
	w.wantVolumes(map[string]int{"p": 1 + 9, "q": 1 + 12, "r": 3}) // of 3 sources, 3 copies are in p, 4 in q and 1 in r

	for range 2 {
		for _, req := range deletions(s, group.GetGroupSnapshotId()) {
			must(t, w.send(req))
		}
	}
	wantCode(t, w.send(getSnapshot(s)), codes.NotFound)
	for _, foreign := range []string{"s", "nfs"} {
		for _, req := range append(deletions(foreign, foreign), listSnapshot(foreign)) {
			must(t, w.send(req))
		}
		w.wantAllRefused([]proto.Message{getSnapshot(foreign), allocated(foreign), getGroup(foreign)}, codes.NotFound)
	}
}

// TestSnapshotPages: pages of every size contain each snapshot of all nodes once and in the
// same order.
func TestSnapshotPages(t *testing.T) {
	w := newEmptyCluster(t)
	w.start("a", w.pool("p", "p", "1Gi"), w.pool("q", "q", "1Gi"))
	w.start("b", w.pool("r", "r", "1Gi"))
	w.updateHostsAndWait()
	var ids []string
	volumes := map[string]string{}
	for pool, node := range map[string]string{"p": "a", "q": "a", "r": "b"} {
		v := w.mustCreateOn(node, "v-"+pool, inPool(pool))
		volumes[pool] = v
		ids = append(ids, w.snapshot("s", v), w.snapshot("s-s", v))
		for _, s := range w.group("s", v, w.mustCreateOn(node, "w-"+pool, inPool(pool))).GetSnapshots() {
			ids = append(ids, s.GetSnapshotId())
		}
	}
	all, err := listAll(t.Context(), w, relay.Snapshots, 0)
	must(t, err)
	if !slices.Equal(sorted(all), sorted(ids)) {
		t.Fatalf("got snapshots %q, want %q", all, ids)
	}
	for size := range int32(len(ids) + 2) {
		if got, err := listAll(t.Context(), w, relay.Snapshots, size); err != nil || !slices.Equal(got, all) {
			t.Errorf("pages of %d: got %q, %v, want %q", size, got, err, all)
		}
		for pool, v := range volumes {
			if got, err := listAll(t.Context(), sourceFilter{w, v}, relay.Snapshots, size); err != nil || len(got) != 3 || !strings.Contains(got[2], ":"+pool+".") {
				t.Errorf("snapshots of %s, pages of %d: got %q, %v, want 3 snapshots", v, size, got, err)
			}
		}
	}
	for _, token := range invalidTokens(all[0]) {
		wantCode(t, w.send(&csi.ListSnapshotsRequest{StartingToken: token}), codes.Aborted, "starting_token")
		wantCode(t, w.send(&csi.ListSnapshotsRequest{StartingToken: token, SnapshotId: all[0]}), codes.Aborted, "starting_token")
	}
	wantCode(t, w.send(&csi.ListSnapshotsRequest{StartingToken: "nonsense", SourceVolumeId: volumes["p"]}), codes.Aborted, "starting_token")
	wantCode(t, w.send(&csi.ListSnapshotsRequest{MaxEntries: -1}), codes.InvalidArgument, "max_entries")
}

// TestSnapshotMetadata: the router forwards a node's stream and its status.
func TestSnapshotMetadata(t *testing.T) {
	c := twoNodes(t)
	resp, err := c.Router.Control.CreateVolume(t.Context(), request("v", preferring("node-2.example")))
	must(t, err)
	id := resp.GetVolume().GetVolumeId()
	s, err := c.Router.Control.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: id})
	must(t, err)
	for offset, want := range map[int64]codes.Code{0: codes.OK, 32 * mib: codes.OK, -1: codes.OutOfRange, 32*mib + 1: codes.OutOfRange} {
		stream, err := c.Router.Control.GetMetadataAllocated(t.Context(), &csi.GetMetadataAllocatedRequest{SnapshotId: s.GetSnapshot().GetSnapshotId(), StartingOffset: offset})
		must(t, err)
		wantCode(t, controllerserver.Pass(stream.Recv, func(*csi.GetMetadataAllocatedResponse) error { return nil }), want)
	}
	_, err = c.Router.Control.CreateVolumeGroupSnapshot(t.Context(), groupRequest("g", id))
	must(t, err)
	capabilities, err := c.Router.Control.GroupControllerGetCapabilities(t.Context(), &csi.GroupControllerGetCapabilitiesRequest{})
	if err != nil || len(capabilities.GetCapabilities()) != 1 {
		t.Errorf("got group capabilities %v, %v, want 1", capabilities, err)
	}
}
