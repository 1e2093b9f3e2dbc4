package backendtest

import (
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
)

// groupRequest asks for a group of snapshots of a new name.
func groupRequest(t *testing.T, of ...*life) *csi.CreateVolumeGroupSnapshotRequest {
	t.Helper()
	r := &csi.CreateVolumeGroupSnapshotRequest{Name: newName(t)}
	for _, l := range of {
		r.SourceVolumeIds = append(r.SourceVolumeIds, l.id)
	}
	return r
}

// group makes a group of snapshots, which is deleted when the test ends. The returned
// snapshots are in the order of the volumes.
func (d *Driver) group(t *testing.T, req *csi.CreateVolumeGroupSnapshotRequest) *csi.VolumeGroupSnapshot {
	t.Helper()
	resp, err := d.Control.CreateVolumeGroupSnapshot(t.Context(), req)
	must(t, err)
	g := resp.GetGroupSnapshot()
	t.Cleanup(func() { d.dropGroup(t, g) })
	slices.SortFunc(g.GetSnapshots(), func(a, b *csi.Snapshot) int {
		return slices.Index(req.GetSourceVolumeIds(), a.GetSourceVolumeId()) - slices.Index(req.GetSourceVolumeIds(), b.GetSourceVolumeId())
	})
	if len(g.GetSnapshots()) != len(req.GetSourceVolumeIds()) || !g.GetReadyToUse() {
		t.Fatalf("a group of %v is %v", req, g)
	}
	for i, s := range g.GetSnapshots() {
		if s.GetSourceVolumeId() != req.GetSourceVolumeIds()[i] || s.GetGroupSnapshotId() != g.GetGroupSnapshotId() {
			t.Errorf("snapshot %d of %v is %v", i, req, s)
		}
	}
	return g
}

func (d *Driver) dropGroup(t *testing.T, g *csi.VolumeGroupSnapshot) {
	t.Helper()
	_, err := d.Control.DeleteVolumeGroupSnapshot(contextForCleanup(t), &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: g.GetGroupSnapshotId()})
	if err != nil {
		t.Errorf("deleting %s: %v", g.GetGroupSnapshotId(), err)
	}
}

// testGroup: a group of snapshots of volumes that are being written shows one moment of all of
// them. It is created and deleted as a whole.
func testGroup(t *testing.T, d *Driver, kind Kind) {
	var volumes []*life
	for range 3 {
		l := newLife(t, d, kind, multiWriter)
		l.up(t)
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
	var copies []*life
	for _, s := range g.GetSnapshots() {
		c := d.restore(t, kind, fromSnapshot(s), gib)
		c.up(t)
		copies = append(copies, c)
	}
	wantMoment(t, since, until, copies...)
	testGroupMembers(t, d, g)
	for range 2 {
		d.dropGroup(t, g)
	}
	for _, s := range g.GetSnapshots() {
		if got := d.list(t, &csi.ListSnapshotsRequest{SnapshotId: s.GetSnapshotId()}); len(got) > 0 {
			t.Errorf("of a group that is deleted there is %v", got)
		}
		_, err := d.Control.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: s.GetSnapshotId()})
		wantCode(t, err, codes.NotFound)
		d.drop(t, s)
	}
	_, err := d.Control.GetVolumeGroupSnapshot(t.Context(), &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: g.GetGroupSnapshotId()})
	wantCode(t, err, codes.NotFound)
}

// testGroupRequests: a group is created completely or not at all. The same request returns the
// same group.
func testGroupRequests(t *testing.T, d *Driver, req *csi.CreateVolumeGroupSnapshotRequest, g *csi.VolumeGroupSnapshot) {
	again := d.group(t, req)
	if again.String() != g.String() {
		t.Errorf("again it is %v, want %v", again, g)
	}
	got, err := d.Control.GetVolumeGroupSnapshot(t.Context(), &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: g.GetGroupSnapshotId()})
	if err != nil || got.GetGroupSnapshot().GetCreationTime().String() != g.GetCreationTime().String() || len(got.GetGroupSnapshot().GetSnapshots()) != len(g.GetSnapshots()) {
		t.Errorf("GetVolumeGroupSnapshot: %v, %v; want %v", got, err, g)
	}
	before := len(d.list(t, &csi.ListSnapshotsRequest{}))
	ids := req.GetSourceVolumeIds()
	for _, tc := range []struct {
		name string
		bad  func(*csi.CreateVolumeGroupSnapshotRequest)
		code codes.Code
	}{
		{"fewer", func(r *csi.CreateVolumeGroupSnapshotRequest) { r.SourceVolumeIds = ids[:2] }, codes.AlreadyExists},
		{"none", func(r *csi.CreateVolumeGroupSnapshotRequest) { r.SourceVolumeIds = nil }, codes.InvalidArgument},
		{"one twice", func(r *csi.CreateVolumeGroupSnapshotRequest) {
			r.Name, r.SourceVolumeIds = "x", []string{ids[0], ids[0]}
		}, codes.InvalidArgument},
		{"one missing", func(r *csi.CreateVolumeGroupSnapshotRequest) {
			r.Name, r.SourceVolumeIds = "x", []string{ids[0], ids[1], ids[2] + "-none"}
		}, codes.NotFound},
		{"one foreign", func(r *csi.CreateVolumeGroupSnapshotRequest) {
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
		t.Errorf("of groups that were refused there are %d snapshots", after-before)
	}
}

// testGroupMembers: the snapshots of a group are listed with it, and not deleted alone.
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

// testGroupOfPools: a group is in one pool, and no volume in another pool can be created from it.
func testGroupOfPools(t *testing.T, _ *Driver, kind Kind) {
	change, other := otherPool(t)
	d := kind.start(t, "20G", change)
	elsewhere := kind.in(other)
	here, there := newSized(t, d, kind, 320*mib), newSized(t, d, elsewhere, 320*mib)
	_, err := d.Control.CreateVolumeGroupSnapshot(t.Context(), groupRequest(t, here, there))
	wantCode(t, err, codes.FailedPrecondition, here.id, there.id)
	if got := d.list(t, &csi.ListSnapshotsRequest{}); len(got) > 0 {
		t.Errorf("of a group that was refused there is %v", got)
	}
	here.up(t)
	write(t, here.data(here.target), pattern(79))
	here.down(t)
	s := here.snapshot(t)
	for _, of := range []*csi.VolumeContentSource{fromSnapshot(s), fromVolume(here)} {
		c := d.restore(t, elsewhere, of, 320*mib)
		c.up(t)
		wantContent(t, c.data(c.target), pattern(79))
		c.down(t)
	}
}
