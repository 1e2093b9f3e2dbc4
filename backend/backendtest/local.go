package backendtest

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// Limits says what the filesystem of a node's directories does to keep them to their
// size; nil: nothing.
type Limits struct {
	// RootExempt: who has CAP_SYS_RESOURCE is not limited.
	RootExempt bool
	// Off switches limits off in the filesystem at a path, and On on again.
	Off, On func(tb testing.TB, path string)
	// Remounts: for that it is mounted anew, and knows afterwards what it knew before.
	Remounts bool
}

// runLocal runs the suite for volumes that are directories of a node's filesystem.
func runLocal(t *testing.T, target Target) {
	kind := target.Kinds[0]
	d := target.start(t, "20G", func(*driver.Options) {})
	runEach(t, d, kind, map[string]func(*testing.T, *Driver, Kind){
		"Contents":     testContents,
		"Reboot":       testRebootDirectory,
		"Growth":       testLocalGrowth,
		"ReadOnly":     testReadOnly,
		"AccessModes":  testAccessModes,
		"StageAgain":   testStageAgain,
		"PublishAgain": testPublishAgain,
		"Duplicates":   testDuplicates,
		"InUse":        testInUse,
		"Health":       testDirectoryHealth,
		"MountFlags":   testLocalFlags,
		"Secrets":      testSecrets,
		"Arguments":    testLocalArguments,
		"Idempotent":   testIdempotentDirectory,
		"Sizes":        testLocalSizes,
		"Topology":     testTopology,
		"Publication":  testPublication,
		"Capabilities": testCapabilities,
		"Owners":       testOwners,
		"SubDir":       testSubDir,
		"OnDelete":     testOnDelete,
		"Hostile":      testHostile,
		"Tenant":       testTenant,
		"Gone":         testGone,
	})
	t.Run("GoneFromDisk", func(t *testing.T) { testGone(t, target.startAtRoot(t), kind) })
	t.Run("Limits", func(t *testing.T) { testLimits(t, target, d) })
	t.Run("Moved", func(t *testing.T) { testMoved(t, target) })
	t.Run("Paging", func(t *testing.T) { testPaging(t, target) })
	t.Run("Promise", func(t *testing.T) { testPromise(t, target) })
	t.Run("NodeLimit", func(t *testing.T) { testNodeLimit(t, target) })
	t.Run("Snapshots", func(t *testing.T) {
		runDirectorySnapshots(t, target, isSubvolume(t, newLife(t, d, kind, multiWriter).directory()))
	})
}

// testLocalGrowth: more is promised, and nothing is left to do on the node.
func testLocalGrowth(t *testing.T, d *Driver, kind Kind) {
	l := newLife(t, d, kind, multiWriter)
	l.up(t)
	for _, tc := range []struct{ ask, want int64 }{{2*gib + 1, 2*gib + 4096}, {2*gib + 1, 2*gib + 4096}, {3 * gib, 3 * gib}} {
		resp, err := l.expand(t.Context(), tc.ask)
		must(t, err)
		if resp.GetCapacityBytes() != tc.want || resp.GetNodeExpansionRequired() {
			t.Errorf("ControllerExpandVolume to %d: %v", tc.ask, resp)
		}
		node, err := d.Node.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{
			VolumeId: l.id, VolumePath: l.target, CapacityRange: &csi.CapacityRange{RequiredBytes: tc.ask},
		})
		if err != nil || node.GetCapacityBytes() != tc.want {
			t.Errorf("NodeExpandVolume to %d: %v, %v", tc.ask, node, err)
		}
	}
	for _, tc := range []struct {
		r    *csi.CapacityRange
		code codes.Code
		says string
	}{
		{nil, codes.InvalidArgument, "capacity_range is missing"},
		{&csi.CapacityRange{RequiredBytes: 1, LimitBytes: 2}, codes.OutOfRange, "do not shrink"},
		{&csi.CapacityRange{RequiredBytes: 1 << 60}, codes.OutOfRange, "required_bytes"},
		{&csi.CapacityRange{RequiredBytes: 1<<63 - 1}, codes.OutOfRange, "required_bytes"},
	} {
		_, err := d.Control.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{VolumeId: l.id, CapacityRange: tc.r})
		wantCode(t, err, tc.code, tc.says)
	}
	v, err := d.Control.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: l.id})
	if err != nil || v.GetVolume().GetCapacityBytes() != 3*gib {
		t.Errorf("after all that: %v, %v", v, err)
	}
	l.wantReasons(t, nil, nil)
}

