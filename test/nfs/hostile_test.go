//go:build vm

package nfs

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
)

// siege is a driver whose export somebody else can write to as root, and what that one
// is not to get at through the driver.
type siege struct {
	*machine
	server *nfsd.Server
	dir    string // of the pool, at the server
	victim *vol   // a directory
	image  *vol   // one with an image
}

// TestHostile: a tenant with root on another client changes what is on the export.
// Nothing outside the volume is touched or mounted, no call hangs, and each says what
// is wrong.
func TestHostile(t *testing.T) {
	server := nfsd.Start(t, nfsd.Options{})
	export := server.Export(t, "nas")
	server.Export(t, "other")
	s := &siege{server: server, dir: server.Dir(export)}
	t.Cleanup(func() { wantEmpty(t, server, export) })
	s.machine = start(t, server.Node(t, "node-1"), "node-1", nfsPool("nas", server, export))
	s.setVictims(t)
	if !t.Failed() {
		t.Run("images", s.testImages)
		t.Run("directories", s.testDirectories)
		t.Run("staged", s.testStaged)
		t.Run("pool", s.testPool)
		t.Run("IDs", s.testIDs)
		t.Run("static", s.testStatic)
		t.Run("trash", s.testTrash)
	}
	s.wantVictims(t)
}

func (s *siege) setVictims(t *testing.T) {
	t.Helper()
	s.victim = s.directory(t, "nas", "victim")
	s.image = s.machine.image(t, "nas", "victim-image", "ext4", 32*mib)
	for _, v := range []*vol{s.victim, s.image} {
		s.up(t, v)
		write(t, s.file(v, "precious"), v.name)
		s.down(t, v)
	}
	for _, dir := range []string{s.server.Dir("/other"), filepath.Join(s.server.Dir("/"), "unexported")} {
		must(t, os.MkdirAll(dir, 0o755))
		write(t, filepath.Join(dir, "precious"), dir)
	}
}

// wantVictims looks whether what was not to be touched is as it was, and deletes it.
func (s *siege) wantVictims(t *testing.T) {
	t.Helper()
	for _, v := range []*vol{s.victim, s.image} {
		s.up(t, v)
		wantText(t, s.file(v, "precious"), v.name)
		s.down(t, v)
		must(t, s.delete(t, v))
	}
	s.awaitTrash(t)
	for _, dir := range []string{s.server.Dir("/other"), filepath.Join(s.server.Dir("/"), "unexported")} {
		wantText(t, filepath.Join(dir, "precious"), dir)
		left, err := os.ReadDir(dir)
		if err != nil || len(left) != 1 {
			t.Errorf("%s has got %v, %v", dir, left, err)
		}
	}
}

// folder is a volume's, at the server.
func (s *siege) folder(v *vol) string { return filepath.Join(s.dir, "volumes", v.name) }

// state is how everything is that the driver is not to touch while it is asked for a
// volume. Access times and the number of names of a file may change.
func (s *siege) state(t *testing.T, attacked *vol) string {
	t.Helper()
	var b strings.Builder
	top := s.server.Dir("/")
	err := filepath.WalkDir(top, func(path string, e fs.DirEntry, err error) error {
		if attacked != nil && strings.HasPrefix(path, s.folder(attacked)) || strings.HasPrefix(path, s.dir+"/.trivet") || path == s.dir+"/volumes" {
			return skip(e)
		}
		if err != nil {
			return err
		}
		var st syscall.Stat_t
		if err := syscall.Lstat(path, &st); err != nil {
			return err
		}
		fmt.Fprintln(&b, path, st.Ino, st.Mode, st.Uid, st.Gid, st.Size, st.Mtim)
		return nil
	})
	must(t, err)
	return b.String()
}

func skip(e fs.DirEntry) error {
	if e != nil && e.IsDir() && filepath.Base(e.Name()) != "volumes" {
		return fs.SkipDir
	}
	return nil
}

// reply is what a call has said.
type reply struct {
	call string
	err  error
}

// askAll makes every call for a volume, as an orchestrator does over its life.
func (s *siege) askAll(t *testing.T, v *vol) []reply {
	t.Helper()
	return append(s.askMost(t, v), reply{"DeleteVolume", s.delete(t, v)})
}

