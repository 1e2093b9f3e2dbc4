package export

import (
	"cmp"
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/volume"
)

// Relay is a relay.Service: the workers answer the calls for NFS servers, Local answers
// all others.
type Relay struct {
	Pools *Pools
	Local relay.Service
}

// row says how a call is answered.
type row struct {
	// worker finds the worker that answers; nil: Local answers.
	worker func(*Pools, proto.Message) (*Worker, error)
	// teardown: the worker answers also while its server is silent.
	teardown bool
	// silent makes the response for a silent server; nil: the call fails.
	silent func(volumeID string, condition []backend.Condition) proto.Message
	// merge answers from Local and all workers.
	merge func(context.Context, *Relay, proto.Message) (proto.Message, error)
}

// rows are the calls that may concern a server. Local answers all others, such as those
// about capabilities, which are the same for all pools.
var rows = map[string]row{
	csi.Controller_CreateVolume_FullMethodName:               {worker: ofParameters},
	csi.Controller_GetCapacity_FullMethodName:                {worker: ofParameters},
	csi.Controller_DeleteVolume_FullMethodName:               {worker: ofVolume},
	csi.Controller_ControllerPublishVolume_FullMethodName:    {worker: ofVolume},
	csi.Controller_ControllerUnpublishVolume_FullMethodName:  {worker: ofVolume},
	csi.Controller_ControllerExpandVolume_FullMethodName:     {worker: ofVolume},
	csi.Controller_ControllerModifyVolume_FullMethodName:     {worker: ofVolume},
	csi.Controller_ValidateVolumeCapabilities_FullMethodName: {worker: ofVolume},
	csi.Controller_ControllerGetVolume_FullMethodName:        {worker: ofVolume},
	csi.Controller_ControllerGetVolumeHealth_FullMethodName:  {worker: ofVolume, silent: silentVolume},
	csi.Controller_ListVolumes_FullMethodName:                {merge: merged(relay.Volumes)},
	csi.Controller_ControllerListVolumeHealth_FullMethodName: {merge: merged(relay.VolumeHealths)},

	csi.Controller_CreateSnapshot_FullMethodName:                 {worker: ofSourceVolume},
	csi.Controller_DeleteSnapshot_FullMethodName:                 {worker: ofSnapshot},
	csi.Controller_GetSnapshot_FullMethodName:                    {worker: ofSnapshot},
	csi.Controller_ListSnapshots_FullMethodName:                  {merge: listSnapshots},
	csi.GroupController_CreateVolumeGroupSnapshot_FullMethodName: {worker: ofGroupSources},
	csi.GroupController_DeleteVolumeGroupSnapshot_FullMethodName: {worker: ofGroup},
	csi.GroupController_GetVolumeGroupSnapshot_FullMethodName:    {worker: ofGroup},
	csi.SnapshotMetadata_GetMetadataAllocated_FullMethodName:     {worker: ofSnapshot},
	csi.SnapshotMetadata_GetMetadataDelta_FullMethodName:         {worker: ofBaseSnapshot},

	csi.Node_NodeStageVolume_FullMethodName:      {worker: toMount},
	csi.Node_NodePublishVolume_FullMethodName:    {worker: toMount},
	csi.Node_NodeUnpublishVolume_FullMethodName:  {worker: ofPath, teardown: true},
	csi.Node_NodeUnstageVolume_FullMethodName:    {worker: ofPath, teardown: true},
	csi.Node_NodeExpandVolume_FullMethodName:     {worker: ofPath},
	csi.Node_NodeGetVolumeStats_FullMethodName:   {worker: ofPath},
	csi.Node_NodeGetVolumeHealth_FullMethodName:  {worker: ofPath, silent: silentMount},
	csi.Node_NodeGetStorageHealth_FullMethodName: {merge: storageHealth},
}

// Call implements relay.Service.
func (r *Relay) Call(ctx context.Context, method string, req proto.Message) (proto.Message, error) {
	row := rows[method]
	if row.merge != nil {
		return row.merge(ctx, r, req)
	}
	w, err := row.find(r.Pools, req)
	if err != nil {
		return nil, err
	}
	resp, err := r.at(w, row.teardown).Call(ctx, method, req)
	if err != nil && w != nil && row.silent != nil {
		if condition := w.condition(); condition != nil {
			return row.silent(req.(volumeCall).GetVolumeId(), condition), nil
		}
	}
	return resp, err
}

// Stream implements relay.Service.
func (r *Relay) Stream(ctx context.Context, method string, req proto.Message, send func(any) error) error {
	w, err := rows[method].find(r.Pools, req)
	if err != nil {
		return err
	}
	return r.at(w, false).Stream(ctx, method, req, send)
}

func (r row) find(ps *Pools, req proto.Message) (*Worker, error) {
	if r.worker == nil {
		return nil, nil //nolint:nilnil // Local answers
	}
	return r.worker(ps, req)
}

// at is the service of a worker; nil is Local.
func (r *Relay) at(w *Worker, teardown bool) relay.Service {
	if w == nil {
		return r.Local
	}
	return workerService{w, teardown}
}

// The requests of the rows, by the fields that are read here.
type (
	parametersCall interface{ GetParameters() map[string]string }
	volumeCall     interface{ GetVolumeId() string }
	snapshotCall   interface{ GetSnapshotId() string }
	groupCall      interface{ GetGroupSnapshotId() string }
	mountCall      interface {
		volumeCall
		GetVolumeContext() map[string]string
		GetVolumeCapability() *csi.VolumeCapability
		GetStagingTargetPath() string
	}
)

