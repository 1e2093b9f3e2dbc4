package router_test

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/volume"
)

// twoNodes starts the controller's driver and the drivers of two nodes.
func twoNodes(t *testing.T) *backendtest.Cluster {
	t.Helper()
	dir := testenv.Filesystem(t, "xfs", "64G")
	return backendtest.StartCluster(t, []string{filepath.Join(dir, "a"), filepath.Join(dir, "b")}, loop.Kind)
}

// TestVolumeLifecycle creates, publishes, stages, expands and deletes a volume on the second of two nodes.
func TestVolumeLifecycle(t *testing.T) {
	c := twoNodes(t)
	d, ctx := c.Member(1), t.Context()
	ok := func(_ proto.Message, err error) { t.Helper(); must(t, err) }
	fails := func(code codes.Code, text string) func(proto.Message, error) {
		return func(_ proto.Message, err error) { t.Helper(); wantCode(t, err, code, text) }
	}
	xfs := backendtest.Kind{FSType: "xfs"}.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)
	req := request("v", preferring("node-2.example"), sized(512*mib))
	req.VolumeCapabilities = []*csi.VolumeCapability{xfs}
	created, err := d.Control.CreateVolume(ctx, req)
	must(t, err)
	id := created.GetVolume().GetVolumeId()
	publish := &csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: "node-2.example", VolumeCapability: xfs, Readonly: true}
	published, err := d.Control.ControllerPublishVolume(ctx, publish)
	if err != nil || published.GetPublishContext()["csi.trivet.dev/readonly"] != "true" {
		t.Errorf("ControllerPublishVolume: got %v, %v, want a read-only publish context", published, err)
	}
	publish.NodeId = "node-1.example"
	fails(codes.NotFound, "node-2.example")(d.Control.ControllerPublishVolume(ctx, publish))
	publish.NodeId, publish.VolumeCapability = "node-2.example", capability()
	fails(codes.FailedPrecondition, "ext4")(d.Control.ControllerPublishVolume(ctx, publish))

	staging, target := t.TempDir(), filepath.Join(t.TempDir(), "target")
	ok(d.Node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: xfs}))
	ok(d.Node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: staging, TargetPath: target, VolumeCapability: xfs}))
	must(t, os.WriteFile(filepath.Join(target, "file"), []byte("content"), 0o600))
	fails(codes.FailedPrecondition, "in use")(d.Control.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id}))
	expanded, err := d.Control.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: 1024 * mib}})
	if err != nil || expanded.GetCapacityBytes() != 1024*mib || !expanded.GetNodeExpansionRequired() {
		t.Errorf("ControllerExpandVolume: got %v, %v, want 1 GiB and node expansion", expanded, err)
	}
	ok(d.Node.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: id, VolumePath: target}))
	stats, err := d.Node.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: target})
	if err != nil || stats.GetUsage()[0].GetTotal() < 700*mib {
		t.Errorf("NodeGetVolumeStats: got %v, %v, want at least 700 MiB", stats, err)
	}
	volume, err := d.Control.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{VolumeId: id})
	if err != nil || volume.GetVolume().GetCapacityBytes() != 1024*mib || volume.GetStatus() != nil {
		t.Errorf("ControllerGetVolume: got %v, %v, want 1 GiB and no status", volume, err)
	}
	ok(d.Node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target}))
	ok(d.Node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging}))
	ok(d.Control.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: "node-2.example"}))
	for range 2 {
		ok(d.Control.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id}))
	}
	fails(codes.NotFound, "")(d.Control.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{VolumeId: id}))
}

// TestOneVolumePerName: concurrent calls with one name and without a topology create one
// volume.
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
		t.Fatalf("got %d volumes, want 1: %v", len(list.GetEntries()), list)
	}
	for _, id := range ids {
		if id != "" && id != list.GetEntries()[0].GetVolume().GetVolumeId() {
			t.Errorf("CreateVolume: got %s, want the only listed volume %v", id, list)
		}
	}
}

// TestCapabilities: capabilities that need a record of publications are not advertised.
func TestCapabilities(t *testing.T) {
	c := twoNodes(t)
	resp, err := c.Router.Control.ControllerGetCapabilities(t.Context(), &csi.ControllerGetCapabilitiesRequest{})
	must(t, err)
	advertised := map[csi.ControllerServiceCapability_RPC_Type]bool{}
	for _, c := range resp.GetCapabilities() {
		advertised[c.GetRpc().GetType()] = true
	}
	for capability, want := range map[csi.ControllerServiceCapability_RPC_Type]bool{
		csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME: true, csi.ControllerServiceCapability_RPC_EXPAND_VOLUME: true,
		csi.ControllerServiceCapability_RPC_MODIFY_VOLUME: true,
		csi.ControllerServiceCapability_RPC_GET_CAPACITY:  true, csi.ControllerServiceCapability_RPC_LIST_VOLUME_HEALTH: true,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES_PUBLISHED_NODES: false, csi.ControllerServiceCapability_RPC_PUBLISH_READONLY: false,
	} {
		if advertised[capability] != want {
			t.Errorf("capability %v: got advertised=%t, want %t", capability, advertised[capability], want)
		}
	}
}

// TestModify: limits of I/O are changed on the node of the volume. The namespace of a volume, which FlexVolume changes by the same
// call, is not.
func TestModify(t *testing.T) {
	c := twoNodes(t)
	resp, err := c.Router.Control.CreateVolume(t.Context(), request("v", preferring("node-2.example")))
	must(t, err)
	modify := func(key, value string) error {
		_, err := c.Router.Control.ControllerModifyVolume(t.Context(), &csi.ControllerModifyVolumeRequest{
			VolumeId: resp.GetVolume().GetVolumeId(), MutableParameters: map[string]string{key: value},
		})
		return err
	}
	record := func() string {
		t.Helper()
		b, err := os.ReadFile(filepath.Join(c.Nodes[1].Pool(), "volumes/v/volume.json"))
		must(t, err)
		return string(b)
	}
	if strings.Contains(record(), "ioLimits") {
		t.Errorf("a new volume has the record %s, want no ioLimits", record())
	}
	must(t, modify("iopsRead", volume.NoIOLimit))
	if !strings.Contains(record(), "ioLimits") {
		t.Errorf("the modified volume has the record %s, want ioLimits", record())
	}
	wantCode(t, modify(volume.ParamNamespace, "team-a"), codes.InvalidArgument, volume.ParamNamespace, "is unknown")
	if strings.Contains(record(), "team-a") {
		t.Errorf("the volume has the record %s, want no namespace", record())
	}
}
