package backendtest

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// change returns a changed copy of a request.
func change[M proto.Message](m M, f func(M)) M {
	c := proto.CloneOf(m)
	f(c)
	return c
}

// wantUnchanged returns a row that runs test with a published volume, and fails if the test changes the list
// of volumes or the devices.
func wantUnchanged(test func(*testing.T, *testVolume)) func(*testing.T, *Driver, Kind) {
	return func(t *testing.T, d *Driver, kind Kind) {
		t.Helper()
		l := newVolume(t, d, kind, multiWriter)
		l.stageAndPublish(t)
		before, devices := d.listing(t), d.devices(t)
		test(t, l)
		if after := d.listing(t); after != before {
			t.Errorf("the refused calls changed the list of volumes from\n%s\nto\n%s", before, after)
		}
		if after := d.devices(t); !slices.Equal(after, devices) {
			t.Errorf("the refused calls changed the devices from %q to %q", devices, after)
		}
	}
}

// devices returns the loop devices of the driver's pools.
func (d *Driver) devices(t *testing.T) []string {
	t.Helper()
	var own []string
	for line := range strings.Lines(testenv.Run(t, "losetup", "-n", "-O", "NAME,BACK-FILE")) {
		if strings.Contains(line, d.Pool()) || strings.Contains(line, d.privateMounts()) {
			own = append(own, strings.Join(strings.Fields(line), " ")) // the width of the columns depends on other devices
		}
	}
	slices.Sort(own)
	return own
}

// listing returns the list of all volumes as text.
func (d *Driver) listing(t *testing.T) string {
	t.Helper()
	resp, err := d.Control.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	must(t, err)
	return resp.String()
}

// testCreateArguments: CreateVolume refuses every invalid argument with a message that names the field, the
// value and the remedy.
func testCreateArguments(t *testing.T, l *testVolume) {
	d := l.d
	good := &csi.CreateVolumeRequest{
		Name: "arguments", VolumeCapabilities: []*csi.VolumeCapability{Kind{FSType: "ext4"}.Capability(writer)},
	}
	type request = *csi.CreateVolumeRequest
	for _, tc := range []struct {
		name string
		bad  func(request)
		says []string
	}{
		{"no name", func(r request) { r.Name = "" }, []string{"name is missing"}},
		{"long name", func(r request) { r.Name = strings.Repeat("n", 129) }, []string{"name has 129 bytes", "128"}},
		{"no capability", func(r request) { r.VolumeCapabilities = nil }, []string{"volume_capabilities are missing"}},
		{"no access type", func(r request) { r.VolumeCapabilities[0].AccessType = nil }, []string{"neither block nor mount"}},
		{"no access mode", func(r request) { r.VolumeCapabilities[0].AccessMode = nil }, []string{"access_mode is missing"}},
		{"unknown access mode", func(r request) { r.VolumeCapabilities[0].AccessMode.Mode = 99 }, []string{"access_mode", "99"}},
		{"unknown filesystem", func(r request) { r.VolumeCapabilities[0].GetMount().FsType = "ntfs" }, []string{"fs_type", "ntfs", "ext4, xfs, btrfs"}},
		{"volume group", func(r request) { r.VolumeCapabilities[0].GetMount().VolumeMountGroup = "100" }, []string{"volume_mount_group", "100"}},
		{"block and mount", func(r request) {
			r.VolumeCapabilities = append(r.VolumeCapabilities, Kind{}.Capability(writer))
		}, []string{"block and mount"}},
		{"two filesystems", func(r request) {
			r.VolumeCapabilities = append(r.VolumeCapabilities, Kind{FSType: "xfs"}.Capability(writer))
		}, []string{"ext4", "xfs"}},
		{"unknown parameter", func(r request) { r.Parameters = map[string]string{"poool": "x"} }, []string{"poool", "takes backend", "did you mean pool?"}},
		{"unknown pool", func(r request) { r.Parameters = map[string]string{"pool": "elsewhere"} }, []string{"pool", "elsewhere"}},
		{"unknown backend", func(r request) { r.Parameters = map[string]string{"backend": "tape"} }, []string{"backend", "tape", "loop"}},
		{"unknown allocation", func(r request) { r.Parameters = map[string]string{"allocation": "medium"} }, []string{"allocation", "medium", "thin", "thick"}},
		{"mkfs option that is not allowed", func(r request) { r.Parameters = map[string]string{"mkfsOptions": "-J device=/dev/sda"} }, []string{"mkfsOptions", "-J device=/dev/sda"}},
		{"mkfs option without a value", func(r request) { r.Parameters = map[string]string{"mkfsOptions": "-m"} }, []string{"mkfsOptions", "-m"}},
		{"mkfs option with a device", func(r request) { r.Parameters = map[string]string{"mkfsOptions": "-m 1 /dev/sda x"} }, []string{"mkfsOptions", "/dev/sda"}},
		{"mount flag that is not allowed", func(r request) { r.VolumeCapabilities[0].GetMount().MountFlags = []string{"remount"} }, []string{"mount_flags", "remount"}},
		{"mistyped mount flag", func(r request) { r.VolumeCapabilities[0].GetMount().MountFlags = []string{"ro,noatim"} }, []string{"mount_flags", `"noatim"`, "noatime"}},
		{"mount flag of another filesystem", func(r request) { r.VolumeCapabilities[0].GetMount().MountFlags = []string{"logbufs=8"} }, []string{"mount_flags", "logbufs=8", "ext4"}},
		{"mount flag that panics the kernel", func(r request) { r.VolumeCapabilities[0].GetMount().MountFlags = []string{"errors=panic"} }, []string{"mount_flags", "errors=panic", "errors=continue|remount-ro"}},
		{"more inodes than fit", func(r request) { r.Parameters = map[string]string{"mkfsOptions": "-N 9999999"} }, []string{"-N 9999999", "inodes"}},
		{"empty content source", func(r request) { r.VolumeContentSource = &csi.VolumeContentSource{} }, []string{"volume_content_source"}},
		{"mutable parameter", func(r request) { r.MutableParameters = map[string]string{"iops": "1"} }, []string{"mutable parameter", "iops", "iopsRead"}},
		{"limit that is too low", func(r request) { r.Parameters = map[string]string{"iopsRead": "1"} }, []string{"iopsRead", `"1"`, "max, or a number from 10"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := d.Control.CreateVolume(t.Context(), change(good, tc.bad))
			wantCode(t, err, codes.InvalidArgument, tc.says...)
		})
	}
}

