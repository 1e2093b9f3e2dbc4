package backendtest

import (
	"context"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// testSplitServices serves controller and node from two drivers, as in a cluster:
// what is forwarded meets what is staged on the node.
func testSplitServices(t *testing.T, target Target) {
	pools := []string{filepath.Join(testenv.Filesystem(t, "xfs", "20G"), "pool")}
	c := StartCluster(t, pools, target.New)
	if _, err := c.Nodes[0].Control.ListVolumes(t.Context(), &csi.ListVolumesRequest{}); status.Code(err) != codes.Unimplemented {
		t.Errorf("the socket of the node's driver answers controller calls: %v", err)
	}
	for _, kind := range target.Kinds {
		t.Run(kind.Name(), func(t *testing.T) { testSplitLife(t, c.Member(0), kind) })
	}
}

func testSplitLife(t *testing.T, d *Driver, kind Kind) {
	l := newLife(t, d, kind, multiWriter)
	l.up(t)
	content := pattern(9)
	write(t, l.data(l.target), content)
	_, err := d.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: l.id})
	wantCode(t, err, codes.FailedPrecondition, "in use")
	if kind.FSType != "ext4" { // which does not grow online everywhere
		_, err := l.expand(t.Context(), 2*gib)
		must(t, err)
		_, err = d.Node.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{VolumeId: l.id, VolumePath: l.target})
		must(t, err)
		wantSize(t, l, 2*gib)
	}
	l.down(t)
	// A stage and a delete at once, through two drivers: one of them wins, and
	// nothing is mounted of what is gone.
	staged := make(chan error, 1)
	go func() { staged <- l.stage(context.WithoutCancel(t.Context())) }()
	_, deleted := d.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: l.id})
	if err := <-staged; (err == nil) == (deleted == nil) {
		t.Errorf("stage ended with %v, and delete with %v", err, deleted)
	}
}
