package backendtest

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/driver"
)

// nodeNames are the names of the two nodes of onTwoNodes.
var nodeNames = []string{Node, "node-2.example"}

// onTwoNodes returns a row that runs test with the drivers of two nodes that serve the same pool. Each driver also
// serves the Controller service.
func onTwoNodes(test func(*testing.T, []*Driver, Kind)) func(*testing.T, *Driver, Kind) {
	return func(t *testing.T, _ *Driver, kind Kind) {
		t.Helper()
		m := kind.target.Medium(t, Room{Total: "20G"})
		var drivers []*Driver
		for _, name := range nodeNames {
			drivers = append(drivers, kind.target.startOn(t, m, func(o *driver.Options) { o.NodeID = name }))
		}
		test(t, drivers, kind)
	}
}

// onNode returns the same volume with the driver of another node.
func (l *testVolume) onNode(t *testing.T, d *Driver) *testVolume {
	t.Helper()
	other := *l
	dir := t.TempDir()
	other.d, other.staging, other.target = d, filepath.Join(dir, "staging"), filepath.Join(dir, "target")
	must(t, os.Mkdir(other.staging, 0o755))
	return &other
}

// testTwoNodes: two nodes use a volume at the same time, and each sees the writes of the other.
func testTwoNodes(t *testing.T, drivers []*Driver, kind Kind) {
	first := newVolume(t, drivers[0], kind, manyWriters)
	second := first.onNode(t, drivers[1])
	for i, l := range []*testVolume{first, second} {
		for range 2 {
			must(t, l.publishTo(t.Context(), nodeNames[i]))
		}
		l.stageAndPublish(t)
	}
	write(t, filepath.Join(first.target, "a"), pattern(20))
	write(t, filepath.Join(second.target, "b"), pattern(21))
	wantContent(t, filepath.Join(second.target, "a"), pattern(20))
	wantContent(t, filepath.Join(first.target, "b"), pattern(21))
	for _, l := range []*testVolume{first, second} {
		v, err := l.d.Control.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: l.id})
		must(t, err)
		nodes := slices.Sorted(slices.Values(v.GetStatus().GetPublishedNodeIds()))
		if !slices.Equal(nodes, slices.Sorted(slices.Values(nodeNames))) {
			t.Errorf("got published nodes %q, want %q", nodes, nodeNames)
		}
		wantCode(t, l.delete(t.Context()), codes.FailedPrecondition, "published")
	}
	second.unpublishAndUnstage(t)
	first.unpublishAndUnstage(t)
	must(t, first.unpublishFrom(t.Context(), nodeNames[0]))
	wantCode(t, first.delete(t.Context()), codes.FailedPrecondition, nodeNames[1])
}

// testOneNode: a volume that is published to a node in a single-node mode cannot be published to another node until
// it is unpublished.
func testOneNode(t *testing.T, drivers []*Driver, kind Kind) {
	l := newVolume(t, drivers[0], kind, multiWriter)
	elsewhere := l.onNode(t, drivers[1])
	must(t, l.publishTo(t.Context(), nodeNames[0]))
	wantCode(t, elsewhere.publishTo(t.Context(), nodeNames[1]), codes.FailedPrecondition, nodeNames[0])
	shared := *elsewhere
	shared.cap = kind.Capability(kind.widestMode())
	wantCode(t, shared.publishTo(t.Context(), nodeNames[1]), codes.FailedPrecondition, nodeNames[0])
	must(t, elsewhere.unpublishFrom(t.Context(), nodeNames[0]))
	must(t, elsewhere.publishTo(t.Context(), nodeNames[1]))
}

// testTwoCreators: two simultaneous requests for the same volume get the same volume.
func testTwoCreators(t *testing.T, drivers []*Driver, kind Kind) {
	for range 10 {
		name := newName(t)
		ids := make(chan string, len(drivers))
		for _, d := range drivers {
			go func() {
				resp, err := d.Control.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
					Name: name, VolumeCapabilities: []*csi.VolumeCapability{kind.Capability(kind.widestMode())}, Parameters: kind.Parameters(),
				})
				if err != nil {
					t.Errorf("creating %s: %v", name, err)
				}
				ids <- resp.GetVolume().GetVolumeId()
			}()
		}
		first, second := <-ids, <-ids
		if first != second {
			t.Errorf("got volumes %q and %q of two simultaneous requests, want the same", first, second)
		}
		for _, d := range drivers {
			remove(t, d, first)
		}
	}
}
