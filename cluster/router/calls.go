package router

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/volume"
)

// row says how a call is answered.
type row struct {
	// serve answers the call; nil: the pool's node does, or Shared if ids are not of a
	// node-local pool.
	serve func(*Server, context.Context, proto.Message) (proto.Message, error)
	// ids reads the IDs from a request, all in one pool.
	ids func(proto.Message) ([]volume.ID, error)
	// copies tells that the call copies volumes. Volumes of a shared pool may have to be copied
	// on the node where they are staged.
	copies bool
	// verify rejects a node's response that has other IDs than the request or that is about
	// another node's pool; nil: the response has no IDs.
	verify verifyFunc
}

type verifyFunc func(ctx context.Context, s *Server, n *node, req, resp proto.Message) error

// rows are the calls that may be for a node-local pool. Shared answers all others.
var rows = map[string]row{
	csi.Controller_ControllerGetCapabilities_FullMethodName:  {serve: served((*Server).getCapabilities)},
	csi.Controller_CreateVolume_FullMethodName:               {serve: served((*Server).createVolume)},
	csi.Controller_GetCapacity_FullMethodName:                {serve: served((*Server).getCapacity)},
	csi.Controller_ControllerPublishVolume_FullMethodName:    {serve: served((*Server).publishVolume)},
	csi.Controller_ControllerUnpublishVolume_FullMethodName:  {serve: served((*Server).unpublishVolume)},
	csi.Controller_DeleteVolume_FullMethodName:               {ids: volumeIn},
	csi.Controller_ControllerExpandVolume_FullMethodName:     {ids: volumeIn},
	csi.Controller_ControllerModifyVolume_FullMethodName:     {serve: notServed},
	csi.Controller_ValidateVolumeCapabilities_FullMethodName: {ids: volumeIn},
	csi.Controller_ControllerGetVolume_FullMethodName:        {ids: volumeIn, verify: verified(verifyGetVolume)},
	csi.Controller_ControllerGetVolumeHealth_FullMethodName:  {ids: volumeIn, verify: verified(verifyHealth)},
	csi.Controller_ListVolumes_FullMethodName:                {serve: paged(source[*csi.ListVolumesResponse_Entry]{list: relay.Volumes, parse: volume.ParseID, edit: withoutStatus})},
	csi.Controller_ControllerListVolumeHealth_FullMethodName: {serve: paged(source[*csi.VolumeHealth]{list: relay.VolumeHealths, parse: volume.ParseID})},

	csi.Controller_CreateSnapshot_FullMethodName:                 {ids: sourceVolumeIn, copies: true, verify: verified(verifyCreateSnapshot)},
	csi.Controller_DeleteSnapshot_FullMethodName:                 {ids: snapshotIn},
	csi.Controller_GetSnapshot_FullMethodName:                    {ids: snapshotIn, verify: verified(verifyGetSnapshot)},
	csi.Controller_ListSnapshots_FullMethodName:                  {serve: served((*Server).listSnapshots)},
	csi.GroupController_CreateVolumeGroupSnapshot_FullMethodName: {ids: groupSourcesIn, copies: true, verify: verified(verifyCreateGroup)},
	csi.GroupController_DeleteVolumeGroupSnapshot_FullMethodName: {ids: groupIn},
	csi.GroupController_GetVolumeGroupSnapshot_FullMethodName:    {ids: groupIn, verify: verified(verifyGetGroup)},
	csi.SnapshotMetadata_GetMetadataAllocated_FullMethodName:     {ids: snapshotIn},
	csi.SnapshotMetadata_GetMetadataDelta_FullMethodName:         {ids: baseSnapshotIn},
}

// Call implements relay.Service.
func (s *Server) Call(ctx context.Context, method string, req proto.Message) (proto.Message, error) {
	row := rows[method]
	if row.serve != nil {
		return row.serve(s, ctx, req)
	}
	ids, local := row.localIDs(req)
	switch {
	case local:
		return s.callOwner(ctx, ids[0], method, req, row.verify)
	case row.copies && len(ids) > 0:
		return s.callCopying(ctx, ids, method, req)
	}
	return s.shared.Call(ctx, method, req)
}

