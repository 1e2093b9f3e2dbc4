package backendtest

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/internal/treetest"
)

// testDirectoryInUse: a directory that is not a subvolume is copied only while it is not in use, also if it is
// retained when its volume is deleted.
func testDirectoryInUse(t *testing.T, d *Driver, kind Kind) {
	requireIdleSource(t, d, kind, newVolume(t, d, kind, kind.widestMode()))
	if kind.Has(Placed) {
		requireIdleSource(t, d, kind, newVolumeOfClass(t, d, kind, kind.widestMode(), kind.Parameters("subDir", "idle/${pv.metadata.name}", "csi.storage.k8s.io/pv/name", "retained", "onDelete", "retain")))
	}
}

// requireIdleSource fails the test unless a directory is not copied while it is published or staged, and is
// copied afterwards.
func requireIdleSource(t *testing.T, d *Driver, kind Kind, l *testVolume) {
	t.Helper()
	l.stageAndPublish(t)
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

// testLiveDirectory: a copy of a subvolume that is being written to shows one point in time.
func testLiveDirectory(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, kind.widestMode())
	l.stageAndPublish(t)
	write(t, l.data(l.target), pattern(90))
	r := record(t, l)
	since := r.done.Load()
	s := l.snapshot(t)
	c := d.newCopy(t, kind, fromVolume(l), 0)
	until := r.done.Load() + 1
	r.await(t)
	must(t, r.end())
	for _, c := range []*testVolume{c, d.newCopy(t, kind, fromSnapshot(s), 0)} {
		c.stageAndPublish(t)
		wantMoment(t, since, until, c)
		wantContent(t, c.data(c.target), pattern(90))
	}
}

// testDirectoryTree: a copy has all files of the directory with all attributes.
func testDirectoryTree(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, kind.widestMode())
	l.stageAndPublish(t)
	treetest.Make(t, l.target, 1)
	l.unpublishAndUnstage(t)
	s := l.snapshot(t)
	copies := []*testVolume{d.newCopy(t, kind, fromVolume(l), 0), d.newCopy(t, kind, fromSnapshot(s), 2*gib)}
	d.Restart(t)
	d.awaitShared(t, kind)
	copies = append(copies, d.newCopy(t, kind, fromSnapshot(s), gib))
	l.stageAndPublish(t)
	for _, c := range copies {
		c.stageAndPublish(t)
		treetest.Compare(t, l.target, c.target)
		write(t, c.data(c.target), pattern(91))
	}
}

// testDirectorySnapshotLifetime: snapshots of directories outlive their volumes, and copies outlive the snapshots.
func testDirectorySnapshotLifetime(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, kind.widestMode())
	empty := l.snapshot(t)
	l.stageAndPublish(t)
	write(t, l.data(l.target), pattern(92))
	l.unpublishAndUnstage(t)
	first := l.snapshot(t)
	early := d.newCopy(t, kind, fromSnapshot(first), gib)
	ofCopy := early.snapshot(t)
	l.stageAndPublish(t)
	write(t, l.data(l.target), pattern(93))
	grow(t, l.data(l.target)+"-larger", pattern(1))
	l.unpublishAndUnstage(t)
	d.wantChanged(t, kind, l, pattern(93), pattern(1))
	l.stageAndPublish(t)
	grow(t, l.data(l.target)+"-larger", pattern(2)) // a server may have delegated the file to the node for the snapshot
	replace(t, l.data(l.target), pattern(96))
	l.unpublishAndUnstage(t)
	d.wantChanged(t, kind, l, pattern(96), slices.Concat(pattern(1), pattern(2)))
	remove(t, d, l.id)
	second := d.newCopy(t, kind, fromSnapshot(first), gib)
	d.deleteSnapshot(t, first)
	d.Restart(t)
	d.awaitShared(t, kind)
	for _, c := range []*testVolume{early, second, d.newCopy(t, kind, fromSnapshot(ofCopy), gib)} {
		c.stageAndPublish(t)
		wantContent(t, c.data(c.target), pattern(92))
		write(t, c.data(c.target), pattern(94))
	}
	ofEmpty := d.newCopy(t, kind, fromSnapshot(empty), 0)
	ofEmpty.stageAndPublish(t)
	write(t, ofEmpty.data(ofEmpty.target), pattern(95))
	_, err := early.expand(t.Context(), 2*gib)
	must(t, err)
	wantContent(t, early.data(early.target), pattern(94))
}

