package backendtest

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/clone"
	"github.com/trivet-csi/trivet/pool"
)

// testRawDeviceInUse: a raw device in use is not copied if the filesystem shares no blocks, because the copy would
// take time.
func testRawDeviceInUse(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, multiWriter)
	l.stageAndPublish(t)
	r := record(t, l)
	_, err := d.Control.CreateSnapshot(t.Context(), snapshotRequest(t, l.id))
	wantCode(t, err, codes.FailedPrecondition, "raw device", "unstage")
	_, err = d.Control.CreateVolume(t.Context(), kind.copyRequest(t, fromVolume(l), 0))
	wantCode(t, err, codes.FailedPrecondition, "raw device")
	r.await(t)
	must(t, r.end())
}

// testLiveSnapshot: a snapshot of a volume that is being written to shows one point in time, and contains all data
// that was durable before the call.
func testLiveSnapshot(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, multiWriter)
	l.stageAndPublish(t)
	write(t, l.data(l.target), pattern(71))
	r := record(t, l)
	for _, consistency := range []string{"crash", "frozen"} {
		t.Run(consistency, func(t *testing.T) { testSnapshotMoment(t, l, r, consistency) })
	}
	d.Restart(t)
	d.awaitShared(t, kind)
	r.await(t) // the filesystem is not frozen
	must(t, r.end())
}

// testSnapshotMoment creates a snapshot with a consistency, and a volume from the snapshot, and checks that the
// volume shows one point in time of the recorder.
func testSnapshotMoment(t *testing.T, l *testVolume, r *recorder, consistency string) {
	d, kind := l.d, l.kind
	if kind.Block() && consistency == "frozen" {
		_, err := d.Control.CreateSnapshot(t.Context(), snapshotRequest(t, l.id, "consistency", consistency))
		wantCode(t, err, codes.FailedPrecondition, "raw device")
		return
	}
	since := r.done.Load()
	s := l.snapshot(t, "consistency", consistency)
	until := r.done.Load() + 1
	r.await(t)
	size := gib
	if consistency == "frozen" && kind.growsHere() {
		size = 2 * gib
	}
	c := d.newCopy(t, kind, fromSnapshot(s), size)
	if consistency == "frozen" && !isClean(t, c) {
		t.Error("the filesystem in a frozen snapshot is not clean")
	}
	c.stageAndPublish(t)
	wantMoment(t, since, until, c)
	wantContent(t, c.data(c.target), pattern(71))
	wantSize(t, c, size)
	write(t, c.data(c.target), pattern(72))
	wantContent(t, l.data(l.target), pattern(71))
	wantDifferentUUIDs(t, l, c)
	c.unpublishAndUnstage(t)
	wantFilesystem(t, c, size)
	c.stageAndPublish(t)
	wantContent(t, c.data(c.target), pattern(72))
}

// isClean reports whether the filesystem of an unstaged volume needs no recovery.
func isClean(t *testing.T, l *testVolume) bool {
	t.Helper()
	if l.kind.FSType != "ext4" {
		return true
	}
	b := make([]byte, 4)
	l.withImage(t, func(path string) {
		image, err := os.Open(path)
		must(t, err)
		defer image.Close()
		_, err = image.ReadAt(b, 1024+0x60) // s_feature_incompat, of which 4 is needs_recovery
		must(t, err)
	})
	return b[0]&4 == 0
}

// wantDifferentUUIDs fails the test if the filesystems of two volumes have the same UUID. Those of xfs may be
// equal, because xfs is mounted with nouuid.
func wantDifferentUUIDs(t *testing.T, a, b *testVolume) {
	t.Helper()
	if a.kind.Block() || a.kind.FSType == "xfs" {
		return
	}
	uuid := func(l *testVolume) string {
		return testenv.Run(t, "blkid", "-p", "-s", "UUID", "-o", "value", deviceOf(t, l))
	}
	if uuid(a) == uuid(b) {
		t.Errorf("both filesystems have the UUID %s", uuid(a))
	}
}

// testClone: the clone of a volume that is not in use is independent of its source.
func testClone(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, kind.widestMode())
	l.stageAndPublish(t)
	write(t, l.data(l.target), pattern(110))
	l.unpublishAndUnstage(t)
	c := d.newCopy(t, kind, fromVolume(l), 0)
	d.Restart(t)
	d.awaitShared(t, kind)
	c.stageAndPublish(t)
	wantContent(t, c.data(c.target), pattern(110))
	write(t, c.data(c.target), pattern(111))
	l.stageAndPublish(t)
	wantContent(t, l.data(l.target), pattern(110))
	l.unpublishAndUnstage(t)
	remove(t, d, l.id)
	wantContent(t, c.data(c.target), pattern(111))
}

