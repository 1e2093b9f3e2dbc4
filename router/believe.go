package router

import (
	"context"
	"maps"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/volume"
)

// believe refuses what a node says of a volume if it is not the node's to say
// (ErrUnavailable): the volume has to be in a pool that this node serves, and
// accessible there and nowhere else.
func (ns *nodes) believe(ctx context.Context, n *node, v *csi.Volume) error {
	id, _ := volume.ParseID(v.GetVolumeId())
	if err := ns.believeID(ctx, n, id, v.GetVolumeId()); err != nil {
		return err
	}
	topology := v.GetAccessibleTopology()
	if len(topology) != 1 || !maps.Equal(topology[0].GetSegments(), translate.Topology(n.name).GetSegments()) {
		return volume.Errorf(volume.ErrUnavailable, "node %q says that volume %q is accessible from %v: nothing of it is used; is its driver ours?", n.name, v.GetVolumeId(), topology)
	}
	return nil
}

// believeSnapshot is believe for a snapshot. What it is of, and the group that it is in,
// are in its own pool; of one whose record cannot be read nothing is said.
func (ns *nodes) believeSnapshot(ctx context.Context, n *node, one *csi.Snapshot) error {
	text := one.GetSnapshotId()
	id, _ := volume.ParseSnapshotID(text)
	if err := ns.believeID(ctx, n, id, text); err != nil {
		return err
	}
	source, err := volume.ParseID(one.GetSourceVolumeId())
	if unread := one.GetSourceVolumeId() == "" && !one.GetReadyToUse(); !unread && (err != nil || !together(source, id)) {
		return volume.Errorf(volume.ErrUnavailable, "node %q says that snapshot %q is of volume %q: nothing of it is used; is its driver ours?", n.name, text, one.GetSourceVolumeId())
	}
	group, set := "", id
	if set.Name = volume.SetOf(id.Name); set != id {
		group = set.String()
	}
	if got := one.GetGroupSnapshotId(); got != group {
		return volume.Errorf(volume.ErrUnavailable, "node %q says that snapshot %q is of group %q: nothing of it is used; is its driver ours?", n.name, text, got)
	}
	return nil
}

// together tells whether two IDs are of one backend and pool.
func together(a, b volume.ID) bool { return a.Backend == b.Backend && keyOf(a) == keyOf(b) }

// believeID is believe for an ID alone, which was read from text; it is empty if that is
// none. A pool that was opened since the node was asked is asked for.
func (ns *nodes) believeID(ctx context.Context, n *node, id volume.ID, text string) error {
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
	return volume.Errorf(volume.ErrUnavailable, "node %q answered with %q, whose pool it does not have: nothing of it is used; is its driver ours?", n.name, text)
}

// answered refuses an answer about something else than was asked for.
func (n *node) answered(got, want string) error {
	if got == want {
		return nil
	}
	return volume.Errorf(volume.ErrUnavailable, "node %q answered with %q when %q was asked for: nothing of it is used; is its driver ours?", n.name, got, want)
}
