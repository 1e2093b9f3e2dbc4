package backendtest

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// Access modes for several nodes.
const (
	manyWriters = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
	manyReaders = csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
)

// directory returns the path of the directory of a volume without subDir, on the server or node.
func (l *testVolume) directory() string {
	return filepath.Join(l.d.Pool(), "volumes", l.name(), "data")
}

// name returns the name in the volume's ID.
func (l *testVolume) name() string { return l.id[strings.LastIndex(l.id, ":")+1:] }

// testDirectoryGrowth: expansion raises the promised size and needs no node expansion.
func testDirectoryGrowth(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, kind.widestMode())
	l.stageAndPublish(t)
	for _, size := range []int64{2*gib + 1, 2*gib + 1, 3 * gib} {
		want := kind.rounded(size)
		resp, err := l.expand(t.Context(), size)
		must(t, err)
		if resp.GetCapacityBytes() != want || resp.GetNodeExpansionRequired() {
			t.Errorf("ControllerExpandVolume to %d: got %v, want %d bytes and no node expansion", size, resp, want)
		}
		node, err := d.Node.NodeExpandVolume(t.Context(), &csi.NodeExpandVolumeRequest{
			VolumeId: l.id, VolumePath: l.target, CapacityRange: &csi.CapacityRange{RequiredBytes: size},
		})
		if err != nil || node.GetCapacityBytes() != want {
			t.Errorf("NodeExpandVolume to %d: got %v, %v; want %d bytes", size, node, err, want)
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
		t.Errorf("after all expansions: got %v, %v; want 3 GiB", v, err)
	}
	l.wantReasons(t, nil, nil)
}

// rounded returns the size of a directory for a requested size. On a node it is a multiple of a block, which is
// the unit of quotas.
func (k Kind) rounded(size int64) int64 {
	if k.Has(NodeLocal) {
		return (size + block - 1) / block * block
	}
	return size
}

// testDirectoryHealth: each problem of a directory is reported.
func testDirectoryHealth(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, kind.widestMode())
	l.stageAndPublish(t)
	l.wantReasons(t, nil, nil)
	away := l.directory() + ".away"
	must(t, os.Rename(l.directory(), away))
	_, control := l.reasons(t)
	if !slices.Equal(control, []string{"DirectoryMissing"}) {
		t.Errorf("got conditions %q of a volume without its directory, want DirectoryMissing", control)
	}
	must(t, os.Rename(away, l.directory()))
	l.wantReasons(t, nil, nil)
	testenv.Run(t, "umount", l.target)
	l.wantReasons(t, []string{"NotMounted"}, nil)
	must(t, l.publish(t.Context()))
	l.wantReasons(t, nil, nil)
	l.unpublishAndUnstage(t)
	must(t, os.Rename(l.directory(), away))
	wantCode(t, l.stage(t.Context()), codes.DataLoss, l.name())
	if n := mountsAt(t, l.staging); n != 0 {
		t.Errorf("got %d mounts of a volume without its directory, want none", n)
	}
	must(t, os.Rename(away, l.directory()))
	l.stageAndPublish(t)
}

// testDirectoryFlags: a mount has the flags of the class. Flags that a directory cannot have are refused, and
// nothing is mounted.
func testDirectoryFlags(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, kind.widestMode())
	invalid := []string{"no-such-option", "noatim", "commit=30", "bind", "remount"}
	shown := []string{"noexec", "nodev", "noatime"}
	requested := []string{"noexec", "nodev,noatime", "defaults"}
	if kind.Has(Shared) {
		invalid = append(invalid, "bg", "addr=127.0.0.1", "nfsvers=2")
		shown, requested = append(shown, "acregmin=7"), append(requested, "acregmin=7")
	} else {
		invalid = append(invalid, "prjquota", "subvol=/")
	}
	for _, flag := range invalid {
		l.cap = kind.Capability(kind.widestMode(), flag)
		wantCode(t, l.stage(t.Context()), codes.InvalidArgument, "mount_flags", flag)
		if n := mountsAt(t, l.staging); n != 0 {
			t.Errorf("got %d mounts after flag %s was refused, want none", n, flag)
		}
	}
	l.cap = kind.Capability(kind.widestMode(), requested...)
	l.stageAndPublish(t)
	for _, path := range []string{l.staging, l.target} {
		options := testenv.Run(t, "findmnt", "-n", "-o", "OPTIONS", path)
		for _, want := range shown {
			if !strings.Contains(options, want) {
				t.Errorf("%s is mounted with options %s, want %s among them", path, options, want)
			}
		}
	}
	l.stageAndPublish(t)
}

