package router

import (
	"cmp"
	"context"
	"slices"

	"github.com/trivet-csi/trivet/volume"
)

// CheckLost returns nil if no node of the cluster can have the pool of a node-local volume: the recorded owner of the
// pool does not exist, all nodes have answered now, and none of them announces the pool, had it before, or has a closed
// pool of that name. registered are the names of nodes that the router must know, because the API server may have reported
// them to another client first. Otherwise the error contains the reason, which is the same for all volumes of the pool.
func (s *Server) CheckLost(ctx context.Context, volumeID string, registered []string) error {
	id, local := nodeLocal(volumeID)
	if !local {
		return volume.Errorf(volume.ErrPrecondition, "%q is not the ID of a volume in a pool of a node", volumeID)
	}
	all, err := s.nodes.all()
	if err != nil {
		return err
	}
	unknown := slices.DeleteFunc(slices.Clone(registered), func(name string) bool { return s.nodes.named(name) != nil })
	if len(unknown) > 0 || len(all) == 0 {
		return volume.Errorf(volume.ErrUnavailable, "the nodes of the cluster are not known yet: %s", cmp.Or(quoted(unknown), "none is known"))
	}
	s.nodes.requestPools(ctx, all)
	key := keyOf(id)
	owner := s.nodes.owner(key)
	silent, closed := unavailable(all, id.Pool)
	_, expecting := s.nodes.possibleOwners(key)
	switch announcing := s.nodes.announcing(key); {
	case ctx.Err() != nil:
		return volume.Errorf(volume.ErrUnavailable, "pool %s may be on a node that has not answered in time: %w", key, ctx.Err())
	case owner == "":
		return volume.Errorf(volume.ErrPrecondition, "the node that has pool %s is not recorded, so the pool may be on another node", key)
	case s.nodes.named(owner) != nil:
		return volume.Errorf(volume.ErrPrecondition, "pool %s is recorded for node %q, which exists", key, owner)
	case len(announcing) > 0:
		return volume.Errorf(volume.ErrPrecondition, "pool %s is on node %s", key, quoted(names(announcing)))
	case len(expecting) > 0:
		return volume.Errorf(volume.ErrPrecondition, "pool %s was on node %s, which has it closed now", key, quoted(names(expecting)))
	case len(silent) > 0:
		return volume.Errorf(volume.ErrUnavailable, "pool %s may be on node %s, which does not answer: check the driver's pod there, or delete the Node object if the node no longer exists", key, quoted(names(silent)))
	case len(closed) > 0:
		return volume.Errorf(volume.ErrUnavailable, "pool %s may be on node %s, where pool %q is closed: check the driver's log there", key, quoted(names(closed)), id.Pool)
	}
	return nil
}
