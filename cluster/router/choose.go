package router

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/volume"
)

// createSomewhere makes a volume on the node that has most room. A volume of that
// name that a live node has already, of a call that was cut off, is the one.
func (s *Server) createSomewhere(ctx context.Context, all, candidates []*node, spec volume.Spec, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	live := living(candidates)
	switch early := untried(all); {
	case len(candidates) == 0:
		return nil, volume.Errorf(volume.ErrExhausted, "accessibility_requirements.requisite %v: there is no such node now", req.GetAccessibilityRequirements().GetRequisite())
	case len(early) > 0:
		return nil, volume.Errorf(volume.ErrUnavailable, "nodes %s were not asked yet whether they have volume %q: try again", list(names(early)), spec.CoName)
	case len(live) == 0:
		return nil, volume.Errorf(volume.ErrUnavailable, "no node that may have the volume answers: %s", list(names(candidates)))
	}
	if n := s.unanswered.where(all, spec.CoName); n != nil {
		// It says best itself whether it has the volume, is still making it, or cannot.
		resp, err := s.createNoting(ctx, n, spec, req)
		if status.Code(err) != codes.ResourceExhausted {
			return resp, inDoubt(err, spec.CoName)
		}
	}
	n, err := s.nodes.made(ctx, living(all), spec)
	if err != nil {
		return nil, err
	}
	if n != nil {
		return s.createNoting(ctx, n, spec, req)
	}
	return s.createRoomiest(ctx, live, spec, req)
}

func (s *Server) createRoomiest(ctx context.Context, live []*node, spec volume.Spec, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	var failed error
	for _, r := range s.rooms(ctx, live, spec.Parameters.Pool, req) {
		if r.err != nil || r.most < max(1, spec.Capacity.Required) {
			failed = cmp.Or(failed, r.err, tryLater(s.nodes.servesNamed(ctx, r.node, spec.Parameters.Pool)))
			continue
		}
		resp, err := s.createNoting(ctx, r.node, spec, req)
		if status.Code(err) != codes.ResourceExhausted {
			return resp, err
		}
		failed = cmp.Or(failed, err)
	}
	return nil, cmp.Or(failed, volume.Errorf(volume.ErrExhausted, "capacity_range.required_bytes %d: none of the %d nodes that answer has so much room: delete volumes, or grow a pool", spec.Capacity.Required, len(live)))
}

// createNoting is createOn, and remembers where there was no answer.
func (s *Server) createNoting(ctx context.Context, n *node, spec volume.Spec, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	resp, err := s.createOn(ctx, n, spec, req)
	s.unanswered.note(spec.CoName, n, err)
	return resp, err
}

// unanswered remembers on which node a volume may have been made by a call that got
// no answer, so that it is not made on another as well.
type unanswered struct {
	mu    sync.Mutex
	calls map[string]call // by the orchestrator's name of the volume
}

// call is the last one that got no answer.
type call struct {
	node string
	at   time.Time
}

// unansweredTime is how long a call is remembered after the last attempt, many times what
// an orchestrator waits between attempts. A volume that nobody asks for again is forgotten.
const unansweredTime = time.Hour

func (u *unanswered) note(coName string, n *node, err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	maps.DeleteFunc(u.calls, func(_ string, c call) bool { return time.Since(c.at) >= unansweredTime })
	switch status.Code(err) {
	// Unknown is the router's own word, that it does not believe the node or does not
	// ask it now: no answer either.
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.Aborted, codes.Unknown:
		u.calls[coName] = call{n.name, time.Now()}
	default:
		delete(u.calls, coName)
	}
}

// where is the node that may have a volume, nil if none may or the node is no more.
func (u *unanswered) where(all []*node, coName string) *node {
	u.mu.Lock()
	defer u.mu.Unlock()
	i := slices.IndexFunc(all, func(n *node) bool { return n.name == u.calls[coName].node })
	if i < 0 {
		delete(u.calls, coName)
		return nil
	}
	return all[i]
}

// inDoubt says why a node is waited for that does not answer.
func inDoubt(err error, coName string) error {
	if status.Code(err) != codes.Unavailable {
		return err
	}
	return status.Errorf(codes.Unavailable, "volume %q may have been made on a node that does not answer now, and is waited for (if the node is gone for good delete its Node object): %s", coName, status.Convert(err).Message())
}

// untried are the nodes that nobody has tried to ask yet.
func untried(all []*node) []*node {
	return slices.DeleteFunc(slices.Clone(all), func(n *node) bool { return n.view().tried })
}

// living are the nodes that a call may reach. A connection that is being made is
// waited for by the call.
func living(all []*node) []*node {
	return slices.DeleteFunc(slices.Clone(all), func(n *node) bool { return n.conn.GetState() == connectivity.TransientFailure })
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

// made finds the node that has a volume as asked for, nil if none has. It fails if one of
// them does not say: the volume would be made twice. A pool that is another node's does not
// count.
func (ns *nodes) made(ctx context.Context, all []*node, spec volume.Spec) (*node, error) {
	var mu sync.Mutex
	var found *node
	err := each(ctx, all, func(ctx context.Context, n *node) error {
		v := n.viewFor(ctx, spec.Parameters.Pool)
		if !v.known {
			return volume.Errorf(volume.ErrUnavailable, "node %q did not say whether it has volume %q: try again", n.name, spec.CoName)
		}
		for _, key := range v.named(spec.Parameters.Pool) {
			if ns.foreign(n, key) {
				continue
			}
			has, err := n.has(ctx, key, spec)
			if err != nil {
				return err
			}
			if has {
				mu.Lock()
				if found == nil || n.name < found.name { // the same one each time
					found = n
				}
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
		return false, n.failed(ctx, err)
	}
}

// room is what one node could still make.
type room struct {
	node *node
	// most bounds one volume, total all together, least is the smallest; in bytes.
	most, total, least int64
	err                error // it did not say
}

// capacityRequest is what a room is asked with: of GetCapacity, or of CreateVolume.
type capacityRequest interface {
	GetParameters() map[string]string
	GetVolumeCapabilities() []*csi.VolumeCapability
}

// rooms asks nodes for theirs, and sorts by it, the largest first.
func (s *Server) rooms(ctx context.Context, all []*node, pool string, req capacityRequest) []room {
	var mu sync.Mutex
	var out []room
	_ = each(ctx, all, func(ctx context.Context, n *node) error {
		r := s.room(ctx, n, pool, req)
		mu.Lock()
		defer mu.Unlock()
		out = append(out, r)
		return nil
	})
	slices.SortFunc(out, func(a, b room) int {
		return cmp.Or(cmp.Compare(b.total, a.total), strings.Compare(a.node.name, b.node.name))
	})
	return out
}

// room asks a node for its room in the pool of a name. It has none without that pool
// or while it is closed, nor in one that is not its own.
func (s *Server) room(ctx context.Context, n *node, pool string, req capacityRequest) room {
	if v := n.viewFor(ctx, pool); v.known && !v.open(pool) {
		return room{node: n}
	}
	switch err := s.nodes.servesNamed(ctx, n, pool); {
	case errors.Is(err, volume.ErrUnavailable):
		return room{node: n, err: err}
	case err != nil:
		return room{node: n}
	}
	resp, err := n.controller.GetCapacity(ctx, &csi.GetCapacityRequest{Parameters: req.GetParameters(), VolumeCapabilities: req.GetVolumeCapabilities()})
	return room{
		node: n, total: resp.GetAvailableCapacity(),
		most: resp.GetMaximumVolumeSize().GetValue(), least: resp.GetMinimumVolumeSize().GetValue(),
		err: n.explain(ctx, err),
	}
}