// wantChanged requires that a new snapshot of a directory has the last content of its two files.
func (d *Driver) wantChanged(t *testing.T, kind Kind, l *testVolume, data, larger []byte) {
	t.Helper()
	c := d.newCopy(t, kind, fromSnapshot(l.snapshot(t)), gib)
	c.stageAndPublish(t)
	for path, want := range map[string][]byte{c.data(c.target): data, c.data(c.target) + "-larger": larger} {
		if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: got %d bytes, %v; want %d bytes as written", path, len(got), err, len(want))
		}
	}
}

// grow appends content to a file.
func grow(t *testing.T, path string, content []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	must(t, err)
	_, err = f.Write(content)
	must(t, errors.Join(err, f.Sync(), f.Close()))
}

// replace renames a new file with content over a file.
func replace(t *testing.T, path string, content []byte) {
	t.Helper()
	write(t, path+"-new", content)
	must(t, os.Rename(path+"-new", path))
}

// testHostileSource: hostile content of a tenant is copied unchanged or refused. No link in the content is
// followed.
func testHostileSource(t *testing.T, d *Driver, kind Kind) {
	victim, outside := newBystanders(t, d, kind)
	before := fingerprint(t, outside, victim.directory())
	l := newVolume(t, d, kind, kind.widestMode())
	plantHostileFiles(t, l.directory(), outside, victim.directory())
	if kind.Has(Subvolumes) {
		_, err := d.Control.CreateSnapshot(t.Context(), snapshotRequest(t, l.id))
		wantCode(t, err, codes.FailedPrecondition, "subvolume", "nested")
		_, err = d.Control.CreateVolume(t.Context(), kind.copyRequest(t, fromVolume(l), 0))
		wantCode(t, err, codes.FailedPrecondition, "subvolume", "nested")
		removeSubvolumes(t, l.directory())
	}
	testenv.Run(t, "find", l.directory(), "-type", "l", "-printf", "%l") // reading a link for the first time changes its access time
	s := l.snapshot(t)
	c, owned := d.newCopy(t, kind, fromSnapshot(s), gib), d.newCopy(t, kind, fromSnapshot(s), gib, owner...)
	l.stageAndPublish(t)
	c.stageAndPublish(t)
	treetest.Compare(t, l.target, c.target)
	wantOwner(t, owned.directory())
	d.newCopy(t, kind, fromSnapshot(s), gib, "subDir", "hostile/source")

	mounted := newVolume(t, d, kind, kind.widestMode())
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
	wantSame(t, before, fingerprint(t, outside, victim.directory()))
}

// testSnapshotOfSubDir: the class determines the path of a copy. An existing directory is
// never adopted.
func testSnapshotOfSubDir(t *testing.T, d *Driver, kind Kind) {
	l := newVolumeOfClass(t, d, kind, kind.widestMode(), kind.Parameters("subDir", "copies/source", "mode", "0750", "uid", "1000"))
	write(t, filepath.Join(d.Pool(), "copies/source/data"), pattern(97))
	s := l.snapshot(t)
	c := d.newCopy(t, kind, fromSnapshot(s), gib, "subDir", "copies/copy")
	wantContent(t, filepath.Join(d.Pool(), "copies/copy/data"), pattern(97))
	c.stageAndPublish(t)
	wantContent(t, c.data(c.target), pattern(97))
	if info, err := os.Stat(c.target); err != nil || info.Mode().Perm() != 0o750 {
		t.Errorf("got mode %v of the copy, %v; want the mode 0750 of the source", info.Mode(), err)
	}
	must(t, os.MkdirAll(filepath.Join(d.Pool(), "copies/existing"), 0o755))
	for _, of := range []*csi.VolumeContentSource{fromSnapshot(s), fromVolume(l)} {
		_, err := d.Control.CreateVolume(t.Context(), kind.copyRequest(t, of, gib, "subDir", "copies/existing"))
		wantCode(t, err, codes.FailedPrecondition, "subDir", "copies/existing")
	}
}

