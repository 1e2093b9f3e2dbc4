package router_test

import (
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// twoNodes are the controller's driver and those of two nodes.
func twoNodes(t *testing.T) *backendtest.Cluster {
	t.Helper()
	dir := testenv.Filesystem(t, "xfs", "64G")
	return backendtest.StartCluster(t, []string{filepath.Join(dir, "a"), filepath.Join(dir, "b")}, loop.Kind)
}

// TestLife takes a volume on the second of two nodes through its whole life.
func TestLife(t *testing.T) {
	c := twoNodes(t)
	d, ctx := c.Member(1), t.Context()
	info, err := d.Node.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	must(t, err)
	xfs := backendtest.Kind{FSType: "xfs"}.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)
	created, err := d.Control.CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name: "v", CapacityRange: &csi.CapacityRange{RequiredBytes: 512 * mib}, VolumeCapabilities: []*csi.VolumeCapability{xfs},
		AccessibilityRequirements: &csi.TopologyRequirement{Preferred: []*csi.Topology{info.GetAccessibleTopology()}},
	})
	must(t, err)
	id := created.GetVolume().GetVolumeId()
	publish := &csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: info.GetNodeId(), VolumeCapability: xfs, Readonly: true}
	published, err := d.Control.ControllerPublishVolume(ctx, publish)
	must(t, err)
	if published.GetPublishContext()["csi.trivet.dev/readonly"] != "true" {
		t.Errorf("published read-only with %v", published)
	}
	publish.NodeId = c.Nodes[0].Options.NodeID
	_, err = d.Control.ControllerPublishVolume(ctx, publish)
	wantCode(t, err, codes.NotFound, "node-2.example")
	publish.NodeId, publish.VolumeCapability = info.GetNodeId(), capability()
	_, err = d.Control.ControllerPublishVolume(ctx, publish)
	wantCode(t, err, codes.FailedPrecondition, "ext4")

	staging, target := t.TempDir(), filepath.Join(t.TempDir(), "target")
	_, err = d.Node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: xfs})
	must(t, err)
	_, err = d.Node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: staging, TargetPath: target, VolumeCapability: xfs})
	must(t, err)
	must(t, os.WriteFile(filepath.Join(target, "file"), []byte("content"), 0o600))
	_, err = d.Control.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
	wantCode(t, err, codes.FailedPrecondition, "in use")
	grown, err := d.Control.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: 1024 * mib}})
	if err != nil || grown.GetCapacityBytes() != 1024*mib || !grown.GetNodeExpansionRequired() {
		t.Errorf("expanded: %v, %v", grown, err)
	}
	_, err = d.Node.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: id, VolumePath: target})
	must(t, err)
	stats, err := d.Node.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: target})
	if err != nil || stats.GetUsage()[0].GetTotal() < 700*mib {
		t.Errorf("stats: %v, %v", stats, err)
	}
	got, err := d.Control.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{VolumeId: id})
	if err != nil || got.GetVolume().GetCapacityBytes() != 1024*mib || got.GetStatus() != nil {
		t.Errorf("got %v, %v", got, err)
	}
	_, err = d.Node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
	must(t, err)
	_, err = d.Node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
	must(t, err)
	_, err = d.Control.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: info.GetNodeId()})
	must(t, err)
	for range 2 {
		_, err = d.Control.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
		must(t, err)
	}
	_, err = d.Control.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{VolumeId: id})
	wantCode(t, err, codes.NotFound)
}

// TestOneVolumePerName: creates of one name at once, nowhere in particular, make one
// volume between them.
func TestOneVolumePerName(t *testing.T) {
	c := twoNodes(t)
	ids := make([]string, 8)
	var calls sync.WaitGroup
	for i := range ids {
		calls.Go(func() {
			resp, err := c.Router.Control.CreateVolume(t.Context(), request("v"))
			if status.Code(err) != codes.Aborted && err != nil {
				t.Error(err)
			}
			ids[i] = resp.GetVolume().GetVolumeId()
		})
	}
	calls.Wait()
	list, err := c.Router.Control.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	must(t, err)
	if len(list.GetEntries()) != 1 {
		t.Fatalf("there are %v", list)
	}
	for _, id := range ids {
		if id != "" && id != list.GetEntries()[0].GetVolume().GetVolumeId() {
			t.Errorf("answered %s, there is %v", id, list)
		}
	}
}

// TestCapabilities: what nobody records is not promised.
func TestCapabilities(t *testing.T) {
	c := twoNodes(t)
	resp, err := c.Router.Control.ControllerGetCapabilities(t.Context(), &csi.ControllerGetCapabilitiesRequest{})
	must(t, err)
	has := map[csi.ControllerServiceCapability_RPC_Type]bool{}
	for _, one := range resp.GetCapabilities() {
		has[one.GetRpc().GetType()] = true
	}
	for _, want := range []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME, csi.ControllerServiceCapability_RPC_EXPAND_VOLUME,
		csi.ControllerServiceCapability_RPC_GET_CAPACITY, csi.ControllerServiceCapability_RPC_LIST_VOLUME_HEALTH,
	} {
		if !has[want] {
			t.Errorf("%v is missing", want)
		}
	}
	if has[csi.ControllerServiceCapability_RPC_LIST_VOLUMES_PUBLISHED_NODES] || has[csi.ControllerServiceCapability_RPC_PUBLISH_READONLY] {
		t.Errorf("it has %v", has)
	}
}
