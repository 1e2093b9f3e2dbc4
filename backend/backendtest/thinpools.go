package backendtest

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/backend/lvm"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// OnThinPool creates a medium that is a thin pool in a volume group, with some room beside it for the records.
func OnThinPool(tb testing.TB, room Room) Medium {
	tb.Helper()
	return onThinPool(tb, room, "--extents", "95%FREE", "--poolmetadatasize", "64m")
}

// onThinPool is OnThinPool with arguments of lvcreate(8). The thin pool is not active.
func onThinPool(tb testing.TB, room Room, size ...string) Medium {
	tb.Helper()
	m := OnGroup(tb, room)
	g := &lvm.Group{VolumeGroup: m.Config.Section.(*lvm.Group).VolumeGroup, ThinPool: "pool0"}
	testenv.Run(tb, "lvm", append([]string{"lvcreate", "--yes", "--type", "thin-pool", "--name", g.ThinPool, g.VolumeGroup}, size...)...)
	testenv.Run(tb, "lvm", "lvchange", "--activate", "n", g.VolumeGroup+"/"+g.ThinPool)
	m.Config.Section = g
	return m
}

// logicalVolumes returns the columns of the logical volumes whose tags match. Without a tag, it returns all.
func (d *Driver) logicalVolumes(t *testing.T, columns, tag string) (lines []string) {
	t.Helper()
	args := []string{"lvs", "--noheadings", "--separator", " ", "-o", columns, d.volumeGroup()}
	if tag != "" {
		args = append(args, "-S", fmt.Sprintf("lv_tags=%q", tag))
	}
	for _, line := range strings.Split(testenv.Run(t, "lvm", args...), "\n") {
		if line = strings.TrimSpace(line); line != "" {
			lines = append(lines, line)
		}
	}
	return lines
}

// testThinVolumes: the logical volumes of volumes and snapshots are in the thin pool. A snapshot is inactive and read-only.
// The logical volumes of deleted volumes and snapshots are removed.
func testThinVolumes(t *testing.T, d *Driver, kind Kind) {
	before := len(d.logicalVolumes(t, "lv_name", ""))
	l := newVolume(t, d, kind, multiWriter)
	l.stageAndPublish(t)
	write(t, l.data(l.target), pattern(120))
	s := l.snapshot(t)
	name := s.GetSnapshotId()[strings.LastIndex(s.GetSnapshotId(), ":")+1:]
	if got := d.logicalVolumes(t, "segtype,pool_lv,lv_permissions", "trivet.volume."+l.name()); !slices.Equal(got, []string{"thin pool0 writeable"}) {
		t.Errorf("got logical volumes %q of the volume, want one in the thin pool", got)
	}
	if got := d.logicalVolumes(t, "segtype,pool_lv,lv_permissions,lv_active", "trivet.snapshot."+name); !slices.Equal(got, []string{"thin pool0 read-only"}) {
		t.Errorf("got logical volumes %q of the snapshot, want one in the thin pool, read-only and not active", got)
	}
	c := d.newCopy(t, kind, fromSnapshot(s), 0)
	remove(t, d, c.id)
	d.deleteSnapshot(t, s)
	l.unpublishAndUnstage(t)
	must(t, l.delete(t.Context()))
	await(t, "the logical volumes to be removed", func() bool { return len(d.logicalVolumes(t, "lv_name", "")) == before })
}

// testThinPool: a pool is opened only with an existing thin pool that zeroes its blocks.
func testThinPool(t *testing.T, _ *Driver, kind Kind) {
	m := kind.target.Medium(t, Room{})
	g := m.Config.Section.(*lvm.Group)
	at := g.VolumeGroup + "/" + g.ThinPool
	closed := func(says ...string) {
		t.Helper()
		d := kind.target.startOn(t, m, func(*driver.Options) {})
		_, err := d.Control.GetCapacity(t.Context(), &csi.GetCapacityRequest{Parameters: kind.target.Class})
		wantCode(t, err, codes.Unavailable, says...)
		d.Stop(t)
	}
	testenv.Run(t, "lvm", "lvchange", "--zero", "n", at)
	closed("does not zero", "lvchange --zero y "+at)
	testenv.Run(t, "lvm", "lvchange", "--zero", "y", at)
	testenv.Run(t, "lvm", "lvrename", at, at+"-renamed")
	closed("no thin pool", "lvcreate --type thin-pool")
	testenv.Run(t, "lvm", "lvrename", at+"-renamed", at)
	d := kind.target.startOn(t, m, func(*driver.Options) {})
	_, err := d.Control.CreateVolume(t.Context(), kind.request(t, "wipe", "zero"))
	wantCode(t, err, codes.InvalidArgument, "wipe")
	l := newVolume(t, d, kind, multiWriter)
	l.stageAndPublish(t)
}

// testThinRoom: nothing is created or grown in a thin pool whose data is almost used up. The state of the pool is
// reported, and ends when the pool is extended.
func testThinRoom(t *testing.T, _ *Driver, kind Kind) {
	m := onThinPool(t, Room{}, "--size", "256m")
	g := m.Config.Section.(*lvm.Group)
	testenv.Run(t, "lvm", "lvchange", "--errorwhenfull", "y", g.VolumeGroup+"/"+g.ThinPool)
	d := kind.target.startOn(t, m, func(o *driver.Options) {
		o.Config.Pools[0].Overcommit, o.Config.Pools[0].Reserve = 10, "50%"
	})
	l := newVolumeOfSize(t, d, kind, gib)
	l.stageAndPublish(t)
	secret := make([]byte, mib)
	for at := range int64(160) {
		writeAt(t, l.target, secret, at*mib)
	}
	d.wantPoolReasons(t, "PoolAlmostFull")
	_, err := d.Control.CreateVolume(t.Context(), kind.request(t))
	wantCode(t, err, codes.ResourceExhausted, "below its reserve", "lvextend")
	_, err = l.expand(t.Context(), 2*gib)
	wantCode(t, err, codes.OutOfRange, "lvextend")
	_, err = d.Control.CreateSnapshot(t.Context(), snapshotRequest(t, l.id))
	wantCode(t, err, codes.ResourceExhausted, "lvextend")
	if room := capacity(t, d, kind); room != 0 {
		t.Errorf("got a capacity of %d bytes of an almost full pool, want 0", room)
	}
	full := false
	for at := int64(160); at < 300 && !full; at++ {
		full = tryWriteAt(l.target, secret, at*mib) != nil
	}
	if !full {
		t.Error("300 MiB were written to a pool of 256 MiB")
	}
	d.wantPoolReasons(t, "PoolAlmostFull", "PoolFull")
	testenv.Run(t, "lvm", "lvextend", "--yes", "--size", "+1g", d.volumeGroup()+"/pool0")
	await(t, "the pool to have room again", func() bool { return capacity(t, d, kind) > 0 })
	d.wantPoolReasons(t)
	_, err = l.expand(t.Context(), 2*gib)
	must(t, err)
	_, err = d.Node.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{VolumeId: l.id, VolumePath: l.target, StagingTargetPath: l.staging, VolumeCapability: l.cap})
	must(t, err)
	writeAt(t, l.target, secret, 1500*mib)
}

// wantPoolReasons fails the test unless the node reports conditions of its storage with these reasons.
func (d *Driver) wantPoolReasons(t *testing.T, want ...string) {
	t.Helper()
	storage, err := d.Node.NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{})
	must(t, err)
	var got []string
	for _, h := range storage.GetBackendHealth() {
		got = append(got, h.GetReason())
	}
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("got conditions %q of the storage, want %q", got, want)
	}
}
