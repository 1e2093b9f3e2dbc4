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

// TestSnapshot: all calls return the same snapshot.
func TestSnapshot(t *testing.T) {
	w := newWorld(t)
	v := w.make("v")
	before := time.Now()
	one := w.cut("s", v)
	pool := strings.TrimSuffix(v, ":v")
	if one.GetSnapshotId() != pool+":s" || one.GetSourceVolumeId() != v || one.GetSizeBytes() != 32*mib || !one.GetReadyToUse() || one.GetGroupSnapshotId() != "" {
		t.Errorf("created: %v", one)
	}
	if at := one.GetCreationTime().AsTime(); at.Before(before) || at.After(time.Now()) {
		t.Errorf("creation time %v", at)
	}
	again := w.cut("s", v)
	got, err := w.Control.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: one.GetSnapshotId()})
	must(t, err)
	listed, err := w.Control.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{})
	must(t, err)
	if !proto.Equal(again, one) || !proto.Equal(got.GetSnapshot(), one) || len(listed.GetEntries()) != 1 || !proto.Equal(listed.GetEntries()[0].GetSnapshot(), one) {
		t.Errorf("created %v\nagain %v\ngot %v\nlisted %v", one, again, got, listed)
	}
	for range 2 {
		_, err = w.Control.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: one.GetSnapshotId()})
		must(t, err)
	}
	_, err = w.Control.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: one.GetSnapshotId()})
	wantCode(t, err, codes.NotFound)
}

// TestSnapshotRefused: invalid requests for snapshots.
func TestSnapshotRefused(t *testing.T) {
	w := newWorld(t)
	v, other := w.make("v"), w.make("other")
	w.cut("taken", v)
	for name, tc := range map[string]struct {
		req  *csi.CreateSnapshotRequest
		want codes.Code
		says string
	}{
		"no name":        {&csi.CreateSnapshotRequest{SourceVolumeId: v}, codes.InvalidArgument, "name is missing"},
		"a long name":    {&csi.CreateSnapshotRequest{SourceVolumeId: v, Name: strings.Repeat("n", 129)}, codes.InvalidArgument, "129 bytes"},
		"no source":      {&csi.CreateSnapshotRequest{Name: "s"}, codes.InvalidArgument, "source_volume_id"},
		"foreign":        {&csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: "v"}, codes.NotFound, "was not created by this driver"},
		"not there":      {&csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: v + "v"}, codes.NotFound, ""},
		"unknown pool":   {&csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: "loop:p.01234567:v"}, codes.Unavailable, ""},
		"a parameter":    {&csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: v, Parameters: map[string]string{"colour": "red"}}, codes.InvalidArgument, `"colour" is unknown`},
		"a value":        {&csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: v, Parameters: map[string]string{"consistency": "some"}}, codes.InvalidArgument, "frozen"},
		"of another":     {&csi.CreateSnapshotRequest{Name: "taken", SourceVolumeId: other}, codes.AlreadyExists, ""},
		"elsewhere":      {&csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: v, AccessibilityRequirements: &csi.TopologyRequirement{Requisite: []*csi.Topology{translate.Topology("other")}}}, codes.ResourceExhausted, "requisite"},
		"directory":      {&csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: w.make("dir", func(r *csi.CreateVolumeRequest) { r.Parameters = map[string]string{"backend": "local"}; directory(r) }), Parameters: map[string]string{"consistency": "x"}}, codes.InvalidArgument, ""},
		"preferred only": {&csi.CreateSnapshotRequest{Name: "s2", SourceVolumeId: v, AccessibilityRequirements: &csi.TopologyRequirement{Preferred: []*csi.Topology{translate.Topology("other")}}}, codes.OK, ""},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := w.Control.CreateSnapshot(t.Context(), tc.req)
			wantCode(t, err, tc.want, tc.says)
		})
	}
	for id, want := range map[string]codes.Code{"": codes.InvalidArgument, "s": codes.OK, v + ".000": codes.OK, "loop:p.01234567:s": codes.Unavailable, "disk:p.01234567:s": codes.Unavailable} {
		_, err := w.Control.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: id})
		wantCode(t, err, want)
	}
	for id, want := range map[string]codes.Code{"": codes.InvalidArgument, "s": codes.NotFound, v: codes.NotFound, v + ".000": codes.NotFound, "loop:p.01234567:s": codes.Unavailable} {
		_, err := w.Control.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: id})
		wantCode(t, err, want)
	}
}

