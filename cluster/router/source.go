package router

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-csi/trivet/cluster/transfer"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/volume"
)

// createFrom creates a volume from a source. If the pool is shared, Options.Shared creates the volume.
func (s *Server) createFrom(ctx context.Context, spec volume.Spec, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	source := spec.Source
	switch shared := s.isShared(spec.Parameters); {
	case shared != source.ID.Shared():
		return nil, volume.Errorf(volume.ErrInvalid, "volume_content_source is %v, and parameter %s=%q: one of the pools is node-local, the other is shared: use a StorageClass of the source's pool", source, volume.ParamPool, spec.Parameters.Pool)
	case shared && source.Snapshot:
		return relay.Call[*csi.CreateVolumeResponse](ctx, s.shared, csi.Controller_CreateVolume_FullMethodName, req)
	case shared:
		resp, err := s.callCopying(ctx, []volume.ID{source.ID}, csi.Controller_CreateVolume_FullMethodName, req)
		if err != nil {
			return nil, err
		}
		return resp.(*csi.CreateVolumeResponse), nil
	}
	if s.transferable(spec) {
		return s.createAnywhereFrom(ctx, spec, req)
	}
	n, err := s.nodes.forID(ctx, source.ID)
	if err != nil {
		return nil, retryable(err)
	}
	if len(within([]*node{n}, req.GetAccessibilityRequirements().GetRequisite())) == 0 {
		return nil, volume.Errorf(volume.ErrExhausted, "accessibility_requirements.requisite does not contain node %q, which has the source %v: a volume is created on the node of its source", n.name, source)
	}
	return s.createOn(ctx, n, spec, req)
}

// transferable reports whether a volume may be created on another node than that of its source.
func (s *Server) transferable(spec volume.Spec) bool {
	return s.transfers != nil && s.transfers(spec.Parameters.Backend) && spec.Source.ID.Backend == spec.Parameters.Backend &&
		spec.Parameters.Get(volume.ParamCopies) == volume.CopiesAnywhere
}

// createAnywhereFrom creates a volume from a source on any node. As without a source, the first preferred node gets the volume, because
// the scheduler has placed the pod there: on another node the volume could be out of the pod's reach. Without a preferred
// topology, the node of the source gets the volume if it can, because the blocks are shared there. Otherwise the router
// selects the node.
func (s *Server) createAnywhereFrom(ctx context.Context, spec volume.Spec, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	all, err := s.nodes.all()
	if err != nil {
		return nil, err
	}
	if resp, done, err := s.createAgain(ctx, all, spec, req); done { // also if the node of the source no longer answers
		return resp, err
	}
	n, err := s.nodes.forID(ctx, spec.Source.ID)
	if err != nil {
		return nil, retryable(err)
	}
	requirements := req.GetAccessibilityRequirements()
	if preferred := requirements.GetPreferred(); len(preferred) > 0 {
		if value, ok := nodeSegment(preferred[0]); ok {
			return s.createAt(ctx, all, value, spec, req)
		}
	}
	candidates := within(all, requirements.GetRequisite())
	k, err := s.kinds.Named(spec.Parameters.Backend)
	if err != nil {
		return nil, err
	}
	if slices.Contains(candidates, n) && n.viewFor(ctx, spec.Parameters.Pool).has(k, spec.Parameters.Pool) {
		resp, err := s.createOn(ctx, n, spec, req)
		if status.Code(err) != codes.ResourceExhausted || len(candidates) == 1 {
			return resp, err
		}
	}
	others := slices.DeleteFunc(slices.Clone(candidates), func(other *node) bool { return other == n })
	if len(others) == 0 {
		return s.createOn(ctx, n, spec, req) // whose error explains why the volume cannot be created
	}
	return s.createAnywhere(ctx, all, others, spec, req)
}