// askMost leaves out that it is deleted.
func (s *siege) askMost(t *testing.T, v *vol) (replies []reply) {
	t.Helper()
	ask := func(call string, err error) { replies = append(replies, reply{call, err}) }
	_, err := s.control.ControllerGetVolume(deadline(t), &csi.ControllerGetVolumeRequest{VolumeId: v.id})
	ask("ControllerGetVolume", err)
	_, err = s.control.ControllerGetVolumeHealth(deadline(t), &csi.ControllerGetVolumeHealthRequest{VolumeId: v.id})
	ask("ControllerGetVolumeHealth", err)
	_, err = s.control.ListVolumes(deadline(t), &csi.ListVolumesRequest{})
	ask("ListVolumes", err)
	ask("ControllerPublishVolume", s.attach(t, v))
	ask("NodeStageVolume", s.stage(t, v))
	s.wantNotMounted(t, v, replies[len(replies)-1].err)
	ask("NodePublishVolume", s.publish(t, v))
	_, err = s.node.NodeGetVolumeStats(deadline(t), &csi.NodeGetVolumeStatsRequest{VolumeId: v.id, VolumePath: s.target(v)})
	ask("NodeGetVolumeStats", err)
	_, err = s.control.ControllerExpandVolume(deadline(t), &csi.ControllerExpandVolumeRequest{
		VolumeId: v.id, CapacityRange: &csi.CapacityRange{RequiredBytes: 48 * mib}, VolumeCapability: v.capability,
	})
	ask("ControllerExpandVolume", err)
	ask("NodeUnpublishVolume", s.unpublish(t, v))
	ask("NodeUnstageVolume", s.unstage(t, v))
	ask("ControllerUnpublishVolume", s.detach(t, v, s.name))
	return replies
}

// wantNotMounted: what was refused is not there.
func (s *siege) wantNotMounted(t *testing.T, v *vol, refused error) {
	t.Helper()
	if at := mountsAt(t, s.staging(v)); refused != nil && at != "" {
		t.Errorf("NodeStageVolume: %v, and mounted is %s", refused, at)
	}
}

// mountsAt are the lines of the mount table for what is at a path.
func mountsAt(t *testing.T, path string) string {
	t.Helper()
	table, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	var found []string
	for line := range strings.Lines(string(table)) {
		if strings.Fields(line)[4] == path {
			found = append(found, line)
		}
	}
	return strings.Join(found, "")
}

// clearCodes are those of errors that tell what to do. Internal and Unknown do not.
var clearCodes = []codes.Code{codes.OK, codes.NotFound, codes.FailedPrecondition, codes.DataLoss, codes.Unavailable, codes.AlreadyExists, codes.InvalidArgument, codes.OutOfRange}

// attack is what somebody does to a volume, in its folder.
type attack struct {
	name string
	do   func(t *testing.T, s *siege, folder string)
	// stage is what staging the volume answers.
	stage codes.Code
	says  string
}

// wantHarmless makes every call for an attacked volume.
func (s *siege) wantHarmless(t *testing.T, a attack, v *vol) {
	t.Helper()
	a.do(t, s, s.folder(v))
	before := s.state(t, v)
	for _, r := range s.askAll(t, v) {
		if !slices.Contains(clearCodes, status.Code(r.err)) {
			t.Errorf("%s: %v", r.call, r.err)
		}
		if r.err != nil {
			t.Logf("%s: %v", r.call, r.err)
		}
		if r.call == "NodeStageVolume" {
			wantCode(t, r.err, a.stage, a.says)
		}
	}
	if after := s.state(t, v); after != before {
		t.Errorf("the call changed what is not the volume's, from\n%s\nto\n%s", before, after)
	}
	s.raze(t, v)
}

// raze removes by hand what is left of an attacked volume.
func (s *siege) raze(t *testing.T, v *vol) {
	t.Helper()
	if at := mountsAt(t, s.staging(v)) + mountsAt(t, s.target(v)); at != "" {
		t.Errorf("mounted are %s", at)
	}
	for _, path := range []string{s.folder(v), s.folder(v) + ".away"} {
		must(t, os.RemoveAll(path))
	}
}

