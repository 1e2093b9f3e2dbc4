package verify

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/volume"
)

// kind is a kind of volume.
type kind = backendtest.Kind

// capability is the capability of all volumes of a kind.
func capability(k kind) *csi.VolumeCapability {
	return k.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)
}

// vol is a volume and where it is published.
type vol struct {
	*ground
	kind    kind
	name    string
	id      string
	staging string
	target  string
	context map[string]string
	up      bool
}

// newVol creates a volume of a source; nil: an empty volume.
func (g *ground) newVol(t *testing.T, k kind, name string, size int64, source *csi.VolumeContentSource) *vol {
	t.Helper()
	dir := t.TempDir()
	v := &vol{ground: g, kind: k, name: name, staging: filepath.Join(dir, "staging"), target: filepath.Join(dir, "target")}
	must(t, os.Mkdir(v.staging, 0o755))
	resp, err := g.control.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: size}, Parameters: k.Parameters(volume.ParamPool, poolName),
		VolumeCapabilities: []*csi.VolumeCapability{capability(k)}, VolumeContentSource: source,
	})
	must(t, err)
	v.id = resp.GetVolume().GetVolumeId()
	return v
}

// file is the path of the written file or device.
func (v *vol) file() string {
	if v.kind.Block() {
		return v.target
	}
	return filepath.Join(v.target, "blocks")
}

// tree is the path of the volume's directory tree.
func (v *vol) tree() string { return filepath.Join(v.target, "tree") }

func (v *vol) publish(t *testing.T) {
	t.Helper()
	resp, err := v.control.ControllerPublishVolume(t.Context(), &csi.ControllerPublishVolumeRequest{VolumeId: v.id, NodeId: nodeID, VolumeCapability: capability(v.kind)})
	must(t, err)
	v.context = resp.GetPublishContext()
	_, err = v.node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{
		VolumeId: v.id, StagingTargetPath: v.staging, VolumeCapability: capability(v.kind), PublishContext: v.context,
	})
	must(t, err)
	_, err = v.node.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{
		VolumeId: v.id, StagingTargetPath: v.staging, TargetPath: v.target, VolumeCapability: capability(v.kind), PublishContext: v.context,
	})
	must(t, err)
	v.up = true
}

// unpublish unpublishes and unstages a volume, and checks its filesystem.
func (v *vol) unpublish(t *testing.T) {
	t.Helper()
	_, err := v.node.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: v.target})
	must(t, err)
	must(t, v.unstage(t.Context()))
	_, err = v.control.ControllerUnpublishVolume(t.Context(), &csi.ControllerUnpublishVolumeRequest{VolumeId: v.id, NodeId: nodeID})
	must(t, err)
	v.up = false
	v.fsck(t)
}

// unstage retries while the device is in use: a program that was started meanwhile may have
// the mounts of its parent for a moment.
func (v *vol) unstage(ctx context.Context) error {
	return retry.For(ctx, patience, func() (bool, error) {
		_, err := v.node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging})
		return status.Code(err) == codes.FailedPrecondition, err
	})
}

func (v *vol) fsck(t *testing.T) {
	t.Helper()
	words := map[string][]string{
		"ext4":  {"e2fsck", "-fn"},
		"xfs":   {"xfs_repair", "-n", "-f"},
		"btrfs": {"btrfs", "check", "--readonly"},
	}[v.kind.FSType]
	if words == nil {
		return
	}
	image := filepath.Join(v.pool, "volumes", v.name, "image")
	if out, err := exec.Command(words[0], append(words[1:], image)...).CombinedOutput(); err != nil {
		t.Errorf("%q of %s: %v\n%s", words, image, err, out)
	}
}

func (v *vol) remove(t *testing.T) {
	t.Helper()
	if v.up {
		v.unpublish(t)
	}
	_, err := v.control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: v.id})
	must(t, err)
}
