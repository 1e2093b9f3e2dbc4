package backendtest

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/internal/retry"
)

// contents returns the paths of the volumes and snapshots in the pool, including temporary and deleted ones.
func (d *Driver) contents(t *testing.T) (paths []string) {
	t.Helper()
	for _, folder := range []string{"volumes", "snapshots", ".trivet/tmp", ".trivet/trash"} {
		paths = append(paths, d.entries(t, folder)...)
	}
	return paths
}

// wantEmpty waits until the pool contains no volumes and snapshots. It waits up to five minutes, because a server
// needs time to remove a tree of many files.
func (d *Driver) wantEmpty(t *testing.T) {
	t.Helper()
	err := retry.For(t.Context(), 5*time.Minute, func() (again bool, err error) {
		if left := d.contents(t); len(left) > 0 {
			err = fmt.Errorf("left in the pool: %q", left)
		}
		return err != nil, err
	})
	if err != nil {
		t.Errorf("%v\n%s", err, trashLog())
	}
}

// testNothingLeft: no files are left of the volumes and snapshots of the rows before.
func testNothingLeft(t *testing.T, d *Driver, _ Kind) { d.wantEmpty(t) }

// snapshotRequest returns a request for a snapshot with a new name.
func snapshotRequest(t *testing.T, id string, parameters ...string) *csi.CreateSnapshotRequest {
	t.Helper()
	r := &csi.CreateSnapshotRequest{SourceVolumeId: id, Name: newName(t), Parameters: map[string]string{}}
	for i := 0; i < len(parameters); i += 2 {
		r.Parameters[parameters[i]] = parameters[i+1]
	}
	return r
}

// snapshot creates a snapshot, which is deleted when the test ends.
func (l *testVolume) snapshot(t *testing.T, parameters ...string) *csi.Snapshot {
	t.Helper()
	s, err := l.d.snapshot(t, snapshotRequest(t, l.id, parameters...))
	must(t, err)
	if s.GetSourceVolumeId() != l.id || !s.GetReadyToUse() || s.GetSizeBytes() <= 0 || s.GetCreationTime().AsTime().IsZero() || s.GetGroupSnapshotId() != "" {
		t.Errorf("got snapshot %v, want a ready snapshot of volume %s", s, l.id)
	}
	return s
}

// snapshot calls CreateSnapshot. The snapshot is deleted when the test ends.
func (d *Driver) snapshot(t *testing.T, req *csi.CreateSnapshotRequest) (*csi.Snapshot, error) {
	t.Helper()
	resp, err := d.Control.CreateSnapshot(t.Context(), req)
	if err == nil {
		t.Cleanup(func() { d.deleteSnapshot(t, resp.GetSnapshot()) })
	}
	return resp.GetSnapshot(), err
}

// deleteSnapshot deletes a snapshot.
func (d *Driver) deleteSnapshot(t *testing.T, s *csi.Snapshot) {
	t.Helper()
	if _, err := d.Control.DeleteSnapshot(context.WithoutCancel(t.Context()), &csi.DeleteSnapshotRequest{SnapshotId: s.GetSnapshotId()}); err != nil {
		t.Errorf("deleting %s: %v", s.GetSnapshotId(), err)
	}
}

func fromSnapshot(s *csi.Snapshot) *csi.VolumeContentSource {
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
		Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: s.GetSnapshotId()},
	}}
}

func fromVolume(l *testVolume) *csi.VolumeContentSource {
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{
		Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: l.id},
	}}
}

// copyRequest returns a request for a volume of size bytes from a source. With size 0 it requests no size.
func (k Kind) copyRequest(t *testing.T, of *csi.VolumeContentSource, size int64, more ...string) *csi.CreateVolumeRequest {
	t.Helper()
	r := k.request(t, more...)
	r.VolumeContentSource = of
	if size > 0 {
		r.CapacityRange = &csi.CapacityRange{RequiredBytes: size}
	}
	return r
}

// newCopy creates a volume from a source. The volume is removed when the test ends.
func (d *Driver) newCopy(t *testing.T, kind Kind, of *csi.VolumeContentSource, size int64, more ...string) *testVolume {
	t.Helper()
	l, v := newVolumeFor(t, d, kind, kind.copyRequest(t, of, size, more...))
	if v.GetContentSource().String() != of.String() || v.GetCapacityBytes() < size {
		t.Errorf("got volume %v, want content source %v and at least %d bytes", v, of, size)
	}
	return l
}