// testVolumeModes restores the snapshot of a filesystem as a raw device, and the snapshot of that device as a filesystem.
// The content of a device without a filesystem is not changed.
func testVolumeModes(t *testing.T, d *Driver, kind Kind) {
	raw := kind
	raw.FSType, raw.Features = "", kind.Features&^Filesystem|Block
	l := newVolume(t, d, kind, multiWriter)
	l.stageAndPublish(t)
	write(t, l.data(l.target), pattern(78))
	l.unpublishAndUnstage(t)
	device := d.newCopy(t, raw, fromSnapshot(l.snapshot(t)), 0)
	again := d.newCopy(t, kind, fromSnapshot(device.snapshot(t)), 0)
	again.stageAndPublish(t)
	wantContent(t, again.data(again.target), pattern(78))
	l.stageAndPublish(t)
	wantDifferentUUIDs(t, l, again)

	device.stageAndPublish(t)
	write(t, device.data(device.target), pattern(79)) // overwrites the superblock
	device.unpublishAndUnstage(t)
	none := d.newCopy(t, kind, fromSnapshot(device.snapshot(t)), 0)
	wantCode(t, none.stage(t.Context()), codes.DataLoss, "nothing was changed")
	kept := d.newCopy(t, raw, fromSnapshot(none.snapshot(t)), 0)
	kept.stageAndPublish(t)
	wantContent(t, kept.data(kept.target), pattern(79))
}

// testCloneStates clones a volume that was never staged, one that is in use, and one that is not in use.
func testCloneStates(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, multiWriter)
	never := d.newCopy(t, kind, fromVolume(l), gib) // the source has no filesystem yet
	l.stageAndPublish(t)
	write(t, l.data(l.target), pattern(73))
	if kind.Has(LiveCopies) {
		r := record(t, l)
		since := r.done.Load()
		c := d.newCopy(t, kind, fromVolume(l), 0)
		until := r.done.Load() + 1
		c.stageAndPublish(t)
		must(t, r.end())
		wantMoment(t, since, until, c)
		wantContent(t, c.data(c.target), pattern(73))
	}
	l.unpublishAndUnstage(t)
	c := d.newCopy(t, kind, fromVolume(l), gib)
	remove(t, d, l.id)
	c.stageAndPublish(t)
	wantContent(t, c.data(c.target), pattern(73))
	again := d.newCopy(t, kind, fromVolume(never), gib)
	for _, empty := range []*testVolume{never, again} {
		empty.stageAndPublish(t)
		write(t, empty.data(empty.target), pattern(74))
		wantContent(t, empty.data(empty.target), pattern(74))
	}
}

// testSnapshotLifetime: snapshots outlive their volumes, and volumes that are created from snapshots outlive the
// snapshots.
func testSnapshotLifetime(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, multiWriter)
	unformatted := l.snapshot(t)
	l.stageAndPublish(t)
	write(t, l.data(l.target), pattern(75))
	l.unpublishAndUnstage(t)
	first := l.snapshot(t)
	l.stageAndPublish(t)
	write(t, l.data(l.target), pattern(76))
	l.unpublishAndUnstage(t)
	second := l.snapshot(t, "consistency", "frozen")
	early := d.newCopy(t, kind, fromSnapshot(first), gib)
	ofCopy := early.snapshot(t) // the copy was never staged
	remove(t, d, l.id)
	d.deleteSnapshot(t, first)
	d.Restart(t)
	d.awaitShared(t, kind)
	for _, tc := range []struct {
		of   *csi.Snapshot
		want []byte
	}{{second, pattern(76)}, {ofCopy, pattern(75)}} {
		c := d.newCopy(t, kind, fromSnapshot(tc.of), gib)
		d.deleteSnapshot(t, tc.of)
		c.stageAndPublish(t)
		wantContent(t, c.data(c.target), tc.want)
		wantSize(t, c, gib)
		_, err := d.Control.CreateVolume(t.Context(), kind.copyRequest(t, fromSnapshot(tc.of), gib))
		wantCode(t, err, codes.NotFound, "snapshot")
	}
	if kind.growsHere() {
		_, err := early.expand(t.Context(), 2*gib)
		must(t, err)
		early.stageAndPublish(t)
		wantSize(t, early, 2*gib)
		wantContent(t, early.data(early.target), pattern(75))
	}
	empty := d.newCopy(t, kind, fromSnapshot(unformatted), gib)
	empty.stageAndPublish(t)
	write(t, empty.data(empty.target), pattern(77))
	wantContent(t, empty.data(empty.target), pattern(77))
}

