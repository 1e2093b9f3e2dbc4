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

// rejected is part of the error for a response that a node must not send.
const rejected = "check which driver runs"

// fakeAndReal returns a test cluster with node a, a volume on it, and the fakeNode b.
func fakeAndReal(t *testing.T) (w *testCluster, onA string, b *fakeNode) {
	t.Helper()
	w = newCluster(t, "a")
	onA = w.mustCreateOn("a", "v")
	b = w.fake()
	w.updateHostsAndWait()
	return w, onA, b
}

// fakeVolumeNamed returns fakeVolume with another name.
func fakeVolumeNamed(name string) volume.ID {
	id := fakeVolume
	id.Name = name
	return id
}

// TestRejectedVolumes: the router rejects volumes that a node must not return.
func TestRejectedVolumes(t *testing.T) {
	w, onA, b := fakeAndReal(t)
	unknownPool := fakeVolume
	unknownPool.PoolUUID = "00000000"
	respond := func(v *csi.Volume) {
		b.answer(&csi.CreateVolumeResponse{Volume: v}, &csi.ControllerGetVolumeResponse{Volume: v},
			&csi.ControllerGetVolumeHealthResponse{VolumeHealth: &csi.VolumeHealth{VolumeId: v.GetVolumeId()}})
	}
	for name, v := range map[string]*csi.Volume{
		"no volume":                nil,
		"a volume of another node": accessible(onA, "b"),
		"topology of another node": accessible(fakeVolume.String(), "a"),
		"two nodes":                accessible(fakeVolume.String(), "b", "a"),
		"no node":                  accessible(fakeVolume.String()),
		"second topology segment":  {VolumeId: fakeVolume.String(), AccessibleTopology: []*csi.Topology{{Segments: map[string]string{translate.TopologyKey: "b", "zone": "z"}}}},
		"another volume":           accessible(fakeVolumeNamed("w").String(), "b"),
		"an unknown pool":          accessible(unknownPool.String(), "b"),
		"a shared pool":            accessible("loop:default:v", "b"),
		"invalid ID":               accessible("v", "b"),
		"a very long ID":           accessible(strings.Repeat("v", 1<<20), "b"),
	} {
		t.Run(name, func(t *testing.T) {
			respond(v)
			created, err := w.CreateVolume(t.Context(), request("v", preferring("b")))
			wantCode(t, err, codes.Unavailable, `node "b"`, rejected)
			got, err := w.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: fakeVolume.String()})
			wantCode(t, err, codes.Unavailable, `node "b"`, rejected)
			if created != nil || got != nil {
				t.Errorf("got responses %v and %v, want none", created, got)
			}
			if v.GetVolumeId() != fakeVolume.String() {
				wantCode(t, w.send(&csi.ControllerGetVolumeHealthRequest{VolumeId: fakeVolume.String()}), codes.Unavailable, `node "b"`, rejected)
			}
		})
	}
	respond(accessible(fakeVolume.String(), "b"))
	must(t, w.get(fakeVolume.String()))
	if id := w.mustCreateOn("b", "v"); id != fakeVolume.String() {
		t.Errorf("got %s, want %s", id, fakeVolume)
	}
	must(t, w.get(onA))
}

// TestRejectedLists: the router rejects lists with entries or tokens that a node must not return.
func TestRejectedLists(t *testing.T) {
	w, onA, b := fakeAndReal(t)
	w.wantListed(1)
	respond := func(token string, ids ...string) {
		resp := &csi.ListVolumesResponse{NextToken: token}
		for _, id := range ids {
			resp.Entries = append(resp.Entries, &csi.ListVolumesResponse_Entry{Volume: &csi.Volume{VolumeId: id}})
		}
		b.answer(resp)
	}
	first := fakeVolumeNamed("a")
	for name, tc := range map[string]struct {
		ids   []string
		token string
	}{
		"a volume of another node": {[]string{onA}, ""},
		"invalid ID":               {[]string{"v"}, ""},
		"duplicate volume":         {[]string{fakeVolume.String(), fakeVolume.String()}, ""},
		"wrong order":              {[]string{fakeVolume.String(), first.String()}, ""},
		"an invalid token":         {nil, "garbage"},
		"the request's token":      {nil, controllerserver.PoolToken(fakeVolumeNamed(""))},
		"a token of another node":  {nil, "pool " + onA},
		"token before the entries": {[]string{fakeVolume.String()}, controllerserver.PoolToken(first)},
		"the same page again":      {[]string{fakeVolume.String()}, controllerserver.PoolToken(fakeVolume)},
	} {
		t.Run(name, func(t *testing.T) {
			respond(tc.token, tc.ids...)
			ids, err := w.list(0)
			wantCode(t, err, codes.Unavailable, `node "b"`, rejected)
			if len(ids) > 0 {
				t.Errorf("got entries %q, want none", ids)
			}
		})
	}
	// ABORTED becomes UNAVAILABLE, because the refused token is the router's and not the caller's.
	b.refuse(status.Error(codes.Aborted, "no such pool"), "ListVolumes")
	wantCode(t, w.listError(), codes.Unavailable, "incomplete", `node "b"`, "no such pool")
	b.refuse(nil)
	// If a node returns more entries than requested, the others are listed on the next page.
	respond("", first.String(), fakeVolume.String())
	resp, err := w.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: 1})
	if err != nil || len(resp.GetEntries()) != 1 || resp.GetNextToken() == "" {
		t.Errorf("got %v, %v, want 1 entry and a token", resp, err)
	}
}

