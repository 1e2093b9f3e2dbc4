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

// nodeNames are the nodes of onTwoNodes.
var nodeNames = []string{Node, "node-2.example"}

// onTwoNodes serves one pool from the drivers of two nodes, each with its own controller, as
// with two sidecars of different leaders.
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

// on is the same volume on another node.
func (l *life) on(t *testing.T, d *Driver) *life {
	t.Helper()
	other := *l
	dir := t.TempDir()
	other.d, other.staging, other.target = d, filepath.Join(dir, "staging"), filepath.Join(dir, "target")
	must(t, os.Mkdir(other.staging, 0o755))
	return &other
}

// testTwoNodes: two nodes use the volume at once and see each other's writes.
func testTwoNodes(t *testing.T, drivers []*Driver, kind Kind) {
	first := newLife(t, drivers[0], kind, manyWriters)
	second := first.on(t, drivers[1])
	for i, l := range []*life{first, second} {
		for range 2 {
			must(t, l.publishTo(t.Context(), nodeNames[i]))
		}
		l.up(t)
	}
	write(t, filepath.Join(first.target, "a"), pattern(20))
	write(t, filepath.Join(second.target, "b"), pattern(21))
	wantContent(t, filepath.Join(second.target, "a"), pattern(20))
	wantContent(t, filepath.Join(first.target, "b"), pattern(21))
	for _, l := range []*life{first, second} {
		v, err := l.d.Control.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: l.id})
		must(t, err)
		nodes := slices.Sorted(slices.Values(v.GetStatus().GetPublishedNodeIds()))
		if !slices.Equal(nodes, slices.Sorted(slices.Values(nodeNames))) {
			t.Errorf("it is published to %q", nodes)
		}
		wantCode(t, l.delete(t.Context()), codes.FailedPrecondition, "published")
	}
	second.down(t)
	first.down(t)
	must(t, first.unpublishFrom(t.Context(), nodeNames[0]))
	wantCode(t, first.delete(t.Context()), codes.FailedPrecondition, nodeNames[1])
}

// testOneNode: a volume in a single-node mode belongs to one node until it is unpublished
// there.
func testOneNode(t *testing.T, drivers []*Driver, kind Kind) {
	l := newLife(t, drivers[0], kind, multiWriter)
	elsewhere := l.on(t, drivers[1])
	must(t, l.publishTo(t.Context(), nodeNames[0]))
	wantCode(t, elsewhere.publishTo(t.Context(), nodeNames[1]), codes.FailedPrecondition, nodeNames[0])
	shared := *elsewhere
	shared.cap = kind.Capability(kind.many())
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
					Name: name, VolumeCapabilities: []*csi.VolumeCapability{kind.Capability(kind.many())}, Parameters: kind.Parameters(),
				})
				if err != nil {
					t.Errorf("creating %s: %v", name, err)
				}
				ids <- resp.GetVolume().GetVolumeId()
			}()
		}
		first, second := <-ids, <-ids
		if first != second {
			t.Errorf("one got %q, the other %q", first, second)
		}
		for _, d := range drivers {
			remove(t, d, first)
		}
	}
}
