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

// testRawInUse: a raw device in use has no snapshots where a copy takes time.
func testRawInUse(t *testing.T, d *Driver, kind Kind) {
	l := newLife(t, d, kind, multiWriter)
	l.up(t)
	r := record(t, l)
	_, err := d.Control.CreateSnapshot(t.Context(), snapshotRequest(t, l.id))
	wantCode(t, err, codes.FailedPrecondition, "raw device", "unstage")
	_, err = d.Control.CreateVolume(t.Context(), kind.copyRequest(t, fromVolume(l), 0))
	wantCode(t, err, codes.FailedPrecondition, "raw device")
	r.await(t)
	must(t, r.end())
}

// testLiveSnapshot: a snapshot of a volume that is being written shows one moment, and has
// everything that was durable before the call.
func testLiveSnapshot(t *testing.T, d *Driver, kind Kind) {
	l := newLife(t, d, kind, multiWriter)
	l.up(t)
	write(t, l.data(l.target), pattern(71))
	r := record(t, l)
	for _, consistency := range []string{"crash", "frozen"} {
		t.Run(consistency, func(t *testing.T) { testMoment(t, l, r, consistency) })
	}
	d.Restart(t)
	d.awaitShared(t, kind)
	r.await(t) // nothing is frozen
	must(t, r.end())
}

// testMoment restores a snapshot and compares it with the recorder of its source.
func testMoment(t *testing.T, l *life, r *recorder, consistency string) {
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
	c := d.restore(t, kind, fromSnapshot(s), size)
	if consistency == "frozen" && !recovered(t, c) {
		t.Error("the filesystem of a frozen one is not clean")
	}
	c.up(t)
	wantMoment(t, since, until, c)
	wantContent(t, c.data(c.target), pattern(71))
	wantSize(t, c, size)
	write(t, c.data(c.target), pattern(72))
	wantContent(t, l.data(l.target), pattern(71))
	wantOthers(t, l, c)
	c.down(t)
	wantFilesystem(t, c, size)
	c.up(t)
	wantContent(t, c.data(c.target), pattern(72))
}

// recovered reports whether the filesystem on a volume's image needs no recovery.
func recovered(t *testing.T, l *life) bool {
	t.Helper()
	if l.kind.FSType != "ext4" {
		return true
	}
	image, err := os.Open(l.image())
	must(t, err)
	defer image.Close()
	b := make([]byte, 4)
	_, err = image.ReadAt(b, 1024+0x60) // s_feature_incompat, of which 4 is needs_recovery
	must(t, err)
	return b[0]&4 == 0
}

// wantOthers fails the test if two filesystems have the same UUID. xfs may: it is mounted with
// nouuid.
func wantOthers(t *testing.T, a, b *life) {
	t.Helper()
	if a.kind.Block() || a.kind.FSType == "xfs" {
		return
	}
	uuid := func(l *life) string {
		return testenv.Run(t, "blkid", "-p", "-s", "UUID", "-o", "value", deviceOf(t, l))
	}
	if uuid(a) == uuid(b) {
		t.Errorf("both filesystems have the UUID %s", uuid(a))
	}
}

// testCloneAtRest clones a volume that is not in use. Source and clone are independent.
func testCloneAtRest(t *testing.T, d *Driver, kind Kind) {
	l := newLife(t, d, kind, kind.many())
	l.up(t)
	write(t, l.data(l.target), pattern(110))
	l.down(t)
	c := d.restore(t, kind, fromVolume(l), 0)
	d.Restart(t)
	d.awaitShared(t, kind)
	c.up(t)
	wantContent(t, c.data(c.target), pattern(110))
	write(t, c.data(c.target), pattern(111))
	l.up(t)
	wantContent(t, l.data(l.target), pattern(110))
	l.down(t)
	remove(t, d, l.id)
	wantContent(t, c.data(c.target), pattern(111))
}

// testClone clones volumes, staged and not.
func testClone(t *testing.T, d *Driver, kind Kind) {
	l := newLife(t, d, kind, multiWriter)
	never := d.restore(t, kind, fromVolume(l), gib) // of one without a filesystem yet
	l.up(t)
	write(t, l.data(l.target), pattern(73))
	if kind.Has(LiveCopies) {
		r := record(t, l)
		since := r.done.Load()
		c := d.restore(t, kind, fromVolume(l), 0)
		until := r.done.Load() + 1
		c.up(t)
		must(t, r.end())
		wantMoment(t, since, until, c)
		wantContent(t, c.data(c.target), pattern(73))
	}
	l.down(t)
	c := d.restore(t, kind, fromVolume(l), gib)
	remove(t, d, l.id)
	c.up(t)
	wantContent(t, c.data(c.target), pattern(73))
	again := d.restore(t, kind, fromVolume(never), gib)
	for _, empty := range []*life{never, again} {
		empty.up(t)
		write(t, empty.data(empty.target), pattern(74))
		wantContent(t, empty.data(empty.target), pattern(74))
	}
}

