package router

import (
	"cmp"
	"context"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/volume"
)

// createVolume creates a volume. A volume of a shared pool is every
// node's. Of another one with a preference is made on the first preferred node or not
// at all: the scheduler has picked that node, and the pod cannot follow elsewhere.
// Without one the node is chosen here. One that is made of something else is where that
// is.
func (s *Server) createVolume(ctx context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	spec, err := controllerserver.CreateSpec(s.kinds, req)
	if err != nil {
		return nil, err
	}
	if spec.Source != nil {
		return s.createFrom(ctx, spec, req)
	}
	if s.isShared(spec.Parameters) {
		return s.createShared(ctx, req)
	}
	all, err := s.nodes.all()
	if err != nil {
		return nil, err
	}
	if err := s.known(all, spec.Parameters.Pool); err != nil {
		return nil, err
	}
	requirements := req.GetAccessibilityRequirements()
	if preferred := requirements.GetPreferred(); len(preferred) > 0 {
		if value, given := nodeOf(preferred[0]); given {
			return s.createAt(ctx, all, value, spec, req)
		}
	}
	return s.createSomewhere(ctx, all, within(all, requirements.GetRequisite()), spec, req)
}

func (s *Server) createShared(ctx context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	return relay.Call[*csi.CreateVolumeResponse](ctx, s.shared, csi.Controller_CreateVolume_FullMethodName, req)
}

// nodeOf is the node's value in a topology segment.
func nodeOf(t *csi.Topology) (value string, given bool) {
	value, given = t.GetSegments()[translate.TopologyKey]
	return value, given
}

// at finds the node that a topology value stands for, nil if there is none.
func at(all []*node, value string) *node {
	i := slices.IndexFunc(all, func(n *node) bool { return n.topology == value })
	if i < 0 {
		return nil
	}
	return all[i]
}

// within are the nodes that a requisite topology allows: any if it is empty.
func within(all []*node, requisite []*csi.Topology) []*node {
	if len(requisite) == 0 {
		return all
	}
	return slices.DeleteFunc(slices.Clone(all), func(n *node) bool {
		return !slices.ContainsFunc(requisite, func(t *csi.Topology) bool {
			value, given := nodeOf(t)
			return !given || value == n.topology
		})
	})
}

// known refuses the name of a pool that no node has, and no name where no node has a
// pool (ErrInvalid), if all nodes have told theirs; the shared ones are known here.
func (s *Server) known(all []*node, pool string) error {
	for _, n := range all {
		if v := n.view(); !v.known || v.has(pool) {
			return nil
		}
	}
	if len(all) == 0 {
		return nil
	}
	shared := cmp.Or(list(s.sharedPools), "none")
	if pool == "" {
		return volume.Errorf(volume.ErrInvalid, "parameter %s is missing, which means a pool of a node itself, and no node has one: name one of the controller's nfs pools (%s) in %[1]s, or add one to the nodes", volume.ParamPool, shared)
	}
	return volume.Errorf(volume.ErrInvalid, "parameter %s=%q: no node has a pool of that name, and the nfs pools of the controller are %s: correct the StorageClass, or the configuration", volume.ParamPool, pool, shared)
}

// createAt makes a volume on the node that a topology value stands for.
func (s *Server) createAt(ctx context.Context, all []*node, value string, spec volume.Spec, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	n := at(all, value)
	if n == nil {
		return nil, volume.Errorf(volume.ErrExhausted, "accessibility_requirements.preferred[0] is node %q, which is gone: the volume can be made on another", value)
	}
	if v := n.viewFor(ctx, spec.Parameters.Pool); v.known && !v.has(spec.Parameters.Pool) {
		return nil, volume.Errorf(volume.ErrExhausted, "accessibility_requirements.preferred[0]: node %q has no pool %q: the volume can be made on another", n.name, spec.Parameters.Pool)
	}
	return s.createOn(ctx, n, spec, req)
}

// createOn has a node make a volume, unless the pool is not its own.
func (s *Server) createOn(ctx context.Context, n *node, spec volume.Spec, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	if err := s.nodes.servesNamed(ctx, n, spec.Parameters.Pool); err != nil {
		return nil, tryLater(err)
	}
	resp, err := n.controller.CreateVolume(ctx, req)
	if err != nil {
		return nil, n.failed(ctx, err)
	}
	v := resp.GetVolume()
	if err := s.nodes.verifyVolume(ctx, n, v); err != nil {
		return nil, tryLater(err)
	}
	if id, _ := volume.ParseID(v.GetVolumeId()); id.Name != volume.NameFor(spec.CoName) {
		return nil, n.verifyAnswer(v.GetVolumeId(), spec.CoName)
	}
	return resp, nil
}

// tryLater is the error of a create after which there may be a volume, if it is one:
// the orchestrator must not take it for the end.
func tryLater(err error) error {
	if err == nil {
		return nil
	}
	return volume.Errorf(volume.ErrUnavailable, "%w", err)
}
