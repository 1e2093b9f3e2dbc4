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

// siege is a driver whose export an attacker can write to as root, and the data that the
// attacker must not reach through the driver.
type siege struct {
	*machine
	server *nfsd.Server
	dir    string // of the pool, on the server
	victim *vol   // a directory
	image  *vol
}

// TestHostile: an attacker with root on another client changes files on the export. The driver
// changes and mounts nothing outside the volume, and each call returns a clear error in time.
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

// wantVictims fails unless the victims have their content, and deletes them.
func (s *siege) wantVictims(t *testing.T) {
	t.Helper()
	for _, v := range []*vol{s.victim, s.image} {
		s.up(t, v)
		wantText(t, s.file(v, "precious"), v.name)
		s.remove(t, v)
	}
	s.awaitTrash(t)
	for _, dir := range []string{s.server.Dir("/other"), filepath.Join(s.server.Dir("/"), "unexported")} {
		wantText(t, filepath.Join(dir, "precious"), dir)
		left, err := os.ReadDir(dir)
		if err != nil || len(left) != 1 {
			t.Errorf("%s contains %v, %v, want one file", dir, left, err)
		}
	}
}

// folder is a volume's folder on the server.
func (s *siege) folder(v *vol) string { return filepath.Join(s.dir, "volumes", v.name) }

// state describes all files that the driver must not change in calls for a volume. Access times
// and link counts may change.
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

// reply is the result of a call.
type reply struct {
	call string
	err  error
}

// callAll makes every call of a volume's life, and checks that each returns a clear code.
func (s *siege) callAll(t *testing.T, v *vol) []reply {
	t.Helper()
	replies := s.callMost(t, v)
	err := s.delete(t, v)
	wantClear(t, "DeleteVolume", err)
	return append(replies, reply{"DeleteVolume", err})
}

// callMost is callAll without DeleteVolume.
func (s *siege) callMost(t *testing.T, v *vol) (replies []reply) {
	t.Helper()
	for _, c := range []struct {
		name string
		do   func(*testing.T, *vol) error
	}{
		{"ControllerGetVolume", s.getVolume},
		{"ControllerGetVolumeHealth", s.getVolumeHealth},
		{"ListVolumes", func(t *testing.T, _ *vol) error { return s.listVolumes(t) }},
		{"ControllerPublishVolume", s.attach},
		{"NodeStageVolume", func(t *testing.T, v *vol) error {
			err := s.stage(t, v)
			s.wantNotMounted(t, v, err)
			return err
		}},
		{"NodePublishVolume", s.publish},
		{"NodeGetVolumeStats", s.stats},
		{"ControllerExpandVolume", func(t *testing.T, v *vol) error { return s.expand(t, v, 48*mib) }},
		{"NodeUnpublishVolume", s.unpublish},
		{"NodeUnstageVolume", s.unstage},
		{"ControllerUnpublishVolume", func(t *testing.T, v *vol) error { return s.detach(t, v, s.name) }},
	} {
		err := c.do(t, v)
		wantClear(t, c.name, err)
		replies = append(replies, reply{c.name, err})
	}
	return replies
}

// wantClear fails unless a call succeeded or returned a code that tells what to do.
func wantClear(t *testing.T, call string, err error) {
	t.Helper()
	if err != nil {
		t.Logf("%s: %v", call, err)
	}
	if !slices.Contains(clearCodes, status.Code(err)) {
		t.Errorf("%s: got %v, want another code", call, err)
	}
}

// wantNotMounted fails if the volume is mounted though NodeStageVolume failed.
func (s *siege) wantNotMounted(t *testing.T, v *vol, staged error) {
	t.Helper()
	if at := mountsAt(t, s.staging(v)); staged != nil && at != "" {
		t.Errorf("NodeStageVolume returned %v, and the mount table has %s", staged, at)
	}
}

// mountsAt returns the lines of the mount table for a path.
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

// clearCodes are the codes that tell what to do. Internal and Unknown do not.
var clearCodes = []codes.Code{codes.OK, codes.NotFound, codes.FailedPrecondition, codes.DataLoss, codes.Unavailable, codes.AlreadyExists, codes.InvalidArgument, codes.OutOfRange}

// attack is a change of the attacker to a volume's folder.
type attack struct {
	name string
	do   func(t *testing.T, folder string)
	// stage and says are the code and a text of the result of NodeStageVolume.
	stage codes.Code
	says  string
}

