package grpcserver

import (
	"context"
	"fmt"
	"path"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/trivet-csi/trivet/volume"
)

// inFlight contains the running calls that change an object.
type inFlight struct {
	mu      sync.Mutex
	methods map[string]string // the name of the running method, by the key of the changed object
}

// OneAtATime returns an interceptor that allows one mutating call per volume, snapshot or group
// at a time (CSI specification, "Concurrency"). Calls that only read are not limited.
func OneAtATime() grpc.UnaryServerInterceptor {
	f := &inFlight{methods: map[string]string{}}
	return f.intercept
}

// intercept rejects a call while another call changes the same object (ErrPending).
func (f *inFlight) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	key := changedObject(req)
	if key == "" {
		return handler(ctx, req)
	}
	method := path.Base(info.FullMethod)
	f.mu.Lock()
	other, busy := f.methods[key]
	if !busy {
		f.methods[key] = method
	}
	f.mu.Unlock()
	if busy {
		return nil, toStatus(volume.Errorf(volume.ErrPending, "%s for %s is still under way: try again when it has ended", other, key))
	}
	defer func() {
		f.mu.Lock()
		delete(f.methods, key)
		f.mu.Unlock()
	}()
	return handler(ctx, req)
}

// changedObject returns the key of the object that a request changes, "" if it changes no object. The name in a
// create request and the ID of the created object give the same key.
func changedObject(req any) string {
	switch r := req.(type) {
	case *csi.CreateVolumeRequest:
		return volumeKey(volume.NameFor(r.GetName()))
	case *csi.CreateSnapshotRequest:
		return snapshotKey(volume.NameFor(r.GetName()))
	case *csi.CreateVolumeGroupSnapshotRequest:
		return snapshotKey(volume.GroupName(r.GetName()))
	case *csi.DeleteSnapshotRequest:
		return snapshotKey(nameIn(r.GetSnapshotId(), volume.ParseSnapshotID))
	case *csi.DeleteVolumeGroupSnapshotRequest:
		return snapshotKey(nameIn(r.GetGroupSnapshotId(), volume.ParseGroupID))
	case *csi.DeleteVolumeRequest, *csi.ControllerPublishVolumeRequest, *csi.ControllerUnpublishVolumeRequest,
		*csi.ControllerExpandVolumeRequest, *csi.ControllerModifyVolumeRequest, *csi.NodeStageVolumeRequest, *csi.NodeUnstageVolumeRequest,
		*csi.NodePublishVolumeRequest, *csi.NodeUnpublishVolumeRequest, *csi.NodeExpandVolumeRequest:
		return volumeKey(nameIn(r.(interface{ GetVolumeId() string }).GetVolumeId(), volume.ParseID))
	}
	return ""
}

// volumeKey and snapshotKey return the results of changedObject for the name of a volume, and of a snapshot or group.
func volumeKey(name string) string { return fmt.Sprintf("volume %q", name) }

func snapshotKey(name string) string { return fmt.Sprintf("snapshot %q", name) }

// nameIn returns the name in an ID, or text itself if it is not an ID.
func nameIn(text string, parse func(string) (volume.ID, error)) string {
	if id, err := parse(text); err == nil {
		return id.Name
	}
	return text
}
