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

// atOnce makes the same call many times at once. Each ends in success or ABORTED, and at least
// one in success.
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
			t.Errorf("one of many at once: %s: %v", what, err)
		}
	}
	if done == 0 {
		t.Errorf("none of many at once succeeded: %s", what)
	}
}

// testDuplicates makes every call many times at once.
func testDuplicates(t *testing.T, d *Driver, kind Kind) {
	l := newLife(t, d, kind, multiWriter)
	name := newName(t)
	atOnce(t, "create", func(ctx context.Context) error {
		_, err := d.Control.CreateVolume(ctx, &csi.CreateVolumeRequest{Name: name, VolumeCapabilities: []*csi.VolumeCapability{l.cap}, Parameters: kind.Parameters()})
		return err
	})
	other := volumeNamed(t, d, name, kind, l.cap)
	atOnce(t, "controller publish", func(ctx context.Context) error { return l.publishTo(ctx, Node) })
	atOnce(t, "stage", l.stage)
	wantOneDevice(t, l)
	atOnce(t, "publish", l.publish)
	if n := mountsAt(t, l.target); n != 1 {
		t.Errorf("%d mounts at the target", n)
	}
	if !kind.Block() && mountsAt(t, l.staging) != 1 {
		t.Errorf("%d mounts at the staging path", mountsAt(t, l.staging))
	}
	larger := gib + 64<<20
	if !kind.Has(Divisible) { // a volume takes all of its disk
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
		_, err := d.Control.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: other})
		return err
	})
}

// wantOneDevice fails the test unless a volume that has a device has one.
func wantOneDevice(t *testing.T, l *life) {
	t.Helper()
	if !l.kind.Has(Directory) {
		deviceOf(t, l)
	}
}

func volumeNamed(t *testing.T, d *Driver, name string, kind Kind, c *csi.VolumeCapability) string {
	t.Helper()
	resp, err := d.Control.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: name, VolumeCapabilities: []*csi.VolumeCapability{c}, Parameters: kind.Parameters(),
	})
	must(t, err)
	return resp.GetVolume().GetVolumeId()
}

// capacity is the available capacity that GetCapacity reports.
func capacity(t *testing.T, d *Driver, kind Kind) int64 {
	t.Helper()
	resp, err := d.Control.GetCapacity(t.Context(), &csi.GetCapacityRequest{Parameters: kind.Parameters()})
	must(t, err)
	return resp.GetAvailableCapacity()
}

// testPromise: the promised bytes never exceed the available ones, however many calls run at
// once. The capacity of GetCapacity can be used. Deleting releases it.
func testPromise(t *testing.T, _ *Driver, kind Kind) {
	d := kind.start(t, "20G", func(o *driver.Options) { o.Config.Pools[0].Size, o.Config.Pools[0].Reserve = "10Gi", "0" })
	room := capacity(t, d, kind)
	if room > 10*gib || room < 9*gib {
		t.Fatalf("a pool of 10 GiB has room for %d bytes", room)
	}
	ids := createMany(t, d, kind, 32, gib)
	if want := int(room / gib); len(ids) != want {
		t.Errorf("%d volumes of 1 GiB were made where %d fit", len(ids), want)
	}
	rest := capacity(t, d, kind)
	if rest != room-int64(len(ids))*gib {
		t.Errorf("%d bytes are left of %d after %d volumes of 1 GiB", rest, room, len(ids))
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
	await(t, "the trash to be emptied", func() bool { return capacity(t, d, kind) == room })
	one := createMany(t, d, kind, 1, room/4096*4096)
	if len(one) != 1 {
		t.Errorf("a volume of all that GetCapacity said could not be made")
	}
}

// createMany creates volumes at once and returns the IDs of the created ones. The others must
// be refused for lack of room.
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

// testNodeLimit: a node accepts as many volumes as it advertises.
func testNodeLimit(t *testing.T, _ *Driver, kind Kind) {
	d := kind.start(t, "20G", func(o *driver.Options) { o.Config.MaxVolumesPerNode = 2 })
	info, err := d.Node.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
	if err != nil || info.GetMaxVolumesPerNode() != 2 {
		t.Fatalf("NodeGetInfo: %v, %v", info, err)
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