// replace puts something in the place of a file of a volume.
func replace(file string, plant func(path string) error) func(*testing.T, *siege, string) {
	return func(t *testing.T, _ *siege, folder string) {
		t.Helper()
		path := filepath.Join(folder, file)
		must(t, os.RemoveAll(path))
		must(t, os.MkdirAll(filepath.Dir(path), 0o700))
		must(t, plant(path))
	}
}

func link(to string) func(path string) error {
	return func(path string) error { return os.Symlink(to, path) }
}

func hardLink(of string) func(path string) error {
	return func(path string) error { return os.Link(filepath.Join(filepath.Dir(path), of), path) }
}

func pipe(path string) error   { return syscall.Mkfifo(path, 0o600) }
func socket(path string) error { return syscall.Mknod(path, syscall.S_IFSOCK|0o600, 0) }
func folder(path string) error { return os.Mkdir(path, 0o700) }
func none(string) error        { return nil }

func device(kind uint32, major, minor int) func(path string) error {
	return func(path string) error { return syscall.Mknod(path, kind|0o600, major<<8|minor) }
}

func text(s string) func(path string) error {
	return func(path string) error { return os.WriteFile(path, []byte(s), 0o600) }
}

func sized(n int64) func(path string) error {
	return func(path string) error { return errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, n)) }
}

// linkedFolder puts a link in the place of the volume's folder.
func linkedFolder(to string) func(*testing.T, *siege, string) {
	return func(t *testing.T, _ *siege, folder string) {
		t.Helper()
		must(t, os.Rename(folder, folder+".away"))
		must(t, os.Symlink(to, folder))
	}
}

// edited changes fields of a volume's record.
func edited(change func(record map[string]any)) func(*testing.T, *siege, string) {
	return func(t *testing.T, _ *siege, folder string) {
		t.Helper()
		path := filepath.Join(folder, "volume.json")
		b, err := os.ReadFile(path)
		must(t, err)
		record := map[string]any{}
		must(t, json.Unmarshal(b, &record))
		change(record)
		b, err = json.Marshal(record)
		must(t, err)
		must(t, os.WriteFile(path, b, 0o600))
	}
}

func bare(t *testing.T, _ *siege, folder string) {
	t.Helper()
	must(t, filepath.WalkDir(folder, func(path string, _ fs.DirEntry, err error) error {
		return errors.Join(err, os.Chown(path, 4711, 4711), os.Chmod(path, 0))
	}))
}

// onRecords are the attacks on what volumes of both kinds have, by the same code.
var onRecords = []attack{
	{"a link for the folder", linkedFolder("victim"), codes.DataLoss, ""},
	{"an absolute link for the folder", linkedFolder("/etc"), codes.DataLoss, ""},
	{"no record", replace("volume.json", none), codes.DataLoss, "volume.json"},
	{"a link for the record", replace("volume.json", link("../victim/volume.json")), codes.DataLoss, ""},
	{"a link for the record to the host", replace("volume.json", link("/etc/hostname")), codes.DataLoss, ""},
	{"a pipe for the record", replace("volume.json", pipe), codes.DataLoss, "regular file"},
	{"a socket for the record", replace("volume.json", socket), codes.DataLoss, "regular file"},
	{"a device for the record", replace("volume.json", device(syscall.S_IFCHR, 1, 5)), codes.DataLoss, "regular file"},
	{"a folder for the record", replace("volume.json", folder), codes.DataLoss, ""},
	{"a huge record", replace("volume.json", sized(1<<40)), codes.DataLoss, "too large"},
	{"an empty record", replace("volume.json", text("")), codes.DataLoss, ""},
	{"another's record", replace("volume.json", hardLink("../victim/volume.json")), codes.DataLoss, "victim"},
	{"a record of another ID", edited(func(r map[string]any) { r["id"] = "nfs:nas:victim" }), codes.DataLoss, "victim"},
	{"a record of less than nothing", edited(func(r map[string]any) { r["capacityBytes"] = -1 }), codes.DataLoss, "capacityBytes"},
	{"a record of another version", edited(func(r map[string]any) { r["version"] = 99 }), codes.DataLoss, "version"},
	{"a record with more in it", edited(func(r map[string]any) { r["path"] = "/etc" }), codes.DataLoss, ""},
	{"a pipe for the attachment", replace("attached/node", pipe), codes.DataLoss, "attached"},
	{"a huge attachment", replace("attached/node", sized(1<<40)), codes.DataLoss, "attached"},
	{"garbage for the attachment", replace("attached/node", text("garbage")), codes.DataLoss, "attached"},
}

