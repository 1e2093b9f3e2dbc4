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
	"github.com/trivet-csi/trivet/internal/translate"
)

func from(source *csi.VolumeContentSource) func(*csi.CreateVolumeRequest) {
	return func(req *csi.CreateVolumeRequest) { req.VolumeContentSource = source }
}

func ofSnapshot(id string) func(*csi.CreateVolumeRequest) {
	return from(&csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: id}}})
}

func ofVolume(id string) func(*csi.CreateVolumeRequest) {
	return from(&csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: id}}})
}

// cut makes a snapshot and gives its ID.
func (w *world) cut(name, of string) string {
	w.t.Helper()
	resp, err := w.CreateSnapshot(w.t.Context(), &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: of})
	must(w.t, err)
	return resp.GetSnapshot().GetSnapshotId()
}

func (w *world) group(name string, of ...string) (*csi.VolumeGroupSnapshot, error) {
	resp, err := w.CreateVolumeGroupSnapshot(w.t.Context(), &csi.CreateVolumeGroupSnapshotRequest{Name: name, SourceVolumeIds: of})
	return resp.GetGroupSnapshot(), err
}

// listSnapshots lists by pages.
func (w *world) listSnapshots(req *csi.ListSnapshotsRequest) (ids []string, err error) {
	for {
		resp, err := w.ListSnapshots(w.t.Context(), req)
		if err != nil {
			return nil, err
		}
		for _, e := range resp.GetEntries() {
			ids = append(ids, e.GetSnapshot().GetSnapshotId())
		}
		if req.StartingToken = resp.GetNextToken(); req.GetStartingToken() == "" {
			return ids, nil
		}
	}
}

// snapshotCalls are those for one snapshot and those for one group, by name. What a list
// does without the snapshot is its own.
func (w *world) snapshotCalls(snapshot, group string) map[string]func() error {
	ctx := w.t.Context()
	return map[string]func() error{
		"delete": func() error {
			_, err := w.DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{SnapshotId: snapshot})
			return err
		},
		"get": func() error {
			_, err := w.GetSnapshot(ctx, &csi.GetSnapshotRequest{SnapshotId: snapshot})
			return err
		},
		"list": func() error {
			_, err := w.ListSnapshots(ctx, &csi.ListSnapshotsRequest{SnapshotId: snapshot})
			return err
		},
		"list of a volume": func() error {
			_, err := w.ListSnapshots(ctx, &csi.ListSnapshotsRequest{SourceVolumeId: snapshot})
			return err
		},
		"allocated": func() error {
			return w.Stream(ctx, csi.SnapshotMetadata_GetMetadataAllocated_FullMethodName, &csi.GetMetadataAllocatedRequest{SnapshotId: snapshot}, func(any) error { return nil })
		},
		"changed": func() error {
			return w.Stream(ctx, csi.SnapshotMetadata_GetMetadataDelta_FullMethodName, &csi.GetMetadataDeltaRequest{BaseSnapshotId: snapshot, TargetSnapshotId: snapshot}, func(any) error { return nil })
		},
		"get group": func() error {
			_, err := w.GetVolumeGroupSnapshot(ctx, &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: group})
			return err
		},
		"delete group": func() error {
			_, err := w.DeleteVolumeGroupSnapshot(ctx, &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: group})
			return err
		},
	}
}

// snapshotsRefused fails the test unless every call for a snapshot and for a group is
// refused alike.
func (w *world) snapshotsRefused(snapshot, group string, want codes.Code, says ...string) {
	w.t.Helper()
	for name, call := range w.snapshotCalls(snapshot, group) {
		if wantCode(w.t, call(), want, says...); w.t.Failed() {
			w.t.Fatalf("so ended %s", name)
		}
	}
}

