package router_test

import (
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/volume"
)

// rejected is in the error for a response that a node must not give.
const rejected = "check which driver runs"

// fakeAndReal returns a test cluster with node a, a volume there, and the fakeNode b.
func fakeAndReal(t *testing.T) (w *testCluster, onA string, b *fakeNode) {
	t.Helper()
	w = newCluster(t, "a")
	onA = w.mustCreateOn("a", "v")
	b = w.fake()
	w.updateHostsAndWait()
	return w, onA, b
}

// named returns own with another name.
func named(name string) volume.ID {
	id := own
	id.Name = name
	return id
}

func TestRejectedVolumes(t *testing.T) {
	w, onA, b := fakeAndReal(t)
	unknownPool := own
	unknownPool.PoolUUID = "00000000"
	says := func(v *csi.Volume) {
		b.answer(&csi.CreateVolumeResponse{Volume: v}, &csi.ControllerGetVolumeResponse{Volume: v},
			&csi.ControllerGetVolumeHealthResponse{VolumeHealth: &csi.VolumeHealth{VolumeId: v.GetVolumeId()}})
	}
	for name, v := range map[string]*csi.Volume{
		"nothing":                  nil,
		"a volume of another node": on(onA, "b"),
		"the topology of another":  on(own.String(), "a"),
		"two nodes":                on(own.String(), "b", "a"),
		"no node":                  on(own.String()),
		"a second segment":         {VolumeId: own.String(), AccessibleTopology: []*csi.Topology{{Segments: map[string]string{translate.TopologyKey: "b", "zone": "z"}}}},
		"another volume":           on(named("w").String(), "b"),
		"an unknown pool":          on(unknownPool.String(), "b"),
		"a shared pool":            on("loop:default:v", "b"),
		"no ID":                    on("v", "b"),
		"a very long ID":           on(strings.Repeat("v", 1<<20), "b"),
	} {
		t.Run(name, func(t *testing.T) {
			says(v)
			created, err := w.CreateVolume(t.Context(), request("v", preferring("b")))
			wantCode(t, err, codes.Unavailable, `node "b"`, rejected)
			got, err := w.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: own.String()})
			wantCode(t, err, codes.Unavailable, `node "b"`, rejected)
			if created != nil || got != nil {
				t.Errorf("passed on: %v, %v", created, got)
			}
			if v.GetVolumeId() != own.String() {
				wantCode(t, w.send(&csi.ControllerGetVolumeHealthRequest{VolumeId: own.String()}), codes.Unavailable, `node "b"`, rejected)
			}
		})
	}
	says(on(own.String(), "b"))
	must(t, w.get(own.String()))
	if id := w.mustCreateOn("b", "v"); id != own.String() {
		t.Errorf("created %s, want %s", id, own)
	}
	must(t, w.get(onA))
}

func TestRejectedLists(t *testing.T) {
	w, onA, b := fakeAndReal(t)
	w.wantListed(1)
	says := func(token string, ids ...string) {
		resp := &csi.ListVolumesResponse{NextToken: token}
		for _, id := range ids {
			resp.Entries = append(resp.Entries, &csi.ListVolumesResponse_Entry{Volume: &csi.Volume{VolumeId: id}})
		}
		b.answer(resp)
	}
	first := named("a")
	for name, tc := range map[string]struct {
		ids   []string
		token string
	}{
		"a volume of another node": {[]string{onA}, ""},
		"no ID":                    {[]string{"v"}, ""},
		"the same twice":           {[]string{own.String(), own.String()}, ""},
		"wrong order":              {[]string{own.String(), first.String()}, ""},
		"an invalid token":         {nil, "garbage"},
		"the request's token":      {nil, controllerserver.PoolToken(named(""))},
		"a token of another node":  {nil, "pool " + onA},
		"a token that goes back":   {[]string{own.String()}, controllerserver.PoolToken(first)},
		"the same page again":      {[]string{own.String()}, controllerserver.PoolToken(own)},
	} {
		t.Run(name, func(t *testing.T) {
			says(tc.token, tc.ids...)
			ids, err := w.list(0)
			wantCode(t, err, codes.Unavailable, `node "b"`, rejected)
			if len(ids) > 0 {
				t.Errorf("listed %q", ids)
			}
		})
	}
	// The router made the token that the node refuses, not the caller.
	b.refuse(status.Error(codes.Aborted, "no such pool"), "ListVolumes")
	wantCode(t, w.listError(), codes.Unavailable, "incomplete", `node "b"`, "no such pool")
	b.refuse(nil)
	// Entries above the limit are cut off and listed on the next page.
	says("", first.String(), own.String())
	resp, err := w.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: 1})
	if err != nil || len(resp.GetEntries()) != 1 || resp.GetNextToken() == "" {
		t.Errorf("%v, %v", resp, err)
	}
}

