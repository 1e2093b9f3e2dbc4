package backendtest

import (
	"context"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/pool"
)

// testSplitServices serves controller and node from two drivers, as in a cluster. Controller
// calls consider the volumes that are staged on the node.
func testSplitServices(t *testing.T, _ *Driver, kind Kind) {
	m := kind.target.Medium(t, Room{Total: "20G", Volumes: 1, Each: gib})
	m.Config.Name = kind.target.Pool
	c := NewCluster(t)
	o := c.NodeOptions(t, "node-1.example", m.Dir, kind.target.Backend)
	o.Config.Pools = []pool.Config{m.Config}
	c.Nodes = []*Driver{StartWith(t, o)}
	c.Router = StartWith(t, c.RouterOptions(t, []driver.ForwardingNode{{Name: o.NodeID, Address: o.Config.Forwarding.Listen}}, kind.target.Backend))
	c.Await(t)
	if _, err := c.Nodes[0].Control.ListVolumes(t.Context(), &csi.ListVolumesRequest{}); err != nil {
		t.Errorf("the socket of the node's driver does not answer controller calls: %v", err)
	}
	testSplitLife(t, c.Member(0), kind)
}

func testSplitLife(t *testing.T, d *Driver, kind Kind) {
	l := newLife(t, d, kind, multiWriter)
	l.up(t)
	content := pattern(9)
	write(t, l.data(l.target), content)
	wantCode(t, l.delete(t.Context()), codes.FailedPrecondition, "in use")
	if kind.Has(Image) && kind.growsHere() {
		_, err := l.expand(t.Context(), 2*gib)
		must(t, err)
		_, err = d.Node.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{VolumeId: l.id, VolumePath: l.target})
		must(t, err)
		wantSize(t, l, 2*gib)
	}
	l.down(t)
	// A stage and a delete run at once, through two drivers. One of them succeeds, and no
	// deleted volume is mounted.
	staged := make(chan error, 1)
	go func() { staged <- l.stage(context.WithoutCancel(t.Context())) }()
	_, deleted := d.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: l.id})
	if err := <-staged; (err == nil) == (deleted == nil) {
		t.Errorf("stage ended with %v, and delete with %v", err, deleted)
	}
}
