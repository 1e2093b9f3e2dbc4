package router

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/volume"
)

// GetMetadataAllocated implements csi.SnapshotMetadataServer.
func (s *Server) GetMetadataAllocated(req *csi.GetMetadataAllocatedRequest, stream csi.SnapshotMetadata_GetMetadataAllocatedServer) error {
	id, here := local(volume.ParseSnapshotID(req.GetSnapshotId()))
	if !here {
		return s.shared.GetMetadataAllocated(req, stream)
	}
	return s.streamFrom(stream.Context(), id, func(ctx context.Context, n *node) error {
		from, err := n.controller.GetMetadataAllocated(ctx, req)
		if err != nil {
			return err
		}
		return controllerserver.Pass(from.Recv, stream.Send)
	})
}

// GetMetadataDelta implements csi.SnapshotMetadataServer: both snapshots are in one pool.
func (s *Server) GetMetadataDelta(req *csi.GetMetadataDeltaRequest, stream csi.SnapshotMetadata_GetMetadataDeltaServer) error {
	id, here := local(volume.ParseSnapshotID(req.GetBaseSnapshotId()))
	if !here {
		return s.shared.GetMetadataDelta(req, stream)
	}
	return s.streamFrom(stream.Context(), id, func(ctx context.Context, n *node) error {
		from, err := n.controller.GetMetadataDelta(ctx, req)
		if err != nil {
			return err
		}
		return controllerserver.Pass(from.Recv, stream.Send)
	})
}

// streamFrom makes a call that a stream answers, at the node that has the pool of an ID.
func (s *Server) streamFrom(ctx context.Context, id volume.ID, do func(context.Context, *node) error) error {
	n, err := s.nodes.having(ctx, id)
	if err != nil {
		return err
	}
	under, cancel := context.WithCancel(ctx)
	defer cancel() // whoever receives may have gone
	if err := do(under, n); err != nil {
		return n.failed(ctx, err)
	}
	return nil
}
