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
// (ErrUnavailable): the volume has to be in a pool that this node has and no other,
// and accessible there and nowhere else.
func (ns *nodes) believe(ctx context.Context, n *node, v *csi.Volume) error {
	if err := ns.believeID(ctx, n, v.GetVolumeId()); err != nil {
		return err
	}
	topology := v.GetAccessibleTopology()
	if len(topology) != 1 || !maps.Equal(topology[0].GetSegments(), translate.Topology(n.name).GetSegments()) {
		return volume.Errorf(volume.ErrUnavailable, "node %q says that volume %q is accessible from %v: nothing of it is used; is its driver ours?", n.name, v.GetVolumeId(), topology)
	}
	return nil
}

// believeID is believe for the ID alone. A pool that was opened since the node was
// asked is asked for.
func (ns *nodes) believeID(ctx context.Context, n *node, text string) error {
	id, local := nodeLocal(text)
	claims := ns.claims(keyOf(id))
	if local && !only(claims, n) {
		n.ask(ctx, 0)
		claims = ns.claims(keyOf(id))
	}
	switch {
	case local && only(claims, n):
		return nil
	case local && slices.Contains(claims, n):
		return conflict(keyOf(id), claims)
	}
	return volume.Errorf(volume.ErrUnavailable, "node %q answered with volume %q, whose pool it does not have: nothing of it is used; is its driver ours?", n.name, text)
}

func only(claims []*node, n *node) bool { return len(claims) == 1 && claims[0] == n }

// answered refuses an answer about another volume than that which was asked for.
func (n *node) answered(got, want string) error {
	if got == want {
		return nil
	}
	return volume.Errorf(volume.ErrUnavailable, "node %q answered with volume %q when %q was asked for: nothing of it is used; is its driver ours?", n.name, got, want)
}
