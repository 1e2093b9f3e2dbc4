package controllerserver

import (
	"cmp"
	"context"
	"errors"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/paging"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/volume"
)

// CreateSnapshot implements csi.ControllerServer.
func (s *Server) CreateSnapshot(ctx context.Context, req *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	if err := translate.Required("source_volume_id", req.GetSourceVolumeId()); err != nil {
		return nil, err
	}
	spec, err := snapshotSpec(req)
	if err != nil {
		return nil, err
	}
	b, v, err := s.source(ctx, req.GetSourceVolumeId())
	if err != nil {
		return nil, err
	}
	if err := checkSetID(v.ID, spec); err != nil {
		return nil, err
	}
	if err := s.checkTopology(req.GetAccessibilityRequirements().GetRequisite(), nil); err != nil {
		return nil, err
	}
	set, err := b.Snapshot(ctx, []volume.Volume{v}, spec)
	if err != nil {
		return nil, err
	}
	return &csi.CreateSnapshotResponse{Snapshot: snapshotMessage(set.Members()[0])}, nil
}

// snapshotRequest is a request to create a snapshot or a group of snapshots.
type snapshotRequest interface {
	GetName() string
	GetParameters() map[string]string
}

// snapshotSpec converts the name and the parameters of a request. It returns ErrInvalid if they are invalid.
func snapshotSpec(req snapshotRequest) (volume.SnapshotSpec, error) {
	spec := volume.SnapshotSpec{CoName: req.GetName()}
	if err := checkName(req.GetName()); err != nil {
		return spec, err
	}
	var err error
	spec.Parameters, err = volume.ParseSnapshotParameters(req.GetParameters())
	return spec, err
}

// checkSetID returns ErrInvalid if the ID of the snapshots of a volume would exceed the maximum length.
// Only IDs that contain an export can be that long.
func checkSetID(source volume.ID, spec volume.SnapshotSpec) error {
	id := source
	id.Name = spec.Name()
	if n := len(id.String()); n > volume.MaxIDLength {
		return volume.Errorf(volume.ErrInvalid, "name %q: the ID %s would have %d bytes, at most %d are allowed: use a shorter name", spec.CoName, id, n, volume.MaxIDLength)
	}
	return nil
}

// DeleteSnapshot implements csi.ControllerServer. It succeeds if the snapshot does not exist. A
// snapshot of a group is deleted only with its group (CSI specification, "DeleteSnapshot
// Errors").
func (s *Server) DeleteSnapshot(ctx context.Context, req *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	b, id, err := s.snapshotter(req.GetSnapshotId())
	switch {
	case errors.Is(err, volume.ErrNotFound):
		return &csi.DeleteSnapshotResponse{}, nil
	case err != nil:
		return nil, err
	}
	if group := setID(id); group != id {
		err = refuseMember(ctx, b, id, group)
	} else {
		err = b.DeleteSnapshots(ctx, id)
	}
	return &csi.DeleteSnapshotResponse{}, err
}

// refuseMember returns the error for a request to delete a member of a group alone. It returns nil if the group
// does not exist, because the member then does not exist either.
func refuseMember(ctx context.Context, b backend.Snapshotter, id, group volume.ID) error {
	_, err := b.Snapshots(ctx, group)
	switch {
	case errors.Is(err, volume.ErrNotFound):
		return nil
	case err == nil, errors.Is(err, volume.ErrDamaged):
		return volume.Errorf(volume.ErrInvalid, "snapshot_id %q: the snapshot is a member of group %s and cannot be deleted alone: delete the group", id, group)
	}
	return err
}

// GetSnapshot implements csi.ControllerServer.
func (s *Server) GetSnapshot(ctx context.Context, req *csi.GetSnapshotRequest) (*csi.GetSnapshotResponse, error) {
	_, snapshot, err := s.snapshot(ctx, req.GetSnapshotId())
	if err != nil {
		return nil, err
	}
	return &csi.GetSnapshotResponse{Snapshot: snapshotMessage(snapshot)}, nil
}

// ListSnapshots implements csi.ControllerServer. A token is the ID of the last snapshot of a
// page.
func (s *Server) ListSnapshots(ctx context.Context, req *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	var entries []*csi.ListSnapshotsResponse_Entry
	var next string
	var err error
	switch {
	case req.GetSnapshotId() != "":
		entries, err = s.listOne(ctx, req)
	case req.GetSourceVolumeId() != "":
		entries, next, err = s.listOfSource(ctx, req)
	default:
		entries, next, err = page(ctx, s.snapshots(), req, snapshotEntry)
	}
	return &csi.ListSnapshotsResponse{Entries: entries, NextToken: next}, err
}

func snapshotEntry(_ backend.Backend, snapshot volume.Snapshot) (*csi.ListSnapshotsResponse_Entry, error) {
	return &csi.ListSnapshotsResponse_Entry{Snapshot: snapshotMessage(snapshot)}, nil
}

