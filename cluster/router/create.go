package router

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-csi/trivet/volume"
)

// createAnywhere creates a volume on the candidate with the most capacity. The candidates are those of all
// nodes that the request allows. If a node has the volume already or may have it, the call is sent to that
// node instead.
func (s *Server) createAnywhere(ctx context.Context, all, candidates []*node, spec volume.Spec, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	unrequested := slices.DeleteFunc(slices.Clone(all), func(n *node) bool { return n.view().requested })
	live := reachable(candidates)
	switch {
	case len(candidates) == 0:
		return nil, volume.Errorf(volume.ErrExhausted, "accessibility_requirements.requisite %v: no such node exists now", req.GetAccessibilityRequirements().GetRequisite())
	case len(unrequested) > 0:
		return nil, volume.Errorf(volume.ErrUnavailable, "nodes %s have not reported yet whether they have volume %q: try again", quoted(names(unrequested)), spec.CoName)
	case len(live) == 0:
		return nil, volume.Errorf(volume.ErrUnavailable, "no node that may have the volume answers: %s: check the driver's pods there", quoted(names(candidates)))
	}
	if resp, done, err := s.createAgain(ctx, all, spec, req); done {
		return resp, err
	}
	n, err := s.nodes.withVolume(ctx, all, spec)
	if err != nil {
		return nil, err
	}
	if n != nil {
		return s.createOn(ctx, n, spec, req)
	}
	var failed error
	for _, c := range s.capacities(ctx, live, spec.Parameters, req) {
		if c.err != nil || c.maxVolume < max(1, spec.Capacity.Required) {
			failed = cmp.Or(failed, c.err, retryable(s.nodes.checkServesNamed(ctx, c.node, spec.Parameters.Pool)))
			continue
		}
		resp, err := s.createOn(ctx, c.node, spec, req)
		if status.Code(err) != codes.ResourceExhausted {
			return resp, err
		}
		failed = cmp.Or(failed, err)
	}
	return nil, cmp.Or(failed, volume.Errorf(volume.ErrExhausted, "capacity_range.required_bytes %d: none of the %d nodes that answer has enough capacity: delete volumes, or grow a pool", spec.Capacity.Required, len(live)))
}

// createAgain repeats the call on the node that may have created the volume in a call without a response.
// done is false if no node may have created the volume, or if that node does not have the volume. createAgain
// omits the preferred topologies from the request, because a retry may prefer another node than that one.
func (s *Server) createAgain(ctx context.Context, all []*node, spec volume.Spec, req *csi.CreateVolumeRequest) (resp *csi.CreateVolumeResponse, done bool, err error) {
	n := s.unconfirmed.node(all, spec.CoName)
	if n == nil {
		return nil, false, nil
	}
	req = proto.CloneOf(req)
	if requirements := req.GetAccessibilityRequirements(); requirements != nil {
		requirements.Preferred = nil
	}
	resp, err = s.createOn(ctx, n, spec, req)
	if status.Code(err) == codes.ResourceExhausted {
		has, hasErr := s.nodes.has(ctx, n, spec)
		if !has && hasErr == nil {
			return nil, false, nil
		}
		s.unconfirmed.add(spec.CoName, n) // the node may have the volume, and the requirements may exclude the node
		return nil, true, cmp.Or(hasErr, err)
	}
	s.unconfirmed.record(spec.CoName, n, err)
	if code := status.Code(err); code == codes.Unavailable {
		err = status.Errorf(code, "volume %q may have been created on a node that does not answer now, which receives the call again (if the node no longer exists, delete its Node object): %s", spec.CoName, status.Convert(err).Message())
	}
	return resp, true, err
}

// unconfirmed records the nodes that may have created a volume in a call without a response, so that
// no other node creates the volume too.
type unconfirmed struct {
	mu    sync.Mutex
	calls map[string]call // by the orchestrator's name of the volume
}

// call is the last call without a response.
type call struct {
	node string
	at   time.Time
}

// unconfirmedTime is the time for which a call is recorded. Orchestrators retry within minutes.
const unconfirmedTime = time.Hour

// record adds or removes the node of a call, depending on the call's result.
func (u *unconfirmed) record(coName string, n *node, err error) {
	switch status.Code(err) {
	// Unknown is the code of the router's own errors. The router did not call the node, or rejected the response.
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.Aborted, codes.Unknown:
		u.add(coName, n)
	default:
		u.mu.Lock()
		defer u.mu.Unlock()
		delete(u.calls, coName)
	}
}

// add records a call without a response.
func (u *unconfirmed) add(coName string, n *node) {
	u.mu.Lock()
	defer u.mu.Unlock()
	maps.DeleteFunc(u.calls, func(_ string, c call) bool { return time.Since(c.at) >= unconfirmedTime })
	u.calls[coName] = call{n.name, time.Now()}
}

// node returns the node that may have created a volume. It returns nil if no such call is recorded, if its
// node no longer exists, or if the call is older than unconfirmedTime.
func (u *unconfirmed) node(all []*node, coName string) *node {
	u.mu.Lock()
	defer u.mu.Unlock()
	last := u.calls[coName]
	i := slices.IndexFunc(all, func(n *node) bool { return n.name == last.node })
	if i < 0 || time.Since(last.at) >= unconfirmedTime {
		delete(u.calls, coName)
		return nil
	}
	return all[i]
}

// reachable returns the nodes whose connections have not failed. Calls wait for a connection that is
// being made.
func reachable(all []*node) []*node {
	return slices.DeleteFunc(slices.Clone(all), func(n *node) bool { return n.failing() })
}

// withVolume returns the reachable node that has a volume, or nil if no node has it. It fails if a reachable
// node does not answer, because that node may have the volume.
func (ns *nodes) withVolume(ctx context.Context, all []*node, spec volume.Spec) (*node, error) {
	var mu sync.Mutex
	var found *node
	err := each(ctx, reachable(all), func(ctx context.Context, n *node) error {
		has, err := ns.has(ctx, n, spec)
		if !has || err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		if found == nil || n.name < found.name { // deterministic for retries
			found = n
		}
		return nil
	})
	return found, err
}

// has reports whether a node has a volume in one of the open pools that no other node owns.
func (ns *nodes) has(ctx context.Context, n *node, spec volume.Spec) (bool, error) {
	v := n.viewFor(ctx, spec.Parameters.Pool)
	if !v.answered {
		return false, volume.Errorf(volume.ErrUnavailable, "node %q did not report whether it has volume %q: try again", n.name, spec.CoName)
	}
	found := false
	for _, key := range v.named(spec.Parameters.Pool) {
		if key.uuid == "" || ns.ownedByOther(n, key) { // no volume is created in a closed pool
			continue
		}
		id := volume.ID{Backend: spec.Parameters.Backend, Pool: key.name, PoolUUID: key.uuid, Name: volume.NameFor(spec.CoName)}
		_, err := n.controller.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{VolumeId: id.String()})
		switch status.Code(err) {
		case codes.NotFound:
		case codes.OK, codes.DataLoss: // CreateVolume reports the damage
			found = true
		default:
			return false, n.callError(ctx, err)
		}
	}
	return found, nil
}
