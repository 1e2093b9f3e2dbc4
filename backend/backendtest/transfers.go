package backendtest

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/internal/translate"
)

// Transfers creates volumes of one kind on the nodes of a cluster.
type Transfers struct {
	*Cluster
	Capability *csi.VolumeCapability
	// Class has the parameters of the StorageClass.
	Class map[string]string
}

// CapabilityOf returns the capability of a filesystem, or of a raw device if fsType is empty.
func CapabilityOf(fsType string) *csi.VolumeCapability {
	capability := &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER}}
	if fsType == "" {
		capability.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	} else {
		capability.AccessType = &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fsType}}
	}
	return capability
}

// Request returns the request for a volume on a node.
func (tr *Transfers) Request(node int, name string, bytes int64, from *csi.VolumeContentSource) *csi.CreateVolumeRequest {
	return &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: bytes}, VolumeContentSource: from,
		VolumeCapabilities: []*csi.VolumeCapability{tr.Capability}, Parameters: tr.Class,
		AccessibilityRequirements: &csi.TopologyRequirement{Preferred: []*csi.Topology{translate.Topology(tr.Nodes[node].Options.NodeID)}},
	}
}

// Create creates a volume on a node.
func (tr *Transfers) Create(t testing.TB, node int, name string, bytes int64, from *csi.VolumeContentSource) *NodeVolume {
	t.Helper()
	resp, err := tr.Router.Control.CreateVolume(t.Context(), tr.Request(node, name, bytes, from))
	must(t, err)
	return &NodeVolume{ID: resp.GetVolume().GetVolumeId(), transfers: tr, node: node}
}

// Snapshot takes a snapshot of a volume, and returns it as the source of others.
func (tr *Transfers) Snapshot(t testing.TB, of *NodeVolume, name string) *csi.VolumeContentSource {
	t.Helper()
	s, err := tr.Router.Control.CreateSnapshot(t.Context(), &csi.CreateSnapshotRequest{Name: name, SourceVolumeId: of.ID})
	must(t, err)
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: s.GetSnapshot().GetSnapshotId()}}}
}

// DeleteSnapshot deletes the snapshot that is a source.
func (tr *Transfers) DeleteSnapshot(t testing.TB, from *csi.VolumeContentSource) {
	t.Helper()
	_, err := tr.Router.Control.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: from.GetSnapshot().GetSnapshotId()})
	must(t, err)
}

// NodeVolume is a volume on one node.
type NodeVolume struct {
	ID              string
	transfers       *Transfers
	node            int
	staging, target string
}

// client returns the Node service of the volume's node, which may have been restarted.
func (m *NodeVolume) client() csi.NodeClient { return m.transfers.Nodes[m.node].Node }

// Source returns the volume as the source of others.
func (m *NodeVolume) Source() *csi.VolumeContentSource {
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: m.ID}}}
}

// Publish stages and publishes the volume until the test ends.
func (m *NodeVolume) Publish(t testing.TB) {
	t.Helper()
	m.staging, m.target = t.TempDir(), filepath.Join(t.TempDir(), "target")
	t.Cleanup(func() { m.Unpublish(t) })
	_, err := m.client().NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: m.ID, StagingTargetPath: m.staging, VolumeCapability: m.transfers.Capability})
	must(t, err)
	_, err = m.client().NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{VolumeId: m.ID, StagingTargetPath: m.staging, TargetPath: m.target, VolumeCapability: m.transfers.Capability})
	must(t, err)
}

// Unpublish unpublishes and unstages the volume.
func (m *NodeVolume) Unpublish(t testing.TB) {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	_, err := m.client().NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: m.ID, TargetPath: m.target})
	must(t, err)
	_, err = m.client().NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: m.ID, StagingTargetPath: m.staging})
	must(t, err)
}

// Delete deletes the volume.
func (m *NodeVolume) Delete(t testing.TB) {
	t.Helper()
	_, err := m.transfers.Router.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: m.ID})
	must(t, err)
}

// path is the path of a file in the filesystem, or of the raw device.
func (m *NodeVolume) path() string {
	if m.transfers.Capability.GetBlock() != nil {
		return m.target
	}
	return filepath.Join(m.target, "file")
}

// Write writes to a file in the filesystem, or to the raw device.
func (m *NodeVolume) Write(t testing.TB, content []byte, at int64) {
	t.Helper()
	f, err := os.OpenFile(m.path(), os.O_WRONLY|os.O_CREATE, 0o600)
	must(t, err)
	defer f.Close()
	_, err = f.WriteAt(content, at)
	must(t, err)
	must(t, f.Sync())
}

