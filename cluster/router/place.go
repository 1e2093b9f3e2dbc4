package router

import (
	"cmp"
	"context"
	"slices"
	"strconv"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/volume"
)

// createVolume answers CreateVolume. A volume with a source is created where the source is. A node-local
// volume with a preferred topology is created only on the first preferred node, because the scheduler has
// placed the pod on that node. Without a preferred topology the router selects the node.
func (s *Server) createVolume(ctx context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	spec, err := controllerserver.CreateSpec(s.kinds, req)
	if err != nil {
		return nil, err
	}
	if spec.Source != nil {
		return s.createFrom(ctx, spec, req)
	}
	if err := s.checkPool(spec.Parameters); err != nil {
		return nil, err
	}
	if s.isShared(spec.Parameters) {
		return relay.Call[*csi.CreateVolumeResponse](ctx, s.shared, csi.Controller_CreateVolume_FullMethodName, req)
	}
	all, err := s.nodes.all()
	if err != nil {
		return nil, err
	}
	requirements := req.GetAccessibilityRequirements()
	if preferred := requirements.GetPreferred(); len(preferred) > 0 {
		if value, ok := nodeSegment(preferred[0]); ok {
			return s.createAt(ctx, all, value, spec, req)
		}
	}
	return s.createAnywhere(ctx, all, within(all, requirements.GetRequisite()), spec, req)
}

// nodeSegment returns the value of the driver's topology key in a topology, if the topology has the key.
func nodeSegment(t *csi.Topology) (value string, ok bool) {
	value, ok = t.GetSegments()[translate.TopologyKey]
	return value, ok
}

// within returns the nodes that match one of the requisite topologies. A topology without the driver's key
// matches every node. If requisite is empty, within returns all nodes.
func within(all []*node, requisite []*csi.Topology) []*node {
	if len(requisite) == 0 {
		return all
	}
	return slices.DeleteFunc(slices.Clone(all), func(n *node) bool {
		return !slices.ContainsFunc(requisite, func(t *csi.Topology) bool {
			value, ok := nodeSegment(t)
			return !ok || value == n.topology
		})
	})
}

// checkPool fails with ErrInvalid if the cluster has no pool in which CreateVolume can create a volume with these
// parameters. It does not fail while a node that may have the pool has not announced its pools.
func (s *Server) checkPool(p volume.Parameters) error {
	k, err := s.kinds.Named(p.Backend)
	if err != nil || volume.IsDirectPool(p.Pool) {
		return err
	}
	pools, complete := s.nodes.usable(k)
	defaults := len(pools) // a class without a pool does not use the shared pools by default
	if k.OnExports() {
		pools = append(pools, s.sharedPools...)
	}
	if k.OnlyOnExports() {
		defaults, complete = len(pools), true
	}
	switch {
	case !complete, p.Pool == "" && defaults > 0, slices.Contains(pools, p.Pool):
		return nil
	case p.Pool == "":
		return volume.Errorf(volume.ErrInvalid, "parameter %s is missing, and no pool is the default for backend %s: set %[1]s to one that it can use (%[3]s), or configure such a pool", volume.ParamPool, k.Name, cmp.Or(quoted(pools), "none"))
	}
	meant := ""
	if nearest, near := volume.Nearest(p.Pool, pools); near {
		meant = "; did you mean " + nearest + "?"
	}
	return volume.Errorf(volume.ErrInvalid, "parameter %s=%q: backend %s cannot use a pool of that name (pools that it can use: %s): correct the StorageClass or the configuration of the nodes%s", volume.ParamPool, p.Pool, k.Name, cmp.Or(quoted(pools), "none"), meant)
}

// createAt creates a volume on the node with the given topology value. If another node may have created the
// volume in an earlier call without a response, that node receives the call first.
func (s *Server) createAt(ctx context.Context, all []*node, value string, spec volume.Spec, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	n := s.nodes.withTopology(value)
	if n == nil {
		return nil, volume.Errorf(volume.ErrExhausted, "accessibility_requirements.preferred[0] is node %q, which does not exist; the volume can be created on another node", value)
	}
	k, err := s.kinds.Named(spec.Parameters.Backend)
	if err != nil {
		return nil, err
	}
	if v := n.viewFor(ctx, spec.Parameters.Pool); v.answered && !v.has(k, spec.Parameters.Pool) {
		wanted := "pool"
		if spec.Parameters.Pool != "" {
			wanted += " " + strconv.Quote(spec.Parameters.Pool)
		}
		return nil, volume.Errorf(volume.ErrExhausted, "accessibility_requirements.preferred[0]: node %q has no %s that backend %s can use; the volume can be created on another node", n.name, wanted, k.Name)
	}
	if resp, done, err := s.createAgain(ctx, all, spec, req); done {
		return resp, err
	}
	return s.createOn(ctx, n, spec, req)
}

// createOn creates a volume on a node if the node serves the pool. If the call fails and the node may have
// created the volume nevertheless, createOn adds the node to s.unconfirmed.
func (s *Server) createOn(ctx context.Context, n *node, spec volume.Spec, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	if err := s.nodes.checkServesNamed(ctx, n, spec.Parameters.Pool); err != nil {
		return nil, retryable(err)
	}
	offered, from, err := s.offerSource(ctx, n, spec)
	if err != nil {
		return nil, retryable(err)
	}
	ended := s.reportTransfer(ctx, from, n, spec, req)
	resp, err := n.controller.CreateVolume(offered, req)
	if err != nil {
		err = n.callError(ctx, err)
	} else {
		err = s.nodes.verifyCreated(ctx, n, spec, resp.GetVolume())
	}
	s.unconfirmed.record(spec.CoName, n, err)
	ended(err)
	if err != nil {
		return nil, err
	}
	recordNodeLoss(spec.Parameters, resp.GetVolume())
	return resp, nil
}

// recordNodeLoss adds the parameter volume.ParamOnNodeLoss of the class, if it is set, to the volume context. The
// PersistentVolume contains it then, and a later class of the same name does not change it.
func recordNodeLoss(p volume.Parameters, v *csi.Volume) {
	value := p.Get(volume.ParamOnNodeLoss)
	if value == "" {
		return
	}
	if v.VolumeContext == nil {
		v.VolumeContext = map[string]string{}
	}
	v.VolumeContext[volume.ParamOnNodeLoss] = value
}

// validateCapabilities answers ValidateVolumeCapabilities. The node does not know the key that recordNodeLoss has added.
func (s *Server) validateCapabilities(ctx context.Context, method string, req *csi.ValidateVolumeCapabilitiesRequest) (proto.Message, error) {
	added := req.GetVolumeContext()[volume.ParamOnNodeLoss]
	if _, local := nodeLocal(req.GetVolumeId()); !local || (added != volume.NodeLossKeep && added != volume.NodeLossRelease) {
		return s.callPool(ctx, method, req)
	}
	forwarded := proto.CloneOf(req)
	delete(forwarded.VolumeContext, volume.ParamOnNodeLoss)
	resp, err := s.callPool(ctx, method, forwarded)
	if answer, ok := resp.(*csi.ValidateVolumeCapabilitiesResponse); ok && answer.GetConfirmed() != nil {
		answer.Confirmed.VolumeContext = req.GetVolumeContext()
	}
	return resp, err
}

// retryable converts an error of CreateVolume to ErrUnavailable, because the volume may exist and the
// orchestrator must retry the call.
func retryable(err error) error {
	if err == nil {
		return nil
	}
	return volume.Errorf(volume.ErrUnavailable, "%w", err)
}
