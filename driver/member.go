package driver

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/volume"
	"github.com/trivet-csi/trivet/worker"
)

// member is what a node's driver serves the controller's: its own pools, and of shared
// ones what only the node can do that has a volume staged: to copy it at one moment.
type member struct {
	controllerserver.Services
	relay *worker.Controller
}

// CreateSnapshot implements csi.ControllerServer.
func (m *member) CreateSnapshot(ctx context.Context, req *csi.CreateSnapshotRequest) (*csi.CreateSnapshotResponse, error) {
	return m.relay.CreateSnapshot(ctx, req)
}

// CreateVolumeGroupSnapshot implements csi.GroupControllerServer.
func (m *member) CreateVolumeGroupSnapshot(ctx context.Context, req *csi.CreateVolumeGroupSnapshotRequest) (*csi.CreateVolumeGroupSnapshotResponse, error) {
	return m.relay.CreateVolumeGroupSnapshot(ctx, req)
}

// CreateVolume implements csi.ControllerServer.
func (m *member) CreateVolume(ctx context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	if id, err := volume.ParseID(req.GetVolumeContentSource().GetVolume().GetVolumeId()); err == nil && id.Shared() {
		return m.relay.CreateVolume(ctx, req)
	}
	return m.Services.CreateVolume(ctx, req)
}
