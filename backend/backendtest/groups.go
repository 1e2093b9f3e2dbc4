package backendtest

import (
	"context"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
)

// groupRequest returns a request for a group of snapshots with a new name.
func groupRequest(t *testing.T, of ...*testVolume) *csi.CreateVolumeGroupSnapshotRequest {
	t.Helper()
	r := &csi.CreateVolumeGroupSnapshotRequest{Name: newName(t)}
	for _, l := range of {
		r.SourceVolumeIds = append(r.SourceVolumeIds, l.id)
	}
	return r
}

// group creates a group of snapshots, which is deleted when the test ends. The returned snapshots are in
// the order of the volumes.
func (d *Driver) group(t *testing.T, req *csi.CreateVolumeGroupSnapshotRequest) *csi.VolumeGroupSnapshot {
	t.Helper()
	resp, err := d.Control.CreateVolumeGroupSnapshot(t.Context(), req)
	must(t, err)
	g := resp.GetGroupSnapshot()
	t.Cleanup(func() { d.deleteGroup(t, g) })
	slices.SortFunc(g.GetSnapshots(), func(a, b *csi.Snapshot) int {
		return slices.Index(req.GetSourceVolumeIds(), a.GetSourceVolumeId()) - slices.Index(req.GetSourceVolumeIds(), b.GetSourceVolumeId())
	})
	if len(g.GetSnapshots()) != len(req.GetSourceVolumeIds()) || !g.GetReadyToUse() {
		t.Fatalf("created group %v, want a ready group of %v", g, req)
	}
	for i, s := range g.GetSnapshots() {
		if s.GetSourceVolumeId() != req.GetSourceVolumeIds()[i] || s.GetGroupSnapshotId() != g.GetGroupSnapshotId() {
			t.Errorf("snapshot %d of the group: got %v, want a snapshot of volume %s", i, s, req.GetSourceVolumeIds()[i])
		}
	}
	return g
}

func (d *Driver) deleteGroup(t *testing.T, g *csi.VolumeGroupSnapshot) {
	t.Helper()
	_, err := d.Control.DeleteVolumeGroupSnapshot(context.WithoutCancel(t.Context()), &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: g.GetGroupSnapshotId()})
	if err != nil {
		t.Errorf("deleting %s: %v", g.GetGroupSnapshotId(), err)
	}
}

// testSnapshotGroup: a group of snapshots of volumes that are being written to shows one point in time of all
// volumes. The group is deleted as a whole.
func testSnapshotGroup(t *testing.T, d *Driver, kind Kind) {
	var volumes []*testVolume
	for range 3 {
		l := newVolume(t, d, kind, multiWriter)
		l.stageAndPublish(t)
		volumes = append(volumes, l)
	}
	r := record(t, volumes...)
	since := r.done.Load()
	req := groupRequest(t, volumes...)
	g := d.group(t, req)
	until := r.done.Load() + 1
	r.await(t)
	must(t, r.end())
	d.Restart(t)
	d.awaitShared(t, kind)
	testGroupRequests(t, d, req, g)
	var copies []*testVolume
	for _, s := range g.GetSnapshots() {
		c := d.newCopy(t, kind, fromSnapshot(s), gib)
		c.stageAndPublish(t)
		copies = append(copies, c)
	}
	wantMoment(t, since, until, copies...)
	testGroupMembers(t, d, g)
	for range 2 {
		d.deleteGroup(t, g)
	}
	for _, s := range g.GetSnapshots() {
		if got := d.list(t, &csi.ListSnapshotsRequest{SnapshotId: s.GetSnapshotId()}); len(got) > 0 {
			t.Errorf("got snapshots %v of the deleted group, want none", got)
		}
		_, err := d.Control.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: s.GetSnapshotId()})
		wantCode(t, err, codes.NotFound)
		d.deleteSnapshot(t, s)
	}
	_, err := d.Control.GetVolumeGroupSnapshot(t.Context(), &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: g.GetGroupSnapshotId()})
	wantCode(t, err, codes.NotFound)
}

