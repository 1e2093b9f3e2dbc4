package controllerserver_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/volume"
)

// TestSnapshot: all calls describe a snapshot in the same way.
func TestSnapshot(t *testing.T) {
	d := newTestDriver(t)
	v := d.createVolume("v")
	before := time.Now()
	one := d.createSnapshot("s", v)
	pool := strings.TrimSuffix(v, ":v")
	if one.GetSnapshotId() != pool+":s" || one.GetSourceVolumeId() != v || one.GetSizeBytes() != 32*mib || !one.GetReadyToUse() || one.GetGroupSnapshotId() != "" {
		t.Errorf("created %v, want a snapshot %s:s of volume %s", one, pool, v)
	}
	if at := one.GetCreationTime().AsTime(); at.Before(before) || at.After(time.Now()) {
		t.Errorf("got creation time %v, want between %v and now", at, before)
	}
	again := d.createSnapshot("s", v)
	got, err := d.Control.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: one.GetSnapshotId()})
	must(t, err)
	listed, err := d.Control.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{})
	must(t, err)
	if !proto.Equal(again, one) || !proto.Equal(got.GetSnapshot(), one) || len(listed.GetEntries()) != 1 || !proto.Equal(listed.GetEntries()[0].GetSnapshot(), one) {
		t.Errorf("got different descriptions of one snapshot, want equal ones:\nCreateSnapshot %v\nsecond CreateSnapshot %v\nGetSnapshot %v\nListSnapshots %v", one, again, got, listed)
	}
	for range 2 {
		_, err = d.Control.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: one.GetSnapshotId()})
		must(t, err)
	}
	_, err = d.Control.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: one.GetSnapshotId()})
	wantCode(t, err, codes.NotFound)
}

// TestSnapshotRefused: invalid requests to create, delete and get snapshots are refused.
func TestSnapshotRefused(t *testing.T) {
	d := newTestDriver(t)
	v, other := d.createVolume("v"), d.createVolume("other")
	d.createSnapshot("taken", v)
	for name, tc := range map[string]struct {
		req  *csi.CreateSnapshotRequest
		want codes.Code
		says string
	}{
		"no name":                               {&csi.CreateSnapshotRequest{SourceVolumeId: v}, codes.InvalidArgument, "name is missing"},
		"a long name":                           {&csi.CreateSnapshotRequest{SourceVolumeId: v, Name: strings.Repeat("n", 129)}, codes.InvalidArgument, "129 bytes"},
		"no source":                             {&csi.CreateSnapshotRequest{Name: "s"}, codes.InvalidArgument, "source_volume_id"},
		"foreign volume":                        {&csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: "v"}, codes.NotFound, "was not created by this driver"},
		"volume does not exist":                 {&csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: v + "v"}, codes.NotFound, ""},
		"unknown pool":                          {&csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: "loop:p.01234567:v"}, codes.Unavailable, ""},
		"unknown parameter":                     {&csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: v, Parameters: map[string]string{"colour": "red"}}, codes.InvalidArgument, `"colour" is unknown`},
		"unknown consistency":                   {&csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: v, Parameters: map[string]string{"consistency": "some"}}, codes.InvalidArgument, "frozen"},
		"name of a snapshot of another volume":  {&csi.CreateSnapshotRequest{Name: "taken", SourceVolumeId: other}, codes.AlreadyExists, ""},
		"requisite is another node":             {&csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: v, AccessibilityRequirements: &csi.TopologyRequirement{Requisite: []*csi.Topology{translate.Topology("other")}}}, codes.ResourceExhausted, "requisite"},
		"directory with an unknown consistency": {&csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: d.createVolume("dir", func(r *csi.CreateVolumeRequest) { r.Parameters = map[string]string{"backend": "local"}; directory(r) }), Parameters: map[string]string{"consistency": "x"}}, codes.InvalidArgument, ""},
		"preferred is another node":             {&csi.CreateSnapshotRequest{Name: "s2", SourceVolumeId: v, AccessibilityRequirements: &csi.TopologyRequirement{Preferred: []*csi.Topology{translate.Topology("other")}}}, codes.OK, ""},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := d.Control.CreateSnapshot(t.Context(), tc.req)
			wantCode(t, err, tc.want, tc.says)
		})
	}
	for id, want := range map[string]codes.Code{"": codes.InvalidArgument, "s": codes.OK, v + ".000": codes.OK, "loop:p.01234567:s": codes.Unavailable, "disk:p.01234567:s": codes.Unavailable} {
		_, err := d.Control.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: id})
		wantCode(t, err, want)
	}
	for id, want := range map[string]codes.Code{"": codes.InvalidArgument, "s": codes.NotFound, v: codes.NotFound, v + ".000": codes.NotFound, "loop:p.01234567:s": codes.Unavailable} {
		_, err := d.Control.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: id})
		wantCode(t, err, want)
	}
}