// TestSnapshots takes snapshots of volumes on the second of two nodes through their lives.
func TestSnapshots(t *testing.T) {
	w := newWorld(t)
	w.start("a", w.pool("p", "p", "1Gi"))
	w.start("b", w.pool("q", "q", "1Gi"), w.pool("r", "r", "1Gi"))
	w.know()
	onA, onB := w.make("a", "v"), w.make("b", "v", inPool("q"))
	made, err := w.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: onB})
	must(t, err)
	s := made.GetSnapshot().GetSnapshotId()
	if s != strings.TrimSuffix(onB, ":v")+":s" {
		t.Errorf("made is %v", made)
	}
	got, err := w.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: s})
	if err != nil || !proto.Equal(got.GetSnapshot(), made.GetSnapshot()) {
		t.Errorf("made is %v; got %v, %v", made, got, err)
	}
	group, err := w.group("g", onB)
	must(t, err)
	for name, call := range w.snapshotCalls(s, group.GetGroupSnapshotId()) {
		if name != "delete" && name != "delete group" {
			if err := call(); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
	_, err = w.group("g", onA, onB)
	wantCode(t, err, codes.FailedPrecondition, onA, onB)
	_, err = w.group("g", onB, onB)
	wantCode(t, err, codes.InvalidArgument, "twice")

	// What is made of it is where it is, whatever is preferred.
	for name, source := range map[string]func(*csi.CreateVolumeRequest){"of-snapshot": ofSnapshot(s), "of-volume": ofVolume(onB), "of-member": ofSnapshot(group.GetSnapshots()[0].GetSnapshotId())} {
		for i, change := range []func(*csi.CreateVolumeRequest){preferring("a", "b"), within("b"), func(*csi.CreateVolumeRequest) {}, inPool("r")} {
			resp, err := w.CreateVolume(t.Context(), request(fmt.Sprintf("%s-%d", name, i), source, change))
			must(t, err)
			if v := resp.GetVolume(); v.GetAccessibleTopology()[0].String() != translate.Topology("b").String() || v.GetContentSource() == nil {
				t.Errorf("%s %d: made is %v", name, i, v)
			}
		}
		_, err := w.CreateVolume(t.Context(), request("none", source, preferring("a")))
		wantCode(t, err, codes.ResourceExhausted, "requisite", `"b"`)
		_, err = w.CreateVolume(t.Context(), request("none", source, func(r *csi.CreateVolumeRequest) { r.Parameters = map[string]string{"server": "nas.lan", "share": "/e"} }))
		wantCode(t, err, codes.InvalidArgument, "volume_content_source")
		_, err = w.CreateVolume(t.Context(), request("none", source, inPool("p")))
		wantCode(t, err, codes.InvalidArgument, "pool")
	}
	_, err = w.CreateVolume(t.Context(), request("none", ofSnapshot("loop:nas:s")))
	wantCode(t, err, codes.InvalidArgument, "volume_content_source")
	_, err = w.CreateVolume(t.Context(), request("none", ofSnapshot(s+"x")))
	wantCode(t, err, codes.NotFound)
	_, err = w.CreateVolume(t.Context(), request("none", ofSnapshot("s")))
	wantCode(t, err, codes.NotFound)
	if n := len(w.folders("p")) + len(w.folders("q")) + len(w.folders("r")); n != 2+12 {
		t.Errorf("%d volumes were made", n)
	}

	for range 2 {
		calls := w.snapshotCalls(s, group.GetGroupSnapshotId())
		must(t, calls["delete"]())
		must(t, calls["delete group"]())
	}
	wantCode(t, w.snapshotCalls(s, "")["get"](), codes.NotFound)
	for _, foreign := range []string{"s", "nfs"} {
		calls := w.snapshotCalls(foreign, foreign)
		must(t, calls["delete"]())
		must(t, calls["list"]())
		must(t, calls["delete group"]())
		wantCode(t, calls["get"](), codes.NotFound)
		wantCode(t, calls["allocated"](), codes.NotFound)
		wantCode(t, calls["get group"](), codes.NotFound)
	}
}

// TestSnapshotPages: pages of every size have each snapshot of all nodes once, and in the
// same order.
func TestSnapshotPages(t *testing.T) {
	w := newWorld(t)
	w.start("a", w.pool("p", "p", "1Gi"), w.pool("q", "q", "1Gi"))
	w.start("b", w.pool("r", "r", "1Gi"))
	w.know()
	var ids []string
	volumes := map[string]string{}
	for pool, node := range map[string]string{"p": "a", "q": "a", "r": "b"} {
		v := w.make(node, "v-"+pool, inPool(pool))
		volumes[pool] = v
		ids = append(ids, w.cut("s", v), w.cut("s-s", v))
		group, err := w.group("s", v, w.make(node, "w-"+pool, inPool(pool)))
		must(t, err)
		for _, one := range group.GetSnapshots() {
			ids = append(ids, one.GetSnapshotId())
		}
	}
	whole, err := w.listSnapshots(&csi.ListSnapshotsRequest{})
	must(t, err)
	if !slices.Equal(sorted(whole), sorted(ids)) {
		t.Fatalf("listed are %q, made were %q", whole, ids)
	}
	for size := range int32(len(ids) + 2) {
		if got, err := w.listSnapshots(&csi.ListSnapshotsRequest{MaxEntries: size}); err != nil || !slices.Equal(got, whole) {
			t.Errorf("by pages of %d: %q, %v", size, got, err)
		}
		for pool, v := range volumes {
			if got, err := w.listSnapshots(&csi.ListSnapshotsRequest{MaxEntries: size, SourceVolumeId: v}); err != nil || len(got) != 3 || !strings.Contains(got[2], ":"+pool+".") {
				t.Errorf("of %s by pages of %d: %q, %v", v, size, got, err)
			}
		}
	}
	for _, bad := range []string{"nonsense", "loop:", "loop:p:s", "disk:p.01234567:s", whole[0] + "\x00", "x" + whole[0], "pool " + whole[0]} {
		_, err := w.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{StartingToken: bad})
		wantCode(t, err, codes.Aborted, "starting_token")
		_, err = w.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{StartingToken: bad, SnapshotId: whole[0]})
		wantCode(t, err, codes.Aborted, "starting_token")
	}
	_, err = w.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{StartingToken: "nonsense", SourceVolumeId: volumes["p"]})
	wantCode(t, err, codes.Aborted, "starting_token")
	_, err = w.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{MaxEntries: -1})
	wantCode(t, err, codes.InvalidArgument, "max_entries")
}

