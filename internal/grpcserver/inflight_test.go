package grpcserver

import (
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/volume"
)

// TestMutates: a name and the ID that is made of it have one key; volumes, snapshots and groups
// of one name have different keys.
func TestMutates(t *testing.T) {
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
		key := mutates(reqs[0])
		for _, req := range reqs {
			if got := mutates(req); got != key || got == "" {
				t.Errorf("%s: %T has key %q, others have %q", name, req, got, key)
			}
		}
		if other, taken := keys[key]; taken {
			t.Errorf("%s and %s both have the key %q", name, other, key)
		}
		keys[key] = name
	}
	for _, req := range []any{&csi.ListSnapshotsRequest{SnapshotId: pool + "x"}, &csi.GetSnapshotRequest{SnapshotId: pool + "x"}, &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: pool + "x.group"}, &csi.GetMetadataAllocatedRequest{SnapshotId: pool + "x"}} {
		if key := mutates(req); key != "" {
			t.Errorf("%T is held up by %q", req, key)
		}
	}
}