// offerSource returns the context of a call that creates a volume on node n. If the source of the volume is on another node, from
// is that node, and the context has the permission to read it.
func (s *Server) offerSource(ctx context.Context, n *node, spec volume.Spec) (offered context.Context, from *node, err error) {
	if spec.Source == nil || spec.Source.ID.Shared() || !s.transferable(spec) {
		return ctx, nil, nil
	}
	from, err = s.nodes.forID(ctx, spec.Source.ID)
	switch {
	case err != nil: // node n may have the volume already
		offered, err = transfer.Offer{Problem: err.Error()}.Attach(ctx)
		return offered, nil, err
	case from == n:
		return ctx, nil, nil
	case !from.connected():
		err := from.explain(ctx, status.Error(codes.Unavailable, "it has the source of the volume"))
		offered, err = transfer.Offer{Node: from.name, Problem: status.Convert(err).Message()}.Attach(ctx)
		return offered, from, err
	}
	ticket, err := s.sign(transfer.NewTicket(*spec.Source, from.name, n.name, spec.Name()))
	if err != nil {
		return ctx, from, err
	}
	offered, err = transfer.Offer{Node: from.name, Address: from.currentAddress(), Ticket: ticket}.Attach(ctx)
	return offered, from, err
}

// Transfer describes a call of CreateVolume whose source is on another node.
type Transfer struct {
	// Namespace and Claim are those of the claim, if the orchestrator passes them. Volume is its name of the volume.
	Namespace, Claim, Volume string
	Source                   volume.Source
	From, To                 string // nodes
	Size                     int64  // of the new volume; 0 if the call does not require one
	// Running is true while the call runs. Otherwise Err is its result: ABORTED with the progress if the transfer continues.
	Running bool
	Err     error
}

// transferNotice is the time after which a running call is reported. Most calls that end earlier find an existing volume.
const transferNotice = 2 * time.Second

// reportTransfer reports a call that creates a volume from a source on another node: once while it runs, and when the returned
// function is called with its result. It does not delay the call.
func (s *Server) reportTransfer(ctx context.Context, from, to *node, spec volume.Spec, req *csi.CreateVolumeRequest) (ended func(error)) {
	if from == nil || s.onTransfer == nil {
		return func(error) {}
	}
	t := Transfer{
		Namespace: req.GetParameters()[volume.ParamClaimNamespace], Claim: req.GetParameters()[volume.ParamClaimName],
		Volume: spec.CoName, Source: *spec.Source, From: from.name, To: to.name, Size: spec.Capacity.Required,
	}
	ctx, result := context.WithoutCancel(ctx), make(chan error, 1)
	go func() {
		notice := time.NewTimer(transferNotice)
		defer notice.Stop()
		select {
		case t.Err = <-result:
		case <-notice.C:
			running := t
			running.Running = true
			s.onTransfer(ctx, running)
			t.Err = <-result
		}
		s.onTransfer(ctx, t)
	}()
	return func(err error) { result <- err }
}

// callCopying makes a call that copies volumes of a shared pool. If Options.Shared refuses the call because
// a volume is staged, the call is first sent to the node where the volume is staged, because only that node
// can copy a consistent state. The call is then repeated at Options.Shared, which returns that copy.
func (s *Server) callCopying(ctx context.Context, sources []volume.ID, method string, req proto.Message) (proto.Message, error) {
	resp, err := s.shared.Call(ctx, method, req)
	if !inUse(err) {
		return resp, err
	}
	n := s.stagedOn(ctx, sources)
	if n == nil {
		return resp, err
	}
	if _, err := n.service.Call(ctx, method, req); err != nil {
		return nil, n.callError(ctx, err)
	}
	return s.shared.Call(ctx, method, req)
}

// inUse reports whether an error may mean that a volume is staged. The error may be ErrPending, because a
// controller on the node where the volume is staged sees the device but not the mount, as during staging.
func inUse(err error) bool {
	code := status.Code(err)
	return errors.Is(err, volume.ErrPrecondition) || errors.Is(err, volume.ErrPending) || code == codes.FailedPrecondition || code == codes.Aborted
}

// stagedOn returns the node to which volumes of a shared pool are published. It returns nil if they are
// published to no node or to several nodes, or if Options.Shared does not return one of the volumes.
func (s *Server) stagedOn(ctx context.Context, volumes []volume.ID) *node {
	found := ""
	for _, id := range volumes {
		resp, err := relay.Call[*csi.ControllerGetVolumeResponse](ctx, s.shared, csi.Controller_ControllerGetVolume_FullMethodName, &csi.ControllerGetVolumeRequest{VolumeId: id.String()})
		if err != nil {
			return nil
		}
		for _, name := range resp.GetStatus().GetPublishedNodeIds() {
			if found != "" && found != name {
				return nil
			}
			found = name
		}
	}
	return s.nodes.named(found)
}