// testPoolFlags: a mount has the flags of the pool and of the class. If both set the NFS version, the class
// takes precedence.
func testPoolFlags(t *testing.T, _ *Driver, kind Kind) {
	d := kind.start(t, "2G", func(o *driver.Options) {
		o.Config.Pools[0].NFS.MountOptions = []string{"nfsvers=4.2,noatime"}
	})
	l := newVolume(t, d, kind, manyWriters)
	l.cap = kind.Capability(manyWriters, "nodev", "nfsvers=4.1")
	l.stageAndPublish(t)
	l.stageAndPublish(t) // repeated calls with the same flags succeed
	options := testenv.Run(t, "findmnt", "-n", "-o", "OPTIONS", l.staging)
	for _, want := range []string{"noatime", "nodev", "vers=4.1"} {
		if !strings.Contains(options, want) {
			t.Errorf("the staging path is mounted with options %s, want %s among them", options, want)
		}
	}
	l.cap = kind.Capability(manyWriters, "nodev,noexec", "nfsvers=4.1")
	wantCode(t, l.stage(t.Context()), codes.AlreadyExists, "mount flags")
}

// testMultiNodeMode publishes a directory in a mode for several nodes, at two targets. The second target refuses
// writes in the mode for readers, and otherwise shows its writes at the first one.
func testMultiNodeMode(t *testing.T, d *Driver, kind Kind, mode csi.VolumeCapability_AccessMode_Mode) {
	l := newVolume(t, d, kind, mode)
	must(t, l.publishTo(t.Context(), Node))
	l.stageAndPublish(t)
	second := filepath.Join(t.TempDir(), "second")
	must(t, l.publishAt(t.Context(), second, false))
	if mode == manyReaders {
		wantRefusesWrites(t, l.data(second))
	} else {
		write(t, l.data(second), pattern(10))
		wantContent(t, l.data(l.target), pattern(10))
	}
	must(t, l.unpublishAt(t.Context(), second))
}

// testIdempotentDirectory: the same request returns the same volume. A different request of
// the same name is refused.
func testIdempotentDirectory(t *testing.T, d *Driver, kind Kind) {
	name := newName(t)
	request := func(more ...string) *csi.CreateVolumeRequest {
		return &csi.CreateVolumeRequest{
			Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: gib, LimitBytes: 2 * gib},
			VolumeCapabilities: []*csi.VolumeCapability{kind.Capability(kind.widestMode())},
			Parameters:         kind.Parameters(slices.Concat([]string{"subDir", "idem/${pvc.metadata.name}", "csi.storage.k8s.io/pvc/name", "claim"}, more)...),
		}
	}
	first, err := create(t, d, request())
	must(t, err)
	for _, same := range []*csi.CreateVolumeRequest{request(), request("onDelete", "delete"), request("subDir", "idem/claim"), request("mode", "0777", "uid", "0")} {
		resp, err := d.Control.CreateVolume(t.Context(), same)
		if err != nil || resp.GetVolume().String() != first.String() {
			t.Errorf("with parameters %v: got %v, %v; want %v", same.GetParameters(), resp, err, first)
		}
	}
	for key, other := range map[string]*csi.CreateVolumeRequest{
		"subDir":         request("csi.storage.k8s.io/pvc/name", "other"),
		"onDelete":       request("onDelete", "archive"),
		"mode":           request("mode", "0700"),
		"uid":            request("uid", "1"),
		"capacity_range": change(request(), func(r *csi.CreateVolumeRequest) { r.CapacityRange = &csi.CapacityRange{RequiredBytes: gib + 1} }),
	} {
		_, err := d.Control.CreateVolume(t.Context(), other)
		wantCode(t, err, codes.AlreadyExists, key)
	}
}