func TestRejectedSnapshots(t *testing.T) {
	w, onA, b := fakeAndReal(t)
	onASnapshot := w.snapshot("s", onA)
	of := func(change func(*csi.Snapshot)) *csi.Snapshot {
		s := &csi.Snapshot{SnapshotId: named("s").String(), SourceVolumeId: own.String(), ReadyToUse: true}
		change(s)
		return s
	}
	valid := of(func(*csi.Snapshot) {})
	group := valid.GetSnapshotId() + ".group"
	lists := func(snapshots ...*csi.Snapshot) {
		resp := &csi.ListSnapshotsResponse{}
		for _, s := range snapshots {
			resp.Entries = append(resp.Entries, &csi.ListSnapshotsResponse_Entry{Snapshot: s})
		}
		b.answer(resp)
	}
	says := func(s *csi.Snapshot) {
		set := &csi.VolumeGroupSnapshot{GroupSnapshotId: group, Snapshots: []*csi.Snapshot{s}}
		b.answer(&csi.CreateSnapshotResponse{Snapshot: s}, &csi.GetSnapshotResponse{Snapshot: s},
			&csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: set}, &csi.GetVolumeGroupSnapshotResponse{GroupSnapshot: set})
		lists(s)
	}
	for name, s := range map[string]*csi.Snapshot{
		"nothing":                    nil,
		"a snapshot of another node": of(func(s *csi.Snapshot) { s.SnapshotId = onASnapshot }),
		"a source on another node":   of(func(s *csi.Snapshot) { s.SourceVolumeId = onA }),
		"no source":                  of(func(s *csi.Snapshot) { s.SourceVolumeId = "" }),
		"a group":                    of(func(s *csi.Snapshot) { s.GroupSnapshotId = own.String() + ".group" }),
		"a member without its group": of(func(s *csi.Snapshot) { s.SnapshotId += ".000" }),
		"a shared pool":              of(func(s *csi.Snapshot) { s.SnapshotId = "loop:default:s" }),
		"no ID":                      of(func(s *csi.Snapshot) { s.SnapshotId = "s" }),
		"the ID of a group":          of(func(s *csi.Snapshot) { s.SnapshotId += ".group" }),
	} {
		t.Run(name, func(t *testing.T) {
			says(s)
			for _, err := range []error{
				w.send(&csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: own.String()}),
				w.send(&csi.GetSnapshotRequest{SnapshotId: valid.GetSnapshotId()}),
				w.send(&csi.ListSnapshotsRequest{SnapshotId: valid.GetSnapshotId()}),
				w.send(groupRequest("s", own.String())),
				w.send(&csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: group}),
			} {
				wantCode(t, err, codes.Unavailable, `node "b"`, rejected)
			}
			if ids, err := listAll(t.Context(), w, relay.Snapshots, 0); err == nil {
				t.Errorf("passed on: %q", ids)
			}
		})
	}
	for name, listed := range map[string][]*csi.Snapshot{"the same twice": {valid, valid}, "wrong order": {valid, of(func(s *csi.Snapshot) { s.SnapshotId = named("a").String() })}} {
		t.Run(name, func(t *testing.T) {
			lists(listed...)
			wantCode(t, w.send(&csi.ListSnapshotsRequest{}), codes.Unavailable, `node "b"`, rejected)
		})
	}
	says(valid)
	must(t, w.send(&csi.GetSnapshotRequest{SnapshotId: valid.GetSnapshotId()}))
	// A snapshot whose record cannot be read has no source.
	for _, s := range []*csi.Snapshot{valid, of(func(s *csi.Snapshot) { s.SourceVolumeId, s.ReadyToUse = "", false })} {
		lists(s)
		if ids, err := listAll(t.Context(), w, relay.Snapshots, 0); err != nil || len(ids) != 2 {
			t.Errorf("%v: %q, %v", s, ids, err)
		}
	}
}

// TestCertificateOfAnotherNode: a node is identified by its certificate, not by its address.
func TestCertificateOfAnotherNode(t *testing.T) {
	w := newCluster(t, "a")
	onA := w.mustCreateOn("a", "v")
	w.setHost("b", w.addresses["a"])
	wantCode(t, w.create("w", preferring("b")), codes.Unavailable, `node "b" cannot be reached`, "certificate of spiffe://csi.trivet.dev/node/a, expected is spiffe://csi.trivet.dev/node/b")
	must(t, w.get(onA))
}
