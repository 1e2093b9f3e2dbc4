package verify

import (
	"context"
	"os"
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

// vol is a volume with its staging and target paths.
type vol struct {
	*testDriver
	kind    kind
	name    string
	id      string
	staging string
	target  string
	context map[string]string
	// published is true after publish and before unpublish.
	published bool
}

// newVol creates a volume from a source, or an empty volume if source is nil.
func (g *testDriver) newVol(t *testing.T, k kind, name string, size int64, source *csi.VolumeContentSource) *vol {
	t.Helper()
	dir := t.TempDir()
	v := &vol{testDriver: g, kind: k, name: name, staging: filepath.Join(dir, "staging"), target: filepath.Join(dir, "target")}
	must(t, os.Mkdir(v.staging, 0o755))
	resp, err := g.control.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: size}, Parameters: k.Parameters(volume.ParamPool, poolName),
		VolumeCapabilities: []*csi.VolumeCapability{capability(k)}, VolumeContentSource: source,
	})
	must(t, err)
	v.id = resp.GetVolume().GetVolumeId()
	return v
}

// file returns the path of the file or device to which the writer writes.
func (v *vol) file() string {
	if v.kind.Block() {
		return v.target
	}
	return filepath.Join(v.target, "blocks")
}

// tree returns the path of the directory tree in the volume.
func (v *vol) tree() string { return filepath.Join(v.target, "tree") }

// publish publishes the volume to the node, stages it and publishes it to a pod.
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
	v.published = true
}

// unpublish undoes publish, and then checks the volume's filesystem.
func (v *vol) unpublish(t *testing.T) {
	t.Helper()
	_, err := v.node.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: v.target})
	must(t, err)
	must(t, v.unstage(t.Context()))
	_, err = v.control.ControllerUnpublishVolume(t.Context(), &csi.ControllerUnpublishVolumeRequest{VolumeId: v.id, NodeId: nodeID})
	must(t, err)
	v.published = false
	if v.kind.Has(backendtest.Filesystem) {
		v.medium.Fsck(t, v.kind, v.id)
	}
}

// unstage unstages the volume. It retries while the device is in use, because a process that was just
// started may have its parent's mounts for a moment.
func (v *vol) unstage(ctx context.Context) error {
	return retry.For(ctx, waitTimeout, func() (bool, error) {
		_, err := v.node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging})
		return status.Code(err) == codes.FailedPrecondition, err
	})
}

// remove unpublishes the volume if necessary, and deletes it.
func (v *vol) remove(t *testing.T) {
	t.Helper()
	if v.published {
		v.unpublish(t)
	}
	_, err := v.control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: v.id})
	must(t, err)
}
