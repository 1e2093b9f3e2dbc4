package backendtest

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/driver"
)

// atOnce makes 12 equal calls at the same time. Each must succeed or be ABORTED, and at least one must succeed.
func atOnce(t *testing.T, what string, call func(ctx context.Context) error) {
	t.Helper()
	const callers = 12
	errs := make([]error, callers)
	var all sync.WaitGroup
	for i := range callers {
		all.Go(func() { errs[i] = call(t.Context()) })
	}
	all.Wait()
	done := 0
	for _, err := range errs {
		switch status.Code(err) {
		case codes.OK:
			done++
		case codes.Aborted:
		default:
			t.Errorf("%s, called %d times at once: got %v, want success or ABORTED", what, callers, err)
		}
	}
	if done == 0 {
		t.Errorf("%s, called %d times at once: no call succeeded", what, callers)
	}
}

// testDuplicates makes each call of a volume's life many times at the same time.
func testDuplicates(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, multiWriter)
	name := newName(t)
	atOnce(t, "create", func(ctx context.Context) error {
		_, err := d.Control.CreateVolume(ctx, &csi.CreateVolumeRequest{Name: name, VolumeCapabilities: []*csi.VolumeCapability{l.cap}, Parameters: kind.Parameters()})
		return err
	})
	created := volumeNamed(t, d, name, kind, l.cap) // the volume of the calls above
	atOnce(t, "controller publish", func(ctx context.Context) error { return l.publishTo(ctx, Node) })
	atOnce(t, "stage", l.stage)
	wantOneDevice(t, l)
	atOnce(t, "publish", l.publish)
	if n := mountsAt(t, l.target); n != 1 {
		t.Errorf("got %d mounts at the target, want 1", n)
	}
	if !kind.Block() && mountsAt(t, l.staging) != 1 {
		t.Errorf("got %d mounts at the staging path, want 1", mountsAt(t, l.staging))
	}
	larger := gib + 64<<20
	if !kind.Has(Divisible) { // a volume always has the size of its disk
		larger = gib
	}
	atOnce(t, "controller expand", func(ctx context.Context) error { _, err := l.expand(ctx, larger); return err })
	if kind.growsHere() {
		atOnce(t, "node expand", func(ctx context.Context) error {
			_, err := d.Node.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: l.id, VolumePath: l.target})
			return err
		})
	}
	atOnce(t, "stats", func(ctx context.Context) error {
		_, err := d.Node.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: l.id, VolumePath: l.target})
		return err
	})
	wantOneDevice(t, l)
	atOnce(t, "unpublish", func(ctx context.Context) error { return l.unpublishAt(ctx, l.target) })
	atOnce(t, "unstage", l.unstage)
	wantNoDevice(t, l)
	atOnce(t, "controller unpublish", func(ctx context.Context) error { return l.unpublishFrom(ctx, Node) })
	atOnce(t, "delete", func(ctx context.Context) error {
		_, err := d.Control.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: created})
		return err
	})
}

// wantOneDevice fails the test unless the volume has one device. It does nothing for a directory.
func wantOneDevice(t *testing.T, l *testVolume) {
	t.Helper()
	if !l.kind.Has(Directory) {
		deviceOf(t, l)
	}
}

// volumeNamed creates a volume with a name, unless it exists, and returns its ID.
func volumeNamed(t *testing.T, d *Driver, name string, kind Kind, c *csi.VolumeCapability) string {
	t.Helper()
	resp, err := d.Control.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: name, VolumeCapabilities: []*csi.VolumeCapability{c}, Parameters: kind.Parameters(),
	})
	must(t, err)
	return resp.GetVolume().GetVolumeId()
}

// capacity returns the available capacity that GetCapacity reports for the kind.
func capacity(t *testing.T, d *Driver, kind Kind) int64 {
	t.Helper()
	resp, err := d.Control.GetCapacity(t.Context(), &csi.GetCapacityRequest{Parameters: kind.Parameters()})
	must(t, err)
	return resp.GetAvailableCapacity()
}

