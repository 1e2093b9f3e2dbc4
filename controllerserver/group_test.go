package controllerserver_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-csi/trivet/volume"
)

func TestGroup(t *testing.T) {
	w := newWorld(t)
	v, other := w.make("v"), w.make("w")
	group, err := w.group("g", v, other)
	must(t, err)
	id := strings.TrimSuffix(v, "v") + "g.group"
	if group.GetGroupSnapshotId() != id || !group.GetReadyToUse() || len(group.GetSnapshots()) != 2 {
		t.Fatalf("made is %v", group)
	}
	var ids []string
	for i, one := range group.GetSnapshots() {
		ids = append(ids, one.GetSnapshotId())
		if one.GetGroupSnapshotId() != id || one.GetSourceVolumeId() != []string{v, other}[i] || !one.GetReadyToUse() || !proto.Equal(one.GetCreationTime(), group.GetCreationTime()) {
			t.Errorf("in the group is %v", one)
		}
		got, err := w.Control.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: one.GetSnapshotId()})
		if err != nil || !proto.Equal(got.GetSnapshot(), one) {
			t.Errorf("alone it is %v, %v; in the group %v", got, err, one)
		}
		_, err = w.Control.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: one.GetSnapshotId()})
		wantCode(t, err, codes.InvalidArgument, id)
		w.make("copy-"+one.GetSnapshotId()[len(id)-len(".group"):], ofSnapshot(one.GetSnapshotId()))
	}
	if again, err := w.group("g", v, other); err != nil || !proto.Equal(again, group) {
		t.Errorf("again it is %v, %v", again, err)
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

// TestGroupOfOne is a group, and beside a snapshot of the same name.
func TestGroupOfOne(t *testing.T) {
	w := newWorld(t)
	v := w.make("v")
	alone := w.cut("g", v)
	group, err := w.group("g", v)
	must(t, err)
	if got, err := w.list(&csi.ListSnapshotsRequest{SourceVolumeId: v}); err != nil || !slices.Equal(got, []string{alone.GetSnapshotId(), group.GetSnapshots()[0].GetSnapshotId()}) {
		t.Errorf("there are %q, %v", got, err)
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
		t.Errorf("there are %q, %v", left, err)
	}
}