func (s *Server) snapshots() listing[volume.Snapshot] {
	l := listing[volume.Snapshot]{
		list: func(b backend.Backend, ctx context.Context, after volume.ID, limit int) ([]volume.Snapshot, bool, error) {
			return b.(backend.Snapshotter).ListSnapshots(ctx, after, limit)
		},
		id: func(snapshot volume.Snapshot) volume.ID { return snapshot.ID }, parse: volume.ParseSnapshotID,
	}
	for _, b := range s.backends.All() {
		if _, can := b.(backend.Snapshotter); can {
			l.backends = append(l.backends, b)
		} else {
			l.without = append(l.without, b.Name())
		}
	}
	return l
}

// listOne lists the snapshot with the ID of a request. The list is empty if the request also has
// the ID of another source volume. There is no second page.
func (s *Server) listOne(ctx context.Context, req *csi.ListSnapshotsRequest) ([]*csi.ListSnapshotsResponse_Entry, error) {
	if _, err := paging.Limit(req.GetMaxEntries()); err != nil {
		return nil, err
	}
	if token := req.GetStartingToken(); token != "" {
		return nil, paging.StaleToken(token)
	}
	_, snapshot, err := s.snapshot(ctx, req.GetSnapshotId())
	if errors.Is(err, volume.ErrNotFound) {
		return nil, nil
	}
	if source := req.GetSourceVolumeId(); err != nil || source != "" && source != snapshot.Source.String() {
		return nil, err
	}
	return []*csi.ListSnapshotsResponse_Entry{{Snapshot: snapshotMessage(snapshot)}}, nil
}

// listOfSource lists the snapshots of a volume, which are in its pool. The volume itself may
// be deleted.
func (s *Server) listOfSource(ctx context.Context, req *csi.ListSnapshotsRequest) ([]*csi.ListSnapshotsResponse_Entry, string, error) {
	limit, err := paging.Limit(req.GetMaxEntries())
	if err != nil {
		return nil, "", err
	}
	b, id, err := s.backends.ByID(req.GetSourceVolumeId())
	if errors.Is(err, volume.ErrNotFound) {
		return nil, "", nil
	}
	if err != nil {
		return nil, "", err
	}
	if _, can := b.(backend.Snapshotter); !can {
		return nil, "", nil
	}
	_, err = b.Get(ctx, id)
	if err != nil && !errors.Is(err, volume.ErrNotFound) && !errors.Is(err, volume.ErrDamaged) { // the list could be incomplete
		return nil, "", err
	}
	id.Name = ""
	token := cmp.Or(req.GetStartingToken(), PoolToken(id))
	if after, err := ParsePoolToken(token); err != nil || after.Backend != id.Backend || !samePool(after, id) {
		return nil, "", paging.StaleToken(token)
	}
	return fill(ctx, s.snapshots(), token, limit, func(b backend.Backend, snapshot volume.Snapshot) (*csi.ListSnapshotsResponse_Entry, error) {
		if snapshot.Source.String() != req.GetSourceVolumeId() {
			return nil, nil
		}
		return snapshotEntry(b, snapshot)
	})
}

// source returns the volume that is to be snapshotted, and its backend.
func (s *Server) source(ctx context.Context, text string) (backend.Snapshotter, volume.Volume, error) {
	b, v, err := s.backends.Volume(ctx, text)
	if err != nil {
		return nil, v, err
	}
	snapshotter, can := b.(backend.Snapshotter)
	if !can {
		return nil, v, volume.Errorf(volume.ErrInvalid, "source volume %s: backend %s does not support snapshots", v.ID, b.Name())
	}
	return snapshotter, v, nil
}

// snapshotter parses the ID of a snapshot, and returns its backend. It returns ErrInvalid if the ID is empty, and
// the errors of snapshotterOf.
func (s *Server) snapshotter(text string) (backend.Snapshotter, volume.ID, error) {
	if err := translate.Required("snapshot_id", text); err != nil {
		return nil, volume.ID{}, err
	}
	id, err := volume.ParseSnapshotID(text)
	if err != nil {
		return nil, id, err
	}
	b, err := s.snapshotterOf(id)
	return b, id, err
}

// snapshotterOf returns the backend of a snapshot or group. It returns ErrNotFound if the backend cannot make
// snapshots, and ErrUnavailable if this version or configuration of the driver does not serve the backend.
func (s *Server) snapshotterOf(id volume.ID) (backend.Snapshotter, error) {
	b, err := s.backends.ByName(id.Backend)
	if err != nil {
		return nil, volume.Errorf(volume.ErrUnavailable, "snapshot %s: this driver does not serve its backend %q: run the version that created it", id, id.Backend)
	}
	snapshotter, can := b.(backend.Snapshotter)
	if !can {
		return nil, volume.Errorf(volume.ErrNotFound, "snapshot %s: backend %s does not support snapshots", id, id.Backend)
	}
	return snapshotter, nil
}

