package relay

import (
	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/volume"
)

// IDs returns the IDs in a request to a controller, which are all in one pool. It returns no IDs if the
// request contains none, or the ID of another driver. It fails if a group snapshot request is invalid.
func IDs(req proto.Message) ([]volume.ID, error) {
	var id volume.ID
	var parseErr error
	switch r := req.(type) {
	case *csi.CreateVolumeGroupSnapshotRequest:
		_, sources, err := controllerserver.GroupArgs(r)
		return sources, err
	case *csi.GetMetadataDeltaRequest:
		id, parseErr = volume.ParseSnapshotID(r.GetBaseSnapshotId())
	case *csi.CreateSnapshotRequest:
		id, parseErr = volume.ParseID(r.GetSourceVolumeId())
	case *csi.ListSnapshotsRequest:
		id, parseErr = volume.ParseSnapshotID(r.GetSnapshotId())
		if r.GetSnapshotId() == "" {
			id, parseErr = volume.ParseID(r.GetSourceVolumeId())
		}
	case interface{ GetSnapshotId() string }:
		id, parseErr = volume.ParseSnapshotID(r.GetSnapshotId())
	case interface{ GetGroupSnapshotId() string }:
		id, parseErr = volume.ParseGroupID(r.GetGroupSnapshotId())
	case interface{ GetVolumeId() string }:
		id, parseErr = volume.ParseID(r.GetVolumeId())
	default:
		return nil, nil
	}
	if parseErr != nil {
		return nil, nil //nolint:nilerr // the ID is of another driver
	}
	return []volume.ID{id}, nil
}
