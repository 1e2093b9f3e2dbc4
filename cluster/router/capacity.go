package router

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/trivet-csi/trivet/internal/relay"
)

// getCapacity answers GetCapacity. A shared pool has the same room
// wherever it is asked for. A node without a pool of its own has no room; of one that
// does not answer nobody knows (ErrUnavailable).
func (s *Server) getCapacity(ctx context.Context, req *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	params, err := s.kinds.Parse(req.GetParameters())
	if err != nil {
		return nil, err
	}
	if s.isShared(params) {
		return relay.Call[*csi.GetCapacityResponse](ctx, s.shared, csi.Controller_GetCapacity_FullMethodName, req)
	}
	all, err := s.nodes.all()
	if err != nil {
		return nil, err
	}
	value, given := nodeOf(req.GetAccessibleTopology())
	if !given {
		return s.capacityOfAll(ctx, all, params.Pool, req)
	}
	n := at(all, value)
	if n == nil {
		return answer(room{}), nil
	}
	r := s.room(ctx, n, params.Pool, req)
	return answer(r), r.err
}

func (s *Server) capacityOfAll(ctx context.Context, all []*node, pool string, req *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	if err := s.nodes.complete(ctx, all); err != nil {
		return nil, err
	}
	var sum room
	for _, r := range s.rooms(ctx, all, pool, req) {
		if r.err != nil {
			return nil, r.err
		}
		sum.total += r.total
		sum.most = max(sum.most, r.most)
		sum.least = max(sum.least, r.least)
	}
	return answer(sum), nil
}

func answer(r room) *csi.GetCapacityResponse {
	return &csi.GetCapacityResponse{
		AvailableCapacity: r.total,
		MaximumVolumeSize: wrapperspb.Int64(r.most),
		MinimumVolumeSize: wrapperspb.Int64(r.least),
	}
}