// TestSnapshotsOfDeadNode: what concerns a node that is away or gone says so, and when it
// is back all is as before.
func TestSnapshotsOfDeadNode(t *testing.T) {
	w := newWorld(t)
	a := w.start("a", w.pool("default", "a", "1Gi"))
	w.start("b", w.pool("default", "b", "1Gi"))
	w.know()
	onA, onB := w.make("a", "v"), w.make("b", "v")
	s, other := w.cut("s", onA), w.cut("s", onB)
	group, err := w.group("g", onA)
	must(t, err)
	g := group.GetGroupSnapshotId()
	a.Stop(t)
	w.down("a")
	create := func() error {
		_, err := w.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "t", SourceVolumeId: onA})
		return err
	}
	createGroup := func() error { _, err := w.group("t", onA); return err }
	restore := func() error {
		_, err := w.CreateVolume(t.Context(), request("copy", ofSnapshot(s), preferring("b", "a")))
		return err
	}
	w.snapshotsRefused(s, g, codes.Unavailable, `node "a" cannot be reached`)
	for _, call := range []func() error{create, createGroup, restore} {
		wantCode(t, call(), codes.Unavailable, `node "a" cannot be reached`)
	}
	_, err = w.listSnapshots(&csi.ListSnapshotsRequest{})
	wantCode(t, err, codes.Unavailable, "incomplete", `"a"`)
	must(t, w.snapshotCalls(other, "")["get"]())

	address := w.hosts["a"]
	w.forget("a")
	w.snapshotsRefused(s, g, codes.FailedPrecondition, `its node "a" is gone`)
	wantCode(t, create(), codes.FailedPrecondition, "is gone")
	wantCode(t, createGroup(), codes.FailedPrecondition, "is gone")
	wantCode(t, restore(), codes.Unavailable, "is gone") // it may be there already
	if got, err := w.listSnapshots(&csi.ListSnapshotsRequest{}); err != nil || !slices.Equal(got, []string{other}) {
		t.Errorf("what is left: %q, %v", got, err)
	}
	a.Restart(t)
	w.hosts["a"] = address
	w.know()
	for _, call := range []func() error{create, createGroup, restore} {
		must(t, call())
	}
	must(t, w.snapshotCalls(s, g)["delete"]())
}