// testLocalFlags: flags of the mount reach it; those of a filesystem are refused, and
// leave nothing.
func testLocalFlags(t *testing.T, d *Driver, kind Kind) {
	l := newLife(t, d, kind, multiWriter)
	for _, flag := range []string{"no-such-option", "noatim", "bind", "remount", "prjquota", "subvol=/", "commit=30"} {
		l.cap = kind.Capability(multiWriter, flag)
		wantCode(t, l.stage(t.Context()), codes.InvalidArgument, "mount_flags", flag)
		if n := mountsAt(t, l.staging); n != 0 {
			t.Errorf("after flag %s was refused there are %d mounts", flag, n)
		}
	}
	l.cap = kind.Capability(multiWriter, "noexec", "nodev,noatime", "defaults")
	l.up(t)
	for _, path := range []string{l.staging, l.target} {
		options := testenv.Run(t, "findmnt", "-n", "-o", "OPTIONS", path)
		for _, want := range []string{"noexec", "nodev", "noatime"} {
			if !strings.Contains(options, want) {
				t.Errorf("%s has the options %s, want %s among them", path, options, want)
			}
		}
	}
	l.up(t)
}

// testLocalArguments: what a directory cannot have is refused by name, and nothing is
// changed.
func testLocalArguments(t *testing.T, d *Driver, kind Kind) {
	l := newLife(t, d, kind, multiWriter)
	l.up(t)
	t.Run("Node", func(t *testing.T) { testTargets(t, l) })
	taken := newLifeWith(t, d, kind, multiWriter, kind.parameters("subDir", "arguments/taken"))
	must(t, os.Symlink("/", filepath.Join(d.pool(), "link")))
	must(t, os.WriteFile(filepath.Join(d.pool(), "file"), nil, 0o600))
	d.awaitTrash(t)
	before, files := d.listing(t), d.tree(t)
	for _, tc := range []struct {
		name string
		more []string
		c    *csi.VolumeCapability
		r    *csi.CapacityRange
		code codes.Code
		says []string
	}{
		{"raw device", nil, Kind{}.Capability(writer), nil, codes.InvalidArgument, []string{"raw device", "backend loop"}},
		{"filesystem", nil, Kind{FSType: "ext4"}.Capability(writer), nil, codes.InvalidArgument, []string{"fs_type", "ext4", "loop"}},
		{"filesystem of nfs", nil, fsTypeOf("nfs"), nil, codes.InvalidArgument, []string{"fs_type", "nfs"}},
		{"many nodes", nil, kind.Capability(manyWriters), nil, codes.InvalidArgument, []string{"MULTI_NODE_MULTI_WRITER", "nfs"}},
		{"mount flag", nil, kind.Capability(writer, "remount"), nil, codes.InvalidArgument, []string{"mount_flags", "remount"}},
		{"flag of a filesystem", nil, kind.Capability(writer, "data=journal"), nil, codes.InvalidArgument, []string{"mount_flags", "data=journal"}},
		{"allocation", []string{"allocation", "thick"}, nil, nil, codes.InvalidArgument, []string{"allocation", "thick"}},
		{"mkfs options", []string{"mkfsOptions", "-m 1"}, nil, nil, codes.InvalidArgument, []string{"mkfsOptions"}},
		{"filesystem parameter", []string{"csi.storage.k8s.io/fstype", "xfs"}, nil, nil, codes.InvalidArgument, []string{"fstype"}},
		{"up", []string{"subDir", "../x"}, nil, nil, codes.InvalidArgument, []string{"subDir", "../x"}},
		{"absolute", []string{"subDir", "/etc"}, nil, nil, codes.InvalidArgument, []string{"subDir", "/etc"}},
		{"two lines", []string{"subDir", "a\nb"}, nil, nil, codes.InvalidArgument, []string{"subDir", "control"}},
		{"long", []string{"subDir", strings.Repeat("d/", 2048) + "d"}, nil, nil, codes.InvalidArgument, []string{"subDir", "4097 bytes"}},
		{"another volume", []string{"subDir", "volumes/" + l.name() + "/data"}, nil, nil, codes.InvalidArgument, []string{"subDir", "volumes"}},
		{"another's subDir", []string{"subDir", "arguments/taken"}, nil, nil, codes.FailedPrecondition, []string{"subDir", taken.name()}},
		{"in another's subDir", []string{"subDir", "arguments/taken/x"}, nil, nil, codes.FailedPrecondition, []string{"subDir", taken.name()}},
		{"a link", []string{"subDir", "link/x"}, nil, nil, codes.FailedPrecondition, []string{"subDir", "link/x"}},
		{"a file", []string{"subDir", "file"}, nil, nil, codes.FailedPrecondition, []string{"subDir", "file"}},
		{"mode", []string{"mode", "rwx"}, nil, nil, codes.InvalidArgument, []string{"mode", "rwx"}},
		{"owner", []string{"uid", "root"}, nil, nil, codes.InvalidArgument, []string{"uid", "root"}},
		{"onDelete", []string{"onDelete", "shred"}, nil, nil, codes.InvalidArgument, []string{"onDelete", "shred"}},
		{"pool", []string{"pool", "elsewhere"}, nil, nil, codes.InvalidArgument, []string{"pool", "elsewhere"}},
		{"server without share", []string{"server", "nas.lan"}, nil, nil, codes.InvalidArgument, []string{"server", "share"}},
		{"one byte", nil, nil, &csi.CapacityRange{RequiredBytes: 1}, codes.OutOfRange, []string{"1 bytes", "1048576"}},
		{"all there is", nil, nil, &csi.CapacityRange{RequiredBytes: 1<<63 - 1}, codes.OutOfRange, []string{"9223372036854775807"}},
		{"too much", nil, nil, &csi.CapacityRange{RequiredBytes: 1 << 60}, codes.ResourceExhausted, []string{"room"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := tc.c
			if c == nil {
				c = kind.Capability(writer)
			}
			_, err := d.Control.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
				Name: newName(t), VolumeCapabilities: []*csi.VolumeCapability{c}, Parameters: kind.parameters(tc.more...), CapacityRange: tc.r,
			})
			wantCode(t, err, tc.code, tc.says...)
		})
	}
	if after := d.listing(t); after != before {
		t.Errorf("bad arguments changed the volumes from\n%s\nto\n%s", before, after)
	}
	await(t, "what was begun to be cleared", func() bool { return slices.Equal(d.tree(t), files) })
}