// testGroupRequests: a group is created completely or not at all. The same request returns the
// same group.
func testGroupRequests(t *testing.T, d *Driver, req *csi.CreateVolumeGroupSnapshotRequest, g *csi.VolumeGroupSnapshot) {
	again := d.group(t, req)
	if again.String() != g.String() {
		t.Errorf("second create: got %v, want %v", again, g)
	}
	got, err := d.Control.GetVolumeGroupSnapshot(t.Context(), &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: g.GetGroupSnapshotId()})
	if err != nil || got.GetGroupSnapshot().GetCreationTime().String() != g.GetCreationTime().String() || len(got.GetGroupSnapshot().GetSnapshots()) != len(g.GetSnapshots()) {
		t.Errorf("GetVolumeGroupSnapshot: got %v, %v; want %v", got, err, g)
	}
	before := len(d.list(t, &csi.ListSnapshotsRequest{}))
	ids := req.GetSourceVolumeIds()
	for _, tc := range []struct {
		name string
		bad  func(*csi.CreateVolumeGroupSnapshotRequest)
		code codes.Code
	}{
		{"same name, fewer volumes", func(r *csi.CreateVolumeGroupSnapshotRequest) { r.SourceVolumeIds = ids[:2] }, codes.AlreadyExists},
		{"no volumes", func(r *csi.CreateVolumeGroupSnapshotRequest) { r.SourceVolumeIds = nil }, codes.InvalidArgument},
		{"one volume twice", func(r *csi.CreateVolumeGroupSnapshotRequest) {
			r.Name, r.SourceVolumeIds = "x", []string{ids[0], ids[0]}
		}, codes.InvalidArgument},
		{"one volume does not exist", func(r *csi.CreateVolumeGroupSnapshotRequest) {
			r.Name, r.SourceVolumeIds = "x", []string{ids[0], ids[1], ids[2] + "-none"}
		}, codes.NotFound},
		{"one foreign ID", func(r *csi.CreateVolumeGroupSnapshotRequest) {
			r.Name, r.SourceVolumeIds = "x", []string{ids[0], "vol-1"}
		}, codes.NotFound},
		{"no name", func(r *csi.CreateVolumeGroupSnapshotRequest) { r.Name = "" }, codes.InvalidArgument},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := d.Control.CreateVolumeGroupSnapshot(t.Context(), change(req, tc.bad))
			wantCode(t, err, tc.code)
		})
	}
	if after := len(d.list(t, &csi.ListSnapshotsRequest{})); after != before {
		t.Errorf("got %d snapshots of the refused groups, want none", after-before)
	}
}

// testGroupMembers: the snapshots of a group are listed like other snapshots, and cannot be deleted alone.
func testGroupMembers(t *testing.T, d *Driver, g *csi.VolumeGroupSnapshot) {
	for _, s := range g.GetSnapshots() {
		_, err := d.Control.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: s.GetSnapshotId()})
		wantCode(t, err, codes.InvalidArgument, g.GetGroupSnapshotId())
		wantListed(t, map[string]*csi.Snapshot{s.GetSnapshotId(): s}, d.list(t, &csi.ListSnapshotsRequest{SnapshotId: s.GetSnapshotId()}))
		wantListed(t, map[string]*csi.Snapshot{s.GetSnapshotId(): s}, d.list(t, &csi.ListSnapshotsRequest{SourceVolumeId: s.GetSourceVolumeId(), MaxEntries: 1}))
	}
	_, err := d.Control.DeleteVolumeGroupSnapshot(t.Context(), &csi.DeleteVolumeGroupSnapshotRequest{
		GroupSnapshotId: g.GetGroupSnapshotId(), SnapshotIds: []string{g.GetSnapshots()[0].GetSnapshotId()},
	})
	wantCode(t, err, codes.InvalidArgument, "snapshot_ids")
}

// testOtherPool: a group of volumes in two pools is refused. A volume can be created from a source in another
// pool of the node.
func testOtherPool(t *testing.T, _ *Driver, kind Kind) {
	change, other := otherPool(t)
	d := kind.start(t, "20G", change)
	inOther := kind.in(other)
	l, otherVolume := newVolumeOfSize(t, d, kind, 320*mib), newVolumeOfSize(t, d, inOther, 320*mib)
	_, err := d.Control.CreateVolumeGroupSnapshot(t.Context(), groupRequest(t, l, otherVolume))
	wantCode(t, err, codes.FailedPrecondition, l.id, otherVolume.id)
	if got := d.list(t, &csi.ListSnapshotsRequest{}); len(got) > 0 {
		t.Errorf("got snapshots %v of the refused group, want none", got)
	}
	l.stageAndPublish(t)
	write(t, l.data(l.target), pattern(79))
	l.unpublishAndUnstage(t)
	s := l.snapshot(t)
	for _, of := range []*csi.VolumeContentSource{fromSnapshot(s), fromVolume(l)} {
		c := d.newCopy(t, inOther, of, 320*mib)
		c.stageAndPublish(t)
		wantContent(t, c.data(c.target), pattern(79))
		c.unpublishAndUnstage(t)
	}
}
