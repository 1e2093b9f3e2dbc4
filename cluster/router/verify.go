package router

import (
	"context"
	"maps"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/volume"
)

// rejected returns the error for a response that a node must not send (ErrUnavailable).
func (n *node) rejected(format string, args ...any) error {
	args = append(append([]any{n.name}, args...), n.name)
	return volume.Errorf(volume.ErrUnavailable, "node %q "+format+": the response was rejected: check which driver runs on node %q", args...)
}

// verifyVolume rejects a volume unless the node serves its pool and the volume is accessible from this
// node alone.
func (ns *nodes) verifyVolume(ctx context.Context, n *node, v *csi.Volume) error {
	id, _ := volume.ParseID(v.GetVolumeId())
	if err := ns.verifyID(ctx, n, id, v.GetVolumeId()); err != nil {
		return err
	}
	topology := v.GetAccessibleTopology()
	if len(topology) != 1 || !maps.Equal(topology[0].GetSegments(), translate.Topology(n.name).GetSegments()) {
		return n.rejected("says that volume %q is accessible from %v", v.GetVolumeId(), topology)
	}
	return nil
}

// verifyCreated is verifyVolume for a response to CreateVolume. It also verifies the volume's name.
func (ns *nodes) verifyCreated(ctx context.Context, n *node, spec volume.Spec, v *csi.Volume) error {
	if err := ns.verifyVolume(ctx, n, v); err != nil {
		return retryable(err)
	}
	if id, _ := volume.ParseID(v.GetVolumeId()); id.Name != volume.NameFor(spec.CoName) {
		return n.verifyAnswer(v.GetVolumeId(), spec.CoName)
	}
	return nil
}

// verifySnapshot rejects a snapshot unless the node serves its pool, and its source and its group are
// in this pool.
func (ns *nodes) verifySnapshot(ctx context.Context, n *node, snapshot *csi.Snapshot) error {
	text := snapshot.GetSnapshotId()
	id, _ := volume.ParseSnapshotID(text)
	if err := ns.verifyID(ctx, n, id, text); err != nil {
		return err
	}
	// A snapshot whose record cannot be read has no source.
	unreadable := snapshot.GetSourceVolumeId() == "" && !snapshot.GetReadyToUse()
	source, err := volume.ParseID(snapshot.GetSourceVolumeId())
	if !unreadable && (err != nil || source.Backend != id.Backend || keyOf(source) != keyOf(id)) {
		return n.rejected("says that snapshot %q is of volume %q", text, snapshot.GetSourceVolumeId())
	}
	want, group := "", id
	if group.Name = volume.SetOf(id.Name); group != id {
		want = group.String()
	}
	if got := snapshot.GetGroupSnapshotId(); got != want {
		return n.rejected("says that snapshot %q is of group %q", text, got)
	}
	return nil
}

// verifySnapshotIs is verifySnapshot for a snapshot with a known ID.
func (ns *nodes) verifySnapshotIs(ctx context.Context, n *node, snapshot *csi.Snapshot, want volume.ID) error {
	if err := n.verifyAnswer(snapshot.GetSnapshotId(), want.String()); err != nil {
		return err
	}
	return ns.verifySnapshot(ctx, n, snapshot)
}

// verifyGroup rejects a group with another ID, and snapshots that are not in it.
func (ns *nodes) verifyGroup(ctx context.Context, n *node, group *csi.VolumeGroupSnapshot, want volume.ID) error {
	if err := n.verifyAnswer(group.GetGroupSnapshotId(), want.String()); err != nil {
		return err
	}
	for _, snapshot := range group.GetSnapshots() {
		if err := n.verifyAnswer(snapshot.GetGroupSnapshotId(), want.String()); err != nil {
			return err
		}
		if err := ns.verifySnapshot(ctx, n, snapshot); err != nil {
			return err
		}
	}
	return nil
}

// verifyID rejects an ID whose pool the node does not serve. id is the parsed text, or empty if text is not an
// ID. Before it rejects the ID, verifyID requests the pools of the node again, because the node may have opened
// the pool since.
func (ns *nodes) verifyID(ctx context.Context, n *node, id volume.ID, text string) error {
	if key := keyOf(id); key.uuid != "" {
		err := ns.checkServes(ctx, n, key)
		if err != nil {
			n.requestPools(ctx, 0)
			err = ns.checkServes(ctx, n, key)
		}
		if err == nil || slices.Contains(ns.announcing(key), n) {
			return err
		}
	}
	return n.rejected("answered with %q, whose pool it does not have", text)
}

// verifyAnswer rejects an ID other than the requested one.
func (n *node) verifyAnswer(got, want string) error {
	if got == want {
		return nil
	}
	return n.rejected("answered with %q when %q was requested", got, want)
}

// verifyResponse rejects a node's response that contains other IDs than the request, or an ID in a pool that
// the node does not serve. id is the first ID in the request.
func (ns *nodes) verifyResponse(ctx context.Context, n *node, id volume.ID, req, resp proto.Message) error {
	switch resp := resp.(type) {
	case *csi.ControllerGetVolumeResponse:
		resp.Status = nil // LIST_VOLUMES_PUBLISHED_NODES is not advertised
		if err := n.verifyAnswer(resp.GetVolume().GetVolumeId(), id.String()); err != nil {
			return err
		}
		return ns.verifyVolume(ctx, n, resp.GetVolume())
	case *csi.ControllerGetVolumeHealthResponse:
		return n.verifyAnswer(resp.GetVolumeHealth().GetVolumeId(), id.String())
	case *csi.CreateSnapshotResponse:
		if err := n.verifyAnswer(resp.GetSnapshot().GetSourceVolumeId(), id.String()); err != nil {
			return err
		}
		id.Name = volume.NameFor(req.(*csi.CreateSnapshotRequest).GetName())
		return ns.verifySnapshotIs(ctx, n, resp.GetSnapshot(), id)
	case *csi.GetSnapshotResponse:
		return ns.verifySnapshotIs(ctx, n, resp.GetSnapshot(), id)
	case *csi.ListSnapshotsResponse:
		return ns.verifyFiltered(ctx, n, req.(*csi.ListSnapshotsRequest), resp.GetEntries())
	case *csi.CreateVolumeGroupSnapshotResponse:
		id.Name = volume.GroupName(req.(*csi.CreateVolumeGroupSnapshotRequest).GetName())
		return ns.verifyGroup(ctx, n, resp.GetGroupSnapshot(), id)
	case *csi.GetVolumeGroupSnapshotResponse:
		return ns.verifyGroup(ctx, n, resp.GetGroupSnapshot(), id)
	}
	return nil
}

// verifyFiltered rejects snapshots that do not match the filter of a request.
func (ns *nodes) verifyFiltered(ctx context.Context, n *node, req *csi.ListSnapshotsRequest, entries []*csi.ListSnapshotsResponse_Entry) error {
	for _, e := range entries {
		if want := req.GetSnapshotId(); want != "" && e.GetSnapshot().GetSnapshotId() != want {
			return n.verifyAnswer(e.GetSnapshot().GetSnapshotId(), want)
		}
		if want := req.GetSourceVolumeId(); want != "" && e.GetSnapshot().GetSourceVolumeId() != want {
			return n.verifyAnswer(e.GetSnapshot().GetSourceVolumeId(), want)
		}
		if err := ns.verifySnapshot(ctx, n, e.GetSnapshot()); err != nil {
			return err
		}
	}
	return nil
}