// lie is what a liar says of snapshots.
type lie struct {
	snapshot *csi.Snapshot
	group    *csi.VolumeGroupSnapshot
	listed   []*csi.Snapshot
	refusal  error
	asked    []string
}

// says notes a call and gives what it is answered with.
func (l *liar) says(call string) lie {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lie.asked = append(l.lie.asked, call)
	return l.lie
}

func (l *liar) CreateSnapshot(context.Context, *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	said := l.says("create")
	return &csi.CreateSnapshotResponse{Snapshot: said.snapshot}, said.refusal
}

func (l *liar) GetSnapshot(context.Context, *csi.GetSnapshotRequest) (*csi.GetSnapshotResponse, error) {
	said := l.says("get")
	return &csi.GetSnapshotResponse{Snapshot: said.snapshot}, said.refusal
}

func (l *liar) ListSnapshots(context.Context, *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	resp := &csi.ListSnapshotsResponse{}
	for _, one := range l.says("list").listed {
		resp.Entries = append(resp.Entries, &csi.ListSnapshotsResponse_Entry{Snapshot: one})
	}
	return resp, nil
}

func (l *liar) CreateVolumeGroupSnapshot(context.Context, *csi.CreateVolumeGroupSnapshotRequest) (*csi.CreateVolumeGroupSnapshotResponse, error) {
	said := l.says("create group")
	return &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: said.group}, said.refusal
}

func (l *liar) GetVolumeGroupSnapshot(context.Context, *csi.GetVolumeGroupSnapshotRequest) (*csi.GetVolumeGroupSnapshotResponse, error) {
	return &csi.GetVolumeGroupSnapshotResponse{GroupSnapshot: l.says("get group").group}, nil
}

