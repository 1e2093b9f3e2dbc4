package backendtest

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/pool"
)

// testSplitServices runs the controller's driver and the node's driver separately, as in a cluster. DeleteVolume and
// ControllerExpandVolume of the controller's driver must know whether the volume is staged on the node.
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
		t.Errorf("ListVolumes on the socket of the node's driver: %v", err)
	}
	testStageAndDelete(t, c.Member(0), kind)
}

// testStageAndDelete makes calls of a volume through both drivers.
func testStageAndDelete(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, multiWriter)
	l.stageAndPublish(t)
	content := pattern(9)
	write(t, l.data(l.target), content)
	wantCode(t, l.delete(t.Context()), codes.FailedPrecondition, "in use")
	if kind.Has(Device|Divisible|Expand) && kind.growsHere() {
		_, err := l.expand(t.Context(), 2*gib)
		must(t, err)
		_, err = d.Node.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{VolumeId: l.id, VolumePath: l.target})
		must(t, err)
		wantSize(t, l, 2*gib)
	}
	l.unpublishAndUnstage(t)
	// Stage and delete run at the same time. At most one of them fails. Both can succeed only for a raw volume, because a
	// raw volume that is staged and not published can be deleted.
	staged := make(chan error, 1)
	go func() { staged <- l.stage(context.WithoutCancel(t.Context())) }()
	deleted := l.delete(t.Context())
	err := <-staged
	if err != nil && deleted != nil || err == nil && deleted == nil && !kind.Block() {
		t.Errorf("got errors %v of stage and %v of delete, want exactly one success (raw: %t)", err, deleted, kind.Block())
	}
	if deleted == nil {
		if left := devicesOf(t, l); len(left) > 0 {
			t.Errorf("the deleted volume has the devices %q", left)
		}
	}
}

// testDeleteBesideStage: a volume is not deleted while another call has its lock, for example to stage it.
func testDeleteBesideStage(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, singleWriter)
	folder, err := os.Open(filepath.Dir(l.record()))
	must(t, err)
	defer folder.Close()
	must(t, unix.Flock(int(folder.Fd()), unix.LOCK_EX))
	wantCode(t, l.delete(t.Context()), codes.Aborted, "another call")
	must(t, folder.Close())
	must(t, l.stage(t.Context()))
	must(t, l.unstage(t.Context()))
	must(t, l.delete(t.Context()))
}