func fsTypeOf(name string) *csi.VolumeCapability {
	c := Kind{FSType: "dir"}.Capability(writer)
	c.GetMount().FsType = name
	return c
}

// tree lists all paths in the pool.
func (d *Driver) tree(t *testing.T) []string {
	t.Helper()
	var paths []string
	_ = filepath.WalkDir(d.pool(), func(path string, _ os.DirEntry, _ error) error { // what goes meanwhile is gone
		paths = append(paths, path)
		return nil
	})
	return paths
}

// testLocalSizes: a directory has the size that was asked for, in blocks.
func testLocalSizes(t *testing.T, d *Driver, kind Kind) {
	for _, tc := range []struct {
		r    *csi.CapacityRange
		want int64
		code codes.Code
	}{
		{nil, gib, codes.OK},
		{&csi.CapacityRange{}, gib, codes.OK},
		{&csi.CapacityRange{LimitBytes: 5 << 20}, 5 << 20, codes.OK},
		{&csi.CapacityRange{RequiredBytes: 1 << 20, LimitBytes: 1 << 20}, 1 << 20, codes.OK},
		{&csi.CapacityRange{RequiredBytes: 1<<20 + 1}, 1<<20 + 4096, codes.OK},
		{&csi.CapacityRange{RequiredBytes: 1<<20 + 1, LimitBytes: 1<<20 + 2}, 0, codes.OutOfRange},
		{&csi.CapacityRange{RequiredBytes: 1<<20 - 1}, 0, codes.OutOfRange},
		{&csi.CapacityRange{RequiredBytes: -1}, 0, codes.InvalidArgument},
		{&csi.CapacityRange{RequiredBytes: 2, LimitBytes: 1}, 0, codes.InvalidArgument},
	} {
		v, err := create(t, d, &csi.CreateVolumeRequest{
			Name: newName(t), CapacityRange: tc.r, VolumeCapabilities: []*csi.VolumeCapability{kind.Capability(multiWriter)}, Parameters: kind.parameters(),
		})
		wantCode(t, err, tc.code)
		if v.GetCapacityBytes() != tc.want {
			t.Errorf("%v: it has %d bytes, want %d", tc.r, v.GetCapacityBytes(), tc.want)
		}
	}
}

