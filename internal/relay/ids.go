package relay

import (
	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/volume"
)

// IDs returns the IDs in a request to a controller, which are all in one pool. It returns none if the
// request contains none, or one that is not of this driver. It fails for an invalid group.
func IDs(req proto.Message) ([]volume.ID, error) {
	var id volume.ID
	var foreign error
	switch r := req.(type) {
	case *csi.CreateVolumeGroupSnapshotRequest:
		_, sources, err := controllerserver.GroupArgs(r)
		return sources, err
	case *csi.GetMetadataDeltaRequest:
		id, foreign = volume.ParseSnapshotID(r.GetBaseSnapshotId())
	case *csi.CreateSnapshotRequest:
		id, foreign = volume.ParseID(r.GetSourceVolumeId())
	case *csi.ListSnapshotsRequest:
		id, foreign = volume.ParseSnapshotID(r.GetSnapshotId())
		if r.GetSnapshotId() == "" {
			id, foreign = volume.ParseID(r.GetSourceVolumeId())
		}
	case interface{ GetSnapshotId() string }:
		id, foreign = volume.ParseSnapshotID(r.GetSnapshotId())
	case interface{ GetGroupSnapshotId() string }:
		id, foreign = volume.ParseGroupID(r.GetGroupSnapshotId())
	case interface{ GetVolumeId() string }:
		id, foreign = volume.ParseID(r.GetVolumeId())
	default:
		return nil, nil
	}
	if foreign != nil {
		return nil, nil //nolint:nilerr // of another driver
	}
	return []volume.ID{id}, nil
}
