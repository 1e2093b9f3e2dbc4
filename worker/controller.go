package worker

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/volume"
)

// Controller implements controllerserver.Services: what concerns nfs pools by their
// workers, all else by Local.
type Controller struct {
	csi.UnimplementedControllerServer
	csi.UnimplementedGroupControllerServer
	csi.UnimplementedSnapshotMetadataServer
	Pools *Pools
	Local controllerserver.Services
}

// controllerByID sends a call to where its volume is. A method of the client is given
// as an expression.
func controllerByID[Req interface{ GetVolumeId() string }, Resp any](
	ctx context.Context, c *Controller, req Req,
	local func(controllerserver.Services, context.Context, Req) (Resp, error),
	forward func(controllerserver.Clients, context.Context, Req, ...grpc.CallOption) (Resp, error),
) (Resp, error) {
	var none Resp
	w, err := c.Pools.byID(req.GetVolumeId())
	if err != nil {
		return none, err
	}
	return controllerAt(ctx, c, w, req, local, forward)
}

// controllerAt makes a call at a worker, or locally if that is nil.
func controllerAt[Req, Resp any](
	ctx context.Context, c *Controller, w *Worker, req Req,
	local func(controllerserver.Services, context.Context, Req) (Resp, error),
	forward func(controllerserver.Clients, context.Context, Req, ...grpc.CallOption) (Resp, error),
) (Resp, error) {
	if w == nil {
		return local(c.Local, ctx, req)
	}
	return invoke(ctx, w, false, func(ctx context.Context, p *process) (Resp, error) { return forward(p.controller, ctx, req) })
}

// CreateVolume implements csi.ControllerServer.
func (c *Controller) CreateVolume(ctx context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	w, err := c.Pools.byParameters(req.GetParameters())
	if err != nil {
		return nil, err
	}
	return controllerAt(ctx, c, w, req, controllerserver.Services.CreateVolume, controllerserver.Clients.CreateVolume)
}

// GetCapacity implements csi.ControllerServer.
func (c *Controller) GetCapacity(ctx context.Context, req *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	w, err := c.Pools.byParameters(req.GetParameters())
	if err != nil {
		return nil, err
	}
	return controllerAt(ctx, c, w, req, controllerserver.Services.GetCapacity, controllerserver.Clients.GetCapacity)
}

// DeleteVolume implements csi.ControllerServer.
func (c *Controller) DeleteVolume(ctx context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	return controllerByID(ctx, c, req, controllerserver.Services.DeleteVolume, controllerserver.Clients.DeleteVolume)
}

// ControllerPublishVolume implements csi.ControllerServer. Of a volume without a
// record nothing is kept, and no server is asked.
func (c *Controller) ControllerPublishVolume(ctx context.Context, req *csi.ControllerPublishVolumeRequest) (*csi.ControllerPublishVolumeResponse, error) {
	return controllerByID(ctx, c, req, controllerserver.Services.ControllerPublishVolume, controllerserver.Clients.ControllerPublishVolume)
}

// ControllerUnpublishVolume implements csi.ControllerServer.
func (c *Controller) ControllerUnpublishVolume(ctx context.Context, req *csi.ControllerUnpublishVolumeRequest) (*csi.ControllerUnpublishVolumeResponse, error) {
	return controllerByID(ctx, c, req, controllerserver.Services.ControllerUnpublishVolume, controllerserver.Clients.ControllerUnpublishVolume)
}

// ControllerExpandVolume implements csi.ControllerServer.
func (c *Controller) ControllerExpandVolume(ctx context.Context, req *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	return controllerByID(ctx, c, req, controllerserver.Services.ControllerExpandVolume, controllerserver.Clients.ControllerExpandVolume)
}

// ValidateVolumeCapabilities implements csi.ControllerServer.
func (c *Controller) ValidateVolumeCapabilities(ctx context.Context, req *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	return controllerByID(ctx, c, req, controllerserver.Services.ValidateVolumeCapabilities, controllerserver.Clients.ValidateVolumeCapabilities)
}

// ControllerGetVolume implements csi.ControllerServer.
func (c *Controller) ControllerGetVolume(ctx context.Context, req *csi.ControllerGetVolumeRequest) (*csi.ControllerGetVolumeResponse, error) {
	return controllerByID(ctx, c, req, controllerserver.Services.ControllerGetVolume, controllerserver.Clients.ControllerGetVolume)
}

// ControllerGetVolumeHealth implements csi.ControllerServer. That a server is silent
// is an answer.
func (c *Controller) ControllerGetVolumeHealth(ctx context.Context, req *csi.ControllerGetVolumeHealthRequest) (*csi.ControllerGetVolumeHealthResponse, error) {
	w, err := c.Pools.byID(req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	resp, err := controllerAt(ctx, c, w, req, controllerserver.Services.ControllerGetVolumeHealth, controllerserver.Clients.ControllerGetVolumeHealth)
	if err != nil && w != nil {
		if silent := w.condition(); silent != nil {
			return &csi.ControllerGetVolumeHealthResponse{VolumeHealth: translate.VolumeHealth(req.GetVolumeId(), silent)}, nil
		}
	}
	return resp, err
}

// ControllerGetCapabilities implements csi.ControllerServer: they are the same for all
// pools.
func (c *Controller) ControllerGetCapabilities(ctx context.Context, req *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	return c.Local.ControllerGetCapabilities(ctx, req)
}

// ListVolumes implements csi.ControllerServer: those of Local, then those of each nfs
// pool of the configuration. Of exports that only StorageClasses name nobody has a
// list. It fails if it would be incomplete.
func (c *Controller) ListVolumes(ctx context.Context, req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	entries, next, err := page(ctx, c.Pools, req, func(ctx context.Context, w *Worker, token string, limit int32) ([]*csi.ListVolumesResponse_Entry, string, error) {
		resp, err := controllerAt(ctx, c, w, &csi.ListVolumesRequest{StartingToken: token, MaxEntries: limit}, controllerserver.Services.ListVolumes, controllerserver.Clients.ListVolumes)
		return resp.GetEntries(), resp.GetNextToken(), err
	}, func(e *csi.ListVolumesResponse_Entry) string { return e.GetVolume().GetVolumeId() })
	if err != nil {
		return nil, err
	}
	return &csi.ListVolumesResponse{Entries: entries, NextToken: next}, nil
}

// ControllerListVolumeHealth implements csi.ControllerServer, as ListVolumes.
func (c *Controller) ControllerListVolumeHealth(ctx context.Context, req *csi.ControllerListVolumeHealthRequest) (*csi.ControllerListVolumeHealthResponse, error) {
	entries, next, err := page(ctx, c.Pools, req, func(ctx context.Context, w *Worker, token string, limit int32) ([]*csi.VolumeHealth, string, error) {
		resp, err := controllerAt(ctx, c, w, &csi.ControllerListVolumeHealthRequest{StartingToken: token, MaxEntries: limit}, controllerserver.Services.ControllerListVolumeHealth, controllerserver.Clients.ControllerListVolumeHealth)
		return resp.GetEntries(), resp.GetNextToken(), err
	}, (*csi.VolumeHealth).GetVolumeId)
	if err != nil {
		return nil, err
	}
	return &csi.ControllerListVolumeHealthResponse{Entries: entries, NextToken: next}, nil
}

// stale refuses a token that nobody here made.
func stale(token string) error {
	return volume.Errorf(volume.ErrStaleToken, "starting_token %q was not made by this driver: list from the beginning", token)
}
