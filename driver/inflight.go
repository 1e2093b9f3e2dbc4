package driver

import (
	"context"
	"path"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/trivet-csi/trivet/volume"
)

// inFlight lets one mutating call per volume through at a time (CSI
// specification, "Concurrency"). Calls that only look are not held up.
type inFlight struct {
	mu   sync.Mutex
	busy map[string]string // volume name: method
}

func newInFlight() *inFlight { return &inFlight{busy: map[string]string{}} }

func (f *inFlight) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	key := mutates(req)
	if key == "" {
		return handler(ctx, req)
	}
	method := path.Base(info.FullMethod)
	f.mu.Lock()
	other, busy := f.busy[key]
	if !busy {
		f.busy[key] = method
	}
	f.mu.Unlock()
	if busy {
		return nil, toStatus(volume.Errorf(volume.ErrPending, "%s for volume %q is still under way: try again when it has ended", other, key))
	}
	defer func() {
		f.mu.Lock()
		delete(f.busy, key)
		f.mu.Unlock()
	}()
	return handler(ctx, req)
}

// mutates is the key of the volume that a request changes, empty for one that
// changes none. A volume's name and its ID give the same key.
func mutates(req any) string {
	switch r := req.(type) {
	case *csi.CreateVolumeRequest:
		return volume.NameFor(r.GetName())
	case *csi.DeleteVolumeRequest, *csi.ControllerPublishVolumeRequest, *csi.ControllerUnpublishVolumeRequest,
		*csi.ControllerExpandVolumeRequest, *csi.NodeStageVolumeRequest, *csi.NodeUnstageVolumeRequest,
		*csi.NodePublishVolumeRequest, *csi.NodeUnpublishVolumeRequest, *csi.NodeExpandVolumeRequest:
		text := r.(interface{ GetVolumeId() string }).GetVolumeId()
		if id, err := volume.ParseID(text); err == nil {
			return id.Name
		}
		return text
	}
	return ""
}
