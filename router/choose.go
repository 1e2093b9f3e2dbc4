package router

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/volume"
)

// createSomewhere makes a volume on the node that has most room. A volume of that
// name that a live node has already, of a call that was cut off, is the one.
func (s *Server) createSomewhere(ctx context.Context, all, candidates []*node, spec volume.Spec, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	live := living(candidates)
	if len(live) == 0 {
		return nil, volume.Errorf(volume.ErrUnavailable, "none of the %d nodes that may have the volume answers", len(candidates))
	}
	n, err := having(ctx, living(all), spec)
	if err != nil {
		return nil, err
	}
	if n != nil {
		return s.createOn(ctx, n, spec, req)
	}
	rooms, err := rooms(ctx, live, req)
	if err != nil {
		return nil, err
	}
	var full error
	for _, r := range rooms {
		if r.most < max(1, spec.Capacity.Required) {
			break
		}
		resp, err := s.createOn(ctx, r.node, spec, req)
		if status.Code(err) != codes.ResourceExhausted {
			return resp, err
		}
		full = err
	}
	return nil, cmp.Or(full, volume.Errorf(volume.ErrExhausted, "capacity_range.required_bytes %d: none of the %d nodes that answer has so much room: delete volumes, or grow a pool", spec.Capacity.Required, len(live)))
}

// living are the nodes that a call would reach at once.
func living(all []*node) []*node {
	return slices.DeleteFunc(slices.Clone(all), func(n *node) bool { return !n.connected() })
}

// each calls do for nodes, some at a time, and returns the first error.
func each(ctx context.Context, all []*node, do func(context.Context, *node) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(fanOut)
	for _, n := range all {
		group.Go(func() error { return do(ctx, n) })
	}
	return group.Wait()
}

// having finds the node that has a volume as asked for, nil if none has. It fails if
// one of them does not say: the volume would be made twice.
func having(ctx context.Context, all []*node, spec volume.Spec) (*node, error) {
	var mu sync.Mutex
	var found *node
	err := each(ctx, all, func(ctx context.Context, n *node) error {
		for _, key := range n.view().named(spec.Parameters.Pool) {
			has, err := n.has(ctx, key, spec)
			if err != nil {
				return err
			}
			if has {
				mu.Lock()
				found = n
				mu.Unlock()
			}
		}
		return nil
	})
	return found, err
}

func (n *node) has(ctx context.Context, key poolKey, spec volume.Spec) (bool, error) {
	if key.uuid == "" { // closed: creating there fails
		return false, nil
	}
	id := volume.ID{Backend: spec.Parameters.Backend, Pool: key.name, PoolUUID: key.uuid, Name: volume.NameFor(spec.CoName)}
	_, err := n.controller.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{VolumeId: id.String()})
	switch status.Code(err) {
	case codes.NotFound:
		return false, nil
	case codes.OK, codes.DataLoss: // what is wrong with it the create will say
		return true, nil
	default:
		return false, n.explain(err)
	}
}

// room is what one node could still make.
type room struct {
	node *node
	// most bounds one volume, total all together, least is the smallest; in bytes.
	most, total, least int64
}

// rooms asks nodes for theirs, and sorts by it, the largest first. A node that has no
// such pool has none; one that does not answer has none either for now, unless ctx
// has ended.
func rooms(ctx context.Context, all []*node, req interface {
	GetParameters() map[string]string
	GetVolumeCapabilities() []*csi.VolumeCapability
},
) ([]room, error) {
	var mu sync.Mutex
	var out []room
	err := each(ctx, all, func(ctx context.Context, n *node) error {
		r, err := n.room(ctx, &csi.GetCapacityRequest{Parameters: req.GetParameters(), VolumeCapabilities: req.GetVolumeCapabilities()})
		if errors.Is(err, volume.ErrUnavailable) || status.Code(err) == codes.Unavailable {
			return nil
		}
		mu.Lock()
		defer mu.Unlock()
		out = append(out, r)
		return err
	})
	slices.SortFunc(out, func(a, b room) int {
		return cmp.Or(cmp.Compare(b.total, a.total), cmp.Compare(a.node.name, b.node.name))
	})
	return out, err
}

func (n *node) room(ctx context.Context, req *csi.GetCapacityRequest) (room, error) {
	resp, err := n.controller.GetCapacity(ctx, req)
	if err != nil {
		return room{}, n.explain(err)
	}
	return room{
		node: n, total: resp.GetAvailableCapacity(),
		most: resp.GetMaximumVolumeSize().GetValue(), least: resp.GetMinimumVolumeSize().GetValue(),
	}, nil
}