// Stream implements relay.Service.
func (s *Server) Stream(ctx context.Context, method string, req proto.Message, send func(any) error) error {
	ids, local := rows[method].localIDs(req)
	if !local {
		return s.shared.Stream(ctx, method, req, send)
	}
	n, err := s.nodes.forID(ctx, ids[0])
	if err != nil {
		return err
	}
	if err := n.service.Stream(ctx, method, req, send); err != nil {
		return n.failed(ctx, err)
	}
	return nil
}

// localIDs returns the IDs in a request, none if one is not of this driver, and whether their pool is
// node-local.
func (r row) localIDs(req proto.Message) (ids []volume.ID, local bool) {
	if r.ids == nil {
		return nil, false
	}
	ids, err := r.ids(req)
	if err != nil {
		return nil, false
	}
	return ids, !ids[0].Shared()
}

// callOwner calls the node that serves the pool of an ID.
func (s *Server) callOwner(ctx context.Context, id volume.ID, method string, req proto.Message, verify verifyFunc) (proto.Message, error) {
	n, err := s.nodes.forID(ctx, id)
	if err != nil {
		return nil, err
	}
	resp, err := n.service.Call(ctx, method, req)
	if err != nil {
		return nil, n.failed(ctx, err)
	}
	if verify != nil {
		if err := verify(ctx, s, n, req, resp); err != nil {
			return nil, err
		}
	}
	return resp, nil
}

// failed adds the node to the error of a call. If the node's pools may have changed, it asks for them,
// so that the retry finds them.
func (n *node) failed(ctx context.Context, err error) error {
	if code := status.Code(err); n.connected() && (code == codes.Unavailable || code == codes.FailedPrecondition) {
		n.ask(ctx, freshness)
	}
	return n.explain(ctx, err)
}

// served returns the serve function for a typed method.
func served[Req, Resp proto.Message](serve func(*Server, context.Context, Req) (Resp, error)) func(*Server, context.Context, proto.Message) (proto.Message, error) {
	return func(s *Server, ctx context.Context, req proto.Message) (proto.Message, error) {
		resp, err := serve(s, ctx, req.(Req))
		if err != nil {
			return nil, err
		}
		return resp, nil
	}
}

// verified returns the verify function for a typed function.
func verified[Req, Resp proto.Message](verify func(context.Context, *Server, *node, Req, Resp) error) verifyFunc {
	return func(ctx context.Context, s *Server, n *node, req, resp proto.Message) error {
		return verify(ctx, s, n, req.(Req), resp.(Resp))
	}
}

// notServed refuses a call that only a node's driver answers.
func notServed(*Server, context.Context, proto.Message) (proto.Message, error) {
	return nil, status.Error(codes.Unimplemented, "the controller's driver does not serve this method")
}

func one(id volume.ID, err error) ([]volume.ID, error) { return []volume.ID{id}, err }

func volumeIn(req proto.Message) ([]volume.ID, error) {
	return one(volume.ParseID(req.(interface{ GetVolumeId() string }).GetVolumeId()))
}

func sourceVolumeIn(req proto.Message) ([]volume.ID, error) {
	return one(volume.ParseID(req.(interface{ GetSourceVolumeId() string }).GetSourceVolumeId()))
}

func snapshotIn(req proto.Message) ([]volume.ID, error) {
	return one(volume.ParseSnapshotID(req.(interface{ GetSnapshotId() string }).GetSnapshotId()))
}

// baseSnapshotIn reads one of the two snapshots, which are in one pool.
func baseSnapshotIn(req proto.Message) ([]volume.ID, error) {
	return one(volume.ParseSnapshotID(req.(*csi.GetMetadataDeltaRequest).GetBaseSnapshotId()))
}

func groupIn(req proto.Message) ([]volume.ID, error) {
	return one(volume.ParseGroupID(req.(interface{ GetGroupSnapshotId() string }).GetGroupSnapshotId()))
}

func groupSourcesIn(req proto.Message) ([]volume.ID, error) {
	_, sources, err := controllerserver.GroupArgs(req.(*csi.CreateVolumeGroupSnapshotRequest))
	return sources, err
}