// wantHarmless makes every call for an attacked volume.
func (s *siege) wantHarmless(t *testing.T, a attack, v *vol) {
	t.Helper()
	a.do(t, s.folder(v))
	before := s.state(t, v)
	for _, r := range s.callAll(t, v) {
		if r.call == "NodeStageVolume" {
			wantCode(t, r.err, a.stage, a.says)
		}
	}
	s.wantState(t, v, before)
	s.removeFolder(t, v)
}

// wantState fails if files outside the attacked volume have changed.
func (s *siege) wantState(t *testing.T, attacked *vol, want string) {
	t.Helper()
	if got := s.state(t, attacked); got != want {
		t.Errorf("the calls changed other files, from\n%s\nto\n%s", want, got)
	}
}

// wantNoMounts fails if the volume is staged or published.
func (s *siege) wantNoMounts(t *testing.T, v *vol) {
	t.Helper()
	if at := mountsAt(t, s.staging(v)) + mountsAt(t, s.target(v)); at != "" {
		t.Errorf("the mount table has %s", at)
	}
}

// removeFolder removes the remains of an attacked volume.
func (s *siege) removeFolder(t *testing.T, v *vol) {
	t.Helper()
	s.wantNoMounts(t, v)
	for _, path := range []string{s.folder(v), s.folder(v) + ".away"} {
		must(t, os.RemoveAll(path))
	}
}

// replace puts another file in the place of a file of a volume.
func replace(file string, plant func(path string) error) func(*testing.T, string) {
	return func(t *testing.T, folder string) {
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
func linkedFolder(to string) func(*testing.T, string) {
	return func(t *testing.T, folder string) {
		t.Helper()
		must(t, os.Rename(folder, folder+".away"))
		must(t, os.Symlink(to, folder))
	}
}

// edited changes fields of a volume's record.
func edited(change func(record map[string]any)) func(*testing.T, string) {
	return func(t *testing.T, folder string) {
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

// bare removes all permissions and changes the owner.
func bare(t *testing.T, folder string) {
	t.Helper()
	must(t, filepath.WalkDir(folder, func(path string, _ fs.DirEntry, err error) error {
		return errors.Join(err, os.Chown(path, 4711, 4711), os.Chmod(path, 0))
	}))
}

// onRecords are the attacks on the records, which both kinds have.
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
	{"a record with a negative size", edited(func(r map[string]any) { r["capacityBytes"] = -1 }), codes.DataLoss, "capacityBytes"},
	{"a record of another version", edited(func(r map[string]any) { r["version"] = 99 }), codes.DataLoss, "version"},
	{"a record with an unknown field", edited(func(r map[string]any) { r["path"] = "/etc" }), codes.DataLoss, ""},
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
	{"a link to a folder that is not exported", replace("data", link("../../../unexported")), codes.DataLoss, "data"},
	{"a pipe", replace("data", pipe), codes.DataLoss, "data"},
	{"a file", replace("data", text("x")), codes.DataLoss, "data"},
	{"nothing", replace("data", none), codes.DataLoss, "missing"},
	{"a record that goes up", edited(func(r map[string]any) { r["directory"].(map[string]any)["subDir"] = "../../unexported" }), codes.DataLoss, "subDir"},
	{"a record of another volume's folder", edited(func(r map[string]any) { r["directory"].(map[string]any)["subDir"] = "volumes/victim/data" }), codes.DataLoss, "subDir"},
	{"an absolute subDir", edited(func(r map[string]any) { r["directory"].(map[string]any)["subDir"] = "/other" }), codes.DataLoss, "subDir"},
	{"no rights", bare, codes.OK, ""},
}

func (s *siege) testDirectories(t *testing.T) {
	for _, a := range slices.Concat(onDirectories, onRecords) {
		if strings.HasSuffix(a.name, "attachment") { // directories have attachments by node
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

// testSubDir replaces a part of the path of a subDir by a link.
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
	through := map[string]string{"backend": "nfs", "pool": "nas", "subDir": "tenants/" + place + "/new"}
	_, err = s.tryCreate(t, "through", mib, v.capability, through)
	wantCode(t, err, codes.FailedPrecondition, "subDir")
	if place == "team" {
		wantCode(t, s.delete(t, v), codes.FailedPrecondition, "link")
		must(t, os.Remove(path))
		must(t, os.Rename(path+".away", path))
	}
	must(t, s.delete(t, v)) // deletes the link itself if it is the last part
	s.awaitTrash(t)
	must(t, os.RemoveAll(filepath.Join(s.dir, "tenants")))
}

// testStaged attacks volumes that are in use: they can be unpublished and unstaged, and no other
// file changes.
func (s *siege) testStaged(t *testing.T) {
	for _, a := range []attack{
		{name: "a link to another image", do: replace("image", link("../victim-image/image"))},
		{name: "another image", do: replace("image", hardLink("../victim-image/image"))},
		{name: "a pipe", do: replace("image", pipe)},
		{name: "a link for the folder", do: linkedFolder("victim-image")},
		{name: "no folder", do: func(t *testing.T, folder string) { t.Helper(); must(t, os.RemoveAll(folder)) }},
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
	a.do(t, s.folder(v))
	before := s.state(t, v)
	wantClear(t, "NodeGetVolumeStats", s.stats(t, v))
	_, err := s.tryHealth(t, v)
	wantClear(t, "NodeGetVolumeHealth", err)
	wantClear(t, "ControllerExpandVolume", s.expand(t, v, 48*mib))
	_, err = s.node.NodeExpandVolume(deadline(t), &csi.NodeExpandVolumeRequest{VolumeId: v.id, VolumePath: s.target(v), StagingTargetPath: s.staging(v), VolumeCapability: v.capability})
	wantClear(t, "NodeExpandVolume", err)
	if err := s.delete(t, v); err == nil && a.name != "no folder" {
		t.Error("a volume in use was deleted")
	}
	s.unmount(t, v)
	wantClear(t, "ControllerUnpublishVolume", s.detach(t, v, s.name))
	wantClear(t, "DeleteVolume", s.delete(t, v))
	s.wantState(t, v, before)
	s.removeFolder(t, v)
}

// testPool attacks the pool's own folders and files.
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
			s.callMost(t, v)
			s.wantNoMounts(t, v)
			must(t, os.RemoveAll(path))
			must(t, os.Rename(path+".away", path))
			eventually(t, func() error { return s.attach(t, v) }) // the driver opens the pool again
			must(t, s.detach(t, v, s.name))
		})
	}
	eventually(t, func() error { return s.delete(t, v) })
	s.awaitTrash(t)
}

// testIDs makes calls with invented IDs.
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
			for _, r := range s.callAll(t, v) {
				if r.err == nil && slices.Contains(needVolume, r.call) {
					t.Errorf("%s succeeded for a volume that does not exist", r.call)
				}
			}
			s.wantNoMounts(t, v)
		})
	}
	s.wantState(t, nil, before)
}