// testGone: pods can go though the volume's directory or record was removed, or
// replaced, behind the driver's back; and another volume is not taken for it.
func testGone(t *testing.T, d *Driver, kind Kind) {
	for name, attack := range map[string]func(l *life){
		"directory removed": func(l *life) { must(t, os.RemoveAll(l.directory())) },
		"directory replaced": func(l *life) {
			must(t, os.Rename(l.directory(), l.directory()+".away"))
			must(t, os.Mkdir(l.directory(), 0o777))
		},
		"record removed": func(l *life) { must(t, os.Remove(l.record())) },
		"folder removed": func(l *life) { must(t, os.RemoveAll(filepath.Dir(l.record()))) },
	} {
		t.Run(name, func(t *testing.T) {
			l, other := newLife(t, d, kind, multiWriter), newLife(t, d, kind, multiWriter)
			neighbour := newLifeWith(t, d, kind, multiWriter, kind.parameters("subDir", "gone/"+l.name()))
			l.up(t)
			other.up(t)
			neighbour.up(t)
			attack(l)
			if err := l.publishAt(t.Context(), filepath.Join(t.TempDir(), "second"), false); err == nil {
				t.Error("it was published again")
			}
			wantCode(t, l.unpublishAt(t.Context(), other.target), codes.FailedPrecondition, "left alone")
			d.Restart(t)
			l.down(t)
			if n := mountsAt(t, l.staging) + mountsAt(t, l.target); n != 0 {
				t.Errorf("%d mounts are left", n)
			}
			l.d, l.id = d, other.id // of l there may be nothing that could be deleted
			must(t, os.RemoveAll(filepath.Dir(l.record())))
			other.down(t)
			neighbour.down(t)
		})
	}
}

// startAtRoot starts a driver whose pool is a filesystem, and no directory in one.
func (target Target) startAtRoot(t *testing.T) *Driver {
	t.Helper()
	c, dir := target.place(t, "20G")
	c.Directory.Path, c.RequireMount = filepath.Dir(dir), true
	return target.startOn(t, c, c.Directory.Path, func(*driver.Options) {})
}

// testTenant: root in a pod does to its volume what it can. Deleting it removes all of
// it, and nothing else.
func testTenant(t *testing.T, d *Driver, kind Kind) {
	victim, outside := newBystanders(t, d, kind)
	before := describe(t, outside, victim.directory())
	archived := 0
	for _, place := range [][]string{{"onDelete", "delete"}, {"onDelete", "archive"}, {"onDelete", "delete", "subDir", "tenant/deleted"}, {"onDelete", "archive", "subDir", "tenant/archived"}} {
		t.Run(strings.Join(place[1:], " "), func(t *testing.T) {
			l := newLifeWith(t, d, kind, multiWriter, kind.parameters(append(place, owner...)...))
			wantOwner(t, l.place(place))
			l.up(t)
			plant(t, l.target, outside, victim.directory())
			l.down(t)
			remove(t, d, l.id)
			d.awaitTrash(t)
			if place[1] == "archive" {
				archived++
			}
			if found := d.find(t, "planted"); len(found) != archived {
				t.Errorf("of %d archived volumes there is %q", archived, found)
			}
		})
	}
	t.Run("mounted below", func(t *testing.T) { testMountedBelow(t, d, kind, outside) })
	wantSame(t, before, describe(t, outside, victim.directory()))
}

// owner has the parameters of a directory that is somebody's.
var owner = []string{"uid", "1000", "gid", "1001", "mode", "0750"}

func wantOwner(t *testing.T, dir string) {
	t.Helper()
	if have := testenv.Run(t, "stat", "-c", "%u:%g %a", dir); have != "1000:1001 750" {
		t.Errorf("%s is of %s", dir, have)
	}
}

// newBystanders makes another's volume, and a directory that is in no pool. In each is a
// file that is neither root's nor of owner.
func newBystanders(t *testing.T, d *Driver, kind Kind) (victim *life, outside string) {
	t.Helper()
	victim, outside = newLife(t, d, kind, multiWriter), t.TempDir()
	for i, dir := range []string{victim.directory(), outside} {
		precious := filepath.Join(dir, "precious")
		write(t, precious, pattern(uint64(40+i)))
		must(t, os.Chmod(precious, 0o640))
		must(t, os.Chown(precious, 2000, 2001))
	}
	return victim, outside
}

// describe tells all of directories that a hostile volume may not have changed; what was
// changed back has another time of its last change.
func describe(t *testing.T, dirs ...string) string {
	t.Helper()
	return testenv.Run(t, "find", append(dirs, "-printf", `%p %M %U:%G changed %C@\n`, "-type", "f", "-exec", "sha256sum", "{}", ";")...)
}