// foreignIDs returns IDs of volumes that do not exist, and the code of a call for each. own is the ID of a
// volume of the driver.
func foreignIDs(own string) map[string]codes.Code {
	parts := strings.Split(own, ":")
	return map[string]codes.Code{
		"":                                  codes.InvalidArgument,
		"vol-0123456789":                    codes.NotFound,
		parts[0] + ":default:../../../etc":  codes.NotFound,
		strings.Repeat("x", 200):            codes.NotFound,
		"tape:" + parts[1] + ":v":           codes.Unavailable, // unknown backend
		parts[0] + ":" + parts[1] + ":none": codes.NotFound,
		parts[0] + ":default.ffffffff:v":    codes.Unavailable, // pool of another driver
		parts[0] + ":elsewhere.00000000:v1": codes.Unavailable,
	}
}

// testControllerArguments: calls of the controller refuse IDs of volumes that do not exist, and invalid
// arguments. Calls that remove something succeed if it does not exist.
func testControllerArguments(t *testing.T, l *testVolume) {
	d, ctx := l.d, t.Context()
	grow := &csi.CapacityRange{RequiredBytes: 2 * gib}
	for id, code := range foreignIDs(l.id) {
		removal := code // the code of a call that removes something
		if removal == codes.NotFound {
			removal = codes.OK
		}
		_, err := d.Control.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
		wantCode(t, err, removal)
		_, err = d.Control.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: Node})
		wantCode(t, err, removal)
		_, err = d.Control.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: Node, VolumeCapability: l.cap})
		wantCode(t, err, code)
		_, err = d.Control.ValidateVolumeCapabilities(ctx, &csi.ValidateVolumeCapabilitiesRequest{VolumeId: id, VolumeCapabilities: []*csi.VolumeCapability{l.cap}})
		wantCode(t, err, code)
		_, err = d.Control.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: grow})
		wantCode(t, err, code)
		_, err = d.Control.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{VolumeId: id})
		wantCode(t, err, code)
		_, err = d.Control.ControllerGetVolumeHealth(ctx, &csi.ControllerGetVolumeHealthRequest{VolumeId: id})
		wantCode(t, err, code)
	}
	_, err := d.Control.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{VolumeId: l.id, VolumeCapability: l.cap})
	wantCode(t, err, codes.InvalidArgument, "node_id is missing")
	_, err = d.Control.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{VolumeId: l.id, NodeId: Node})
	wantCode(t, err, codes.InvalidArgument, "volume_capability is missing")
	_, err = d.Control.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: l.id, CapacityRange: grow, VolumeCapability: l.kind.otherMode().Capability(writer)})
	wantCode(t, err, codes.InvalidArgument)
	for key, value := range map[string]string{"x": "y", "csi.storage.k8s.io/fstype": "zfs", "mkfsOptions": "--evil 1"} {
		_, err = d.Control.GetCapacity(ctx, &csi.GetCapacityRequest{Parameters: l.kind.Parameters(key, value)})
		wantCode(t, err, codes.InvalidArgument, key)
	}
	_, err = d.Control.GetCapacity(ctx, &csi.GetCapacityRequest{Parameters: l.kind.Parameters(), VolumeCapabilities: []*csi.VolumeCapability{Kind{FSType: "zfs"}.Capability(writer)}})
	wantCode(t, err, codes.InvalidArgument, "zfs")
}