// directory changes a request to one for a directory.
func directory(req *csi.CreateVolumeRequest) {
	req.VolumeCapabilities = []*csi.VolumeCapability{backendtest.Kind{FSType: "ext4"}.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)}
	req.VolumeCapabilities[0].GetMount().FsType = ""
}

// TestListSnapshots: lists of all snapshots, of one volume and of one ID, with pages of all sizes.
func TestListSnapshots(t *testing.T) {
	w := newWorld(t)
	inA, other, inB := w.make("v", in("a")), w.make("w", in("a")), w.make("x", in("b"))
	all := []string{w.cut("a-1", inA).GetSnapshotId()}
	group, err := w.group("a-2", inA, other)
	must(t, err)
	for _, s := range group.GetSnapshots() {
		all = append(all, s.GetSnapshotId())
	}
	all = append(all, w.cut("a-3", other).GetSnapshotId(), w.cut("a-4", inA).GetSnapshotId(), w.cut("0", inB).GetSnapshotId(), w.cut("1", inB).GetSnapshotId())
	ofA := []string{all[0], all[1], all[4]}
	for size := range int32(len(all) + 2) {
		for name, tc := range map[string]struct {
			req  *csi.ListSnapshotsRequest
			want []string
		}{
			"all":               {&csi.ListSnapshotsRequest{}, all},
			"of one volume":     {&csi.ListSnapshotsRequest{SourceVolumeId: inA}, ofA},
			"in the other pool": {&csi.ListSnapshotsRequest{SourceVolumeId: inB}, all[5:]},
			"one":               {&csi.ListSnapshotsRequest{SnapshotId: all[3]}, all[3:4]},
			"one of a group":    {&csi.ListSnapshotsRequest{SnapshotId: all[2]}, all[2:3]},
			"one of its volume": {&csi.ListSnapshotsRequest{SnapshotId: all[0], SourceVolumeId: inA}, all[:1]},
			"one of another":    {&csi.ListSnapshotsRequest{SnapshotId: all[0], SourceVolumeId: inB}, nil},
			"foreign":           {&csi.ListSnapshotsRequest{SnapshotId: "s"}, nil},
			"of a foreign one":  {&csi.ListSnapshotsRequest{SourceVolumeId: "v"}, nil},
			"not there":         {&csi.ListSnapshotsRequest{SnapshotId: all[0] + "x"}, nil},
			"of none":           {&csi.ListSnapshotsRequest{SourceVolumeId: inA + "x"}, nil},
		} {
			tc.req.MaxEntries = size
			if got, err := w.list(tc.req); err != nil || !slices.Equal(got, tc.want) {
				t.Errorf("%s by pages of %d: %q, %v; want %q", name, size, got, err, tc.want)
			}
		}
	}
	_, err = w.list(&csi.ListSnapshotsRequest{SourceVolumeId: "loop:p.01234567:v"}) // another driver may have the pool
	wantCode(t, err, codes.Unavailable)
	_, err = w.list(&csi.ListSnapshotsRequest{MaxEntries: -1})
	wantCode(t, err, codes.InvalidArgument, "max_entries")
	for _, bad := range []string{"nonsense", "loop:", "loop:a.00000000:s", "disk:x:y", all[0] + "\x00", "pool " + all[5] + "x:", "pool loop:a.00000000:"} {
		for _, req := range []*csi.ListSnapshotsRequest{{}, {SourceVolumeId: inA}, {SnapshotId: all[0]}} {
			req.StartingToken = bad
			_, err := w.list(req)
			wantCode(t, err, codes.Aborted, "starting_token")
		}
	}
	_, err = w.list(&csi.ListSnapshotsRequest{SourceVolumeId: inA, StartingToken: "pool " + all[5]}) // of the other pool
	wantCode(t, err, codes.Aborted, "starting_token")
	// Snapshots outlive their volume.
	_, err = w.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: inA})
	must(t, err)
	if got, err := w.list(&csi.ListSnapshotsRequest{SourceVolumeId: inA}); err != nil || !slices.Equal(got, ofA) {
		t.Errorf("of a deleted volume: %q, %v", got, err)
	}
}