// TestRejectedSnapshots: the router rejects snapshots that a node must not return.
func TestRejectedSnapshots(t *testing.T) {
	w, onA, b := fakeAndReal(t)
	onASnapshot := w.snapshot("s", onA)
	changed := func(change func(*csi.Snapshot)) *csi.Snapshot {
		s := &csi.Snapshot{SnapshotId: fakeVolumeNamed("s").String(), SourceVolumeId: fakeVolume.String(), ReadyToUse: true}
		change(s)
		return s
	}
	valid := changed(func(*csi.Snapshot) {})
	group := valid.GetSnapshotId() + ".group"
	respondList := func(snapshots ...*csi.Snapshot) {
		resp := &csi.ListSnapshotsResponse{}
		for _, s := range snapshots {
			resp.Entries = append(resp.Entries, &csi.ListSnapshotsResponse_Entry{Snapshot: s})
		}
		b.answer(resp)
	}
	respond := func(s *csi.Snapshot) {
		groupSnapshot := &csi.VolumeGroupSnapshot{GroupSnapshotId: group, Snapshots: []*csi.Snapshot{s}}
		b.answer(&csi.CreateSnapshotResponse{Snapshot: s}, &csi.GetSnapshotResponse{Snapshot: s},
			&csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: groupSnapshot}, &csi.GetVolumeGroupSnapshotResponse{GroupSnapshot: groupSnapshot})
		respondList(s)
	}
	for name, s := range map[string]*csi.Snapshot{
		"no snapshot":                nil,
		"a snapshot of another node": changed(func(s *csi.Snapshot) { s.SnapshotId = onASnapshot }),
		"a source on another node":   changed(func(s *csi.Snapshot) { s.SourceVolumeId = onA }),
		"no source":                  changed(func(s *csi.Snapshot) { s.SourceVolumeId = "" }),
		"an unexpected group":        changed(func(s *csi.Snapshot) { s.GroupSnapshotId = fakeVolume.String() + ".group" }),
		"a member without its group": changed(func(s *csi.Snapshot) { s.SnapshotId += ".000" }),
		"a shared pool":              changed(func(s *csi.Snapshot) { s.SnapshotId = "loop:default:s" }),
		"invalid ID":                 changed(func(s *csi.Snapshot) { s.SnapshotId = "s" }),
		"the ID of a group":          changed(func(s *csi.Snapshot) { s.SnapshotId += ".group" }),
	} {
		t.Run(name, func(t *testing.T) {
			respond(s)
			for _, err := range []error{
				w.send(&csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: fakeVolume.String()}),
				w.send(&csi.GetSnapshotRequest{SnapshotId: valid.GetSnapshotId()}),
				w.send(&csi.ListSnapshotsRequest{SnapshotId: valid.GetSnapshotId()}),
				w.send(groupRequest("s", fakeVolume.String())),
				w.send(&csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: group}),
			} {
				wantCode(t, err, codes.Unavailable, `node "b"`, rejected)
			}
			if ids, err := listAll(t.Context(), w, relay.Snapshots, 0); err == nil {
				t.Errorf("ListSnapshots: got %q, want an error", ids)
			}
		})
	}
	for name, listed := range map[string][]*csi.Snapshot{"duplicate": {valid, valid}, "wrong order": {valid, changed(func(s *csi.Snapshot) { s.SnapshotId = fakeVolumeNamed("a").String() })}} {
		t.Run(name, func(t *testing.T) {
			respondList(listed...)
			wantCode(t, w.send(&csi.ListSnapshotsRequest{}), codes.Unavailable, `node "b"`, rejected)
		})
	}
	respond(valid)
	must(t, w.send(&csi.GetSnapshotRequest{SnapshotId: valid.GetSnapshotId()}))
	// A snapshot whose record cannot be read has no source.
	for _, s := range []*csi.Snapshot{valid, changed(func(s *csi.Snapshot) { s.SourceVolumeId, s.ReadyToUse = "", false })} {
		respondList(s)
		if ids, err := listAll(t.Context(), w, relay.Snapshots, 0); err != nil || len(ids) != 2 {
			t.Errorf("snapshot %v: got IDs %q, %v, want 2 snapshots", s, ids, err)
		}
	}
}

// TestCertificateOfAnotherNode: a node is identified by its certificate, not by its address.
func TestCertificateOfAnotherNode(t *testing.T) {
	w := newCluster(t, "a")
	onA := w.mustCreateOn("a", "v")
	w.setHost("b", w.addresses["a"])
	wantCode(t, w.create("w", preferring("b")), codes.Unavailable, `node "b" cannot be reached`, "certificate of spiffe://csi.trivet.dev/node/a, expected spiffe://csi.trivet.dev/node/b")
	must(t, w.get(onA))
}