var onImages = []attack{
	{"a link to another image", replace("image", link("../victim-image/image")), codes.DataLoss, "regular file"},
	{"a link to the host", replace("image", link("/etc/hostname")), codes.DataLoss, "regular file"},
	{"another image", replace("image", hardLink("../victim-image/image")), codes.DataLoss, "hard links"},
	{"a pipe", replace("image", pipe), codes.DataLoss, "regular file"},
	{"a socket", replace("image", socket), codes.DataLoss, "regular file"},
	{"a folder", replace("image", folder), codes.DataLoss, "regular file"},
	{"a character device", replace("image", device(syscall.S_IFCHR, 1, 5)), codes.DataLoss, "regular file"},
	{"a block device", replace("image", device(syscall.S_IFBLK, 254, 0)), codes.DataLoss, "regular file"},
	{"no image", replace("image", none), codes.DataLoss, "missing"},
	{"a short image", replace("image", sized(4096)), codes.DataLoss, "truncated"},
	{"a link for the attachments", replace("attached", link("../victim/attached")), codes.DataLoss, "attached"},
	{"another's attachment", replace("attached/node", text(`{"version":1,"node":"node-9"}`)), codes.FailedPrecondition, "node-9"},
	{"a pipe for the lock", replace("lock", pipe), codes.FailedPrecondition, "lock"},
	{"a link for the lock", replace("lock", link("../victim-image/image")), codes.FailedPrecondition, "lock"},
	{"no rights", bare, codes.OK, ""},
}

func (s *siege) testImages(t *testing.T) {
	for _, a := range onImages {
		t.Run(a.name, func(t *testing.T) {
			v := s.machine.image(t, "nas", "attacked-image", "ext4", 32*mib)
			s.wantHarmless(t, a, v)
		})
	}
}

var onDirectories = []attack{
	{"a link to another", replace("data", link("../victim/data")), codes.DataLoss, "data"},
	{"a link upwards", replace("data", link("../../..")), codes.DataLoss, "data"},
	{"a link to another export", replace("data", link("/other")), codes.DataLoss, "data"},
	{"a link to what is not exported", replace("data", link("../../../unexported")), codes.DataLoss, "data"},
	{"a pipe", replace("data", pipe), codes.DataLoss, "data"},
	{"a file", replace("data", text("x")), codes.DataLoss, "data"},
	{"nothing", replace("data", none), codes.DataLoss, "missing"},
	{"a record that goes up", edited(func(r map[string]any) { r["directory"].(map[string]any)["subDir"] = "../../unexported" }), codes.DataLoss, "subDir"},
	{"a record of another's folder", edited(func(r map[string]any) { r["directory"].(map[string]any)["subDir"] = "volumes/victim/data" }), codes.DataLoss, "subDir"},
	{"an absolute subDir", edited(func(r map[string]any) { r["directory"].(map[string]any)["subDir"] = "/other" }), codes.DataLoss, "subDir"},
	{"no rights", bare, codes.OK, ""},
}

func (s *siege) testDirectories(t *testing.T) {
	for _, a := range slices.Concat(onDirectories, onRecords) {
		if strings.HasSuffix(a.name, "attachment") { // of one node; these have one for each
			continue
		}
		t.Run(a.name, func(t *testing.T) {
			s.wantHarmless(t, a, s.directory(t, "nas", "attacked"))
		})
	}
	for _, place := range []string{"team", "team/claim"} {
		for _, to := range []string{"victim-files", "../volumes", "/other", "../.."} {
			t.Run("a link at "+place+" to "+to, func(t *testing.T) { s.testSubDir(t, place, to) })
		}
	}
}