// testThickCopy: all blocks of a thick copy of a thick volume are allocated, and none is shared.
func testThickCopy(t *testing.T, d *Driver, kind Kind) {
	size := max(64*mib, kind.Size())
	l := newVolumeOfSize(t, d, kind, size, "allocation", "thick")
	l.stageAndPublish(t)
	write(t, l.data(l.target), pattern(78))
	l.unpublishAndUnstage(t)
	s := l.snapshot(t)
	for _, of := range []*csi.VolumeContentSource{fromSnapshot(s), fromVolume(l)} {
		c := d.newCopy(t, kind, of, size, "allocation", "thick")
		if n := allocatedTo(t, c.image()); n < size {
			t.Errorf("got %d allocated bytes, want at least %d", n, size)
		}
		image, err := os.Open(c.image())
		must(t, err)
		n, ok, err := clone.Unshared(image)
		image.Close()
		if err != nil || ok && n < size {
			t.Errorf("got %d bytes that are not shared, want at least %d: %v", n, size, err)
		}
		c.stageAndPublish(t)
		wantContent(t, c.data(c.target), pattern(78))
	}
}

// testSnapshotSpace: the space that snapshots can need is reserved until they are removed.
func testSnapshotSpace(t *testing.T, _ *Driver, kind Kind) {
	d := kind.start(t, "20G", func(o *driver.Options) { o.Config.Pools[0].Size, o.Config.Pools[0].Reserve = "1Gi", "0" })
	const size = 576 * mib
	room := capacity(t, d, kind)
	l := newVolumeOfSize(t, d, kind, size)
	l.stageAndPublish(t)
	testenv.Run(t, "dd", "if=/dev/urandom", "of="+l.data(l.target), "bs=1M", "count=150", "conv=fsync", "status=none")
	l.unpublishAndUnstage(t)
	before := capacity(t, d, kind)
	var made []*csi.Snapshot
	for range 2 {
		made = append(made, l.snapshot(t))
	}
	after := capacity(t, d, kind)
	if cost := before - after; cost < 2*150*mib || cost > 2*220*mib { // 70 MiB for the metadata of the filesystem
		t.Errorf("two snapshots of 150 MiB reduced the capacity by %d bytes, want 300 MiB to 440 MiB", cost)
	}
	d.Restart(t)
	d.awaitShared(t, kind)
	if again := capacity(t, d, kind); again != after {
		t.Errorf("a restart changed the capacity from %d to %d", after, again)
	}
	_, err := d.Control.CreateSnapshot(t.Context(), snapshotRequest(t, l.id))
	wantCode(t, err, codes.ResourceExhausted, "room")
	for _, of := range []*csi.VolumeContentSource{fromSnapshot(made[0]), fromVolume(l)} {
		_, err = d.Control.CreateVolume(t.Context(), kind.copyRequest(t, of, size))
		wantCode(t, err, codes.ResourceExhausted, "room")
	}
	if again := capacity(t, d, kind); again != after {
		t.Errorf("the refused requests changed the capacity from %d to %d", after, again)
	}
	for _, s := range made {
		d.deleteSnapshot(t, s)
	}
	await(t, "the space of the snapshots to be released", func() bool { return capacity(t, d, kind) == before })
	remove(t, d, l.id)
	await(t, "the space of the volume to be released", func() bool { return capacity(t, d, kind) == room })
	d.wantEmpty(t)
}

// otherPool creates an ext4 filesystem, and returns a change of options that adds a pool on it, and the pool's
// name.
func otherPool(t *testing.T) (change func(*driver.Options), name string) {
	t.Helper()
	dir := filepath.Join(testenv.Filesystem(t, "ext4", "8G"), "pool")
	return func(o *driver.Options) {
		o.Config.Pools = append(o.Config.Pools, pool.Config{Name: "other", Directory: pool.Directory{Path: dir}})
	}, "other"
}