// Read reads the first n bytes.
func (m *NodeVolume) Read(t testing.TB, n int) []byte {
	t.Helper()
	f, err := os.Open(m.path())
	must(t, err)
	defer f.Close()
	b := make([]byte, n)
	_, err = io.ReadFull(f, b)
	must(t, err)
	return b
}

// Size returns the size of the filesystem or of the raw device.
func (m *NodeVolume) Size(t testing.TB) int64 {
	t.Helper()
	if m.transfers.Capability.GetBlock() != nil {
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

// CheckUnused creates a volume of a larger size on the second node, from a volume of the first one, which can be sent only while
// it is not in use. A raw volume shows nothing that the storage of the second node had before. A volume from one that was never
// used is a new one.
func (tr *Transfers) CheckUnused(t testing.TB, name string, size, larger int64) {
	t.Helper()
	source := tr.Create(t, 0, name, size, nil)
	tr.Create(t, 1, name+"-new", size, source.Source()).checkUse(t)
	source.Publish(t)
	first, second := pattern(1), pattern(2)
	const offset = 40 * mib
	source.Write(t, first, 0)
	source.Write(t, second, offset)
	_, err := tr.Router.Control.CreateVolume(t.Context(), tr.Request(1, name+"-used", larger, source.Source()))
	wantCode(t, err, codes.FailedPrecondition, "unpublish and unstage")
	source.Unpublish(t)

	received := tr.Create(t, 1, name+"-received", larger, source.Source())
	received.Publish(t)
	got := received.Size(t)
	if least := larger * 8 / 10; got < least { // a filesystem shows less than its device
		t.Errorf("the received volume has %d bytes, want at least %d", got, least)
	}
	if tr.Capability.GetBlock() == nil {
		got = offset + int64(len(second))
	}
	received.wantParts(t, got, map[int64][]byte{0: first, offset: second})
	received.Unpublish(t)
	received.checkUse(t)
	source.Delete(t)
}

// wantParts fails unless the first n bytes are the parts, which are whole MiB at their offsets, and zeros. What a container of a raw
// volume never encrypted is random data.
func (m *NodeVolume) wantParts(t testing.TB, n int64, parts map[int64][]byte) {
	t.Helper()
	f, err := os.Open(m.path())
	must(t, err)
	defer f.Close()
	random := m.transfers.Capability.GetBlock() != nil && m.transfers.Class["encryption"] == "luks2"
	zeros, b := make([]byte, mib), make([]byte, mib)
	for at := int64(0); at < n; at += mib {
		_, err := f.ReadAt(b, at)
		must(t, err)
		want := zeros
		for offset, part := range parts {
			if at >= offset && at < offset+int64(len(part)) {
				want = part[at-offset:][:mib]
			}
		}
		if !bytes.Equal(b, want) && (!random || &want[0] != &zeros[0]) {
			t.Fatalf("at offset %d, the volume differs from its source; it has old data: %t", at, bytes.Contains(b, []byte("old data")))
		}
	}
}

// checkUse stages the volume, writes to it, and deletes it.
func (m *NodeVolume) checkUse(t testing.TB) {
	t.Helper()
	m.Publish(t)
	m.Write(t, pattern(3), 0)
	if !bytes.Equal(m.Read(t, len(pattern(3))), pattern(3)) {
		t.Errorf("volume %s has another content than what was written", m.ID)
	}
	m.Unpublish(t)
	m.Delete(t)
}

// FillOld writes old data to a device, between the places of signatures, which are at the beginning of a MiB.
func FillOld(t testing.TB, device string, size int64) {
	t.Helper()
	f, err := os.OpenFile(device, os.O_WRONLY, 0)
	must(t, err)
	defer f.Close()
	old := bytes.Repeat([]byte("old data"), 64<<10)
	for at := 2 * mib; at < size-2*mib; at += mib {
		_, err := f.WriteAt(old, at+mib/4)
		must(t, err)
	}
	must(t, f.Sync())
}

// CheckLimited fills a published volume with a size in bytes, in which the user nobody may write. It contains written bytes.
func (m *NodeVolume) CheckLimited(t *testing.T, size, written int64) {
	t.Helper()
	wantFull(t, written+fillFile(t, filepath.Join(m.target, "filled"), asNobody), size)
}