// testSnapshotRequests: the same request returns the same snapshot, and a different request with the same name is
// refused. Deleting a snapshot that does not exist succeeds, and other calls return NOT_FOUND.
func testSnapshotRequests(t *testing.T, d *Driver, kind Kind) {
	l, other := newVolume(t, d, kind, multiWriter), newVolume(t, d, kind, multiWriter)
	req := snapshotRequest(t, l.id, "consistency", "crash")
	first, err := d.snapshot(t, req)
	must(t, err)
	d.Restart(t)
	d.awaitShared(t, kind)
	again, err := d.snapshot(t, req)
	if err != nil || again.String() != first.String() {
		t.Errorf("second CreateSnapshot: got %v, %v; want %v", again, err, first)
	}
	got, err := d.Control.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: first.GetSnapshotId()})
	if err != nil || got.GetSnapshot().String() != first.String() {
		t.Errorf("GetSnapshot: got %v, %v; want %v", got, err, first)
	}
	for _, tc := range []struct {
		name string
		bad  func(*csi.CreateSnapshotRequest)
		code codes.Code
		says string
	}{
		{"another source", func(r *csi.CreateSnapshotRequest) { r.SourceVolumeId = other.id }, codes.AlreadyExists, "exists"},
		{"no name", func(r *csi.CreateSnapshotRequest) { r.Name = "" }, codes.InvalidArgument, "name"},
		{"no source", func(r *csi.CreateSnapshotRequest) { r.SourceVolumeId = "" }, codes.InvalidArgument, "source_volume_id"},
		{"source does not exist", func(r *csi.CreateSnapshotRequest) { r.SourceVolumeId += "-none" }, codes.NotFound, "none"},
		{"foreign source ID", func(r *csi.CreateSnapshotRequest) { r.SourceVolumeId = "vol-0123456789" }, codes.NotFound, "vol-0123456789"},
		{"unknown parameter", func(r *csi.CreateSnapshotRequest) { r.Parameters = map[string]string{"color": "red"} }, codes.InvalidArgument, "color"},
		{"unknown consistency", func(r *csi.CreateSnapshotRequest) { r.Parameters = map[string]string{"consistency": "eventual"} }, codes.InvalidArgument, "eventual"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			bad := snapshotRequest(t, l.id)
			bad.Name = req.GetName()
			tc.bad(bad)
			_, err := d.Control.CreateSnapshot(t.Context(), bad)
			wantCode(t, err, tc.code, tc.says)
		})
	}
	for range 2 {
		d.deleteSnapshot(t, first)
	}
	d.deleteSnapshot(t, &csi.Snapshot{SnapshotId: "snap-0123456789"})
	_, err = d.Control.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{})
	wantCode(t, err, codes.InvalidArgument, "snapshot_id")
	for _, id := range []string{first.GetSnapshotId(), "snap-0123456789", l.id + ":x"} {
		_, err = d.Control.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: id})
		wantCode(t, err, codes.NotFound)
		_, err = d.Control.CreateVolume(t.Context(), kind.copyRequest(t, fromSnapshot(&csi.Snapshot{SnapshotId: id}), gib))
		wantCode(t, err, codes.NotFound)
	}
}

// awaitShared waits until the driver has opened a shared pool after a restart.
func (d *Driver) awaitShared(t *testing.T, kind Kind) {
	t.Helper()
	kind.target.awaitPool(t, d)
}

// testContentSources: a volume is created from a snapshot or a volume only if their properties match.
func testContentSources(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, multiWriter)
	s := l.snapshot(t)
	for name, of := range map[string]*csi.VolumeContentSource{"snapshot": fromSnapshot(s), "volume": fromVolume(l)} {
		t.Run(name, func(t *testing.T) { testContentSource(t, d, kind, of) })
	}
	missing := *l
	missing.id += "-none"
	_, err := d.Control.CreateVolume(t.Context(), kind.copyRequest(t, fromVolume(&missing), gib))
	wantCode(t, err, codes.NotFound)
	_, err = d.Control.CreateVolume(t.Context(), kind.copyRequest(t, &csi.VolumeContentSource{}, gib))
	wantCode(t, err, codes.InvalidArgument, "volume_content_source")
}

