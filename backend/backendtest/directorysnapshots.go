package backendtest

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/internal/treetest"
)

// testDirectoryInUse: a directory that is no subvolume is copied only while it is not in use.
func testDirectoryInUse(t *testing.T, d *Driver, kind Kind) {
	l := newLife(t, d, kind, kind.many())
	l.up(t)
	write(t, l.data(l.target), pattern(90))
	for _, published := range []bool{true, false} {
		_, err := d.Control.CreateSnapshot(t.Context(), snapshotRequest(t, l.id))
		wantCode(t, err, codes.FailedPrecondition, "in use")
		_, err = d.Control.CreateVolume(t.Context(), kind.copyRequest(t, fromVolume(l), 0))
		wantCode(t, err, codes.FailedPrecondition, "in use")
		if published {
			must(t, l.unpublishAt(t.Context(), l.target))
		}
	}
	must(t, l.unstage(t.Context()))
	l.snapshot(t)
}

// testLiveDirectory: a copy of a subvolume that is being written to shows one moment.
func testLiveDirectory(t *testing.T, d *Driver, kind Kind) {
	l := newLife(t, d, kind, kind.many())
	l.up(t)
	write(t, l.data(l.target), pattern(90))
	r := record(t, l)
	since := r.done.Load()
	s := l.snapshot(t)
	c := d.restore(t, kind, fromVolume(l), 0)
	until := r.done.Load() + 1
	r.await(t)
	must(t, r.end())
	for _, one := range []*life{c, d.restore(t, kind, fromSnapshot(s), 0)} {
		one.up(t)
		wantMoment(t, since, until, one)
		wantContent(t, one.data(one.target), pattern(90))
	}
}

// testTree: a copy has all files of the directory with all attributes.
func testTree(t *testing.T, d *Driver, kind Kind) {
	l := newLife(t, d, kind, kind.many())
	l.up(t)
	treetest.Make(t, l.target, 1)
	l.down(t)
	s := l.snapshot(t)
	copies := []*life{d.restore(t, kind, fromVolume(l), 0), d.restore(t, kind, fromSnapshot(s), 2*gib)}
	d.Restart(t)
	d.awaitShared(t, kind)
	copies = append(copies, d.restore(t, kind, fromSnapshot(s), gib))
	l.up(t)
	for _, c := range copies {
		c.up(t)
		treetest.Compare(t, l.target, c.target)
		write(t, c.data(c.target), pattern(91))
	}
}

// testDirectorySnapshotLife is testSnapshotLife for directories.
func testDirectorySnapshotLife(t *testing.T, d *Driver, kind Kind) {
	l := newLife(t, d, kind, kind.many())
	empty := l.snapshot(t)
	l.up(t)
	write(t, l.data(l.target), pattern(92))
	l.down(t)
	first := l.snapshot(t)
	early := d.restore(t, kind, fromSnapshot(first), gib)
	ofCopy := early.snapshot(t)
	l.up(t)
	write(t, l.data(l.target), pattern(93))
	l.down(t)
	remove(t, d, l.id)
	second := d.restore(t, kind, fromSnapshot(first), gib)
	d.drop(t, first)
	d.Restart(t)
	d.awaitShared(t, kind)
	for _, c := range []*life{early, second, d.restore(t, kind, fromSnapshot(ofCopy), gib)} {
		c.up(t)
		wantContent(t, c.data(c.target), pattern(92))
		write(t, c.data(c.target), pattern(94))
	}
	none := d.restore(t, kind, fromSnapshot(empty), 0)
	none.up(t)
	write(t, none.data(none.target), pattern(95))
	_, err := early.expand(t.Context(), 2*gib)
	must(t, err)
	wantContent(t, early.data(early.target), pattern(94))
}

// testHostileSource: hostile content of a tenant is copied unchanged or refused. No link in it
// is followed.
func testHostileSource(t *testing.T, d *Driver, kind Kind) {
	victim, outside := newBystanders(t, d, kind)
	before := describe(t, outside, victim.directory())
	l := newLife(t, d, kind, kind.many())
	plant(t, l.directory(), outside, victim.directory())
	if kind.Has(Subvolumes) {
		_, err := d.Control.CreateSnapshot(t.Context(), snapshotRequest(t, l.id))
		wantCode(t, err, codes.FailedPrecondition, "subvolume", "nested")
		_, err = d.Control.CreateVolume(t.Context(), kind.copyRequest(t, fromVolume(l), 0))
		wantCode(t, err, codes.FailedPrecondition, "subvolume", "nested")
		unnest(t, l.directory())
	}
	testenv.Run(t, "find", l.directory(), "-type", "l", "-printf", "%l") // a link that was never read is changed by that
	s := l.snapshot(t)
	c, owned := d.restore(t, kind, fromSnapshot(s), gib), d.restore(t, kind, fromSnapshot(s), gib, owner...)
	l.up(t)
	c.up(t)
	treetest.Compare(t, l.target, c.target)
	wantOwner(t, owned.directory())
	d.restore(t, kind, fromSnapshot(s), gib, "subDir", "hostile/source")

	mounted := newLife(t, d, kind, kind.many())
	below := filepath.Join(mounted.directory(), "below")
	must(t, os.Mkdir(below, 0o755))
	testenv.Run(t, "mount", "--bind", outside, below)
	defer testenv.Run(t, "umount", below)
	if kind.Has(Subvolumes) { // a snapshot of a subvolume includes the files below
		mounted.snapshot(t)
	} else {
		_, err := d.Control.CreateSnapshot(t.Context(), snapshotRequest(t, mounted.id))
		wantCode(t, err, codes.FailedPrecondition, "mounted", "below")
	}
	wantSame(t, before, describe(t, outside, victim.directory()))
}