// directory changes a request to one for a directory.
func directory(req *csi.CreateVolumeRequest) {
	req.VolumeCapabilities = []*csi.VolumeCapability{backendtest.Kind{FSType: "ext4"}.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)}
	req.VolumeCapabilities[0].GetMount().FsType = ""
}

// TestListSnapshots lists all snapshots, those of one volume, and one snapshot, with pages of all sizes.
func TestListSnapshots(t *testing.T) {
	d := newTestDriver(t)
	inA, other, inB := d.createVolume("v", in("a")), d.createVolume("w", in("a")), d.createVolume("x", in("b"))
	all := []string{d.createSnapshot("a-1", inA).GetSnapshotId()}
	group, err := d.createGroup("a-2", inA, other)
	must(t, err)
	for _, s := range group.GetSnapshots() {
		all = append(all, s.GetSnapshotId())
	}
	all = append(all, d.createSnapshot("a-3", other).GetSnapshotId(), d.createSnapshot("a-4", inA).GetSnapshotId(), d.createSnapshot("0", inB).GetSnapshotId(), d.createSnapshot("1", inB).GetSnapshotId())
	ofA := []string{all[0], all[1], all[4]}
	for size := range int32(len(all) + 2) {
		for name, tc := range map[string]struct {
			req  *csi.ListSnapshotsRequest
			want []string
		}{
			"all":                              {&csi.ListSnapshotsRequest{}, all},
			"of one volume":                    {&csi.ListSnapshotsRequest{SourceVolumeId: inA}, ofA},
			"in the other pool":                {&csi.ListSnapshotsRequest{SourceVolumeId: inB}, all[5:]},
			"one snapshot":                     {&csi.ListSnapshotsRequest{SnapshotId: all[3]}, all[3:4]},
			"member of a group":                {&csi.ListSnapshotsRequest{SnapshotId: all[2]}, all[2:3]},
			"one snapshot of its volume":       {&csi.ListSnapshotsRequest{SnapshotId: all[0], SourceVolumeId: inA}, all[:1]},
			"one snapshot, but another volume": {&csi.ListSnapshotsRequest{SnapshotId: all[0], SourceVolumeId: inB}, nil},
			"foreign snapshot":                 {&csi.ListSnapshotsRequest{SnapshotId: "s"}, nil},
			"of a foreign volume":              {&csi.ListSnapshotsRequest{SourceVolumeId: "v"}, nil},
			"snapshot does not exist":          {&csi.ListSnapshotsRequest{SnapshotId: all[0] + "x"}, nil},
			"of a volume that does not exist":  {&csi.ListSnapshotsRequest{SourceVolumeId: inA + "x"}, nil},
		} {
			tc.req.MaxEntries = size
			if got, err := d.listSnapshots(tc.req); err != nil || !slices.Equal(got, tc.want) {
				t.Errorf("%s, in pages of %d: got %q, %v; want %q", name, size, got, err, tc.want)
			}
		}
	}
	_, err = d.listSnapshots(&csi.ListSnapshotsRequest{SourceVolumeId: "loop:p.01234567:v"}) // another driver may have the pool
	wantCode(t, err, codes.Unavailable)
	_, err = d.listSnapshots(&csi.ListSnapshotsRequest{MaxEntries: -1})
	wantCode(t, err, codes.InvalidArgument, "max_entries")
	for _, bad := range []string{"nonsense", "loop:", "loop:a.00000000:s", "disk:x:y", all[0] + "\x00", "pool " + all[5] + "x:", "pool loop:a.00000000:"} {
		for _, req := range []*csi.ListSnapshotsRequest{{}, {SourceVolumeId: inA}, {SnapshotId: all[0]}} {
			req.StartingToken = bad
			_, err := d.listSnapshots(req)
			wantCode(t, err, codes.Aborted, "starting_token")
		}
	}
	_, err = d.listSnapshots(&csi.ListSnapshotsRequest{SourceVolumeId: inA, StartingToken: "pool " + all[5]}) // a token of the other pool
	wantCode(t, err, codes.Aborted, "starting_token")
	// Snapshots outlive their volume.
	_, err = d.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: inA})
	must(t, err)
	if got, err := d.listSnapshots(&csi.ListSnapshotsRequest{SourceVolumeId: inA}); err != nil || !slices.Equal(got, ofA) {
		t.Errorf("snapshots of a deleted volume: got %q, %v; want %q", got, err, ofA)
	}
}

