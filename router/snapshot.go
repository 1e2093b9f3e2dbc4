package router

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/volume"
)

// CreateSnapshot implements csi.ControllerServer: a snapshot is made where its volume is.
func (s *Server) CreateSnapshot(ctx context.Context, req *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	id, foreign := volume.ParseID(req.GetSourceVolumeId())
	switch {
	case foreign != nil:
		return s.shared.CreateSnapshot(ctx, req)
	case id.Shared():
		return whereStaged(ctx, s, []volume.ID{id}, req, controllerserver.Services.CreateSnapshot, controllerserver.Clients.CreateSnapshot)
	}
	want := id
	want.Name = volume.NameFor(req.GetName())
	return atOwner(ctx, s, id, req, controllerserver.Clients.CreateSnapshot, func(ctx context.Context, n *node, resp *csi.CreateSnapshotResponse) error {
		if err := n.answered(resp.GetSnapshot().GetSourceVolumeId(), req.GetSourceVolumeId()); err != nil {
			return err
		}
		return s.believeThe(ctx, n, resp.GetSnapshot(), want.String())
	})
}

// believeThe is believeSnapshot for the one that was asked for.
func (s *Server) believeThe(ctx context.Context, n *node, one *csi.Snapshot, want string) error {
	if err := n.answered(one.GetSnapshotId(), want); err != nil {
		return err
	}
	return s.nodes.believeSnapshot(ctx, n, one)
}

// DeleteSnapshot implements csi.ControllerServer.
func (s *Server) DeleteSnapshot(ctx context.Context, req *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	id, here := local(volume.ParseSnapshotID(req.GetSnapshotId()))
	if !here {
		return s.shared.DeleteSnapshot(ctx, req)
	}
	return atOwner(ctx, s, id, req, controllerserver.Clients.DeleteSnapshot, anything[*csi.DeleteSnapshotResponse])
}

// GetSnapshot implements csi.ControllerServer.
func (s *Server) GetSnapshot(ctx context.Context, req *csi.GetSnapshotRequest) (*csi.GetSnapshotResponse, error) {
	id, here := local(volume.ParseSnapshotID(req.GetSnapshotId()))
	if !here {
		return s.shared.GetSnapshot(ctx, req)
	}
	return atOwner(ctx, s, id, req, controllerserver.Clients.GetSnapshot, func(ctx context.Context, n *node, resp *csi.GetSnapshotResponse) error {
		return s.believeThe(ctx, n, resp.GetSnapshot(), req.GetSnapshotId())
	})
}

// ListSnapshots implements csi.ControllerServer, as ListVolumes. One snapshot, and those
// of one volume, are asked for where they are.
func (s *Server) ListSnapshots(ctx context.Context, req *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	if req.GetSnapshotId() != "" || req.GetSourceVolumeId() != "" {
		return s.listSome(ctx, req)
	}
	entries, next, err := page(ctx, s, req, source[*csi.ListSnapshotsResponse_Entry]{
		node: func(n *node) lister[*csi.ListSnapshotsResponse_Entry] {
			return snapshots(func(ctx context.Context, req *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
				resp, err := n.controller.ListSnapshots(ctx, req)
				if err != nil {
					return nil, err
				}
				return resp, s.believeAll(ctx, n, resp)
			})
		},
		shared: snapshots(s.shared.ListSnapshots),
		id:     func(e *csi.ListSnapshotsResponse_Entry) string { return e.GetSnapshot().GetSnapshotId() },
		parse:  volume.ParseSnapshotID,
	})
	if err != nil {
		return nil, err
	}
	return &csi.ListSnapshotsResponse{Entries: entries, NextToken: next}, nil
}

func snapshots(list func(context.Context, *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error)) lister[*csi.ListSnapshotsResponse_Entry] {
	return func(ctx context.Context, token string, limit int32) ([]*csi.ListSnapshotsResponse_Entry, string, error) {
		resp, err := list(ctx, &csi.ListSnapshotsRequest{StartingToken: token, MaxEntries: limit})
		return resp.GetEntries(), resp.GetNextToken(), err
	}
}

// believeAll is believeSnapshot for a list.
func (s *Server) believeAll(ctx context.Context, n *node, resp *csi.ListSnapshotsResponse) error {
	for _, e := range resp.GetEntries() {
		if err := s.nodes.believeSnapshot(ctx, n, e.GetSnapshot()); err != nil {
			return err
		}
	}
	return nil
}

// listSome lists one snapshot, or those of one volume.
func (s *Server) listSome(ctx context.Context, req *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	id, here := nodeLocal(req.GetSourceVolumeId())
	if req.GetSnapshotId() != "" {
		id, here = local(volume.ParseSnapshotID(req.GetSnapshotId()))
	}
	if !here {
		return s.shared.ListSnapshots(ctx, req)
	}
	return atOwner(ctx, s, id, req, controllerserver.Clients.ListSnapshots, func(ctx context.Context, n *node, resp *csi.ListSnapshotsResponse) error {
		for _, e := range resp.GetEntries() {
			if want := req.GetSnapshotId(); want != "" && e.GetSnapshot().GetSnapshotId() != want {
				return n.answered(e.GetSnapshot().GetSnapshotId(), want)
			}
			if want := req.GetSourceVolumeId(); want != "" && e.GetSnapshot().GetSourceVolumeId() != want {
				return n.answered(e.GetSnapshot().GetSourceVolumeId(), want)
			}
		}
		return s.believeAll(ctx, n, resp)
	})
}
