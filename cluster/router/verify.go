package router

import (
	"context"
	"maps"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/volume"
)

// rejected returns the error for a response that a node must not give (ErrUnavailable).
func (n *node) rejected(format string, args ...any) error {
	args = append(append([]any{n.name}, args...), n.name)
	return volume.Errorf(volume.ErrUnavailable, "node %q "+format+": the response was rejected: check which driver runs on node %q", args...)
}

// verifyVolume rejects a volume unless it is in a pool that the node serves and accessible from
// this node alone.
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

// verifySnapshot rejects a snapshot unless the node serves its pool and its source and group are
// in this pool. A snapshot whose record cannot be read has no source.
func (ns *nodes) verifySnapshot(ctx context.Context, n *node, one *csi.Snapshot) error {
	text := one.GetSnapshotId()
	id, _ := volume.ParseSnapshotID(text)
	if err := ns.verifyID(ctx, n, id, text); err != nil {
		return err
	}
	source, err := volume.ParseID(one.GetSourceVolumeId())
	if unread := one.GetSourceVolumeId() == "" && !one.GetReadyToUse(); !unread && (err != nil || source.Backend != id.Backend || keyOf(source) != keyOf(id)) {
		return n.rejected("says that snapshot %q is of volume %q", text, one.GetSourceVolumeId())
	}
	group, set := "", id
	if set.Name = volume.SetOf(id.Name); set != id {
		group = set.String()
	}
	if got := one.GetGroupSnapshotId(); got != group {
		return n.rejected("says that snapshot %q is of group %q", text, got)
	}
	return nil
}

// verifySnapshotIs is verifySnapshot for a snapshot with a known ID.
func (ns *nodes) verifySnapshotIs(ctx context.Context, n *node, one *csi.Snapshot, want string) error {
	if err := n.verifyAnswer(one.GetSnapshotId(), want); err != nil {
		return err
	}
	return ns.verifySnapshot(ctx, n, one)
}

// verifyGroup rejects a group with another ID, and snapshots that are not in it.
func (ns *nodes) verifyGroup(ctx context.Context, n *node, group *csi.VolumeGroupSnapshot, want string) error {
	if err := n.verifyAnswer(group.GetGroupSnapshotId(), want); err != nil {
		return err
	}
	for _, one := range group.GetSnapshots() {
		if err := n.verifyAnswer(one.GetGroupSnapshotId(), want); err != nil {
			return err
		}
		if err := ns.verifySnapshot(ctx, n, one); err != nil {
			return err
		}
	}
	return nil
}

// verifyID rejects an ID whose pool the node does not serve. id is empty if text is not an ID. The
// node is asked for its pools again, because it may have opened the pool since.
func (ns *nodes) verifyID(ctx context.Context, n *node, id volume.ID, text string) error {
	if key := keyOf(id); key.uuid != "" {
		err := ns.serves(ctx, n, key)
		if err != nil {
			n.ask(ctx, 0)
			err = ns.serves(ctx, n, key)
		}
		if err == nil || slices.Contains(ns.announcing(key), n) {
			return err
		}
	}
	return n.rejected("answered with %q, whose pool it does not have", text)
}

// verifyAnswer rejects an ID other than that of the request.
func (n *node) verifyAnswer(got, want string) error {
	if got == want {
		return nil
	}
	return n.rejected("answered with %q when %q was asked for", got, want)
}

func verifyGetVolume(ctx context.Context, s *Server, n *node, req *csi.ControllerGetVolumeRequest, resp *csi.ControllerGetVolumeResponse) error {
	resp.Status = nil // LIST_VOLUMES_PUBLISHED_NODES is not advertised
	if err := n.verifyAnswer(resp.GetVolume().GetVolumeId(), req.GetVolumeId()); err != nil {
		return err
	}
	return s.nodes.verifyVolume(ctx, n, resp.GetVolume())
}

func verifyHealth(_ context.Context, _ *Server, n *node, req *csi.ControllerGetVolumeHealthRequest, resp *csi.ControllerGetVolumeHealthResponse) error {
	return n.verifyAnswer(resp.GetVolumeHealth().GetVolumeId(), req.GetVolumeId())
}
