package router

import (
	"context"

	"github.com/trivet-csi/trivet/volume"
)

// CheckLost returns nil if no node of the cluster can have the pool of a node-local volume: the recorded owner of the
// pool does not exist, all nodes have answered now, and none of them announces the pool, had it before, or has a closed
// pool of that name. Otherwise the error contains the reason.
func (s *Server) CheckLost(ctx context.Context, volumeID string) error {
	id, local := nodeLocal(volumeID)
	if !local {
		return volume.Errorf(volume.ErrPrecondition, "%q is not the ID of a volume in a pool of a node", volumeID)
	}
	all, err := s.nodes.all()
	if err != nil {
		return err
	}
	s.nodes.requestPools(ctx, all)
	key := keyOf(id)
	owner := s.nodes.owner(key)
	silent, closed := unavailable(all, id.Pool)
	_, expecting := s.nodes.possibleOwners(key)
	switch announcing := s.nodes.announcing(key); {
	case ctx.Err() != nil:
		return ctx.Err()
	case owner == "":
		return volume.Errorf(volume.ErrPrecondition, "%s: the node that has pool %s is not recorded, so the pool may be on another node", id, key)
	case s.nodes.named(owner) != nil:
		return volume.Errorf(volume.ErrPrecondition, "%s: pool %s is recorded for node %q, which exists", id, key, owner)
	case len(announcing) > 0:
		return volume.Errorf(volume.ErrPrecondition, "%s: pool %s is on node %s", id, key, quoted(names(announcing)))
	case len(expecting) > 0:
		return volume.Errorf(volume.ErrPrecondition, "%s: pool %s was on node %s, which has it closed now", id, key, quoted(names(expecting)))
	case len(silent) > 0:
		return volume.Errorf(volume.ErrUnavailable, "%s: pool %s may be on node %s, which does not answer: check the driver's pod there, or delete the Node object if the node no longer exists", id, key, quoted(names(silent)))
	case len(closed) > 0:
		return volume.Errorf(volume.ErrUnavailable, "%s: pool %s may be on node %s, where pool %q is closed: check the driver's log there", id, key, quoted(names(closed)), id.Pool)
	}
	return nil
}