// testContentSource tests requests for volumes from one source.
func testContentSource(t *testing.T, d *Driver, kind Kind, of *csi.VolumeContentSource) {
	other := kind.otherFilesystem()
	type row struct {
		name string
		bad  func(*csi.CreateVolumeRequest)
		code codes.Code
		says string
	}
	rows := []row{
		{"smaller than the source", func(r *csi.CreateVolumeRequest) { r.CapacityRange = &csi.CapacityRange{RequiredBytes: gib / 2} }, codes.OutOfRange, "1 GiB"},
		{"limit below the size of the source", func(r *csi.CreateVolumeRequest) { r.CapacityRange = &csi.CapacityRange{LimitBytes: gib - 1} }, codes.OutOfRange, "1 GiB"},
		{"more than the pool has", func(r *csi.CreateVolumeRequest) { r.CapacityRange = &csi.CapacityRange{RequiredBytes: 1 << 50} }, codes.ResourceExhausted, "room"},
	}
	if kind.Has(Filesystem) {
		rows = append(rows,
			row{"another filesystem", func(r *csi.CreateVolumeRequest) {
				r.VolumeCapabilities = []*csi.VolumeCapability{other.Capability(multiWriter)}
			}, codes.InvalidArgument, kind.FSType},
			row{"another filesystem in the class", func(r *csi.CreateVolumeRequest) {
				r.VolumeCapabilities[0].GetMount().FsType = ""
				r.Parameters["csi.storage.k8s.io/fstype"] = other.FSType
			}, codes.InvalidArgument, kind.FSType},
		)
	}
	if kind.Has(Filesystem) && of.GetVolume() != nil {
		rows = append(rows, row{"raw device", func(r *csi.CreateVolumeRequest) {
			r.VolumeCapabilities = []*csi.VolumeCapability{Kind{}.Capability(multiWriter)}
		}, codes.InvalidArgument, "block"})
	}
	for _, tc := range rows {
		t.Run(tc.name, func(t *testing.T) {
			bad := kind.copyRequest(t, of, gib)
			tc.bad(bad)
			_, err := d.Control.CreateVolume(t.Context(), bad)
			wantCode(t, err, tc.code, tc.says)
		})
	}
	req := kind.copyRequest(t, of, 0)
	v, err := create(t, d, req)
	if err != nil || v.GetCapacityBytes() != gib {
		t.Fatalf("creating a copy without a size: got %v, %v; want 1 GiB", v, err)
	}
	again, err := d.Control.CreateVolume(t.Context(), req)
	if err != nil || again.GetVolume().String() != v.String() {
		t.Errorf("second CreateVolume: got %v, %v; want %v", again, err, v)
	}
	req.VolumeContentSource = nil
	_, err = d.Control.CreateVolume(t.Context(), req)
	wantCode(t, err, codes.AlreadyExists)
}

// testSnapshotList lists all snapshots, in pages of several sizes, and the snapshots of a source or with an ID.
func testSnapshotList(t *testing.T, d *Driver, kind Kind) {
	volumes := []*testVolume{newVolume(t, d, kind, multiWriter), newVolume(t, d, kind, multiWriter)}
	want := map[string]*csi.Snapshot{}
	ofSource := map[string]int{}
	for i := range 5 {
		s := volumes[i%2].snapshot(t)
		want[s.GetSnapshotId()] = s
		ofSource[s.GetSourceVolumeId()]++
	}
	for _, n := range []int32{0, 1, 2, 3} {
		wantListed(t, want, d.list(t, &csi.ListSnapshotsRequest{MaxEntries: n}))
	}
	for source, n := range ofSource {
		for _, entries := range []int32{0, 1, 2} {
			got := d.list(t, &csi.ListSnapshotsRequest{SourceVolumeId: source, MaxEntries: entries})
			for _, s := range got {
				if s.GetSourceVolumeId() != source {
					t.Errorf("got %v in the list of the snapshots of %s", s, source)
				}
			}
			if len(got) != n {
				t.Errorf("got %d snapshots of %s in pages of %d, want %d", len(got), source, entries, n)
			}
		}
	}
	for id, s := range want {
		wantListed(t, map[string]*csi.Snapshot{id: s}, d.list(t, &csi.ListSnapshotsRequest{SnapshotId: id}))
	}
	for _, none := range []*csi.ListSnapshotsRequest{{SnapshotId: "snap-1"}, {SourceVolumeId: "vol-1"}, {SnapshotId: volumes[0].id}} {
		if got := d.list(t, none); len(got) > 0 {
			t.Errorf("ListSnapshots(%v): got %v, want none", none, got)
		}
	}
	_, err := d.Control.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{StartingToken: "nonsense"})
	wantCode(t, err, codes.Aborted, "starting_token")
	_, err = d.Control.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{MaxEntries: -1})
	wantCode(t, err, codes.InvalidArgument, "max_entries")
}

