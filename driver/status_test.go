package driver_test

import (
	"encoding/json"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/disk"
	"github.com/trivet-csi/trivet/backend/local"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/cluster/status"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
)

// report reads /status.
func report(t *testing.T, address string) (r status.Report) {
	t.Helper()
	code, body := get(t, address, "/status")
	if code != http.StatusOK {
		t.Fatalf("/status: got code %d and %q", code, body)
	}
	must(t, json.Unmarshal([]byte(body), &r))
	return r
}

// TestStatus: the report of a driver contains its pool, volume, snapshot, device and calls.
func TestStatus(t *testing.T) {
	o := options(t, loop.Kind)
	o.HTTPAddress = backendtest.FreeAddress(t)
	d := backendtest.StartWith(t, o)
	kind := backendtest.Kind{FSType: "ext4"}
	v := create(t, d, kind, 64)
	snapshot, err := d.Control.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: "s", SourceVolumeId: v.GetVolumeId()})
	must(t, err)
	staging := t.TempDir()
	_, err = d.Node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{
		VolumeId: v.GetVolumeId(), StagingTargetPath: staging, VolumeContext: v.GetVolumeContext(),
		VolumeCapability: kind.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER),
	})
	must(t, err)
	r := report(t, o.HTTPAddress)
	_, err = d.Node.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: v.GetVolumeId(), StagingTargetPath: staging})
	must(t, err)
	_, err = d.Control.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: snapshot.GetSnapshot().GetSnapshotId()})
	must(t, err)
	_, err = d.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: v.GetVolumeId()})
	must(t, err)
	await(t, "the removal of the snapshot", func() bool {
		now := report(t, o.HTTPAddress).Pools[0]
		return now.Snapshots == 0 && now.Trash == 0
	})
	if len(r.Processes) != 1 || r.Processes[0].Node != o.NodeID || r.Processes[0].Problem != "" {
		t.Fatalf("got processes %+v, want one without a problem", r.Processes)
	}
	calls := map[string]status.Call{}
	for _, c := range r.Processes[0].Calls {
		calls[c.Method] = c
	}
	if c := calls["CreateVolume"]; c.Count != 1 || c.Failed != 0 || c.TotalSeconds <= 0 || c.Running != 0 {
		t.Errorf("got %+v for CreateVolume, want one completed call", c)
	}
	if len(r.Pools) != 1 || r.Pools[0].UUID == "" || r.Pools[0].Volumes != 1 || r.Pools[0].Snapshots != 1 || r.Pools[0].SizeBytes == 0 {
		t.Errorf("got pools %+v, want one with one volume and one snapshot", r.Pools)
	}
	if len(r.Snapshots) != 1 || r.Snapshots[0].Source != v.GetVolumeId() {
		t.Errorf("got snapshots %+v, want one of %s", r.Snapshots, v.GetVolumeId())
	}
	if len(r.Volumes) != 1 {
		t.Fatalf("got volumes %+v, want one", r.Volumes)
	}
	got := r.Volumes[0]
	if got.ID != v.GetVolumeId() || got.SizeBytes != 64*mib || got.UsedBytes <= 0 || got.Content != "ext4" || got.Device == "" || !got.Staged || got.IO == nil || got.IO.WrittenBytes == 0 || len(got.Health) != 0 {
		t.Errorf("got volume %+v, want %s with 64 MiB of ext4 and a device that was written to", got, v.GetVolumeId())
	}
}

// TestLiveSnapshots: the report tells of which volumes no snapshot can be taken while they are in use.
func TestLiveSnapshots(t *testing.T) {
	directory := func(fsType string) pool.Config {
		return pool.Config{Name: "default", Directory: pool.Directory{Path: filepath.Join(testenv.Filesystem(t, fsType, "256M"), "pool")}}
	}
	device, _, _ := testenv.Disk(t, 256*mib)
	filesystem, tree := backendtest.Kind{FSType: "ext4"}, backendtest.Kind{Features: backendtest.Directory}
	for name, tc := range map[string]struct {
		kind backend.Kind
		of   backendtest.Kind
		pool pool.Config
		none bool
	}{
		"image":              {loop.Kind, filesystem, directory("ext4"), false},
		"directory on btrfs": {local.Kind, tree, directory("btrfs"), false},
		"directory on ext4":  {local.Kind, tree, directory("ext4"), true},
		"disk":               {disk.Kind, filesystem, pool.Config{Name: "disks", Section: &disk.Disks{Match: []string{device}}}, true},
	} {
		t.Run(name, func(t *testing.T) {
			o := options(t, tc.kind)
			o.HTTPAddress, o.Config.Pools = backendtest.FreeAddress(t), []pool.Config{tc.pool}
			create(t, backendtest.StartWith(t, o), tc.of, 64)
			if r := report(t, o.HTTPAddress); len(r.Volumes) != 1 || r.Volumes[0].NoLiveSnapshots != tc.none {
				t.Errorf("got %+v, want one volume with noLiveSnapshots %t", r.Volumes, tc.none)
			}
		})
	}
}

// TestStatusOfNodes: the report of the controller's driver contains the reports of the nodes.
func TestStatusOfNodes(t *testing.T) {
	c := backendtest.NewCluster(t)
	_, address := startNode(t, c)
	var r status.Report
	await(t, "the report of node a", func() bool {
		r = reportOf(t, c, driver.ForwardingNode{Name: "a", Address: address})
		return len(r.Pools) == 1 && r.Pools[0].Node == "a" && r.Pools[0].Problem == ""
	})
	if len(r.Processes) != 2 || r.Processes[0].Node != "" || r.Processes[1].Problem != "" || r.Processes[1].CertificateExpires.IsZero() {
		t.Errorf("got processes %+v, want those of the controller and of node a", r.Processes)
	}
}

// TestStatusOfSilentNode: the report contains the reason why a node did not report.
func TestStatusOfSilentNode(t *testing.T) {
	r := reportOf(t, backendtest.NewCluster(t), driver.ForwardingNode{Name: "b", Address: backendtest.FreeAddress(t)})
	if len(r.Processes) != 2 || !strings.Contains(r.Processes[1].Problem, `node "b"`) {
		t.Errorf("got processes %+v, want a problem of node b", r.Processes)
	}
}

// reportOf returns the report of the controller's driver of a cluster. The first call starts the driver.
func reportOf(t *testing.T, c *backendtest.Cluster, node driver.ForwardingNode) status.Report {
	t.Helper()
	if c.Router == nil {
		o := c.RouterOptions(t, []driver.ForwardingNode{node}, loop.Kind)
		o.HTTPAddress = backendtest.FreeAddress(t)
		c.Router = backendtest.StartWith(t, o)
	}
	return report(t, c.Router.Options.HTTPAddress)
}