// testSubDir: a part of the path of a directory among others' becomes a link.
func (s *siege) testSubDir(t *testing.T, place, to string) {
	v := s.create(t, "attacked", mib, filesystem("", manyNodes), map[string]string{"backend": "nfs", "pool": "nas", "subDir": "tenants/team/claim"})
	path := filepath.Join(s.dir, "tenants", place)
	must(t, os.Rename(path, path+".away"))
	must(t, os.Symlink(to, path))
	must(t, s.attach(t, v))
	err := s.stage(t, v)
	wantCode(t, err, codes.DataLoss, "tenants/team/claim")
	s.wantNotMounted(t, v, err)
	must(t, s.unstage(t, v))
	must(t, s.detach(t, v, s.name))
	_, err = s.control.CreateVolume(deadline(t), &csi.CreateVolumeRequest{
		Name: "through", CapacityRange: &csi.CapacityRange{RequiredBytes: mib}, VolumeCapabilities: []*csi.VolumeCapability{v.capability},
		Parameters: map[string]string{"backend": "nfs", "pool": "nas", "subDir": "tenants/" + place + "/new"},
	})
	wantCode(t, err, codes.FailedPrecondition, "subDir")
	if place == "team" {
		wantCode(t, s.delete(t, v), codes.FailedPrecondition, "link")
		must(t, os.Remove(path))
		must(t, os.Rename(path+".away", path))
	}
	must(t, s.delete(t, v)) // of a link at the end this is the link itself
	s.awaitTrash(t)
	must(t, os.RemoveAll(filepath.Join(s.dir, "tenants")))
}

// testStaged: what is in use is taken down whatever becomes of it, and nothing else is.
func (s *siege) testStaged(t *testing.T) {
	for _, a := range []attack{
		{name: "a link to another image", do: replace("image", link("../victim-image/image"))},
		{name: "another image", do: replace("image", hardLink("../victim-image/image"))},
		{name: "a pipe", do: replace("image", pipe)},
		{name: "a link for the folder", do: linkedFolder("victim-image")},
		{name: "no folder", do: func(t *testing.T, _ *siege, folder string) { t.Helper(); must(t, os.RemoveAll(folder)) }},
		{name: "a pipe for the record", do: replace("volume.json", pipe)},
		{name: "no rights", do: bare},
	} {
		for _, kind := range []string{"image", "data"} {
			t.Run(a.name+" "+kind, func(t *testing.T) { s.testStagedVolume(t, a, kind) })
		}
	}
}

func (s *siege) testStagedVolume(t *testing.T, a attack, kind string) {
	var v *vol
	if kind == "image" {
		v = s.machine.image(t, "nas", "attacked-image", "ext4", 32*mib)
	} else {
		v = s.directory(t, "nas", "attacked")
		if strings.Contains(a.name, "image") {
			a.do = replace("data", link("../victim/data"))
		}
	}
	s.up(t, v)
	write(t, s.file(v, "mine"), "mine")
	a.do(t, s, s.folder(v))
	before := s.state(t, v)
	clearly := func(call string, err error) {
		t.Helper()
		if !slices.Contains(clearCodes, status.Code(err)) {
			t.Errorf("%s: %v", call, err)
		}
	}
	_, err := s.node.NodeGetVolumeStats(deadline(t), &csi.NodeGetVolumeStatsRequest{VolumeId: v.id, VolumePath: s.target(v)})
	clearly("NodeGetVolumeStats", err)
	_, err = s.node.NodeGetVolumeHealth(deadline(t), &csi.NodeGetVolumeHealthRequest{VolumeId: v.id, VolumePublishPath: s.target(v), StagingTargetPath: s.staging(v)})
	clearly("NodeGetVolumeHealth", err)
	_, err = s.control.ControllerExpandVolume(deadline(t), &csi.ControllerExpandVolumeRequest{
		VolumeId: v.id, CapacityRange: &csi.CapacityRange{RequiredBytes: 48 * mib}, VolumeCapability: v.capability,
	})
	clearly("ControllerExpandVolume", err)
	_, err = s.node.NodeExpandVolume(deadline(t), &csi.NodeExpandVolumeRequest{VolumeId: v.id, VolumePath: s.target(v), StagingTargetPath: s.staging(v), VolumeCapability: v.capability})
	clearly("NodeExpandVolume", err)
	if err := s.delete(t, v); err == nil && a.name != "no folder" {
		t.Error("a volume in use was deleted")
	}
	must(t, s.unpublish(t, v))
	must(t, s.unstage(t, v))
	clearly("ControllerUnpublishVolume", s.detach(t, v, s.name))
	clearly("DeleteVolume", s.delete(t, v))
	if after := s.state(t, v); after != before {
		t.Errorf("the calls changed what is not the volume's, from\n%s\nto\n%s", before, after)
	}
	s.raze(t, v)
}

