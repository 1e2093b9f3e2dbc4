package router

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/volume"
)

// GroupControllerGetCapabilities implements csi.GroupControllerServer.
func (s *Server) GroupControllerGetCapabilities(ctx context.Context, req *csi.GroupControllerGetCapabilitiesRequest) (*csi.GroupControllerGetCapabilitiesResponse, error) {
	return s.shared.GroupControllerGetCapabilities(ctx, req)
}

// CreateVolumeGroupSnapshot implements csi.GroupControllerServer: a group is made where
// its volumes are, which are in one pool.
func (s *Server) CreateVolumeGroupSnapshot(ctx context.Context, req *csi.CreateVolumeGroupSnapshotRequest) (*csi.CreateVolumeGroupSnapshotResponse, error) {
	spec, sources, err := controllerserver.GroupArgs(req)
	if err != nil {
		return nil, err
	}
	if sources[0].Shared() {
		return whereStaged(ctx, s, sources, req, controllerserver.Services.CreateVolumeGroupSnapshot, controllerserver.Clients.CreateVolumeGroupSnapshot)
	}
	want := sources[0]
	want.Name = spec.Name()
	return atOwner(ctx, s, want, req, controllerserver.Clients.CreateVolumeGroupSnapshot, func(ctx context.Context, n *node, resp *csi.CreateVolumeGroupSnapshotResponse) error {
		return s.believeGroup(ctx, n, resp.GetGroupSnapshot(), want.String())
	})
}

// DeleteVolumeGroupSnapshot implements csi.GroupControllerServer.
func (s *Server) DeleteVolumeGroupSnapshot(ctx context.Context, req *csi.DeleteVolumeGroupSnapshotRequest) (*csi.DeleteVolumeGroupSnapshotResponse, error) {
	id, here := local(volume.ParseGroupID(req.GetGroupSnapshotId()))
	if !here {
		return s.shared.DeleteVolumeGroupSnapshot(ctx, req)
	}
	return atOwner(ctx, s, id, req, controllerserver.Clients.DeleteVolumeGroupSnapshot, anything[*csi.DeleteVolumeGroupSnapshotResponse])
}

// GetVolumeGroupSnapshot implements csi.GroupControllerServer.
func (s *Server) GetVolumeGroupSnapshot(ctx context.Context, req *csi.GetVolumeGroupSnapshotRequest) (*csi.GetVolumeGroupSnapshotResponse, error) {
	id, here := local(volume.ParseGroupID(req.GetGroupSnapshotId()))
	if !here {
		return s.shared.GetVolumeGroupSnapshot(ctx, req)
	}
	return atOwner(ctx, s, id, req, controllerserver.Clients.GetVolumeGroupSnapshot, func(ctx context.Context, n *node, resp *csi.GetVolumeGroupSnapshotResponse) error {
		return s.believeGroup(ctx, n, resp.GetGroupSnapshot(), req.GetGroupSnapshotId())
	})
}

// believeGroup is believeThe for a group and all that is in it.
func (s *Server) believeGroup(ctx context.Context, n *node, group *csi.VolumeGroupSnapshot, want string) error {
	if err := n.answered(group.GetGroupSnapshotId(), want); err != nil {
		return err
	}
	for _, one := range group.GetSnapshots() {
		if err := n.answered(one.GetGroupSnapshotId(), want); err != nil {
			return err
		}
		if err := s.nodes.believeSnapshot(ctx, n, one); err != nil {
			return err
		}
	}
	return nil
}
