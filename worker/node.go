package worker

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/trivet-csi/trivet/internal/translate"
)

// Node implements csi.NodeServer: what concerns servers by their workers, all else by
// Local.
type Node struct {
	csi.UnimplementedNodeServer
	Pools *Pools
	Local csi.NodeServer
}

// nodeAt makes a call at a worker, or locally if that is nil; teardown: also while its
// server is silent.
func nodeAt[Req, Resp any](
	ctx context.Context, n *Node, w *Worker, teardown bool, req Req,
	local func(csi.NodeServer, context.Context, Req) (Resp, error),
	forward func(csi.NodeClient, context.Context, Req, ...grpc.CallOption) (Resp, error),
) (Resp, error) {
	if w == nil {
		return local(n.Local, ctx, req)
	}
	return invoke(ctx, w, teardown, func(ctx context.Context, p *process) (Resp, error) { return forward(p.node, ctx, req) })
}

// NodeStageVolume implements csi.NodeServer.
func (n *Node) NodeStageVolume(ctx context.Context, req *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	w, err := n.Pools.toMount(req.GetVolumeId(), req.GetVolumeContext(), flagsOf(req), req.GetStagingTargetPath())
	if err != nil {
		return nil, err
	}
	return nodeAt(ctx, n, w, false, req, csi.NodeServer.NodeStageVolume, csi.NodeClient.NodeStageVolume)
}

// NodePublishVolume implements csi.NodeServer.
func (n *Node) NodePublishVolume(ctx context.Context, req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	w, err := n.Pools.toMount(req.GetVolumeId(), req.GetVolumeContext(), flagsOf(req), req.GetStagingTargetPath())
	if err != nil {
		return nil, err
	}
	return nodeAt(ctx, n, w, false, req, csi.NodeServer.NodePublishVolume, csi.NodeClient.NodePublishVolume)
}

func flagsOf(req interface {
	GetVolumeCapability() *csi.VolumeCapability
},
) []string {
	return req.GetVolumeCapability().GetMount().GetMountFlags()
}

// NodeUnpublishVolume implements csi.NodeServer.
func (n *Node) NodeUnpublishVolume(ctx context.Context, req *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	w, err := n.Pools.onNode(req.GetVolumeId(), nil, nil, req.GetTargetPath())
	if err != nil {
		return nil, err
	}
	return nodeAt(ctx, n, w, true, req, csi.NodeServer.NodeUnpublishVolume, csi.NodeClient.NodeUnpublishVolume)
}

// NodeUnstageVolume implements csi.NodeServer.
func (n *Node) NodeUnstageVolume(ctx context.Context, req *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	w, err := n.Pools.onNode(req.GetVolumeId(), nil, nil, req.GetStagingTargetPath())
	if err != nil {
		return nil, err
	}
	return nodeAt(ctx, n, w, true, req, csi.NodeServer.NodeUnstageVolume, csi.NodeClient.NodeUnstageVolume)
}

// NodeExpandVolume implements csi.NodeServer.
func (n *Node) NodeExpandVolume(ctx context.Context, req *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	w, err := n.Pools.onNode(req.GetVolumeId(), nil, nil, req.GetVolumePath())
	if err != nil {
		return nil, err
	}
	return nodeAt(ctx, n, w, false, req, csi.NodeServer.NodeExpandVolume, csi.NodeClient.NodeExpandVolume)
}

// NodeGetVolumeStats implements csi.NodeServer.
func (n *Node) NodeGetVolumeStats(ctx context.Context, req *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	w, err := n.Pools.onNode(req.GetVolumeId(), nil, nil, req.GetVolumePath())
	if err != nil {
		return nil, err
	}
	return nodeAt(ctx, n, w, false, req, csi.NodeServer.NodeGetVolumeStats, csi.NodeClient.NodeGetVolumeStats)
}

// NodeGetVolumeHealth implements csi.NodeServer. That a server is silent is an answer.
func (n *Node) NodeGetVolumeHealth(ctx context.Context, req *csi.NodeGetVolumeHealthRequest) (*csi.NodeGetVolumeHealthResponse, error) {
	path := req.GetVolumePublishPath()
	if path == "" {
		path = req.GetStagingTargetPath()
	}
	w, err := n.Pools.onNode(req.GetVolumeId(), nil, nil, path)
	if err != nil {
		return nil, err
	}
	resp, err := nodeAt(ctx, n, w, false, req, csi.NodeServer.NodeGetVolumeHealth, csi.NodeClient.NodeGetVolumeHealth)
	if err != nil && w != nil {
		if silent := w.condition(); silent != nil {
			return &csi.NodeGetVolumeHealthResponse{VolumeHealth: translate.VolumeHealth(req.GetVolumeId(), silent)}, nil
		}
	}
	return resp, err
}

// NodeGetCapabilities implements csi.NodeServer: they are the same for all pools.
func (n *Node) NodeGetCapabilities(ctx context.Context, req *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	return n.Local.NodeGetCapabilities(ctx, req)
}

// NodeGetInfo implements csi.NodeServer.
func (n *Node) NodeGetInfo(ctx context.Context, req *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return n.Local.NodeGetInfo(ctx, req)
}

// NodeGetStorageHealth implements csi.NodeServer: what Local says, what the workers
// last reported, and which servers are silent. CSI wants one message per status and
// reason.
func (n *Node) NodeGetStorageHealth(ctx context.Context, req *csi.NodeGetStorageHealthRequest) (*csi.NodeGetStorageHealthResponse, error) {
	resp, err := n.Local.NodeGetStorageHealth(ctx, req)
	if err != nil {
		return nil, err
	}
	for _, w := range n.Pools.all() {
		for _, h := range w.storageHealth() {
			add(resp, h)
		}
	}
	return resp, nil
}

func add(resp *csi.NodeGetStorageHealthResponse, h *csi.NodeGetStorageHealthResponse_StorageBackendHealth) {
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