// snapshot returns a snapshot by its ID. The snapshot may be a member of a group.
func (s *Server) snapshot(ctx context.Context, text string) (backend.Snapshotter, volume.Snapshot, error) {
	b, id, err := s.snapshotter(text)
	if err != nil {
		return nil, volume.Snapshot{}, err
	}
	set, err := b.Snapshots(ctx, setID(id))
	if err != nil {
		return nil, volume.Snapshot{}, err
	}
	for _, snapshot := range set.Members() {
		if snapshot.ID == id {
			return b, snapshot, nil
		}
	}
	return nil, volume.Snapshot{}, volume.Errorf(volume.ErrNotFound, "snapshot %s is not in its group %s", id, set.ID)
}

// setID returns the ID of the volume.SnapshotSet of a snapshot: the ID of its group, or its own.
func setID(id volume.ID) volume.ID {
	id.Name = volume.SetOf(id.Name)
	return id
}

// snapshotMessage converts a snapshot. A snapshot whose record cannot be read has only an ID,
// and is not ready.
func snapshotMessage(snapshot volume.Snapshot) *csi.Snapshot {
	m := &csi.Snapshot{SnapshotId: snapshot.ID.String(), SizeBytes: snapshot.Size}
	if snapshot.Group != (volume.ID{}) {
		m.GroupSnapshotId = snapshot.Group.String()
	}
	if snapshot.Source == (volume.ID{}) {
		return m
	}
	m.SourceVolumeId, m.CreationTime, m.ReadyToUse = snapshot.Source.String(), timestamppb.New(snapshot.Created), true
	return m
}

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

// GroupArgs converts a CreateVolumeGroupSnapshotRequest. It returns ErrPrecondition if the volumes are not in one
// pool and of one backend, because only such volumes can be snapshotted at the same moment (CSI specification,
// "Cannot snapshot multiple volumes together"). It returns ErrNotFound for an ID that is not from this driver,
// and ErrInvalid for other errors.
func GroupArgs(req *csi.CreateVolumeGroupSnapshotRequest) (volume.SnapshotSpec, []volume.ID, error) {
	spec, err := snapshotSpec(req)
	if err != nil {
		return spec, nil, err
	}
	spec.Group = true
	switch n := len(req.GetSourceVolumeIds()); {
	case n == 0:
		return spec, nil, volume.Errorf(volume.ErrInvalid, "source_volume_ids are missing: give at least one")
	case n > volume.MaxGroup:
		return spec, nil, volume.Errorf(volume.ErrInvalid, "source_volume_ids has %d entries: a group has at most %d", n, volume.MaxGroup)
	}
	var ids []volume.ID
	for _, text := range req.GetSourceVolumeIds() {
		id, err := volume.ParseID(text)
		switch {
		case err != nil:
			return spec, nil, err
		case slices.Contains(ids, id):
			return spec, nil, volume.Errorf(volume.ErrInvalid, "source_volume_ids contains %q twice: give each volume once", text)
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
	case errors.Is(err, volume.ErrDamaged): // the members are unknown, and not compared with the request
	case err != nil:
		return nil, err
	}
	return &csi.DeleteVolumeGroupSnapshotResponse{}, b.DeleteSnapshots(ctx, set.ID)
}

// GetVolumeGroupSnapshot implements csi.GroupControllerServer.
func (s *Server) GetVolumeGroupSnapshot(ctx context.Context, req *csi.GetVolumeGroupSnapshotRequest) (*csi.GetVolumeGroupSnapshotResponse, error) {
	_, set, err := s.group(ctx, req)
	if err != nil {
		return nil, err
	}
	return &csi.GetVolumeGroupSnapshotResponse{GroupSnapshot: groupMessage(set)}, nil
}

// group returns the group of a request. It returns ErrInvalid if the request names snapshots that are not exactly
// the members of the group (CSI specification, "Snapshot list mismatch"). If it returns ErrDamaged, the returned
// set has only an ID.
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
	b, err := s.snapshotterOf(id)
	if err != nil {
		return nil, volume.SnapshotSet{}, err
	}
	set, err := b.Snapshots(ctx, id)
	if err != nil {
		return b, volume.SnapshotSet{ID: id}, err
	}
	return b, set, checkMembers(set, req.GetSnapshotIds())
}

// checkMembers returns ErrInvalid if IDs of snapshots are named and are not exactly those of the set.
func checkMembers(set volume.SnapshotSet, named []string) error {
	if len(named) == 0 {
		return nil
	}
	have := make([]string, len(set.Snapshots))
	for i, snapshot := range set.Snapshots {
		have[i] = snapshot.ID.String()
	}
	if !slices.Equal(slices.Sorted(slices.Values(have)), slices.Sorted(slices.Values(named))) {
		return volume.Errorf(volume.ErrInvalid, "snapshot_ids is %q, but group %s has the members %q: name exactly these, or none", named, set.ID, have)
	}
	return nil
}

// groupMessage converts a group.
func groupMessage(set volume.SnapshotSet) *csi.VolumeGroupSnapshot {
	m := &csi.VolumeGroupSnapshot{GroupSnapshotId: set.ID.String(), CreationTime: timestamppb.New(set.Created), ReadyToUse: true}
	for _, snapshot := range set.Members() {
		m.Snapshots = append(m.Snapshots, snapshotMessage(snapshot))
	}
	return m
}