// needVolume are the calls that must fail for a volume that does not exist.
var needVolume = []string{
	"NodeStageVolume", "NodePublishVolume", "NodeGetVolumeStats", "ControllerExpandVolume", "ControllerPublishVolume", "ControllerGetVolume",
}

// testStatic: the path of a static volume must not contain a symbolic link.
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

// testTrash: volumes that are hard to remove do not keep others in the trash.
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
	err := retry.For(t.Context(), patience, func() (bool, error) { return len(left()) != 1, fmt.Errorf("the trash has %v, want one volume", left()) })
	if err != nil && len(left()) != 1 {
		t.Error(err)
	}
	again := s.directory(t, "nas", "stuck") // the name can be used again
	must(t, s.delete(t, again))
	found, _ := filepath.Glob(trash + "/stuck.*/data/fixed")
	if len(found) != 1 {
		t.Fatalf("the immutable file is at %v, want one path", found)
	}
	run(t, "chattr", "-i", found[0])
	s.stop(t)
	s.run(t)
	must(t, s.listVolumes(t))
	s.awaitTrash(t)
}

// mkdirDeep is MkdirAll for a path that is longer than the kernel accepts.
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

// awaitEmpty waits until a folder is empty.
func awaitEmpty(t *testing.T, dir string) {
	t.Helper()
	names := func() []os.DirEntry {
		entries, err := os.ReadDir(dir)
		must(t, err)
		return entries
	}
	err := retry.For(context.Background(), patience, func() (bool, error) { return len(names()) > 0, fmt.Errorf("%s contains %v", dir, names()) })
	if err != nil && len(names()) > 0 {
		t.Error(err)
	}
}
