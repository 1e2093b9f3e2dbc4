package controllerserver

import (
	"context"
	"errors"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/volume"
)

// GroupControllerGetCapabilities implements csi.GroupControllerServer.
func (s *Server) GroupControllerGetCapabilities(context.Context, *csi.GroupControllerGetCapabilitiesRequest) (*csi.GroupControllerGetCapabilitiesResponse, error) {
	resp := &csi.GroupControllerGetCapabilitiesResponse{}
	if len(backend.As[backend.Snapshotter](s.backends)) > 0 {
		resp.Capabilities = []*csi.GroupControllerServiceCapability{{
			Type: &csi.GroupControllerServiceCapability_Rpc{Rpc: &csi.GroupControllerServiceCapability_RPC{
				Type: csi.GroupControllerServiceCapability_RPC_CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT,
			}},
		}}
	}
	return resp, nil
}

// CreateVolumeGroupSnapshot implements csi.GroupControllerServer.
func (s *Server) CreateVolumeGroupSnapshot(ctx context.Context, req *csi.CreateVolumeGroupSnapshotRequest) (*csi.CreateVolumeGroupSnapshotResponse, error) {
	spec, ids, err := GroupArgs(req)
	if err != nil {
		return nil, err
	}
	var b backend.Snapshotter
	volumes := make([]volume.Volume, len(ids))
	for i, id := range ids {
		if b, volumes[i], err = s.source(ctx, id.String()); err != nil {
			return nil, err
		}
	}
	set, err := b.Snapshot(ctx, volumes, spec)
	if err != nil {
		return nil, err
	}
	return &csi.CreateVolumeGroupSnapshotResponse{GroupSnapshot: groupMessage(set)}, nil
}

// DeleteVolumeGroupSnapshot implements csi.GroupControllerServer. What is not there is
// deleted.
func (s *Server) DeleteVolumeGroupSnapshot(ctx context.Context, req *csi.DeleteVolumeGroupSnapshotRequest) (*csi.DeleteVolumeGroupSnapshotResponse, error) {
	b, set, err := s.group(ctx, req)
	switch {
	case errors.Is(err, volume.ErrNotFound):
		return &csi.DeleteVolumeGroupSnapshotResponse{}, nil
	case errors.Is(err, volume.ErrDamaged): // of which nobody knows what is in it
	case err != nil:
		return nil, err
	}
	if err := b.DeleteSnapshots(ctx, set.ID); err != nil {
		return nil, err
	}
	return &csi.DeleteVolumeGroupSnapshotResponse{}, nil
}

// GetVolumeGroupSnapshot implements csi.GroupControllerServer.
func (s *Server) GetVolumeGroupSnapshot(ctx context.Context, req *csi.GetVolumeGroupSnapshotRequest) (*csi.GetVolumeGroupSnapshotResponse, error) {
	_, set, err := s.group(ctx, req)
	if err != nil {
		return nil, err
	}
	return &csi.GetVolumeGroupSnapshotResponse{GroupSnapshot: groupMessage(set)}, nil
}

// group looks up the group that a request is about. ErrInvalid if the snapshots that it
// names are not those of the group (CSI specification, "Snapshot list mismatch"); it need
// not name any. With ErrDamaged the set has its ID.
func (s *Server) group(ctx context.Context, req interface {
	GetGroupSnapshotId() string
	GetSnapshotIds() []string
},
) (backend.Snapshotter, volume.SnapshotSet, error) {
	if req.GetGroupSnapshotId() == "" {
		return nil, volume.SnapshotSet{}, volume.Errorf(volume.ErrInvalid, "group_snapshot_id is missing")
	}
	id, err := volume.ParseGroupID(req.GetGroupSnapshotId())
	if err != nil {
		return nil, volume.SnapshotSet{}, err
	}
	b, err := s.snapshotter(id)
	if err != nil {
		return nil, volume.SnapshotSet{}, err
	}
	set, err := b.Snapshots(ctx, id)
	if err != nil {
		return b, volume.SnapshotSet{ID: id}, err
	}
	return b, set, checkMembers(set, req.GetSnapshotIds())
}

func checkMembers(set volume.SnapshotSet, named []string) error {
	if len(named) == 0 {
		return nil
	}
	have := make([]string, len(set.Snapshots))
	for i, one := range set.Snapshots {
		have[i] = one.ID.String()
	}
	if !slices.Equal(slices.Sorted(slices.Values(have)), slices.Sorted(slices.Values(named))) {
		return volume.Errorf(volume.ErrInvalid, "snapshot_ids are %q, those of group %s are %q: name these, or none", named, set.ID, have)
	}
	return nil
}

// groupMessage is a group as CSI has it.
func groupMessage(set volume.SnapshotSet) *csi.VolumeGroupSnapshot {
	m := &csi.VolumeGroupSnapshot{GroupSnapshotId: set.ID.String(), CreationTime: timestamppb.New(set.Created), ReadyToUse: true}
	for _, one := range set.Members() {
		m.Snapshots = append(m.Snapshots, snapshotMessage(one))
	}
	return m
}