// testSnapshotOfSubDir: the class determines the path of a copy. An existing directory is
// never adopted.
func testSnapshotOfSubDir(t *testing.T, d *Driver, kind Kind) {
	l := newLifeWith(t, d, kind, kind.many(), kind.Parameters("subDir", "copies/source", "mode", "0750", "uid", "1000"))
	write(t, filepath.Join(d.Pool(), "copies/source/data"), pattern(97))
	s := l.snapshot(t)
	c := d.restore(t, kind, fromSnapshot(s), gib, "subDir", "copies/copy")
	wantContent(t, filepath.Join(d.Pool(), "copies/copy/data"), pattern(97))
	c.up(t)
	wantContent(t, c.data(c.target), pattern(97))
	if info, err := os.Stat(c.target); err != nil || info.Mode().Perm() != 0o750 {
		t.Errorf("of a directory with mode 0750 the copy is %v, %v", info.Mode(), err)
	}
	must(t, os.MkdirAll(filepath.Join(d.Pool(), "copies/there"), 0o755))
	for _, of := range []*csi.VolumeContentSource{fromSnapshot(s), fromVolume(l)} {
		_, err := d.Control.CreateVolume(t.Context(), kind.copyRequest(t, of, gib, "subDir", "copies/there"))
		wantCode(t, err, codes.FailedPrecondition, "subDir", "copies/there")
	}
}

// testNoBlocks: a directory has no changed blocks.
func testNoBlocks(t *testing.T, d *Driver, kind Kind) {
	s := newLife(t, d, kind, kind.many()).snapshot(t)
	in, err := d.Control.GetMetadataAllocated(t.Context(), &csi.GetMetadataAllocatedRequest{SnapshotId: s.GetSnapshotId()})
	must(t, err)
	_, err = in.Recv()
	wantCode(t, err, codes.InvalidArgument, "directory")
}

// testDirectoryGroup: directories that are not in use can form a group of snapshots, whose
// members cannot be deleted alone.
func testDirectoryGroup(t *testing.T, d *Driver, kind Kind) {
	volumes := []*life{newLife(t, d, kind, kind.many()), newLife(t, d, kind, kind.many()), newLife(t, d, kind, kind.many())}
	for i, l := range volumes {
		l.up(t)
		write(t, l.data(l.target), pattern(uint64(100+i)))
	}
	_, err := d.Control.CreateVolumeGroupSnapshot(t.Context(), groupRequest(t, volumes...))
	wantCode(t, err, codes.FailedPrecondition, "in use")
	for _, l := range volumes {
		l.down(t)
	}
	req := groupRequest(t, volumes...)
	g := d.group(t, req)
	testGroupRequests(t, d, req, g)
	testGroupMembers(t, d, g)
	for i, s := range g.GetSnapshots() {
		c := d.restore(t, kind, fromSnapshot(s), gib)
		c.up(t)
		wantContent(t, c.data(c.target), pattern(uint64(100+i)))
	}
	d.dropGroup(t, g)
}

// testLimitedCopy: a copy is limited to its size. A volume with snapshots can be overwritten
// completely.
func testLimitedCopy(t *testing.T, d *Driver, kind Kind) {
	const size = 48 * mib
	as := kind.target.Limits.root()
	l := newSized(t, d, kind, size)
	l.up(t)
	file := l.data(l.target)
	wantFull(t, fill(t, file, as), size)
	l.down(t)
	s := l.snapshot(t)
	copies := []*life{d.restore(t, kind, fromSnapshot(s), size), d.restore(t, kind, fromVolume(l), 2*size)}
	shares := kind.Has(Subvolumes)
	for i, c := range copies {
		c.wantEnforced(t, "cooperative")
		c.up(t)
		if shares { // what it shares counts with who wrote it
			must(t, os.Remove(c.data(c.target)))
		}
		wantFull(t, fill(t, c.data(c.target), as), int64(1+i)*size)
		c.wantReasons(t, nil, nil)
		c.down(t)
	}
	kept := d.restore(t, kind, fromVolume(copies[0]), size)
	whole := d.restore(t, kind, fromSnapshot(s), size)
	l.up(t)
	for _, drop := range []func(){
		func() { d.drop(t, s) }, func() { remove(t, d, copies[0].id) }, func() { remove(t, d, copies[1].id) }, func() { remove(t, d, kept.id) },
		func() { remove(t, d, whole.id) },
	} {
		must(t, os.Remove(file))
		write(t, file, make([]byte, size-slack)) // the old blocks belong to the volumes that share them
		l.wantReasons(t, nil, nil)
		drop()
	}
	await(t, "its limit to be what it was", func() bool {
		return l.stats(t)[csi.VolumeUsage_BYTES].GetTotal() == size && len(d.under(t, ".trivet/trash")) == 0
	})
	l.wantReasons(t, nil, nil)
	must(t, os.Remove(file))
	await(t, "the deleted data to be freed", func() bool {
		testenv.Run(t, "sync", "-f", l.target)
		return l.stats(t)[csi.VolumeUsage_BYTES].GetUsed() < slack
	})
	wantFull(t, fill(t, file, as), size)
}