// testPool: the pool's own folders and files.
func (s *siege) testPool(t *testing.T) {
	v := s.directory(t, "nas", "besieged")
	for _, tc := range []struct {
		name, path string
		plant      func(path string) error
	}{
		{"another pool's volumes", "volumes", link("../other")},
		{"volumes of the host", "volumes", link("/etc")},
		{"no volumes", "volumes", folder},
		{"a pipe for the marker", "pool.json", pipe},
		{"a link for the marker", "pool.json", link("/etc/hostname")},
		{"a huge marker", "pool.json", sized(1 << 40)},
		{"a link for the pool's folder", ".trivet", link("../other")},
	} {
		t.Run(tc.name, func(t *testing.T) {
			path := filepath.Join(s.dir, tc.path)
			must(t, os.Rename(path, path+".away"))
			must(t, tc.plant(path))
			for _, r := range s.askMost(t, v) {
				if !slices.Contains(clearCodes, status.Code(r.err)) {
					t.Errorf("%s: %v", r.call, r.err)
				}
				if r.err != nil {
					t.Logf("%s: %v", r.call, r.err)
				}
			}
			if at := mountsAt(t, s.staging(v)) + mountsAt(t, s.target(v)); at != "" {
				t.Errorf("mounted are %s", at)
			}
			must(t, os.RemoveAll(path))
			must(t, os.Rename(path+".away", path))
			eventually(t, func() error { return s.attach(t, v) }) // it is opened again
			must(t, s.detach(t, v, s.name))
		})
	}
	eventually(t, func() error { return s.delete(t, v) })
	s.awaitTrash(t)
}

// testIDs: IDs that somebody made up.
func (s *siege) testIDs(t *testing.T) {
	before := s.state(t, nil)
	for _, id := range []string{
		"nfs:=no-such-host.invalid=/x:v",
		"nfs:=" + s.server.Address() + "=/other:v",
		"loop:=" + s.server.Address() + "=/other:v",
		"nfs:=" + s.server.Address() + "=/:v",
		"nfs:=" + s.server.Address() + "=/nas:victim",
		"nfs:=" + s.server.Address() + "=/nas/volumes/victim:data",
		"nfs:=" + s.server.Address() + "=/missing:v",
		"nfs:=127.0.0.1=/etc:v",
		"nfs:=%2e%2e=/..:v",
		"loop:nas:victim",
		"nfs:nas:victim-image",
		"nfs:nas:../victim",
		"nfs:nas:victim/data",
		"nfs:nas:.",
		"nfs:nas:",
		"nfs:nas.01234567:victim",
		"nfs:missing:victim",
		"nfs:nas:" + strings.Repeat("v", 200),
	} {
		t.Run(id[:min(len(id), 40)], func(t *testing.T) {
			v := &vol{name: "made-up", id: id, capability: filesystem("", manyNodes)}
			for _, r := range s.askAll(t, v) {
				if !slices.Contains(clearCodes, status.Code(r.err)) {
					t.Errorf("%s: %v", r.call, r.err)
				}
				if r.err == nil && slices.Contains([]string{"NodeStageVolume", "NodePublishVolume", "NodeGetVolumeStats", "ControllerExpandVolume", "ControllerPublishVolume", "ControllerGetVolume"}, r.call) {
					t.Errorf("%s: made", r.call)
				}
				t.Logf("%s: %v", r.call, r.err)
			}
			if at := mountsAt(t, s.staging(v)); at != "" {
				t.Errorf("mounted is %s", at)
			}
		})
	}
	if after := s.state(t, nil); after != before {
		t.Errorf("changed, from\n%s\nto\n%s", before, after)
	}
}

