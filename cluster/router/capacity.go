package router

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/volume"
)

// capacity is the capacity of a node in bytes.
type capacity struct {
	node *node
	// maxVolume and minVolume limit the size of one volume. total is the free capacity.
	maxVolume, minVolume, total int64
	err                         error // the reason why the capacity is not known
}

// unlimited is the capacity in bytes for parameters that CreateVolume refuses (1 EiB).
const unlimited = 1 << 60

// getCapacity answers GetCapacity. For parameters that CreateVolume refuses on every node it returns unlimited,
// because the scheduler selects only nodes with enough capacity, and CreateVolume, whose error names the remedy,
// is called after that.
func (s *Server) getCapacity(ctx context.Context, req *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	resp, err := s.validCapacity(ctx, req)
	if errors.Is(err, volume.ErrInvalid) || status.Code(err) == codes.InvalidArgument {
		return &csi.GetCapacityResponse{AvailableCapacity: unlimited, MaximumVolumeSize: wrapperspb.Int64(unlimited)}, nil
	}
	return resp, err
}

// validCapacity is getCapacity for valid parameters; for others it returns their error. The capacity of a shared
// pool does not depend on the topology. A node without the pool has capacity 0. If a requested node does not
// answer, the call fails with ErrUnavailable.
func (s *Server) validCapacity(ctx context.Context, req *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	params, err := s.kinds.Parse(req.GetParameters())
	if err == nil {
		err = s.checkPool(params)
	}
	if err != nil {
		return nil, err
	}
	if s.isShared(params) {
		return relay.Call[*csi.GetCapacityResponse](ctx, s.shared, csi.Controller_GetCapacity_FullMethodName, req)
	}
	nodes, err := s.nodes.all()
	if err != nil {
		return nil, err
	}
	if value, ok := nodeSegment(req.GetAccessibleTopology()); ok {
		nodes = nil
		if n := s.nodes.withTopology(value); n != nil {
			nodes = []*node{n}
		}
	} else if err := s.nodes.checkComplete(ctx, nodes); err != nil {
		return nil, err
	}
	var sum capacity
	for _, c := range s.capacities(ctx, nodes, params, req) {
		if c.err != nil {
			return nil, c.err
		}
		sum.total += c.total
		sum.maxVolume = max(sum.maxVolume, c.maxVolume)
		sum.minVolume = max(sum.minVolume, c.minVolume) // a volume of this size is possible on every node
	}
	return &csi.GetCapacityResponse{
		AvailableCapacity: sum.total,
		MaximumVolumeSize: wrapperspb.Int64(sum.maxVolume),
		MinimumVolumeSize: wrapperspb.Int64(sum.minVolume),
	}, nil
}

// capacityRequest is a GetCapacityRequest or a CreateVolumeRequest.
type capacityRequest interface {
	GetParameters() map[string]string
	GetVolumeCapabilities() []*csi.VolumeCapability
}

// capacities requests the capacity of nodes for the parameters in req. The node with the largest total is first.
func (s *Server) capacities(ctx context.Context, nodes []*node, params volume.Parameters, req capacityRequest) []capacity {
	var mu sync.Mutex
	var out []capacity
	_ = each(ctx, nodes, func(ctx context.Context, n *node) error {
		c := s.capacityOf(ctx, n, params, req)
		mu.Lock()
		defer mu.Unlock()
		out = append(out, c)
		return nil
	})
	slices.SortFunc(out, func(a, b capacity) int {
		return cmp.Or(cmp.Compare(b.total, a.total), strings.Compare(a.node.name, b.node.name))
	})
	return out
}

// capacityOf requests the capacity of a node for the parameters in req. The capacity is 0 if the node has no such
// pool open, or if it does not serve all of them.
func (s *Server) capacityOf(ctx context.Context, n *node, params volume.Parameters, req capacityRequest) capacity {
	k, err := s.kinds.Named(params.Backend)
	if err != nil {
		return capacity{node: n, err: err}
	}
	if v := n.viewFor(ctx, params.Pool); v.answered && (!v.has(k, params.Pool) || !v.open(params.Pool)) {
		return capacity{node: n}
	}
	switch err := s.nodes.checkServesNamed(ctx, n, params.Pool); {
	case errors.Is(err, volume.ErrUnavailable):
		return capacity{node: n, err: err}
	case err != nil:
		return capacity{node: n}
	}
	resp, err := n.controller.GetCapacity(ctx, &csi.GetCapacityRequest{Parameters: req.GetParameters(), VolumeCapabilities: req.GetVolumeCapabilities()})
	return capacity{
		node: n, total: resp.GetAvailableCapacity(),
		maxVolume: resp.GetMaximumVolumeSize().GetValue(), minVolume: resp.GetMinimumVolumeSize().GetValue(),
		err: n.explain(ctx, err),
	}
}