// TestDamagedSnapshot: an unreadable snapshot is listed as not ready.
func TestDamagedSnapshot(t *testing.T) {
	w := newWorld(t)
	v := w.make("v")
	one := w.cut("s", v)
	_, err := w.group("g", v)
	must(t, err)
	for _, set := range []string{"s", "g.group"} {
		must(t, os.WriteFile(filepath.Join(w.dir, "a", "snapshots", set, "snapshot.json"), []byte("{"), 0o600))
	}
	resp, err := w.Control.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{})
	must(t, err)
	if len(resp.GetEntries()) != 2 {
		t.Fatalf("listed: %v", resp)
	}
	for _, e := range resp.GetEntries() {
		if e.GetSnapshot().GetReadyToUse() || e.GetSnapshot().GetSnapshotId() == "" {
			t.Errorf("listed: %v", e)
		}
	}
	if got, err := w.list(&csi.ListSnapshotsRequest{MaxEntries: 1}); err != nil || len(got) != 2 {
		t.Errorf("by pages: %q, %v", got, err)
	}
	_, err = w.Control.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: one.GetSnapshotId()})
	wantCode(t, err, codes.DataLoss)
	_, err = w.Control.CreateVolume(t.Context(), request("copy", ofSnapshot(one.GetSnapshotId())))
	wantCode(t, err, codes.DataLoss)
	_, err = w.Control.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: strings.TrimSuffix(v, "v") + "g.000"})
	wantCode(t, err, codes.InvalidArgument, "g.group")
}

