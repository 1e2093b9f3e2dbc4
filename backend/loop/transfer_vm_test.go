//go:build vm

package loop_test

import (
	"bytes"
	"crypto/rand"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/internal/translate"
)

// TestTransfer: a volume that is restored from a snapshot on another node has the content of its source, and grows. An encrypted
// volume has the passphrase of its source.
func TestTransfer(t *testing.T) {
	dir := testenv.Filesystem(t, "xfs", "24G")
	c := backendtest.StartCluster(t, []string{filepath.Join(dir, "a"), filepath.Join(dir, "b")}, loop.Kind)
	for _, encryption := range []string{"none", "luks2"} {
		for _, fsType := range []string{"ext4", "xfs", "btrfs", ""} {
			name := encryption + "-" + map[bool]string{true: "block", false: fsType}[fsType == ""]
			t.Run(name, func(t *testing.T) { testTransfer(t, c, name, fsType, encryption) })
		}
	}
}

func testTransfer(t *testing.T, c *backendtest.Cluster, name, fsType, encryption string) {
	const size, larger = 512 << 20, 640 << 20
	capability := &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER}}
	if fsType == "" {
		capability.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	} else {
		capability.AccessType = &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fsType}}
	}
	create := func(name, node string, bytes int64, from *csi.VolumeContentSource) string {
		resp, err := c.Router.Control.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
			Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: bytes}, VolumeContentSource: from,
			VolumeCapabilities: []*csi.VolumeCapability{capability}, Parameters: map[string]string{"encryption": encryption},
			AccessibilityRequirements: &csi.TopologyRequirement{Preferred: []*csi.Topology{translate.Topology(node)}},
		})
		must(t, err)
		return resp.GetVolume().GetVolumeId()
	}
	content := make([]byte, 20<<20)
	_, _ = rand.Read(content)
	source := &mounted{d: c.Member(0), id: create(name, "node-1.example", size, nil), capability: capability}
	source.publish(t)
	source.write(t, content)
	s, err := c.Router.Control.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: source.id})
	must(t, err)
	from := &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: s.GetSnapshot().GetSnapshotId()}}}
	restored := &mounted{d: c.Member(1), id: create(name+"-restored", "node-2.example", larger, from), capability: capability}
	restored.publish(t)
	if got := restored.read(t, len(content)); !bytes.Equal(got, content) {
		t.Error("the restored volume differs from its source")
	}
	if got := restored.size(t); got <= larger*8/10 {
		t.Errorf("the restored volume has %d bytes, want that it has grown to %d", got, larger)
	}
	if plain := contains(t, filepath.Join(c.Nodes[1].Pool(), "volumes", name+"-restored", "image"), content[:4096]); plain != (encryption == "none") {
		t.Errorf("the image contains the plain text: %t, want %t", plain, encryption == "none")
	}
	restored.unpublish(t)
	source.unpublish(t)
	for _, v := range []*mounted{restored, source} {
		_, err := c.Router.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: v.id})
		must(t, err)
	}
}

// contains reports whether a file contains a block of 4096 bytes.
func contains(t *testing.T, path string, block []byte) bool {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	for b := make([]byte, 1<<20); ; {
		n, err := io.ReadFull(f, b)
		if bytes.Contains(b[:n], block) {
			return true
		}
		if err != nil {
			return false
		}
	}
}

// mounted is a volume that is staged and published on its node.
type mounted struct {
	d               *backendtest.Driver
	id              string
	capability      *csi.VolumeCapability
	staging, target string
}

func (m *mounted) publish(t *testing.T) {
	m.staging, m.target = t.TempDir(), filepath.Join(t.TempDir(), "target")
	_, err := m.d.Node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: m.id, StagingTargetPath: m.staging, VolumeCapability: m.capability})
	must(t, err)
	_, err = m.d.Node.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{VolumeId: m.id, StagingTargetPath: m.staging, TargetPath: m.target, VolumeCapability: m.capability})
	must(t, err)
}

func (m *mounted) unpublish(t *testing.T) {
	_, err := m.d.Node.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: m.id, TargetPath: m.target})
	must(t, err)
	_, err = m.d.Node.NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: m.id, StagingTargetPath: m.staging})
	must(t, err)
}

// path is the path of a file in the filesystem, or of the raw device.
func (m *mounted) path() string {
	if m.capability.GetBlock() != nil {
		return m.target
	}
	return filepath.Join(m.target, "file")
}

func (m *mounted) write(t *testing.T, content []byte) {
	f, err := os.OpenFile(m.path(), os.O_WRONLY|os.O_CREATE, 0o600)
	must(t, err)
	defer f.Close()
	_, err = f.Write(content)
	must(t, err)
	must(t, f.Sync())
}

func (m *mounted) read(t *testing.T, n int) []byte {
	f, err := os.Open(m.path())
	must(t, err)
	defer f.Close()
	b := make([]byte, n)
	_, err = io.ReadFull(f, b)
	must(t, err)
	return b
}

// size returns the size of the filesystem or of the raw device.
func (m *mounted) size(t *testing.T) int64 {
	if m.capability.GetBlock() != nil {
		f, err := os.Open(m.target)
		must(t, err)
		defer f.Close()
		size, err := f.Seek(0, io.SeekEnd)
		must(t, err)
		return size
	}
	var st syscall.Statfs_t
	must(t, syscall.Statfs(m.target, &st))
	return int64(st.Blocks) * st.Bsize
}
