package loop_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/linux/clone"
)

// TestDifferences: only the changes since an earlier snapshot are received if a volume with its content was not used yet.
func TestDifferences(t *testing.T) {
	const size, changed = 512 << 20, 4 << 20
	dirs := []string{testenv.Filesystem(t, "xfs", "4G"), testenv.Filesystem(t, "btrfs", "4G"), testenv.Filesystem(t, "ext4", "4G"), testenv.Filesystem(t, "xfs", "4G")}
	c := backendtest.StartCluster(t, dirs, loop.Kind)
	tr := &transfers{c, capabilityOf(""), "none"}
	source := tr.create(t, 0, "v", size, nil)
	source.publish(t)
	content := make([]byte, 64<<20)
	_, _ = rand.Read(content)
	source.write(t, content, 0)
	first := tr.snapshot(t, source, "s1")
	var older []*mounted
	for node := range dirs {
		older = append(older, tr.create(t, node, fmt.Sprintf("older-%d", node), size, first))
	}

	_, _ = rand.Read(content[:changed/2])
	source.write(t, content[:changed/2], 0)
	clear(content[32<<20:][:changed/2])
	source.write(t, content[32<<20:][:changed/2], 32<<20)
	second := tr.snapshot(t, source, "s2")
	image := func(node int, name string) string { return filepath.Join(dirs[node], "volumes", name, "image") }
	wantImage := func(node int, name string, copied int64) {
		t.Helper()
		got, err := os.Open(image(node, name))
		must(t, err)
		defer got.Close()
		b := make([]byte, len(content)+1<<20)
		_, err = got.ReadAt(b, 0)
		must(t, err)
		if !bytes.Equal(b[:len(content)], content) || !bytes.Equal(b[len(content):], make([]byte, 1<<20)) {
			t.Errorf("node %d: %s differs from its source", node, name)
		}
		own, shares, err := clone.Unshared(got)
		must(t, err)
		if shares && own > copied || !shares && copied < int64(len(content)) {
			t.Errorf("node %d: %s has %d bytes of its own, %t, want at most %d", node, name, own, shares, copied)
		}
	}
	const more = changed + 1<<20 // the filesystem may copy whole blocks of its own
	newer := map[int]*mounted{}
	for node, copied := range map[int]int64{1: more, 2: int64(len(content)), 3: more} {
		name := fmt.Sprintf("newer-%d", node)
		newer[node] = tr.create(t, node, name, size, second)
		wantImage(node, name, copied)
	}

	// A volume that was used is no base any more, nor is one whose image was replaced.
	older[3].publish(t)
	older[3].write(t, []byte("changed"), 0)
	older[3].unpublish(t)
	now := time.Now().Add(time.Second)
	must(t, os.Chtimes(image(1, "older-1"), now, now))
	for _, node := range []int{1, 3} {
		newer[node].delete(t)
		name := fmt.Sprintf("again-%d", node)
		tr.create(t, node, name, size, second)
		wantImage(node, name, int64(len(content)))
	}
}

// transfers creates volumes of one kind on the nodes of a cluster.
type transfers struct {
	*backendtest.Cluster
	capability *csi.VolumeCapability
	encryption string
}

// capabilityOf returns the capability of a filesystem, or of a raw device if fsType is empty.
func capabilityOf(fsType string) *csi.VolumeCapability {
	capability := &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER}}
	if fsType == "" {
		capability.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	} else {
		capability.AccessType = &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fsType}}
	}
	return capability
}

// create creates a volume on a node.
func (tr *transfers) create(t testing.TB, node int, name string, bytes int64, from *csi.VolumeContentSource) *mounted {
	t.Helper()
	resp, err := tr.Router.Control.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: bytes}, VolumeContentSource: from,
		VolumeCapabilities: []*csi.VolumeCapability{tr.capability}, Parameters: map[string]string{"encryption": tr.encryption},
		AccessibilityRequirements: &csi.TopologyRequirement{Preferred: []*csi.Topology{translate.Topology(tr.Nodes[node].Options.NodeID)}},
	})
	must(t, err)
	return &mounted{d: tr.Member(node), id: resp.GetVolume().GetVolumeId(), capability: tr.capability}
}

// snapshot takes a snapshot of a volume, and returns it as the source of others.
func (tr *transfers) snapshot(t testing.TB, of *mounted, name string) *csi.VolumeContentSource {
	t.Helper()
	s, err := tr.Router.Control.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: of.id})
	must(t, err)
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: s.GetSnapshot().GetSnapshotId()}}}
}

// mounted is a volume that is staged and published on its node.
type mounted struct {
	d               *backendtest.Driver
	id              string
	capability      *csi.VolumeCapability
	staging, target string
}

func (m *mounted) publish(t testing.TB) {
	m.staging, m.target = t.TempDir(), filepath.Join(t.TempDir(), "target")
	t.Cleanup(func() { m.unpublish(t) })
	_, err := m.d.Node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: m.id, StagingTargetPath: m.staging, VolumeCapability: m.capability})
	must(t, err)
	_, err = m.d.Node.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{VolumeId: m.id, StagingTargetPath: m.staging, TargetPath: m.target, VolumeCapability: m.capability})
	must(t, err)
}

func (m *mounted) unpublish(t testing.TB) {
	ctx := context.WithoutCancel(t.Context())
	_, err := m.d.Node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: m.id, TargetPath: m.target})
	must(t, err)
	_, err = m.d.Node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: m.id, StagingTargetPath: m.staging})
	must(t, err)
}

func (m *mounted) delete(t testing.TB) {
	_, err := m.d.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: m.id})
	must(t, err)
}

// path is the path of a file in the filesystem, or of the raw device.
func (m *mounted) path() string {
	if m.capability.GetBlock() != nil {
		return m.target
	}
	return filepath.Join(m.target, "file")
}

func (m *mounted) write(t testing.TB, content []byte, at int64) {
	f, err := os.OpenFile(m.path(), os.O_WRONLY|os.O_CREATE, 0o600)
	must(t, err)
	defer f.Close()
	_, err = f.WriteAt(content, at)
	must(t, err)
	must(t, f.Sync())
}