// testNodeArguments: calls of the node refuse IDs of volumes that do not exist, and invalid or missing
// arguments.
func testNodeArguments(t *testing.T, l *testVolume) {
	d, ctx := l.d, t.Context()
	for id, code := range foreignIDs(l.id) {
		_, err := d.Node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: l.staging, VolumeCapability: l.cap})
		wantCode(t, err, code)
		_, err = d.Node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: l.staging, TargetPath: l.target, VolumeCapability: l.cap})
		wantCode(t, err, code)
		_, err = d.Node.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: l.target})
		wantCode(t, err, code)
		_, err = d.Node.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: id, VolumePath: l.target})
		wantCode(t, err, code)
		_, err = d.Node.NodeGetVolumeHealth(ctx, &csi.NodeGetVolumeHealthRequest{VolumeId: id})
		wantCode(t, err, code)
	}
	for _, path := range []string{"", "relative", "/a/../b", "/a/"} {
		for _, err := range []error{
			errOf(d.Node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: l.id, StagingTargetPath: path, VolumeCapability: l.cap})),
			errOf(d.Node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: l.id, StagingTargetPath: path})),
			l.publishAt(ctx, path, false),
			l.unpublishAt(ctx, path),
		} {
			wantCode(t, err, codes.InvalidArgument, "path", path)
		}
	}
	_, err := d.Node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: l.id, StagingTargetPath: l.staging})
	wantCode(t, err, codes.InvalidArgument, "volume_capability is missing")
	_, err = d.Node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: l.id, StagingTargetPath: l.staging, TargetPath: l.target})
	wantCode(t, err, codes.InvalidArgument, "volume_capability is missing")
	for _, path := range []string{"relative", "/nowhere/at/all", t.TempDir()} {
		_, err = d.Node.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: l.id, VolumePath: path})
		wantCode(t, err, codes.NotFound, path)
	}
}

// errOf returns the error of a call.
func errOf[T any](_ T, err error) error { return err }

// testTargetPaths: target paths that are not empty directories are refused, and stay unchanged.
func testTargetPaths(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, multiWriter)
	l.stageAndPublish(t)
	ctx, dir := t.Context(), t.TempDir()
	file, full, link := filepath.Join(dir, "file"), filepath.Join(dir, "full"), filepath.Join(dir, "link")
	must(t, os.WriteFile(file, []byte("precious"), 0o600))
	must(t, os.Mkdir(full, 0o755))
	must(t, os.WriteFile(filepath.Join(full, "precious"), []byte("precious"), 0o600))
	must(t, os.Symlink(full, link))
	foreign := filepath.Join(dir, "foreign")
	must(t, os.Mkdir(foreign, 0o755))
	testenv.Run(t, "mount", "-t", "tmpfs", "tmpfs", foreign)
	t.Cleanup(func() { testenv.Run(t, "umount", foreign) })

	other := newVolume(t, l.d, l.kind, multiWriter)
	for _, tc := range []struct {
		path, says string
		code       codes.Code
	}{
		{file, "not a directory", codes.FailedPrecondition},
		{full, "not empty", codes.FailedPrecondition},
		{link, "not a directory", codes.FailedPrecondition},
		{foreign, "something other", codes.AlreadyExists},
		{filepath.Join(dir, "no", "parent"), "parent", codes.FailedPrecondition},
		{filepath.Join(file, "below"), "parent", codes.FailedPrecondition},
	} {
		wantCode(t, l.publishAt(ctx, tc.path, false), tc.code, "target_path", tc.says)
		_, err := l.d.Node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: other.id, StagingTargetPath: tc.path, VolumeCapability: l.cap})
		wantCode(t, err, tc.code, "staging_target_path", tc.says)
	}
	for _, path := range []string{file, full, link, foreign} {
		wantCode(t, l.unpublishAt(ctx, path), codes.FailedPrecondition, "it stays")
	}
	must(t, l.unpublishAt(ctx, filepath.Join(dir, "no", "parent")))
	for _, path := range []string{file, filepath.Join(full, "precious")} {
		if b, err := os.ReadFile(path); string(b) != "precious" {
			t.Errorf("%s: got content %q, %v; want it unchanged", path, b, err)
		}
	}
	entries, err := os.ReadDir(dir)
	must(t, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if want := []string{"file", "foreign", "full", "link"}; !slices.Equal(names, want) {
		t.Errorf("got files %q in the directory of the targets, want %q", names, want)
	}
	testReadOnlyParent(t, l)
}

// testReadOnlyParent: on a read-only filesystem, a target that does not exist is refused, and an existing
// target is used.
func testReadOnlyParent(t *testing.T, l *testVolume) {
	dir := t.TempDir()
	testenv.Run(t, "mount", "-t", "tmpfs", "tmpfs", dir)
	t.Cleanup(func() { testenv.Run(t, "umount", dir) })
	existing := filepath.Join(dir, "existing")
	must(t, os.Mkdir(existing, 0o755))
	testenv.Run(t, "mount", "-o", "remount,ro", dir)
	other := newVolume(t, l.d, l.kind, multiWriter)
	other.staging = filepath.Join(dir, "missing")
	wantCode(t, other.stage(t.Context()), codes.FailedPrecondition, "staging_target_path", "read-only")
	wantCode(t, l.publishAt(t.Context(), other.staging, false), codes.FailedPrecondition, "target_path", "read-only")
	other.staging = existing
	must(t, other.stage(t.Context()))
	must(t, other.unstage(t.Context()))
}