// testDirectoryHasNoBlocks: a directory has no changed blocks.
func testDirectoryHasNoBlocks(t *testing.T, d *Driver, kind Kind) {
	s := newVolume(t, d, kind, kind.widestMode()).snapshot(t)
	in, err := d.Control.GetMetadataAllocated(t.Context(), &csi.GetMetadataAllocatedRequest{SnapshotId: s.GetSnapshotId()})
	must(t, err)
	_, err = in.Recv()
	wantCode(t, err, codes.InvalidArgument, "directory")
}

// testDirectoryGroup: directories that are not in use can form a group of snapshots, whose
// members cannot be deleted alone.
func testDirectoryGroup(t *testing.T, d *Driver, kind Kind) {
	volumes := []*testVolume{newVolume(t, d, kind, kind.widestMode()), newVolume(t, d, kind, kind.widestMode()), newVolume(t, d, kind, kind.widestMode())}
	for i, l := range volumes {
		l.stageAndPublish(t)
		write(t, l.data(l.target), pattern(uint64(100+i)))
	}
	_, err := d.Control.CreateVolumeGroupSnapshot(t.Context(), groupRequest(t, volumes...))
	wantCode(t, err, codes.FailedPrecondition, "in use")
	for _, l := range volumes {
		l.unpublishAndUnstage(t)
	}
	req := groupRequest(t, volumes...)
	g := d.group(t, req)
	testGroupRequests(t, d, req, g)
	testGroupMembers(t, d, g)
	for i, s := range g.GetSnapshots() {
		c := d.newCopy(t, kind, fromSnapshot(s), gib)
		c.stageAndPublish(t)
		wantContent(t, c.data(c.target), pattern(uint64(100+i)))
	}
	d.deleteGroup(t, g)
}

// testLimitedCopy: a copy is limited to its size. A volume with snapshots and copies can be overwritten
// completely, and gets its limit back when they are removed.
func testLimitedCopy(t *testing.T, d *Driver, kind Kind) {
	const size = 48 * mib
	command := kind.target.Limits.asLimitedRoot()
	l := newVolumeOfSize(t, d, kind, size)
	l.stageAndPublish(t)
	file := l.data(l.target)
	wantFull(t, fillFile(t, file, command), size)
	l.unpublishAndUnstage(t)
	s := l.snapshot(t)
	copies := []*testVolume{d.newCopy(t, kind, fromSnapshot(s), size), d.newCopy(t, kind, fromVolume(l), 2*size)}
	shares := kind.Has(Subvolumes)
	for i, c := range copies {
		c.wantEnforced(t, "cooperative")
		c.stageAndPublish(t)
		if shares { // shared data counts as usage of the volume that wrote it
			must(t, os.Remove(c.data(c.target)))
		}
		wantFull(t, fillFile(t, c.data(c.target), command), int64(1+i)*size)
		c.wantReasons(t, nil, nil)
		c.unpublishAndUnstage(t)
	}
	ofCopy := d.newCopy(t, kind, fromVolume(copies[0]), size)
	ofSnapshot := d.newCopy(t, kind, fromSnapshot(s), size)
	l.stageAndPublish(t)
	for _, removeOne := range []func(){
		func() { d.deleteSnapshot(t, s) }, func() { remove(t, d, copies[0].id) }, func() { remove(t, d, copies[1].id) }, func() { remove(t, d, ofCopy.id) },
		func() { remove(t, d, ofSnapshot.id) },
	} {
		must(t, os.Remove(file))
		write(t, file, make([]byte, size-slack)) // the old blocks belong to the volumes that share them
		l.wantReasons(t, nil, nil)
		removeOne()
	}
	await(t, "the original limit of the volume", func() bool {
		return l.stats(t)[csi.VolumeUsage_BYTES].GetTotal() == size && len(d.entries(t, ".trivet/trash")) == 0
	})
	l.wantReasons(t, nil, nil)
	must(t, os.Remove(file))
	await(t, "the deleted data to be freed", func() bool {
		testenv.Run(t, "sync", "-f", l.target)
		return l.stats(t)[csi.VolumeUsage_BYTES].GetUsed() < slack
	})
	wantFull(t, fillFile(t, file, command), size)
}