// TestContentSource: volumes from snapshots and from volumes, and invalid sources.
func TestContentSource(t *testing.T) {
	w := newWorld(t)
	v := w.make("v")
	s := w.cut("s", v).GetSnapshotId()
	for i, source := range []func(*csi.CreateVolumeRequest){ofSnapshot(s), ofVolume(v)} {
		req := request(fmt.Sprintf("copy-%d", i), source)
		// Another node is preferred and allowed: the volume is created where its source is.
		req.AccessibilityRequirements = &csi.TopologyRequirement{
			Preferred: []*csi.Topology{translate.Topology("other")}, Requisite: []*csi.Topology{translate.Topology("other"), translate.Topology(backendtest.Node)},
		}
		made, err := w.Control.CreateVolume(t.Context(), req)
		must(t, err)
		if !proto.Equal(made.GetVolume().GetContentSource(), req.GetVolumeContentSource()) {
			t.Errorf("requested %v, created %v", req.GetVolumeContentSource(), made)
		}
		got, err := w.Control.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: made.GetVolume().GetVolumeId()})
		if err != nil || !proto.Equal(got.GetVolume(), made.GetVolume()) {
			t.Errorf("created %v, got %v, %v", made, got, err)
		}
		valid, err := w.Control.ValidateVolumeCapabilities(t.Context(), &csi.ValidateVolumeCapabilitiesRequest{
			VolumeId: made.GetVolume().GetVolumeId(), VolumeCapabilities: req.GetVolumeCapabilities(), Parameters: map[string]string{"backend": "loop"},
		})
		if err != nil || valid.GetConfirmed() == nil {
			t.Errorf("%v, %v", valid, err)
		}
		again, err := w.Control.CreateVolume(t.Context(), req)
		if err != nil || !proto.Equal(again, made) {
			t.Errorf("created %v, again %v, %v", made, again, err)
		}
		req.VolumeContentSource = nil
		req.AccessibilityRequirements = nil
		_, err = w.Control.CreateVolume(t.Context(), req)
		wantCode(t, err, codes.AlreadyExists, "content")
	}
	for name, tc := range map[string]struct {
		change []func(*csi.CreateVolumeRequest)
		want   codes.Code
		says   string
	}{
		"neither":              {[]func(*csi.CreateVolumeRequest){from(&csi.VolumeContentSource{})}, codes.InvalidArgument, "neither"},
		"no snapshot's ID":     {[]func(*csi.CreateVolumeRequest){ofSnapshot("")}, codes.InvalidArgument, "snapshot_id is missing"},
		"no volume's ID":       {[]func(*csi.CreateVolumeRequest){ofVolume("")}, codes.InvalidArgument, "volume_id is missing"},
		"foreign snapshot":     {[]func(*csi.CreateVolumeRequest){ofSnapshot("s")}, codes.NotFound, "volume_content_source"},
		"foreign volume":       {[]func(*csi.CreateVolumeRequest){ofVolume("v")}, codes.NotFound, "volume_content_source"},
		"a snapshot as volume": {[]func(*csi.CreateVolumeRequest){ofVolume(v + ".000")}, codes.NotFound, ""},
		"no such snapshot":     {[]func(*csi.CreateVolumeRequest){ofSnapshot(v)}, codes.NotFound, ""},
		"no such volume":       {[]func(*csi.CreateVolumeRequest){ofVolume(s)}, codes.NotFound, ""},
		"another backend":      {[]func(*csi.CreateVolumeRequest){ofVolume(v), directory, func(r *csi.CreateVolumeRequest) { r.Parameters = map[string]string{"backend": "local"} }}, codes.InvalidArgument, "loop"},
		"elsewhere": {[]func(*csi.CreateVolumeRequest){ofVolume(v), func(r *csi.CreateVolumeRequest) {
			r.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: []*csi.Topology{translate.Topology("other")}}
		}}, codes.ResourceExhausted, "requisite"},
		"too small": {[]func(*csi.CreateVolumeRequest){ofVolume(v), func(r *csi.CreateVolumeRequest) {
			r.CapacityRange = &csi.CapacityRange{RequiredBytes: 16 * mib, LimitBytes: 16 * mib}
		}}, codes.OutOfRange, ""},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := w.Control.CreateVolume(t.Context(), request("none", tc.change...))
			wantCode(t, err, tc.want, tc.says)
		})
	}
}

func TestGroup(t *testing.T) {
	w := newWorld(t)
	v, other := w.make("v"), w.make("w")
	group, err := w.group("g", v, other)
	must(t, err)
	id := strings.TrimSuffix(v, "v") + "g.group"
	if group.GetGroupSnapshotId() != id || !group.GetReadyToUse() || len(group.GetSnapshots()) != 2 {
		t.Fatalf("created: %v", group)
	}
	var ids []string
	for i, one := range group.GetSnapshots() {
		ids = append(ids, one.GetSnapshotId())
		if one.GetGroupSnapshotId() != id || one.GetSourceVolumeId() != []string{v, other}[i] || !one.GetReadyToUse() || !proto.Equal(one.GetCreationTime(), group.GetCreationTime()) {
			t.Errorf("member %v", one)
		}
		got, err := w.Control.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: one.GetSnapshotId()})
		if err != nil || !proto.Equal(got.GetSnapshot(), one) {
			t.Errorf("got %v, %v; in the group %v", got, err, one)
		}
		_, err = w.Control.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: one.GetSnapshotId()})
		wantCode(t, err, codes.InvalidArgument, id)
		w.make("copy-"+one.GetSnapshotId()[len(id)-len(".group"):], ofSnapshot(one.GetSnapshotId()))
	}
	if again, err := w.group("g", v, other); err != nil || !proto.Equal(again, group) {
		t.Errorf("again: %v, %v", again, err)
	}
	_, err = w.group("g", v)
	wantCode(t, err, codes.AlreadyExists)

	for _, named := range [][]string{nil, ids, {ids[1], ids[0]}} {
		got, err := w.Control.GetVolumeGroupSnapshot(t.Context(), &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: id, SnapshotIds: named})
		if err != nil || !proto.Equal(got.GetGroupSnapshot(), group) {
			t.Errorf("with %q: %v, %v", named, got, err)
		}
	}
	for _, named := range [][]string{ids[:1], {ids[0], ids[0]}, {ids[0], v}, append(slices.Clone(ids), v)} {
		_, err := w.Control.GetVolumeGroupSnapshot(t.Context(), &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: id, SnapshotIds: named})
		wantCode(t, err, codes.InvalidArgument, "snapshot_ids")
		_, err = w.Control.DeleteVolumeGroupSnapshot(t.Context(), &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: id, SnapshotIds: named})
		wantCode(t, err, codes.InvalidArgument, "snapshot_ids")
	}
	for range 2 {
		_, err = w.Control.DeleteVolumeGroupSnapshot(t.Context(), &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: id, SnapshotIds: ids})
		must(t, err)
		_, err = w.Control.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: ids[0]})
		must(t, err)
	}
	_, err = w.Control.GetVolumeGroupSnapshot(t.Context(), &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: id})
	wantCode(t, err, codes.NotFound)
}