// testSnapshotLife: snapshots of volumes in all states outlive their volumes. Volumes created from
// snapshots outlive the snapshots.
func testSnapshotLife(t *testing.T, d *Driver, kind Kind) {
	l := newLife(t, d, kind, multiWriter)
	unformatted := l.snapshot(t)
	l.up(t)
	write(t, l.data(l.target), pattern(75))
	l.down(t)
	first := l.snapshot(t)
	l.up(t)
	write(t, l.data(l.target), pattern(76))
	l.down(t)
	second := l.snapshot(t, "consistency", "frozen")
	early := d.restore(t, kind, fromSnapshot(first), gib)
	ofCopy := early.snapshot(t) // of one that was never staged
	remove(t, d, l.id)
	d.drop(t, first)
	d.Restart(t)
	d.awaitShared(t, kind)
	for _, tc := range []struct {
		of   *csi.Snapshot
		want []byte
	}{{second, pattern(76)}, {ofCopy, pattern(75)}} {
		c := d.restore(t, kind, fromSnapshot(tc.of), gib)
		d.drop(t, tc.of)
		c.up(t)
		wantContent(t, c.data(c.target), tc.want)
		wantSize(t, c, gib)
		_, err := d.Control.CreateVolume(t.Context(), kind.copyRequest(t, fromSnapshot(tc.of), gib))
		wantCode(t, err, codes.NotFound, "snapshot")
	}
	if kind.growsHere() {
		_, err := early.expand(t.Context(), 2*gib)
		must(t, err)
		early.up(t)
		wantSize(t, early, 2*gib)
		wantContent(t, early.data(early.target), pattern(75))
	}
	empty := d.restore(t, kind, fromSnapshot(unformatted), gib)
	empty.up(t)
	write(t, empty.data(empty.target), pattern(77))
	wantContent(t, empty.data(empty.target), pattern(77))
}

// testThickCopy: a thick copy of a thick volume has all its blocks allocated, and shares none.
func testThickCopy(t *testing.T, d *Driver, kind Kind) {
	size := max(64*mib, kind.Size())
	l := newSized(t, d, kind, size, "allocation", "thick")
	l.up(t)
	write(t, l.data(l.target), pattern(78))
	l.down(t)
	s := l.snapshot(t)
	for _, of := range []*csi.VolumeContentSource{fromSnapshot(s), fromVolume(l)} {
		c := d.restore(t, kind, of, size, "allocation", "thick")
		if n := allocatedTo(t, c.image()); n < size {
			t.Errorf("of %d bytes %d are allocated", size, n)
		}
		image, err := os.Open(c.image())
		must(t, err)
		n, ok, err := clone.Unshared(image)
		image.Close()
		if err != nil || ok && n < size {
			t.Errorf("of %d bytes %d are its own: %v", size, n, err)
		}
		c.up(t)
		wantContent(t, c.data(c.target), pattern(78))
	}
}

// testSnapshotLedger: the space that snapshots can need is promised to them until they are
// removed.
func testSnapshotLedger(t *testing.T, _ *Driver, kind Kind) {
	d := kind.start(t, "20G", func(o *driver.Options) { o.Config.Pools[0].Size, o.Config.Pools[0].Reserve = "1Gi", "0" })
	const size = 576 * mib
	room := capacity(t, d, kind)
	l := newSized(t, d, kind, size)
	l.up(t)
	testenv.Run(t, "dd", "if=/dev/urandom", "of="+l.data(l.target), "bs=1M", "count=150", "conv=fsync", "status=none")
	l.down(t)
	before := capacity(t, d, kind)
	var made []*csi.Snapshot
	for range 2 {
		made = append(made, l.snapshot(t))
	}
	after := capacity(t, d, kind)
	if cost := before - after; cost < 2*150*mib || cost > 2*220*mib { // a filesystem has up to 70 MiB of its own
		t.Errorf("two snapshots of 150 MiB take %d bytes of what can be promised", cost)
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
		t.Errorf("the refused request changed the capacity from %d to %d", after, again)
	}
	for _, s := range made {
		d.drop(t, s)
	}
	await(t, "the snapshots' room", func() bool { return capacity(t, d, kind) == before })
	remove(t, d, l.id)
	await(t, "the volume's room", func() bool { return capacity(t, d, kind) == room })
	d.wantEmpty(t)
}

// otherPool gives a driver a second pool, on an ext4.
func otherPool(t *testing.T) (change func(*driver.Options), name string) {
	t.Helper()
	dir := filepath.Join(testenv.Filesystem(t, "ext4", "8G"), "pool")
	return func(o *driver.Options) {
		o.Config.Pools = append(o.Config.Pools, pool.Config{Name: "other", Directory: pool.Directory{Path: dir}})
	}, "other"
}