func wantSame(t *testing.T, before, after string) {
	t.Helper()
	if before != after {
		t.Errorf("what no call may touch was\n%s\nand is\n%s", before, after)
	}
}

// awaitTrash waits until all that was deleted is removed.
func (d *Driver) awaitTrash(t *testing.T) {
	t.Helper()
	var left []os.DirEntry
	t.Cleanup(func() {
		for _, e := range left {
			t.Logf("in the trash: %s\n%s", e.Name(), trashLog())
		}
	})
	await(t, "the trash to be emptied", func() (empty bool) {
		var err error
		left, err = os.ReadDir(filepath.Join(d.pool(), ".trivet/trash"))
		return err == nil && len(left) == 0
	})
}

// plant fills a directory with all that is hard to remove.
func plant(t *testing.T, dir, outside, victim string) {
	t.Helper()
	at := func(name string) string { return filepath.Join(dir, name) }
	write(t, at("planted"), pattern(42))
	for name, to := range map[string]string{"host": outside, "victim": victim, "root": "/", "up": "../../..", "loop": "loop"} {
		must(t, os.Symlink(to, at(name)))
	}
	must(t, os.Link(at("planted"), at("hard link")))
	testenv.Run(t, "mknod", at("null"), "c", "1", "3")
	testenv.Run(t, "mkfifo", at("pipe"))
	deep := dir
	for range 200 {
		deep = filepath.Join(deep, "deep")
		must(t, os.Mkdir(deep, 0o755))
	}
	write(t, filepath.Join(deep, "file"), []byte("x"))
	must(t, os.Mkdir(at("\n.. \x01"), 0))
	must(t, os.MkdirAll(at("fixed/inner"), 0o755))
	write(t, at("fixed/inner/file"), []byte("x"))
	write(t, at("append"), []byte("x"))
	testenv.Run(t, "chattr", "+i", at("fixed/inner/file"))
	testenv.Run(t, "chattr", "+i", at("fixed/inner"))
	testenv.Run(t, "chattr", "+a", at("fixed"))
	testenv.Run(t, "chattr", "+a", at("append"))
	if fsType := testenv.Run(t, "findmnt", "-n", "-o", "FSTYPE", "-T", dir); fsType == "btrfs" {
		testenv.Run(t, "btrfs", "-q", "subvolume", "create", at("nested"))
		testenv.Run(t, "btrfs", "-q", "subvolume", "snapshot", "-r", at("nested"), filepath.Join(deep, "snapshot"))
	}
	testenv.Run(t, "chattr", "+i", dir)
}

// unnest takes the subvolumes out of what plant made, which have no copy.
func unnest(t *testing.T, dir string) {
	t.Helper()
	testenv.Run(t, "chattr", "-i", dir)
	for _, nested := range []string{"nested", strings.Repeat("deep/", 200) + "snapshot"} {
		testenv.Run(t, "btrfs", "-q", "subvolume", "delete", filepath.Join(dir, nested))
	}
	testenv.Run(t, "chattr", "+i", dir)
}

// testMountedBelow: what is mounted in a volume's directory is not touched. It keeps its
// place from being removed until it is unmounted, but for a subvolume's: the kernel
// unmounts what is in one that is destroyed.
func testMountedBelow(t *testing.T, d *Driver, kind Kind, outside string) {
	l := newLife(t, d, kind, multiWriter)
	below := filepath.Join(l.directory(), "below")
	must(t, os.Mkdir(below, 0o755))
	testenv.Run(t, "mount", "--bind", outside, below)
	subvolume := isSubvolume(t, l.directory())
	remove(t, d, l.id)
	if subvolume {
		d.awaitTrash(t)
		return
	}
	mounted := strings.TrimSpace(testenv.Run(t, "sh", "-c", fmt.Sprintf("findmnt -rn -o TARGET | grep '/%s[.].*/below$'", l.name())))
	wantContent(t, filepath.Join(mounted, "precious"), pattern(41))
	testenv.Run(t, "umount", mounted)
	d.Restart(t)
	await(t, "the trash to be emptied", func() bool { return len(d.find(t, "below")) == 0 })
}

func trashLog() string {
	var out []string
	for line := range strings.Lines(Log()) {
		if strings.Contains(line, "trash") {
			out = append(out, line)
		}
	}
	return strings.Join(out, "")
}