// TestLiesOfSnapshots: nothing of an answer that is not the node's to give is passed on.
func TestLiesOfSnapshots(t *testing.T) {
	w := newWorld(t)
	w.start("a", w.pool("default", "a", "1Gi"))
	w.know()
	onA := w.make("a", "v")
	snapOnA := w.cut("s", onA)
	liar := w.lie()
	w.know()
	of := func(change func(*csi.Snapshot)) *csi.Snapshot {
		one := &csi.Snapshot{SnapshotId: strings.TrimSuffix(own.String(), "v") + "s", SourceVolumeId: own.String(), ReadyToUse: true}
		change(one)
		return one
	}
	truth := of(func(*csi.Snapshot) {})
	const rejected = "check which driver runs"
	for name, said := range map[string]*csi.Snapshot{
		"nothing":           nil,
		"another's":         of(func(s *csi.Snapshot) { s.SnapshotId = snapOnA }),
		"of another's":      of(func(s *csi.Snapshot) { s.SourceVolumeId = onA }),
		"of nothing":        of(func(s *csi.Snapshot) { s.SourceVolumeId = "" }),
		"in a group":        of(func(s *csi.Snapshot) { s.GroupSnapshotId = own.String() + ".group" }),
		"a group's, alone":  of(func(s *csi.Snapshot) { s.SnapshotId += ".000" }),
		"in a shared pool":  of(func(s *csi.Snapshot) { s.SnapshotId = "loop:default:s" }),
		"what is no ID":     of(func(s *csi.Snapshot) { s.SnapshotId = "s" }),
		"what is a group's": of(func(s *csi.Snapshot) { s.SnapshotId += ".group" }),
	} {
		liar.say(func() {
			liar.lie = lie{snapshot: said, listed: []*csi.Snapshot{said}, group: &csi.VolumeGroupSnapshot{GroupSnapshotId: truth.GetSnapshotId() + ".group", Snapshots: []*csi.Snapshot{said}}}
		})
		_, err := w.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: own.String()})
		wantCode(t, err, codes.Unavailable, `node "b"`, rejected)
		calls := w.snapshotCalls(truth.GetSnapshotId(), truth.GetSnapshotId()+".group")
		for _, call := range []string{"get", "list", "get group"} {
			wantCode(t, calls[call](), codes.Unavailable, `node "b"`, rejected)
		}
		_, err = w.group("s", own.String())
		wantCode(t, err, codes.Unavailable, `node "b"`, rejected)
		if ids, err := w.listSnapshots(&csi.ListSnapshotsRequest{}); err == nil {
			t.Errorf("passed on: %q", ids)
		}
		if t.Failed() {
			t.Fatalf("so ended %s", name)
		}
	}
	for name, listed := range map[string][]*csi.Snapshot{"twice": {truth, truth}, "backwards": {truth, of(func(s *csi.Snapshot) { s.SnapshotId = strings.Replace(s.SnapshotId, ":s", ":a", 1) })}} {
		liar.say(func() { liar.lie = lie{listed: listed} })
		_, err := w.listSnapshots(&csi.ListSnapshotsRequest{})
		if wantCode(t, err, codes.Unavailable, `node "b"`, rejected); t.Failed() {
			t.Fatalf("so ended %s", name)
		}
	}
	liar.say(func() { liar.lie = lie{snapshot: truth, listed: []*csi.Snapshot{truth}} })
	must(t, w.snapshotCalls(truth.GetSnapshotId(), "")["get"]())
	if ids, err := w.listSnapshots(&csi.ListSnapshotsRequest{}); err != nil || len(ids) != 2 {
		t.Errorf("%q, %v", ids, err)
	}
	// Of what cannot be read it knows no more.
	unread := of(func(s *csi.Snapshot) { s.SourceVolumeId, s.ReadyToUse = "", false })
	liar.say(func() { liar.lie = lie{listed: []*csi.Snapshot{unread}} })
	if ids, err := w.listSnapshots(&csi.ListSnapshotsRequest{}); err != nil || len(ids) != 2 {
		t.Errorf("%q, %v", ids, err)
	}
}

// TestStreamsOfNodes: what a node sends is passed on, and how it ends.
func TestStreamsOfNodes(t *testing.T) {
	c := twoNodes(t)
	resp, err := c.Router.Control.CreateVolume(t.Context(), request("v", preferring("node-2.example")))
	must(t, err)
	made, err := c.Router.Control.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: resp.GetVolume().GetVolumeId()})
	must(t, err)
	for offset, want := range map[int64]codes.Code{0: codes.OK, 32 * mib: codes.OK, -1: codes.OutOfRange, 32*mib + 1: codes.OutOfRange} {
		stream, err := c.Router.Control.GetMetadataAllocated(t.Context(), &csi.GetMetadataAllocatedRequest{SnapshotId: made.GetSnapshot().GetSnapshotId(), StartingOffset: offset})
		must(t, err)
		wantCode(t, controllerserver.Pass(stream.Recv, func(*csi.GetMetadataAllocatedResponse) error { return nil }), want)
	}
	_, err = c.Router.Control.CreateVolumeGroupSnapshot(t.Context(), &csi.CreateVolumeGroupSnapshotRequest{Name: "g", SourceVolumeIds: []string{resp.GetVolume().GetVolumeId()}})
	must(t, err)
	capabilities, err := c.Router.Control.GroupControllerGetCapabilities(t.Context(), &csi.GroupControllerGetCapabilitiesRequest{})
	if err != nil || len(capabilities.GetCapabilities()) != 1 {
		t.Errorf("%v, %v", capabilities, err)
	}
}
