package export

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// Relay is a relay.Service. The workers answer the calls for NFS servers, Local answers all
// others.
type Relay struct {
	Pools *Pools
	Local relay.Service
}

// row describes which service answers a call, and how.
type row struct {
	// worker selects the worker that answers. It returns nil if Local answers. The default is ofIDs.
	worker func(*Pools, proto.Message) (*Worker, error)
	// teardown is true if the worker answers even if its server is silent.
	teardown bool
	// silent returns the response for a silent server. If silent is nil, the call fails.
	silent func(volumeID string, condition []backend.Condition) proto.Message
	// merge, if not nil, answers with the combined responses of Local and of all workers.
	merge func(context.Context, *Relay, proto.Message) (proto.Message, error)
}

// rows contains the calls that need more than routing by the IDs in the request. Local answers calls without an
// ID, for example those for capabilities, which are the same for all pools.
var rows = map[string]row{
	csi.Controller_CreateVolume_FullMethodName:               {worker: ofParameters},
	csi.Controller_GetCapacity_FullMethodName:                {worker: ofParameters},
	csi.Controller_ControllerGetVolumeHealth_FullMethodName:  {silent: silentVolume},
	csi.Controller_ListVolumes_FullMethodName:                {merge: mergePages(relay.Volumes)},
	csi.Controller_ControllerListVolumeHealth_FullMethodName: {merge: mergePages(relay.VolumeHealths)},
	csi.Controller_ListSnapshots_FullMethodName:              {merge: listSnapshots},

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
	service, w, err := r.route(row, req)
	if err != nil {
		return nil, err
	}
	resp, err := service.Call(ctx, method, req)
	if err != nil && w != nil && row.silent != nil {
		if condition := w.condition(); condition != nil {
			return row.silent(req.(volumeCall).GetVolumeId(), condition), nil
		}
	}
	return resp, err
}

// Stream implements relay.Service.
func (r *Relay) Stream(ctx context.Context, method string, req proto.Message, send func(any) error) error {
	service, _, err := r.route(rows[method], req)
	if err != nil {
		return err
	}
	return service.Stream(ctx, method, req, send)
}

// route returns the service that answers a call, and its worker; the worker of Local is nil.
func (r *Relay) route(row row, req proto.Message) (relay.Service, *Worker, error) {
	worker := row.worker
	if worker == nil {
		worker = ofIDs
	}
	w, err := worker(r.Pools, req)
	if w == nil || err != nil {
		return r.Local, nil, err
	}
	return workerService{w, row.teardown}, w, nil
}

// volumeCall is a request about one volume.
type volumeCall interface{ GetVolumeId() string }

// ofParameters returns the worker for new volumes with the parameters of a request, or nil if Local
// answers. It returns ErrInvalid if the parameters need an nfs pool that is not configured.
func ofParameters(ps *Pools, req proto.Message) (*Worker, error) {
	p, err := ps.options.Kinds.Parse(req.(interface{ GetParameters() map[string]string }).GetParameters())
	if err != nil {
		return nil, err
	}
	if _, configured := ps.configured(p.Pool); !configured && !ps.options.Kinds.Shared(p) {
		return nil, nil //nolint:nilnil // Local answers
	}
	if p.Pool == "" && len(ps.options.Pools) > 0 {
		p.Pool = ps.options.Pools[0].Name
	}
	if w := ps.byName(p.Pool); w != nil {
		return w, nil
	}
	if p.Pool == "" {
		return nil, volume.Errorf(volume.ErrInvalid, "parameter %s=%q: the configuration has no nfs pool: add one, or name %s and %s of an export in the StorageClass", volume.ParamBackend, p.Backend, volume.ParamServer, volume.ParamShare)
	}
	return nil, volume.Errorf(volume.ErrInvalid, "parameter %s=%q: backend %s needs an nfs pool, and the configuration has none of that name (it has %s): use one of these, or add that pool", volume.ParamPool, p.Pool, p.Backend, ps.names())
}

// ofIDs returns the worker of the pool in the IDs of a request, or nil if the request contains no ID, or the
// pool is node-local.
func ofIDs(ps *Pools, req proto.Message) (*Worker, error) {
	ids, err := relay.IDs(req)
	if len(ids) == 0 || err != nil {
		return nil, err
	}
	return ps.byID(ids[0])
}