func ofParameters(ps *Pools, req proto.Message) (*Worker, error) {
	return ps.byParameters(req.(parametersCall).GetParameters())
}

func ofVolume(ps *Pools, req proto.Message) (*Worker, error) {
	return ps.having(volume.ParseID(req.(volumeCall).GetVolumeId()))
}

func ofSourceVolume(ps *Pools, req proto.Message) (*Worker, error) {
	return ps.having(volume.ParseID(req.(*csi.CreateSnapshotRequest).GetSourceVolumeId()))
}

func ofSnapshot(ps *Pools, req proto.Message) (*Worker, error) {
	return ps.having(volume.ParseSnapshotID(req.(snapshotCall).GetSnapshotId()))
}

// ofBaseSnapshot: both snapshots are in one pool.
func ofBaseSnapshot(ps *Pools, req proto.Message) (*Worker, error) {
	return ps.having(volume.ParseSnapshotID(req.(*csi.GetMetadataDeltaRequest).GetBaseSnapshotId()))
}

func ofGroup(ps *Pools, req proto.Message) (*Worker, error) {
	return ps.having(volume.ParseGroupID(req.(groupCall).GetGroupSnapshotId()))
}

// ofGroupSources: all volumes of a group are in one pool.
func ofGroupSources(ps *Pools, req proto.Message) (*Worker, error) {
	_, sources, err := controllerserver.GroupArgs(req.(*csi.CreateVolumeGroupSnapshotRequest))
	if err != nil {
		return nil, err
	}
	return ps.having(sources[0], nil)
}

func toMount(ps *Pools, req proto.Message) (*Worker, error) {
	r := req.(mountCall)
	return ps.toMount(r.GetVolumeId(), r.GetVolumeContext(), r.GetVolumeCapability().GetMount().GetMountFlags(), r.GetStagingTargetPath())
}

// ofPath is for calls of the Node service that name a volume and a path, and no context.
func ofPath(ps *Pools, req proto.Message) (*Worker, error) {
	var path string
	switch r := req.(type) {
	case *csi.NodeUnpublishVolumeRequest:
		path = r.GetTargetPath()
	case *csi.NodeUnstageVolumeRequest:
		path = r.GetStagingTargetPath()
	case *csi.NodeGetVolumeHealthRequest:
		path = cmp.Or(r.GetVolumePublishPath(), r.GetStagingTargetPath())
	case interface{ GetVolumePath() string }:
		path = r.GetVolumePath()
	}
	return ps.onNode(req.(volumeCall).GetVolumeId(), nil, nil, path)
}

func silentVolume(id string, condition []backend.Condition) proto.Message {
	return &csi.ControllerGetVolumeHealthResponse{VolumeHealth: translate.VolumeHealth(id, condition)}
}

func silentMount(id string, condition []backend.Condition) proto.Message {
	return &csi.NodeGetVolumeHealthResponse{VolumeHealth: translate.VolumeHealth(id, condition)}
}

// merged answers a list: the entries of Local, then those of each configured nfs pool.
// Pools that only StorageClasses name are not listed. It fails if it would be incomplete.
func merged[E any](list relay.List[E]) func(context.Context, *Relay, proto.Message) (proto.Message, error) {
	return func(ctx context.Context, r *Relay, req proto.Message) (proto.Message, error) {
		return page(ctx, r, req.(pageCall), list)
	}
}

// listSnapshots answers for one snapshot or one volume from where that is.
func listSnapshots(ctx context.Context, r *Relay, req proto.Message) (proto.Message, error) {
	find := ofSnapshot
	switch q := req.(*csi.ListSnapshotsRequest); {
	case q.GetSnapshotId() != "":
	case q.GetSourceVolumeId() != "":
		find = func(ps *Pools, _ proto.Message) (*Worker, error) {
			return ps.having(volume.ParseID(q.GetSourceVolumeId()))
		}
	default:
		return page(ctx, r, q, relay.Snapshots)
	}
	w, err := find(r.Pools, req)
	if err != nil {
		return nil, err
	}
	return r.at(w, false).Call(ctx, relay.Snapshots.Method, req)
}

// storageHealth adds to the answer of Local what the workers reported last, and which
// servers are silent. CSI requires one message per status and reason.
func storageHealth(ctx context.Context, r *Relay, req proto.Message) (proto.Message, error) {
	resp, err := relay.Call[*csi.NodeGetStorageHealthResponse](ctx, r.Local, csi.Node_NodeGetStorageHealth_FullMethodName, req)
	if err != nil {
		return nil, err
	}
	for _, w := range r.Pools.all() {
		for _, h := range w.storageHealth() {
			addHealth(resp, h)
		}
	}
	return resp, nil
}

func addHealth(resp *csi.NodeGetStorageHealthResponse, h *csi.NodeGetStorageHealthResponse_StorageBackendHealth) {
	for _, have := range resp.GetBackendHealth() {
		if have.GetStatus() == h.GetStatus() && have.GetReason() == h.GetReason() {
			have.Message += "; " + h.GetMessage()
			return
		}
	}
	resp.BackendHealth = append(resp.BackendHealth, &csi.NodeGetStorageHealthResponse_StorageBackendHealth{
		Status: h.GetStatus(), Reason: h.GetReason(), Message: h.GetMessage(),
	})
}