// testDirectorySizes: a directory has the requested size. On a node the size is rounded up to blocks.
func testDirectorySizes(t *testing.T, d *Driver, kind Kind) {
	for _, tc := range []struct {
		needs Feature
		r     *csi.CapacityRange
		want  int64
		code  codes.Code
	}{
		{0, nil, gib, codes.OK},
		{0, &csi.CapacityRange{}, gib, codes.OK},
		{0, &csi.CapacityRange{LimitBytes: 5 << 20}, 5 << 20, codes.OK},
		{0, &csi.CapacityRange{RequiredBytes: 1 << 20, LimitBytes: 1 << 20}, 1 << 20, codes.OK},
		{0, &csi.CapacityRange{RequiredBytes: 1<<20 + 1}, kind.rounded(1<<20 + 1), codes.OK},
		{Shared, &csi.CapacityRange{LimitBytes: 5000}, 5000, codes.OK},
		{Shared, &csi.CapacityRange{RequiredBytes: 1, LimitBytes: 1}, 1, codes.OK},
		{NodeLocal, &csi.CapacityRange{RequiredBytes: 1<<20 + 1, LimitBytes: 1<<20 + 2}, 0, codes.OutOfRange},
		{NodeLocal, &csi.CapacityRange{RequiredBytes: 1<<20 - 1}, 0, codes.OutOfRange},
		{0, &csi.CapacityRange{RequiredBytes: 1 << 60}, 0, codes.ResourceExhausted},
		{0, &csi.CapacityRange{RequiredBytes: -1}, 0, codes.InvalidArgument},
		{0, &csi.CapacityRange{RequiredBytes: 2, LimitBytes: 1}, 0, codes.InvalidArgument},
	} {
		if !kind.Has(tc.needs) {
			continue
		}
		v, err := create(t, d, &csi.CreateVolumeRequest{
			Name: newName(t), CapacityRange: tc.r, VolumeCapabilities: []*csi.VolumeCapability{kind.Capability(kind.widestMode())}, Parameters: kind.Parameters(),
		})
		wantCode(t, err, tc.code)
		if v.GetCapacityBytes() != tc.want {
			t.Errorf("range %v: got a volume of %d bytes, want %d", tc.r, v.GetCapacityBytes(), tc.want)
		}
	}
}

// testNoTopology: a volume in a shared pool has no topology, whatever is requested.
func testNoTopology(t *testing.T, d *Driver, kind Kind) {
	elsewhere := &csi.Topology{Segments: map[string]string{"csi.trivet.dev/node": "another"}}
	c := kind.Capability(writer)
	v, err := create(t, d, &csi.CreateVolumeRequest{
		Name: newName(t), VolumeCapabilities: []*csi.VolumeCapability{c}, Parameters: kind.Parameters(),
		AccessibilityRequirements: &csi.TopologyRequirement{Requisite: []*csi.Topology{elsewhere}, Preferred: []*csi.Topology{elsewhere}},
	})
	must(t, err)
	if len(v.GetAccessibleTopology()) > 0 {
		t.Errorf("got accessible topology %v, want none", v.GetAccessibleTopology())
	}
	if c := v.GetVolumeContext(); kind.Has(Directory) && (c["backend"] != "nfs" || c["enforced"] != "false") || c["pool"] == "" {
		t.Errorf("got volume context %v, want a pool, and for a directory backend nfs and enforced false", c)
	}
	reported, err := d.Control.GetCapacity(t.Context(), &csi.GetCapacityRequest{
		Parameters: kind.Parameters(), AccessibleTopology: elsewhere, VolumeCapabilities: []*csi.VolumeCapability{c},
	})
	if err != nil || reported.GetAvailableCapacity() == 0 || (reported.GetMinimumVolumeSize().GetValue() == 1) != kind.Has(Directory) {
		t.Errorf("GetCapacity of another node: got %v, %v; want room, and for a directory a minimum of 1 byte", reported, err)
	}
}