// byID returns the worker of the pool in an ID, or nil if the pool is node-local. It returns ErrUnavailable
// if the configuration has no such pool.
func (ps *Pools) byID(id volume.ID) (*Worker, error) {
	if !id.Shared() {
		return nil, nil //nolint:nilnil // Local answers
	}
	if w := ps.byName(id.Pool); w != nil {
		return w, nil
	}
	return nil, volume.Errorf(volume.ErrUnavailable, "%s: the configuration of this driver has no nfs pool %q (it has %s): add that pool", id, id.Pool, ps.names())
}

// toMount returns the worker for a call that mounts a volume; see forNode.
func toMount(ps *Pools, req proto.Message) (*Worker, error) {
	r := req.(interface {
		volumeCall
		GetVolumeContext() map[string]string
		GetVolumeCapability() *csi.VolumeCapability
		GetStagingTargetPath() string
	})
	w, err := ps.forNode(r.GetVolumeId(), r.GetVolumeContext(), r.GetVolumeCapability().GetMount().GetMountFlags(), r.GetStagingTargetPath())
	if err == nil && w != nil && ps.options.Refused != nil {
		return nil, fmt.Errorf("volume %q: %w", r.GetVolumeId(), ps.options.Refused)
	}
	return w, err
}

// ofPath returns the worker for a call that has a path and no volume context; see forNode.
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
	return ps.forNode(req.(volumeCall).GetVolumeId(), nil, nil, path)
}

// forNode returns the worker for a call of the Node service, or nil if Local answers. text is the volume ID,
// which determines the worker if it contains a configured nfs pool. For a static volume, which has no
// record, the volume context or, in calls without one, the mount at path determines the worker. For a
// volume of a pool that is no longer configured, the mount at path determines it.
func (ps *Pools) forNode(text string, volumeContext map[string]string, flags []string, path string) (*Worker, error) {
	var unknownPool error
	if id, err := volume.ParseID(text); err == nil {
		w, err := ps.byID(id)
		if err == nil {
			return w, nil
		}
		unknownPool = err
	}
	if volume.IsInline(volumeContext) { // the author of the pod writes the context, which must not select a server
		return nil, nil //nolint:nilnil // Local answers
	}
	server := volume.Attribute(volumeContext, volume.ParamServer)
	share, shareErr := volume.Share(volumeContext)
	if unknownPool == nil && text != "" && (server != "" || share != "" || shareErr != nil) { // the worker reports shareErr
		w, err := ps.static(server, mount.ParseEndpoint(flags))
		if err != nil {
			return nil, volume.Errorf(volume.ErrInvalid, "volume_context.%w", err)
		}
		return w, nil
	}
	if w, mountErr := ps.byMount(path); w != nil || mountErr != nil {
		return w, mountErr
	}
	return nil, unknownPool
}

// byMount returns the worker for the NFS mount at a path in the mount table, or nil if there is none.
func (ps *Pools) byMount(path string) (*Worker, error) {
	if !filepath.IsAbs(path) {
		return nil, nil //nolint:nilnil // Local answers
	}
	e, err := mount.OnPath(path)
	if err != nil || e == nil || !mount.IsNFS(e) {
		return nil, err
	}
	server, _, ok := mount.ParseNFSSource(e.Source)
	if !ok {
		return nil, volume.Errorf(volume.ErrPrecondition, "path %q: the source %q of the NFS mount at this path has no server, so it is left mounted: unmount it", path, e.Source)
	}
	return ps.static(server, mount.NFSEndpoint(e))
}

// silentVolume is the row.silent of ControllerGetVolumeHealth.
func silentVolume(id string, condition []backend.Condition) proto.Message {
	return &csi.ControllerGetVolumeHealthResponse{VolumeHealth: translate.VolumeHealth(id, condition)}
}

// silentMount is the row.silent of NodeGetVolumeHealth.
func silentMount(id string, condition []backend.Condition) proto.Message {
	return &csi.NodeGetVolumeHealthResponse{VolumeHealth: translate.VolumeHealth(id, condition)}
}
