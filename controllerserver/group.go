package controllerserver

import (
	"context"
	"errors"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/translate"
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

// GroupArgs converts a CreateVolumeGroupSnapshotRequest. The volumes must be in one pool and of
// one backend, because only these can be snapshotted at one moment (ErrPrecondition: CSI
// specification, "Cannot snapshot multiple volumes together"). Other errors are ErrInvalid, and
// ErrNotFound for an ID that is not from this driver.
func GroupArgs(req *csi.CreateVolumeGroupSnapshotRequest) (volume.SnapshotSpec, []volume.ID, error) {
	spec, err := snapshotSpec(req)
	if err != nil {
		return spec, nil, err
	}
	spec.Group = true
	switch n := len(req.GetSourceVolumeIds()); {
	case n == 0:
		return spec, nil, volume.Errorf(volume.ErrInvalid, "source_volume_ids are missing: name at least one")
	case n > volume.MaxGroup:
		return spec, nil, volume.Errorf(volume.ErrInvalid, "source_volume_ids are %d: a group has at most %d", n, volume.MaxGroup)
	}
	var ids []volume.ID
	for _, text := range req.GetSourceVolumeIds() {
		id, err := volume.ParseID(text)
		switch {
		case err != nil:
			return spec, nil, err
		case slices.Contains(ids, id):
			return spec, nil, volume.Errorf(volume.ErrInvalid, "source_volume_ids name %q twice: name each volume once", text)
		case len(ids) > 0 && (id.Backend != ids[0].Backend || !samePool(id, ids[0])):
			return spec, nil, volume.Errorf(volume.ErrPrecondition, "source_volume_ids %q and %q are not in one pool or not of one backend: create one group for each", ids[0], id)
		}
		ids = append(ids, id)
	}
	return spec, ids, checkSetID(ids[0], spec)
}

// DeleteVolumeGroupSnapshot implements csi.GroupControllerServer. It succeeds if the group does
// not exist.
func (s *Server) DeleteVolumeGroupSnapshot(ctx context.Context, req *csi.DeleteVolumeGroupSnapshotRequest) (*csi.DeleteVolumeGroupSnapshotResponse, error) {
	b, set, err := s.group(ctx, req)
	switch {
	case errors.Is(err, volume.ErrNotFound):
		return &csi.DeleteVolumeGroupSnapshotResponse{}, nil
	case errors.Is(err, volume.ErrDamaged): // its members are unknown
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

// group returns the group of a request. ErrInvalid if the request names snapshots, and they are
// not the members of the group (CSI specification, "Snapshot list mismatch"). With ErrDamaged the
// set has its ID.
func (s *Server) group(ctx context.Context, req interface {
	GetGroupSnapshotId() string
	GetSnapshotIds() []string
},
) (backend.Snapshotter, volume.SnapshotSet, error) {
	if err := translate.Required("group_snapshot_id", req.GetGroupSnapshotId()); err != nil {
		return nil, volume.SnapshotSet{}, err
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

// groupMessage converts a group.
func groupMessage(set volume.SnapshotSet) *csi.VolumeGroupSnapshot {
	m := &csi.VolumeGroupSnapshot{GroupSnapshotId: set.ID.String(), CreationTime: timestamppb.New(set.Created), ReadyToUse: true}
	for _, one := range set.Members() {
		m.Snapshots = append(m.Snapshots, snapshotMessage(one))
	}
	return m
}