// testValidateDirectory: only capabilities that the volume has are confirmed.
func testValidateDirectory(t *testing.T, d *Driver, kind Kind) {
	c := kind.Capability(kind.widestMode())
	v, err := create(t, d, &csi.CreateVolumeRequest{Name: newName(t), VolumeCapabilities: []*csi.VolumeCapability{c}, Parameters: kind.Parameters("mode", "0750")})
	must(t, err)
	wantValidated(t, d, v, []validation{
		{"all arguments", c, v.GetVolumeContext(), kind.Parameters("mode", "750"), true},
		{"the capability alone", c, nil, nil, true},
		{"mode for one node", kind.Capability(writer), nil, nil, true},
		{"filesystem of a device", Kind{FSType: "ext4"}.Capability(writer), nil, nil, false},
		{"block", Kind{}.Capability(writer), nil, nil, false},
		{"mount flags", kind.Capability(writer, "remount"), nil, nil, false},
		{"another context", c, map[string]string{"pool": "other"}, nil, false},
		{"another mode", c, nil, kind.Parameters("mode", "0777"), false},
		{"another subDir", c, nil, kind.Parameters("subDir", "x"), false},
		{"no backend", c, nil, map[string]string{"pool": kind.target.Pool}, false},
	})
}

// testDirectoryOwner: a directory has the mode and the owner that the class gives.
func testDirectoryOwner(t *testing.T, d *Driver, kind Kind) {
	for _, tc := range []struct {
		name     string
		more     []string
		mode     uint32
		uid, gid uint32
	}{
		{"no parameters", nil, 0o777, 0, 0},
		{"mode and owner", []string{"mode", "2770", "uid", "1000", "gid", "2000"}, 0o2770, 1000, 2000},
		{"mountPermissions", []string{"mountPermissions", "0755"}, 0o755, 0, 0},
		{"mountPermissions 0", []string{"mountPermissions", "0"}, 0o777, 0, 0},
		{"in a subDir", []string{"subDir", "owners/a", "mode", "0700", "uid", "7"}, 0o700, 7, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			l := newVolumeOfClass(t, d, kind, kind.widestMode(), kind.Parameters(tc.more...))
			l.stageAndPublish(t)
			var st syscall.Stat_t
			must(t, syscall.Stat(l.target, &st))
			if st.Mode&0o7777 != tc.mode || st.Uid != tc.uid || st.Gid != tc.gid {
				t.Errorf("got mode %o and owner %d:%d, want %o and %d:%d", st.Mode&0o7777, st.Uid, st.Gid, tc.mode, tc.uid, tc.gid)
			}
		})
	}
}

// testSubDir: the class determines the path of a directory. An existing directory is adopted
// unchanged. Two volumes cannot share a directory.
func testSubDir(t *testing.T, d *Driver, kind Kind) {
	claim := func(subDir, claim string, more ...string) map[string]string {
		return kind.Parameters(slices.Concat([]string{"subDir", subDir, "csi.storage.k8s.io/pvc/name", claim, "csi.storage.k8s.io/pvc/namespace", "team"}, more)...)
	}
	const template = "sub/${pvc.metadata.namespace}/${pvc.metadata.name}"
	l := newVolumeOfClass(t, d, kind, kind.widestMode(), claim(template, "made"))
	l.stageAndPublish(t)
	write(t, l.data(l.target), pattern(11))
	wantContent(t, filepath.Join(d.Pool(), "sub/team/made/data"), pattern(11))

	adopted := filepath.Join(d.Pool(), "sub/team/adopted")
	must(t, os.MkdirAll(adopted, 0o755))
	must(t, os.Chmod(adopted, 0o711))
	write(t, filepath.Join(adopted, "data"), pattern(12))
	a := newVolumeOfClass(t, d, kind, kind.widestMode(), claim(template, "adopted", "onDelete", "retain"))
	a.stageAndPublish(t)
	wantContent(t, a.data(a.target), pattern(12))
	if info, err := os.Stat(a.target); err != nil || info.Mode().Perm() != 0o711 {
		t.Errorf("got mode %v of the adopted directory, %v; want 0711", info.Mode(), err)
	}
	refused := func(parameters map[string]string) {
		t.Helper()
		_, err := d.Control.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
			Name: newName(t), VolumeCapabilities: []*csi.VolumeCapability{kind.Capability(kind.widestMode())}, Parameters: parameters,
		})
		wantCode(t, err, codes.FailedPrecondition, "subDir")
	}
	refused(claim(template, "made"))
	refused(claim(template+"/inside", "made"))
	refused(claim("sub/team", "made"))
	refused(claim(template, "adopted"))
	b := newVolumeOfClass(t, d, kind, kind.widestMode(), claim(template, "adopted", "onDelete", "retain"))
	b.stageAndPublish(t)
	wantContent(t, b.data(b.target), pattern(12))
}