// TestDamagedSnapshot: an unreadable snapshot is listed as not ready.
func TestDamagedSnapshot(t *testing.T) {
	d := newTestDriver(t)
	v := d.createVolume("v")
	one := d.createSnapshot("s", v)
	_, err := d.createGroup("g", v)
	must(t, err)
	for _, set := range []string{"s", "g.group"} {
		must(t, os.WriteFile(filepath.Join(d.dir, "a", "snapshots", set, "snapshot.json"), []byte("{"), 0o600))
	}
	resp, err := d.Control.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{})
	must(t, err)
	if len(resp.GetEntries()) != 2 {
		t.Fatalf("got list %v, want two entries", resp)
	}
	for _, e := range resp.GetEntries() {
		if e.GetSnapshot().GetReadyToUse() || e.GetSnapshot().GetSnapshotId() == "" {
			t.Errorf("got entry %v, want an ID that is not ready", e)
		}
	}
	if got, err := d.listSnapshots(&csi.ListSnapshotsRequest{MaxEntries: 1}); err != nil || len(got) != 2 {
		t.Errorf("in pages of 1: got %q, %v; want two entries", got, err)
	}
	_, err = d.Control.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: one.GetSnapshotId()})
	wantCode(t, err, codes.DataLoss)
	_, err = d.Control.CreateVolume(t.Context(), request("copy", ofSnapshot(one.GetSnapshotId())))
	wantCode(t, err, codes.DataLoss)
	_, err = d.Control.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: strings.TrimSuffix(v, "v") + "g.000"})
	wantCode(t, err, codes.InvalidArgument, "g.group")
}

