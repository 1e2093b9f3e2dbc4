package grpcserver

import (
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/volume"
)

// TestChangedObject: a name and the ID of the created object give the same key. Volumes, snapshots and groups with
// the same name have different keys.
func TestChangedObject(t *testing.T) {
	const pool = "loop:p.01234567:"
	long := strings.Repeat("N", 100)
	keys := map[string]string{}
	for name, reqs := range map[string][]any{
		"volume":           {&csi.CreateVolumeRequest{Name: "x"}, &csi.DeleteVolumeRequest{VolumeId: pool + "x"}, &csi.NodeStageVolumeRequest{VolumeId: pool + "x"}},
		"snapshot":         {&csi.CreateSnapshotRequest{Name: "x", SourceVolumeId: pool + "y"}, &csi.DeleteSnapshotRequest{SnapshotId: pool + "x"}},
		"group":            {&csi.CreateVolumeGroupSnapshotRequest{Name: "x"}, &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: pool + "x.group"}},
		"long snapshot":    {&csi.CreateSnapshotRequest{Name: long}, &csi.DeleteSnapshotRequest{SnapshotId: pool + volume.NameFor(long)}},
		"long group":       {&csi.CreateVolumeGroupSnapshotRequest{Name: long}, &csi.DeleteVolumeGroupSnapshotRequest{GroupSnapshotId: pool + volume.GroupName(long)}},
		"foreign volume":   {&csi.DeleteVolumeRequest{VolumeId: "a b"}, &csi.NodeUnstageVolumeRequest{VolumeId: "a b"}},
		"foreign snapshot": {&csi.DeleteSnapshotRequest{SnapshotId: "a b"}},
	} {
		key := changedObject(reqs[0])
		for _, req := range reqs {
			if got := changedObject(req); got != key || got == "" {
				t.Errorf("%s: %T: got key %q, want %q", name, req, got, key)
			}
		}
		if other, taken := keys[key]; taken {
			t.Errorf("%s and %s both have the key %q", name, other, key)
		}
		keys[key] = name
	}
	for _, req := range []any{&csi.ListSnapshotsRequest{SnapshotId: pool + "x"}, &csi.GetSnapshotRequest{SnapshotId: pool + "x"}, &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: pool + "x.group"}, &csi.GetMetadataAllocatedRequest{SnapshotId: pool + "x"}} {
		if key := changedObject(req); key != "" {
			t.Errorf("%T: got key %q, want none, because it changes nothing", req, key)
		}
	}
}