// testOnDelete: onDelete deletes, archives or retains the directory.
func testOnDelete(t *testing.T, d *Driver, kind Kind) {
	for _, subDir := range []string{"", "ondelete"} {
		for _, onDelete := range []string{"delete", "archive", "retain"} {
			t.Run(onDelete+" "+subDir, func(t *testing.T) {
				more := []string{"onDelete", onDelete}
				if subDir != "" {
					more = append(more, "subDir", "${pvc.metadata.namespace}/"+onDelete, "csi.storage.k8s.io/pvc/namespace", subDir)
				}
				l := newVolumeOfClass(t, d, kind, kind.widestMode(), kind.Parameters(more...))
				l.stageAndPublish(t)
				mark := onDelete + subDir + "-mark"
				write(t, filepath.Join(l.target, mark), pattern(13))
				l.unpublishAndUnstage(t)
				for range 2 {
					remove(t, d, l.id)
				}
				_, err := d.Control.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: l.id})
				wantCode(t, err, codes.NotFound)
				if onDelete == "delete" {
					await(t, "the directory to be removed", func() bool { return len(d.findFiles(t, mark)) == 0 })
					return
				}
				found := d.findFiles(t, mark)
				if len(found) != 1 {
					t.Fatalf("got files %q of the deleted volume, want one", found)
				}
				wantContent(t, found[0], pattern(13))
				if retained := filepath.Join(d.Pool(), subDir, onDelete, mark); (found[0] == retained) != (onDelete == "retain" && subDir != "") {
					t.Errorf("the kept file is at %s, want it at %s only if a subDir is retained", found[0], retained)
				}
			})
		}
	}
}

// findFiles returns the paths of the files with a name in the pool.
func (d *Driver) findFiles(t *testing.T, name string) []string {
	t.Helper()
	var found []string
	_ = filepath.WalkDir(d.Pool(), func(path string, e os.DirEntry, err error) error { // files can be removed meanwhile
		if err == nil && e.Name() == name {
			found = append(found, path)
		}
		return nil
	})
	return found
}

// testStaticVolume: a static volume is mounted from the directory that the administrator specifies. The driver
// neither creates nor deletes the directory.
func testStaticVolume(t *testing.T, d *Driver, kind Kind) {
	m := kind.target.Medium(t, Room{Total: "2G"})
	server, share := m.Config.NFS.Server, m.Config.NFS.Export
	must(t, os.MkdirAll(filepath.Join(m.Dir, "team/a"), 0o777))
	write(t, filepath.Join(m.Dir, "team/a/data"), pattern(14))
	write(t, filepath.Join(m.Dir, "data"), pattern(15))
	for _, tc := range []struct {
		name    string
		context map[string]string
		want    []byte
	}{
		{"directory", map[string]string{"server": server, "share": share, "subDir": "team/a"}, pattern(14)},
		{"whole share", map[string]string{"server": server, "share": share}, pattern(15)},
		{"keys of csi-driver-nfs", map[string]string{"server": server, "share": share, "subdir": "team/a"}, pattern(14)},
		{"keys in other cases", map[string]string{"Server": server, "SHARE": share, "SubDir": "team/a"}, pattern(14)},
	} {
		t.Run(tc.name, func(t *testing.T) { testStaticVolumeCase(t, d, kind, tc.context, tc.want) })
	}
	for _, bad := range []map[string]string{
		{"server": server, "share": share, "subDir": "team/../../x"},
		{"server": server, "share": share + "/.."},
		{"server": server},
	} {
		_, err := d.Node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{
			VolumeId: "bad-handle", StagingTargetPath: t.TempDir(), VolumeCapability: kind.Capability(kind.widestMode()), VolumeContext: bad,
		})
		wantCode(t, err, codes.InvalidArgument)
	}
	left, err := os.ReadDir(m.Dir)
	must(t, err)
	if len(left) != 2 {
		t.Errorf("got files %v on the share, want only data and team", left)
	}
}