// testStatic: a directory that an administrator names is not another one.
func (s *siege) testStatic(t *testing.T) {
	team := filepath.Join(s.server.Dir("/other"), "team")
	must(t, os.MkdirAll(filepath.Join(team, "claim"), 0o755))
	defer func() { must(t, os.RemoveAll(team)) }()
	for name, to := range map[string]string{"up": "../..", "beside": "claim"} {
		must(t, os.Symlink(to, filepath.Join(team, name)))
		t.Run(name, func(t *testing.T) {
			v := &vol{
				name: "static-" + name, id: "by-hand-" + name, capability: filesystem("", manyNodes),
				context: map[string]string{"server": s.server.Address(), "share": "/other", "subDir": "team/" + name},
			}
			err := s.stage(t, v)
			wantCode(t, err, codes.FailedPrecondition, "symbolic link")
			s.wantNotMounted(t, v, err)
			must(t, s.unstage(t, v))
		})
	}
}

// testTrash: what is hard to remove keeps nothing else from being removed.
func (s *siege) testTrash(t *testing.T) {
	deep := s.directory(t, "nas", "deep")
	at := filepath.Join(s.folder(deep), "data")
	for range 12 {
		at = filepath.Join(at, strings.Repeat(strings.Repeat("d", 100)+"/", 20))
		must(t, mkdirDeep(at))
	}
	stuck := s.directory(t, "nas", "stuck")
	fixed := filepath.Join(s.folder(stuck), "data/fixed")
	must(t, os.WriteFile(fixed, []byte("x"), 0o600))
	must(t, os.Link(filepath.Join(s.folder(s.victim), "data/precious"), filepath.Join(s.folder(stuck), "data/hard")))
	must(t, os.Symlink(filepath.Join(s.folder(s.victim), "data"), filepath.Join(s.folder(stuck), "data/soft")))
	run(t, "chattr", "+i", fixed)
	plain := s.directory(t, "nas", "plain")
	for _, v := range []*vol{deep, stuck, plain} {
		must(t, s.delete(t, v))
	}
	trash := filepath.Join(s.dir, ".trivet/trash")
	left := func() []string {
		names, err := filepath.Glob(trash + "/*")
		must(t, err)
		return names
	}
	err := retry.For(t.Context(), patience, func() (bool, error) { return len(left()) != 1, fmt.Errorf("in the trash are %v", left()) })
	if err != nil && len(left()) != 1 {
		t.Error(err)
	}
	again := s.directory(t, "nas", "stuck") // its name is free
	must(t, s.delete(t, again))
	found, _ := filepath.Glob(trash + "/stuck.*/data/fixed")
	if len(found) != 1 {
		t.Fatalf("what cannot be removed is at %v", found)
	}
	run(t, "chattr", "-i", found[0])
	s.stop(t)
	s.run(t)
	_, err = s.control.ListVolumes(deadline(t), &csi.ListVolumesRequest{})
	must(t, err)
	s.awaitTrash(t)
}

// mkdirDeep is MkdirAll for a path that is longer than the kernel takes.
func mkdirDeep(path string) error {
	parts := strings.Split(strings.TrimPrefix(path, "/"), "/")
	at, err := syscall.Open("/", syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
	for _, p := range parts {
		if err != nil {
			return err
		}
		if err := syscall.Mkdirat(at, p, 0o700); err != nil && !errors.Is(err, syscall.EEXIST) {
			return err
		}
		var next int
		next, err = syscall.Openat(at, p, syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
		_ = syscall.Close(at)
		at = next
	}
	if err == nil {
		err = syscall.Close(at)
	}
	return err
}

func (s *siege) awaitTrash(t *testing.T) {
	t.Helper()
	awaitEmpty(t, filepath.Join(s.dir, ".trivet/trash"))
}

// awaitEmpty waits until a folder is.
func awaitEmpty(t *testing.T, dir string) {
	t.Helper()
	names := func() []os.DirEntry {
		entries, err := os.ReadDir(dir)
		must(t, err)
		return entries
	}
	err := retry.For(context.Background(), patience, func() (bool, error) { return len(names()) > 0, fmt.Errorf("in %s are %v", dir, names()) })
	if err != nil && len(names()) > 0 {
		t.Error(err)
	}
}