// list returns the snapshots of all pages of a list.
func (d *Driver) list(t *testing.T, req *csi.ListSnapshotsRequest) (all []*csi.Snapshot) {
	t.Helper()
	for {
		resp, err := d.Control.ListSnapshots(t.Context(), req)
		must(t, err)
		if n := int(req.GetMaxEntries()); n > 0 && len(resp.GetEntries()) > n {
			t.Fatalf("got a page of %d entries, want at most %d", len(resp.GetEntries()), n)
		}
		for _, e := range resp.GetEntries() {
			all = append(all, e.GetSnapshot())
		}
		if req.StartingToken = resp.GetNextToken(); req.GetStartingToken() == "" {
			return all
		}
	}
}

// wantListed fails the test unless a list contains exactly the snapshots of want.
func wantListed(t *testing.T, want map[string]*csi.Snapshot, got []*csi.Snapshot) {
	t.Helper()
	for _, s := range got {
		if want[s.GetSnapshotId()].String() != s.String() {
			t.Errorf("got list entry %v, want %v", s, want[s.GetSnapshotId()])
		}
	}
	if len(got) != len(want) {
		t.Errorf("got a list of %d snapshots, want %d", len(got), len(want))
	}
}

// testParallelSnapshots creates many snapshots of a volume at the same time, then a volume from each, and deletes
// all of them.
func testParallelSnapshots(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, multiWriter)
	l.stageAndPublish(t)
	write(t, l.data(l.target), pattern(70))
	l.unpublishAndUnstage(t)
	name := newName(t)
	atOnce(t, "snapshot", func(ctx context.Context) error {
		_, err := d.Control.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{SourceVolumeId: l.id, Name: name})
		return err
	})
	requests := make([]*csi.CreateSnapshotRequest, parallelCalls)
	for i := range requests {
		requests[i] = snapshotRequest(t, l.id)
	}
	requests[0].Name = name
	made := make([]*csi.Snapshot, parallelCalls)
	inParallel(t, func(i int) error {
		resp, err := d.Control.CreateSnapshot(t.Context(), requests[i])
		made[i] = resp.GetSnapshot()
		return err
	})
	copies := make([]*csi.CreateVolumeRequest, parallelCalls)
	for i := range copies {
		copies[i] = kind.copyRequest(t, fromSnapshot(made[i]), gib)
	}
	ids := make([]string, parallelCalls)
	inParallel(t, func(i int) error {
		resp, err := d.Control.CreateVolume(t.Context(), copies[i])
		ids[i] = resp.GetVolume().GetVolumeId()
		return err
	})
	inParallel(t, func(i int) error {
		_, err := d.Control.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: made[i].GetSnapshotId()})
		return err
	})
	for _, id := range ids[parallelCalls-2:] {
		c := *l
		c.id = id
		c.stageAndPublish(t)
		wantContent(t, c.data(c.target), pattern(70))
		c.unpublishAndUnstage(t)
	}
	inParallel(t, func(i int) error {
		_, err := d.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: ids[i]})
		return err
	})
}

// parallelCalls is the number of calls of inParallel.
const parallelCalls = 16

// inParallel makes parallelCalls calls at the same time, and retries each while it is ABORTED.
func inParallel(t *testing.T, call func(i int) error) {
	t.Helper()
	var all sync.WaitGroup
	for i := range parallelCalls {
		all.Go(func() {
			if err := untilDone(t, func() error { return call(i) }); err != nil {
				t.Errorf("call %d of %d parallel calls: %v", i, parallelCalls, err)
			}
		})
	}
	all.Wait()
}

// untilDone makes a call as an orchestrator does, and retries it while it is ABORTED.
func untilDone(t *testing.T, call func() error) error {
	t.Helper()
	return retry.For(t.Context(), 5*time.Minute, func() (again bool, err error) {
		err = call()
		return status.Code(err) == codes.Aborted, err
	})
}
