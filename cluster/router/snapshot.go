package router

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/volume"
)

func verifyCreateSnapshot(ctx context.Context, s *Server, n *node, req *csi.CreateSnapshotRequest, resp *csi.CreateSnapshotResponse) error {
	if err := n.verifyAnswer(resp.GetSnapshot().GetSourceVolumeId(), req.GetSourceVolumeId()); err != nil {
		return err
	}
	want, err := volume.ParseID(req.GetSourceVolumeId())
	if err != nil {
		return err
	}
	want.Name = volume.NameFor(req.GetName())
	return s.nodes.verifySnapshotIs(ctx, n, resp.GetSnapshot(), want.String())
}

func verifyGetSnapshot(ctx context.Context, s *Server, n *node, req *csi.GetSnapshotRequest, resp *csi.GetSnapshotResponse) error {
	return s.nodes.verifySnapshotIs(ctx, n, resp.GetSnapshot(), req.GetSnapshotId())
}

func verifyCreateGroup(ctx context.Context, s *Server, n *node, req *csi.CreateVolumeGroupSnapshotRequest, resp *csi.CreateVolumeGroupSnapshotResponse) error {
	spec, sources, err := controllerserver.GroupArgs(req)
	if err != nil {
		return err
	}
	want := sources[0]
	want.Name = spec.Name()
	return s.nodes.verifyGroup(ctx, n, resp.GetGroupSnapshot(), want.String())
}

func verifyGetGroup(ctx context.Context, s *Server, n *node, req *csi.GetVolumeGroupSnapshotRequest, resp *csi.GetVolumeGroupSnapshotResponse) error {
	return s.nodes.verifyGroup(ctx, n, resp.GetGroupSnapshot(), req.GetGroupSnapshotId())
}

// listSnapshots answers ListSnapshots. With a filter, the node that serves the filter's pool answers.
func (s *Server) listSnapshots(ctx context.Context, req *csi.ListSnapshotsRequest) (proto.Message, error) {
	if req.GetSnapshotId() == "" && req.GetSourceVolumeId() == "" {
		return listPage(ctx, s, req, source[*csi.ListSnapshotsResponse_Entry]{
			list: relay.Snapshots, parse: volume.ParseSnapshotID,
			verify: func(ctx context.Context, n *node, e *csi.ListSnapshotsResponse_Entry) error {
				return s.nodes.verifySnapshot(ctx, n, e.GetSnapshot())
			},
		})
	}
	filtered := row{ids: sourceVolumeIn}
	if req.GetSnapshotId() != "" {
		filtered.ids = snapshotIn
	}
	ids, local := filtered.localIDs(req)
	if !local {
		return s.shared.Call(ctx, relay.Snapshots.Method, req)
	}
	return s.callOwner(ctx, ids[0], relay.Snapshots.Method, req, verified(verifyFiltered))
}

func verifyFiltered(ctx context.Context, s *Server, n *node, req *csi.ListSnapshotsRequest, resp *csi.ListSnapshotsResponse) error {
	for _, e := range resp.GetEntries() {
		if want := req.GetSnapshotId(); want != "" && e.GetSnapshot().GetSnapshotId() != want {
			return n.verifyAnswer(e.GetSnapshot().GetSnapshotId(), want)
		}
		if want := req.GetSourceVolumeId(); want != "" && e.GetSnapshot().GetSourceVolumeId() != want {
			return n.verifyAnswer(e.GetSnapshot().GetSourceVolumeId(), want)
		}
		if err := s.nodes.verifySnapshot(ctx, n, e.GetSnapshot()); err != nil {
			return err
		}
	}
	return nil
}