// testPromisedSpace: the sizes of all volumes never exceed the available space, however many calls run at the same
// time. A volume can have the whole capacity that GetCapacity reports. DeleteVolume releases the space.
func testPromisedSpace(t *testing.T, _ *Driver, kind Kind) {
	d := kind.start(t, "20G", func(o *driver.Options) { o.Config.Pools[0].Size, o.Config.Pools[0].Reserve = "10Gi", "0" })
	room := capacity(t, d, kind)
	if room > 10*gib || room < 9*gib {
		t.Fatalf("got a capacity of %d bytes of a pool of 10 GiB, want 9 to 10 GiB", room)
	}
	ids := createMany(t, d, kind, 32, gib)
	if want := int((room + kind.Overhead()) / (gib + kind.Overhead())); len(ids) != want {
		t.Errorf("created %d volumes of 1 GiB, want %d", len(ids), want)
	}
	rest := capacity(t, d, kind)
	if want := room - int64(len(ids))*(gib+kind.Overhead()); rest != want {
		t.Errorf("got a capacity of %d bytes after %d volumes of 1 GiB were created, want %d", rest, len(ids), want)
	}
	d.Restart(t)
	d.awaitShared(t, kind)
	if again := capacity(t, d, kind); again != rest {
		t.Errorf("a restart changed the capacity from %d to %d", rest, again)
	}
	for _, id := range ids {
		_, err := d.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
		must(t, err)
	}
	await(t, "the space of the deleted volumes to be released", func() bool { return capacity(t, d, kind) == room })
	one := createMany(t, d, kind, 1, room/4096*4096)
	if len(one) != 1 {
		t.Errorf("creating a volume of the whole capacity of %d bytes failed", room)
	}
}

// createMany creates n volumes at the same time, and returns the IDs of the created ones. The others must be refused
// for lack of room.
func createMany(t *testing.T, d *Driver, kind Kind, n int, size int64) []string {
	t.Helper()
	var mu sync.Mutex
	var ids []string
	var all sync.WaitGroup
	prefix := newName(t)
	for i := range n {
		all.Go(func() {
			resp, err := d.Control.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
				Name: fmt.Sprintf("%s-%d", prefix, i), CapacityRange: &csi.CapacityRange{RequiredBytes: size},
				VolumeCapabilities: []*csi.VolumeCapability{kind.Capability(multiWriter)}, Parameters: kind.Parameters(),
			})
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				ids = append(ids, resp.GetVolume().GetVolumeId())
				return
			}
			wantCode(t, err, codes.ResourceExhausted, "room")
		})
	}
	all.Wait()
	return ids
}

// testVolumesPerNode: as many volumes can be published to a node as NodeGetInfo reports, and no more.
func testVolumesPerNode(t *testing.T, _ *Driver, kind Kind) {
	d := kind.start(t, "20G", func(o *driver.Options) { o.Config.MaxVolumesPerNode = 2 })
	info, err := d.Node.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
	if err != nil || info.GetMaxVolumesPerNode() != 2 {
		t.Fatalf("NodeGetInfo: got %v, %v; want a maximum of 2 volumes", info, err)
	}
	c := kind.Capability(multiWriter)
	publish := func(id string) error {
		_, err := d.Control.ControllerPublishVolume(t.Context(), &csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: Node, VolumeCapability: c})
		return err
	}
	var ids []string
	for range 3 {
		ids = append(ids, volumeNamed(t, d, newName(t), kind, c))
	}
	must(t, publish(ids[0]))
	must(t, publish(ids[1]))
	must(t, publish(ids[1]))
	wantCode(t, publish(ids[2]), codes.ResourceExhausted, "limit of 2")
	d.Restart(t)
	wantCode(t, publish(ids[2]), codes.ResourceExhausted, "limit of 2")
	_, err = d.Control.ControllerUnpublishVolume(t.Context(), &csi.ControllerUnpublishVolumeRequest{VolumeId: ids[0], NodeId: Node})
	must(t, err)
	must(t, publish(ids[2]))
}
