package worker

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/controllerserver"
)

// CreateSnapshot implements csi.ControllerServer.
func (c *Controller) CreateSnapshot(ctx context.Context, req *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	w, err := c.Pools.byID(req.GetSourceVolumeId())
	if err != nil {
		return nil, err
	}
	return controllerAt(ctx, c, w, req, controllerserver.Services.CreateSnapshot, controllerserver.Clients.CreateSnapshot)
}

// DeleteSnapshot implements csi.ControllerServer.
func (c *Controller) DeleteSnapshot(ctx context.Context, req *csi.DeleteSnapshotRequest) (*csi.DeleteSnapshotResponse, error) {
	w, err := c.Pools.bySnapshotID(req.GetSnapshotId())
	if err != nil {
		return nil, err
	}
	return controllerAt(ctx, c, w, req, controllerserver.Services.DeleteSnapshot, controllerserver.Clients.DeleteSnapshot)
}

// GetSnapshot implements csi.ControllerServer.
func (c *Controller) GetSnapshot(ctx context.Context, req *csi.GetSnapshotRequest) (*csi.GetSnapshotResponse, error) {
	w, err := c.Pools.bySnapshotID(req.GetSnapshotId())
	if err != nil {
		return nil, err
	}
	return controllerAt(ctx, c, w, req, controllerserver.Services.GetSnapshot, controllerserver.Clients.GetSnapshot)
}

// ListSnapshots implements csi.ControllerServer, as ListVolumes. Those of one volume are
// where it is.
func (c *Controller) ListSnapshots(ctx context.Context, req *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
	at := func(ctx context.Context, w *Worker, req *csi.ListSnapshotsRequest) (*csi.ListSnapshotsResponse, error) {
		return controllerAt(ctx, c, w, req, controllerserver.Services.ListSnapshots, controllerserver.Clients.ListSnapshots)
	}
	if req.GetSnapshotId() != "" || req.GetSourceVolumeId() != "" {
		w, err := c.listing(req)
		if err != nil {
			return nil, err
		}
		return at(ctx, w, req)
	}
	entries, next, err := page(ctx, c.Pools, req, func(ctx context.Context, w *Worker, token string, limit int32) ([]*csi.ListSnapshotsResponse_Entry, string, error) {
		resp, err := at(ctx, w, &csi.ListSnapshotsRequest{StartingToken: token, MaxEntries: limit})
		return resp.GetEntries(), resp.GetNextToken(), err
	}, func(e *csi.ListSnapshotsResponse_Entry) string { return e.GetSnapshot().GetSnapshotId() })
	if err != nil {
		return nil, err
	}
	return &csi.ListSnapshotsResponse{Entries: entries, NextToken: next}, nil
}

// listing is the worker that lists a snapshot, or those of a volume.
func (c *Controller) listing(req *csi.ListSnapshotsRequest) (*Worker, error) {
	if req.GetSnapshotId() != "" {
		return c.Pools.bySnapshotID(req.GetSnapshotId())
	}
	return c.Pools.byID(req.GetSourceVolumeId())
}

// GroupControllerGetCapabilities implements csi.GroupControllerServer: they are the same
// for all pools.
func (c *Controller) GroupControllerGetCapabilities(ctx context.Context, req *csi.GroupControllerGetCapabilitiesRequest) (*csi.GroupControllerGetCapabilitiesResponse, error) {
	return c.Local.GroupControllerGetCapabilities(ctx, req)
}

// CreateVolumeGroupSnapshot implements csi.GroupControllerServer: all volumes of a group
// are in one pool.
func (c *Controller) CreateVolumeGroupSnapshot(ctx context.Context, req *csi.CreateVolumeGroupSnapshotRequest) (*csi.CreateVolumeGroupSnapshotResponse, error) {
	_, sources, err := controllerserver.GroupArgs(req)
	if err != nil {
		return nil, err
	}
	w, err := c.Pools.having(sources[0], nil)
	if err != nil {
		return nil, err
	}
	return controllerAt(ctx, c, w, req, controllerserver.Services.CreateVolumeGroupSnapshot, controllerserver.Clients.CreateVolumeGroupSnapshot)
}

// DeleteVolumeGroupSnapshot implements csi.GroupControllerServer.
func (c *Controller) DeleteVolumeGroupSnapshot(ctx context.Context, req *csi.DeleteVolumeGroupSnapshotRequest) (*csi.DeleteVolumeGroupSnapshotResponse, error) {
	w, err := c.Pools.byGroupID(req.GetGroupSnapshotId())
	if err != nil {
		return nil, err
	}
	return controllerAt(ctx, c, w, req, controllerserver.Services.DeleteVolumeGroupSnapshot, controllerserver.Clients.DeleteVolumeGroupSnapshot)
}

// GetVolumeGroupSnapshot implements csi.GroupControllerServer.
func (c *Controller) GetVolumeGroupSnapshot(ctx context.Context, req *csi.GetVolumeGroupSnapshotRequest) (*csi.GetVolumeGroupSnapshotResponse, error) {
	w, err := c.Pools.byGroupID(req.GetGroupSnapshotId())
	if err != nil {
		return nil, err
	}
	return controllerAt(ctx, c, w, req, controllerserver.Services.GetVolumeGroupSnapshot, controllerserver.Clients.GetVolumeGroupSnapshot)
}

// GetMetadataAllocated implements csi.SnapshotMetadataServer.
func (c *Controller) GetMetadataAllocated(req *csi.GetMetadataAllocatedRequest, stream csi.SnapshotMetadata_GetMetadataAllocatedServer) error {
	w, err := c.Pools.bySnapshotID(req.GetSnapshotId())
	if err != nil {
		return err
	}
	if w == nil {
		return c.Local.GetMetadataAllocated(req, stream)
	}
	return invokeStream(stream.Context(), w, stream.Send, func(ctx context.Context, p *process) (receiver[csi.GetMetadataAllocatedResponse], error) {
		return p.controller.GetMetadataAllocated(ctx, req)
	})
}

// GetMetadataDelta implements csi.SnapshotMetadataServer: both snapshots are in one pool.
func (c *Controller) GetMetadataDelta(req *csi.GetMetadataDeltaRequest, stream csi.SnapshotMetadata_GetMetadataDeltaServer) error {
	w, err := c.Pools.bySnapshotID(req.GetBaseSnapshotId())
	if err != nil {
		return err
	}
	if w == nil {
		return c.Local.GetMetadataDelta(req, stream)
	}
	return invokeStream(stream.Context(), w, stream.Send, func(ctx context.Context, p *process) (receiver[csi.GetMetadataDeltaResponse], error) {
		return p.controller.GetMetadataDelta(ctx, req)
	})
}

// receiver is a stream of answers.
type receiver[M any] interface{ Recv() (*M, error) }

// invokeStream makes a call that a stream answers, and sends that on.
func invokeStream[M any](ctx context.Context, w *Worker, send func(*M) error, do func(context.Context, *process) (receiver[M], error)) error {
	_, err := invoke(ctx, w, false, func(ctx context.Context, p *process) (none struct{}, err error) {
		from, err := do(ctx, p)
		if err != nil {
			return none, err
		}
		return none, controllerserver.Pass(from.Recv, send)
	})
	return err
}