// testStaticVolumeCase makes all calls for a static volume.
func testStaticVolumeCase(t *testing.T, d *Driver, kind Kind, volumeContext map[string]string, content []byte) {
	id, ctx := "nas#"+newName(t)+"##", t.Context()
	c := kind.Capability(kind.widestMode())
	dir := t.TempDir()
	staging, target := filepath.Join(dir, "staging"), filepath.Join(dir, "target")
	must(t, os.Mkdir(staging, 0o755))
	valid, err := d.Control.ValidateVolumeCapabilities(ctx, &csi.ValidateVolumeCapabilitiesRequest{VolumeId: id, VolumeContext: volumeContext, VolumeCapabilities: []*csi.VolumeCapability{c}})
	if err != nil || valid.GetConfirmed() == nil {
		t.Errorf("ValidateVolumeCapabilities: got %v, %v; want confirmed", valid, err)
	}
	for range 2 {
		_, err = d.Control.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: Node, VolumeCapability: c, VolumeContext: volumeContext})
		must(t, err)
		_, err = d.Node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: staging, VolumeCapability: c, VolumeContext: volumeContext})
		must(t, err)
		_, err = d.Node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
			VolumeId: id, StagingTargetPath: staging, TargetPath: target, VolumeCapability: c, VolumeContext: volumeContext, Readonly: true,
		})
		must(t, err)
	}
	wantContent(t, filepath.Join(target, "data"), content)
	wantRefusesWrites(t, filepath.Join(target, "data"))
	stats, err := d.Node.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: target})
	if err != nil || stats.GetUsage()[0].GetTotal() == 0 {
		t.Errorf("NodeGetVolumeStats: got %v, %v; want a total size", stats, err)
	}
	for range 2 {
		_, err = d.Node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
		must(t, err)
		_, err = d.Node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: staging})
		must(t, err)
		_, err = d.Control.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: Node})
		must(t, err)
		remove(t, d, id)
	}
	if n := mountsAt(t, staging) + mountsAt(t, target); n != 0 {
		t.Errorf("got %d mounts after unstage, want none", n)
	}
}

// testDirectPool: a class with server and share needs no pool in the configuration. Other files on the share stay
// unchanged.
func testDirectPool(t *testing.T, d *Driver, kind Kind) {
	m := kind.target.Medium(t, Room{Total: "2G"})
	server, share := m.Config.NFS.Server, m.Config.NFS.Export
	write(t, filepath.Join(m.Dir, "theirs"), pattern(16))
	c := kind.Capability(manyWriters)
	req := &csi.CreateVolumeRequest{
		Name: newName(t), VolumeCapabilities: []*csi.VolumeCapability{c}, CapacityRange: &csi.CapacityRange{RequiredBytes: gib},
		Parameters: map[string]string{
			"server": server, "share": share, "onDelete": "retain",
			"subDir": "${pvc.metadata.namespace}/claim", "csi.storage.k8s.io/pvc/namespace": "team",
		},
	}
	var v *csi.Volume
	must(t, retry.For(t.Context(), time.Minute, func() (again bool, err error) { // UNAVAILABLE while the pool is being opened
		v, err = create(t, d, req)
		return status.Code(err) == codes.Unavailable, err
	}))
	again, err := d.Control.CreateVolume(t.Context(), req)
	if err != nil || again.GetVolume().String() != v.String() {
		t.Errorf("second CreateVolume: got %v, %v; want %v", again, err, v)
	}
	l := &testVolume{d: d, kind: kind, cap: c, id: v.GetVolumeId(), staging: t.TempDir(), target: filepath.Join(t.TempDir(), "target")}
	l.stageAndPublish(t)
	write(t, l.data(l.target), pattern(17))
	wantContent(t, filepath.Join(m.Dir, "team/claim/data"), pattern(17))
	l.unpublishAndUnstage(t)
	remove(t, d, l.id)
	wantContent(t, filepath.Join(m.Dir, "team/claim/data"), pattern(17))
	wantContent(t, filepath.Join(m.Dir, "theirs"), pattern(16))
}