// TestGroupOfOne: a group of one snapshot is different from a snapshot of the same name.
func TestGroupOfOne(t *testing.T) {
	w := newWorld(t)
	v := w.make("v")
	alone := w.cut("g", v)
	group, err := w.group("g", v)
	must(t, err)
	if got, err := w.list(&csi.ListSnapshotsRequest{SourceVolumeId: v}); err != nil || !slices.Equal(got, []string{alone.GetSnapshotId(), group.GetSnapshots()[0].GetSnapshotId()}) {
		t.Errorf("got %q, %v", got, err)
	}
	_, err = w.Control.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: alone.GetSnapshotId()})
	must(t, err)
	_, err = w.Control.GetVolumeGroupSnapshot(t.Context(), &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: group.GetGroupSnapshotId()})
	must(t, err)
}

func TestGroupRefused(t *testing.T) {
	w := newWorld(t)
	v, elsewhere := w.make("v", in("a")), w.make("w", in("b"))
	dir := w.make("d", directory, func(r *csi.CreateVolumeRequest) { r.Parameters = map[string]string{"backend": "local", "pool": "a"} })
	var many []string
	for i := range volume.MaxGroup + 1 {
		many = append(many, fmt.Sprintf("%s-%d", v, i))
	}
	for name, tc := range map[string]struct {
		of   []string
		want codes.Code
		says []string
	}{
		"none":         {nil, codes.InvalidArgument, []string{"source_volume_ids"}},
		"twice":        {[]string{v, v}, codes.InvalidArgument, []string{v, "twice"}},
		"too many":     {many, codes.InvalidArgument, []string{"101", "100"}},
		"two pools":    {[]string{v, elsewhere}, codes.FailedPrecondition, []string{v, elsewhere}},
		"two backends": {[]string{v, dir}, codes.FailedPrecondition, []string{v, dir}},
		"foreign":      {[]string{v, "w"}, codes.NotFound, nil},
		"not there":    {[]string{v, v + "x"}, codes.NotFound, nil},
		"unknown pool": {[]string{"loop:p.01234567:v"}, codes.Unavailable, nil},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := w.group("g", tc.of...)
			wantCode(t, err, tc.want, tc.says...)
		})
	}
	_, err := w.group("", v)
	wantCode(t, err, codes.InvalidArgument, "name")
	for id, want := range map[string]codes.Code{"": codes.InvalidArgument, "g": codes.NotFound, v: codes.NotFound, v + ".group": codes.NotFound, "loop:p.01234567:g.group": codes.Unavailable} {
		_, err := w.Control.GetVolumeGroupSnapshot(t.Context(), &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: id})
		wantCode(t, err, want)
		_, err = w.Control.DeleteVolumeGroupSnapshot(t.Context(), &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: id})
		if want == codes.NotFound {
			want = codes.OK
		}
		wantCode(t, err, want)
	}
	if left, err := w.list(&csi.ListSnapshotsRequest{}); err != nil || len(left) > 0 {
		t.Errorf("got %q, %v", left, err)
	}
}