// TestContentSource creates volumes from a snapshot and from a volume. Invalid sources are refused.
func TestContentSource(t *testing.T) {
	d := newTestDriver(t)
	v := d.createVolume("v")
	s := d.createSnapshot("s", v).GetSnapshotId()
	for i, source := range []func(*csi.CreateVolumeRequest){ofSnapshot(s), ofVolume(v)} {
		req := request(fmt.Sprintf("copy-%d", i), source)
		// Another node is preferred, but the volume is created on the node of its source.
		req.AccessibilityRequirements = &csi.TopologyRequirement{
			Preferred: []*csi.Topology{translate.Topology("other")}, Requisite: []*csi.Topology{translate.Topology("other"), translate.Topology(backendtest.Node)},
		}
		made, err := d.Control.CreateVolume(t.Context(), req)
		must(t, err)
		if !proto.Equal(made.GetVolume().GetContentSource(), req.GetVolumeContentSource()) {
			t.Errorf("created %v, want content source %v", made, req.GetVolumeContentSource())
		}
		got, err := d.Control.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: made.GetVolume().GetVolumeId()})
		if err != nil || !proto.Equal(got.GetVolume(), made.GetVolume()) {
			t.Errorf("ControllerGetVolume: got %v, %v; want %v", got, err, made)
		}
		valid, err := d.Control.ValidateVolumeCapabilities(t.Context(), &csi.ValidateVolumeCapabilitiesRequest{
			VolumeId: made.GetVolume().GetVolumeId(), VolumeCapabilities: req.GetVolumeCapabilities(), Parameters: map[string]string{"backend": "loop"},
		})
		if err != nil || valid.GetConfirmed() == nil {
			t.Errorf("ValidateVolumeCapabilities: got %v, %v; want confirmed", valid, err)
		}
		again, err := d.Control.CreateVolume(t.Context(), req)
		if err != nil || !proto.Equal(again, made) {
			t.Errorf("second CreateVolume: got %v, %v; want %v", again, err, made)
		}
		req.VolumeContentSource = nil
		req.AccessibilityRequirements = nil
		_, err = d.Control.CreateVolume(t.Context(), req)
		wantCode(t, err, codes.AlreadyExists, "content")
	}
	for name, tc := range map[string]struct {
		change []func(*csi.CreateVolumeRequest)
		want   codes.Code
		says   string
	}{
		"no type":                      {[]func(*csi.CreateVolumeRequest){from(&csi.VolumeContentSource{})}, codes.InvalidArgument, "neither"},
		"no snapshot's ID":             {[]func(*csi.CreateVolumeRequest){ofSnapshot("")}, codes.InvalidArgument, "snapshot_id is missing"},
		"no volume's ID":               {[]func(*csi.CreateVolumeRequest){ofVolume("")}, codes.InvalidArgument, "volume_id is missing"},
		"foreign snapshot":             {[]func(*csi.CreateVolumeRequest){ofSnapshot("s")}, codes.NotFound, "volume_content_source"},
		"foreign volume":               {[]func(*csi.CreateVolumeRequest){ofVolume("v")}, codes.NotFound, "volume_content_source"},
		"ID of a snapshot as a volume": {[]func(*csi.CreateVolumeRequest){ofVolume(v + ".000")}, codes.NotFound, ""},
		"snapshot does not exist":      {[]func(*csi.CreateVolumeRequest){ofSnapshot(v)}, codes.NotFound, ""},
		"volume does not exist":        {[]func(*csi.CreateVolumeRequest){ofVolume(s)}, codes.NotFound, ""},
		"another backend":              {[]func(*csi.CreateVolumeRequest){ofVolume(v), directory, func(r *csi.CreateVolumeRequest) { r.Parameters = map[string]string{"backend": "local"} }}, codes.InvalidArgument, "loop"},
		"requisite is another node": {[]func(*csi.CreateVolumeRequest){ofVolume(v), func(r *csi.CreateVolumeRequest) {
			r.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: []*csi.Topology{translate.Topology("other")}}
		}}, codes.ResourceExhausted, "requisite"},
		"too small": {[]func(*csi.CreateVolumeRequest){ofVolume(v), func(r *csi.CreateVolumeRequest) {
			r.CapacityRange = &csi.CapacityRange{RequiredBytes: 16 * mib, LimitBytes: 16 * mib}
		}}, codes.OutOfRange, ""},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := d.Control.CreateVolume(t.Context(), request("none", tc.change...))
			wantCode(t, err, tc.want, tc.says)
		})
	}
}

// TestGroup: all calls describe a group and its members in the same way. A call that names other snapshots than the
// members is refused.
func TestGroup(t *testing.T) {
	d := newTestDriver(t)
	v, other := d.createVolume("v"), d.createVolume("w")
	group, err := d.createGroup("g", v, other)
	must(t, err)
	id := strings.TrimSuffix(v, "v") + "g.group"
	if group.GetGroupSnapshotId() != id || !group.GetReadyToUse() || len(group.GetSnapshots()) != 2 {
		t.Fatalf("created %v, want a group %s of two snapshots", group, id)
	}
	var ids []string
	for i, one := range group.GetSnapshots() {
		ids = append(ids, one.GetSnapshotId())
		if one.GetGroupSnapshotId() != id || one.GetSourceVolumeId() != []string{v, other}[i] || !one.GetReadyToUse() || !proto.Equal(one.GetCreationTime(), group.GetCreationTime()) {
			t.Errorf("member %d: got %v, want a snapshot of %s in group %s", i, one, []string{v, other}[i], id)
		}
		got, err := d.Control.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: one.GetSnapshotId()})
		if err != nil || !proto.Equal(got.GetSnapshot(), one) {
			t.Errorf("GetSnapshot: got %v, %v; want %v", got, err, one)
		}
		_, err = d.Control.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: one.GetSnapshotId()})
		wantCode(t, err, codes.InvalidArgument, id)
		d.createVolume(fmt.Sprintf("copy-%d", i), ofSnapshot(one.GetSnapshotId()))
	}
	if again, err := d.createGroup("g", v, other); err != nil || !proto.Equal(again, group) {
		t.Errorf("second create: got %v, %v; want %v", again, err, group)
	}
	_, err = d.createGroup("g", v)
	wantCode(t, err, codes.AlreadyExists)

	for _, named := range [][]string{nil, ids, {ids[1], ids[0]}} {
		got, err := d.Control.GetVolumeGroupSnapshot(t.Context(), &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: id, SnapshotIds: named})
		if err != nil || !proto.Equal(got.GetGroupSnapshot(), group) {
			t.Errorf("GetVolumeGroupSnapshot with %q: got %v, %v; want %v", named, got, err, group)
		}
	}
	for _, named := range [][]string{ids[:1], {ids[0], ids[0]}, {ids[0], v}, append(slices.Clone(ids), v)} {
		_, err := d.Control.GetVolumeGroupSnapshot(t.Context(), &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: id, SnapshotIds: named})
		wantCode(t, err, codes.InvalidArgument, "snapshot_ids")
		_, err = d.Control.DeleteVolumeGroupSnapshot(t.Context(), &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: id, SnapshotIds: named})
		wantCode(t, err, codes.InvalidArgument, "snapshot_ids")
	}
	for range 2 {
		_, err = d.Control.DeleteVolumeGroupSnapshot(t.Context(), &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: id, SnapshotIds: ids})
		must(t, err)
		_, err = d.Control.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: ids[0]})
		must(t, err)
	}
	_, err = d.Control.GetVolumeGroupSnapshot(t.Context(), &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: id})
	wantCode(t, err, codes.NotFound)
}

