package flexvolume_test

import (
	"encoding/json"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
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
	node := k.startDriver(binary, config).node
	staging, target := t.TempDir(), filepath.Join(t.TempDir(), "target")
	_, err := node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: capability})
	must(t, err)
	_, err = node.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: staging, TargetPath: target, VolumeCapability: capability})
	must(t, err)
	k.read(filepath.Join(target, "file"), "kept")
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
