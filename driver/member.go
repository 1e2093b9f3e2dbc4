package driver

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-csi/trivet/export"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/volume"
)

// member is the Service that a node's driver serves to the controller's driver. It answers the calls
// for the node's own pools and, for shared pools, those that copy a volume: only the node where
// the volume is staged can freeze it.
type member struct {
	relay.Service
	exports *export.Relay
}

// Call implements relay.Service.
func (m *member) Call(ctx context.Context, method string, req proto.Message) (proto.Message, error) {
	switch r := req.(type) {
	case *csi.CreateSnapshotRequest, *csi.CreateVolumeGroupSnapshotRequest:
		return m.exports.Call(ctx, method, req)
	case *csi.CreateVolumeRequest:
		if id, err := volume.ParseID(r.GetVolumeContentSource().GetVolume().GetVolumeId()); err == nil && id.Shared() {
			return m.exports.Call(ctx, method, req)
		}
	}
	return m.Service.Call(ctx, method, req)
}