// TestGroupOfOne: a group of one snapshot is different from a snapshot of the same name.
func TestGroupOfOne(t *testing.T) {
	d := newTestDriver(t)
	v := d.createVolume("v")
	alone := d.createSnapshot("g", v)
	group, err := d.createGroup("g", v)
	must(t, err)
	if got, err := d.listSnapshots(&csi.ListSnapshotsRequest{SourceVolumeId: v}); err != nil || !slices.Equal(got, []string{alone.GetSnapshotId(), group.GetSnapshots()[0].GetSnapshotId()}) {
		t.Errorf("got list %q, %v; want the snapshot and the member of the group", got, err)
	}
	_, err = d.Control.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: alone.GetSnapshotId()})
	must(t, err)
	_, err = d.Control.GetVolumeGroupSnapshot(t.Context(), &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: group.GetGroupSnapshotId()})
	must(t, err)
}

// TestGroupRefused: invalid requests to create, get and delete groups are refused, and create no snapshot.
func TestGroupRefused(t *testing.T) {
	d := newTestDriver(t)
	v, elsewhere := d.createVolume("v", in("a")), d.createVolume("w", in("b"))
	dir := d.createVolume("d", directory, func(r *csi.CreateVolumeRequest) { r.Parameters = map[string]string{"backend": "local", "pool": "a"} })
	var many []string
	for i := range volume.MaxGroup + 1 {
		many = append(many, fmt.Sprintf("%s-%d", v, i))
	}
	for name, tc := range map[string]struct {
		of   []string
		want codes.Code
		says []string
	}{
		"no volumes":            {nil, codes.InvalidArgument, []string{"source_volume_ids"}},
		"one volume twice":      {[]string{v, v}, codes.InvalidArgument, []string{v, "twice"}},
		"too many":              {many, codes.InvalidArgument, []string{"101", "100"}},
		"two pools":             {[]string{v, elsewhere}, codes.FailedPrecondition, []string{v, elsewhere}},
		"two backends":          {[]string{v, dir}, codes.FailedPrecondition, []string{v, dir}},
		"foreign volume":        {[]string{v, "w"}, codes.NotFound, nil},
		"volume does not exist": {[]string{v, v + "x"}, codes.NotFound, nil},
		"unknown pool":          {[]string{"loop:p.01234567:v"}, codes.Unavailable, nil},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := d.createGroup("g", tc.of...)
			wantCode(t, err, tc.want, tc.says...)
		})
	}
	_, err := d.createGroup("", v)
	wantCode(t, err, codes.InvalidArgument, "name")
	for id, want := range map[string]codes.Code{"": codes.InvalidArgument, "g": codes.NotFound, v: codes.NotFound, v + ".group": codes.NotFound, "loop:p.01234567:g.group": codes.Unavailable} {
		_, err := d.Control.GetVolumeGroupSnapshot(t.Context(), &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: id})
		wantCode(t, err, want)
		_, err = d.Control.DeleteVolumeGroupSnapshot(t.Context(), &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: id})
		if want == codes.NotFound {
			want = codes.OK
		}
		wantCode(t, err, want)
	}
	if left, err := d.listSnapshots(&csi.ListSnapshotsRequest{}); err != nil || len(left) > 0 {
		t.Errorf("got list %q, %v; want no snapshots", left, err)
	}
}
