//go:build vm

package nfs

import (
	"crypto/x509"
	"fmt"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
)

// TestForwardedSnapshot takes snapshots of an image in use with the controller's driver. The driver of
// the node that uses the image must make the copy, because only that node has the writes that are not
// on the server yet.
func TestForwardedSnapshot(t *testing.T) {
	s := nfsd.Start(t, nfsd.Options{})
	export := s.Export(t, "volumes")
	node, controller := startForwarded(t, s.Node(t, "node-1"), nfsPool(pool, s, export))
	for _, fsType := range []string{"ext4", "xfs"} {
		t.Run(fsType, func(t *testing.T) {
			for _, consistency := range []string{"crash", "frozen"} {
				t.Run(consistency, func(t *testing.T) { testSnapshotOnNode(t, node, controller, fsType, consistency) })
			}
		})
	}
	wantEmpty(t, s, export) // before the drivers end, because they empty the trash
}

// startForwarded starts the driver of a node, and the controller's driver, which forwards calls
// to the node.
func startForwarded(t *testing.T, n *nfsd.Node, pools string) (node, controller *machine) {
	t.Helper()
	const address = "127.0.0.1:9811"
	ca := backendtest.NewCluster(t)
	node = &machine{Node: n, name: "node-1", dir: t.TempDir(), flags: []string{"--services", "node", "--node-id", "node-1", "--http-address", ""}}
	ca.Certify(t, node.path("certificates"), pki.NodeURI(backendtest.DriverName, node.name), x509.ExtKeyUsageServerAuth)
	node.serve(t, fmt.Sprintf("forwarding: {listen: %q}\npools:\n%s", address, pools))
	controller = &machine{Node: n, name: "controller", dir: t.TempDir(), flags: []string{"--services", "controller", "--http-address", ""}}
	ca.Certify(t, controller.path("certificates"), pki.ControllerURI(backendtest.DriverName), x509.ExtKeyUsageClientAuth)
	controller.serve(t, fmt.Sprintf("forwarding: {nodes: [{name: %s, address: %q}]}\npools:\n%s", node.name, address, pools))
	node.control = controller.control
	return node, controller
}

// testSnapshotOnNode takes a snapshot while a writer writes to the image. A restored volume must contain the
// records that were synced before.
func testSnapshotOnNode(t *testing.T, node, controller *machine, fsType, consistency string) {
	source := node.image(t, pool, "source-"+fsType+"-"+consistency, fsType, 512*mib)
	must(t, node.controllerPublish(t, source))
	node.mount(t, source) // the node may still be opening the pool
	w := startWriter(t, node.file(source, "log"))
	w.awaitProgress(t)
	before := w.acknowledged()
	var snapshot *csi.Snapshot
	eventually(t, func() error {
		resp, err := controller.control.CreateSnapshot(deadline(t), &csi.CreateSnapshotRequest{
			Name: source.name, SourceVolumeId: source.id, Parameters: map[string]string{"consistency": consistency},
		})
		snapshot = resp.GetSnapshot()
		return err
	})
	if !snapshot.GetReadyToUse() {
		t.Errorf("got snapshot %v, want readyToUse", snapshot)
	}
	w.awaitProgress(t)
	w.finish(t)
	copied := node.restore(t, "copy-"+source.name, source, snapshot)
	node.up(t, copied)
	wantRecords(t, node.file(copied, "log"), before)
	for _, v := range []*vol{source, copied} {
		node.remove(t, v)
	}
	_, err := controller.control.DeleteSnapshot(deadline(t), &csi.DeleteSnapshotRequest{SnapshotId: snapshot.GetSnapshotId()})
	must(t, err)
}

// restore creates a volume from a snapshot, with the capability of the volume like.
func (m *machine) restore(t *testing.T, name string, like *vol, s *csi.Snapshot) *vol {
	t.Helper()
	v := &vol{name: name, capability: like.capability}
	eventually(t, func() error {
		resp, err := m.control.CreateVolume(deadline(t), &csi.CreateVolumeRequest{
			Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: s.GetSizeBytes()},
			VolumeCapabilities: []*csi.VolumeCapability{like.capability}, Parameters: imageIn(pool),
			VolumeContentSource: &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
				Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: s.GetSnapshotId()},
			}},
		})
		v.id, v.context = resp.GetVolume().GetVolumeId(), resp.GetVolume().GetVolumeContext()
		return err
	})
	return v
}
