package flexvolume_test

import (
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// testWayOut is what docs/flexvolume.md tells: the driver is given the pool, and a
// PersistentVolume with a csi source has the very volume that FlexVolume had.
func testWayOut(t *testing.T, binary string) {
	k := newKubelet(t, binary, testenv.Filesystem(t, "xfs", "1G"))
	web := k.target("web")
	k.succeed("loop", "mount", web, options("size", "32Mi"))
	k.write(filepath.Join(web, "file"), "kept")
	k.succeed("loop", "unmount", web)

	config := filepath.Join(k.plugins, "trivet~loop", "config.yaml")
	id := k.volumeID(binary, config)
	node := startDriver(t, binary, config)
	capability := &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
	}
	staging, target := t.TempDir(), filepath.Join(t.TempDir(), "target")
	_, err := node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability})
	must(t, err)
	_, err = node.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: staging, TargetPath: target, VolumeCapability: capability})
	must(t, err)
	k.read(filepath.Join(target, "file"), "kept")
	k.refuse("PersistentVolumes with a csi source", "loop", "mount", k.target("web"), options())
	_, err = node.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
	must(t, err)
	_, err = node.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
	must(t, err)
}

// volumeID is that of the only volume, as the documentation has it found.
func (k *kubelet) volumeID(binary, config string) string {
	k.t.Helper()
	out := testenv.Run(k.t, binary, "volumes", "--config", config, "--state-dir", k.state, "-o", "json")
	var list []struct{ ID, Name string }
	if err := json.Unmarshal([]byte(out), &list); err != nil || len(list) != 1 || list[0].Name != "pv" {
		k.t.Fatalf("%s: %v", out, err)
	}
	return list[0].ID
}

// startDriver starts the driver, and waits until it serves.
func startDriver(t *testing.T, binary, config string) csi.NodeClient {
	t.Helper()
	socket := "unix://" + t.TempDir() + "/csi.sock"
	c := exec.Command(binary, "driver", "--endpoint", socket, "--node-id", "n", "--config", config, "--state-dir", t.TempDir(), "--http-address", "")
	c.Stderr = os.Stderr
	must(t, c.Start())
	t.Cleanup(func() { _ = c.Process.Kill(); _ = c.Wait() })
	conn, err := grpc.NewClient(socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for ready := false; !ready; {
		resp, err := csi.NewIdentityClient(conn).Probe(ctx, &csi.ProbeRequest{}, grpc.WaitForReady(true))
		must(t, err)
		ready = resp.GetReady().GetValue()
	}
	return csi.NewNodeClient(conn)
}
