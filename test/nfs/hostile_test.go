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

// attackedPool is a pool on an export that an attacker can change as root, and the driver that uses
// it. The attacker must not be able to change the victims through the driver.
type attackedPool struct {
	*machine
	server *nfsd.Server
	dir    string // the pool's directory on the server
	victim *vol   // a directory
	image  *vol   // a victim that is a disk image
}

// TestHostile: an attacker who is root on another client changes files on the export. The driver
// changes and mounts nothing outside the attacked volume, and returns a clear error in time.
func TestHostile(t *testing.T) {
	server := nfsd.Start(t, nfsd.Options{})
	export := server.Export(t, "nas")
	server.Export(t, "other")
	s := &attackedPool{server: server, dir: server.Dir(export)}
	t.Cleanup(func() { wantEmpty(t, server, export) })
	s.machine = start(t, server.Node(t, "node-1"), "node-1", nfsPool("nas", server, export))
	s.createVictims(t)
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

// createVictims creates two volumes and two directories outside the pool, each with a file.
func (s *attackedPool) createVictims(t *testing.T) {
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

// wantVictims fails unless the victims are unchanged. It deletes the volumes among them.
func (s *attackedPool) wantVictims(t *testing.T) {
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
			t.Errorf("got entries %v and error %v in %s, want one file", left, err, dir)
		}
	}
}

// folder returns the path of a volume's folder on the server.
func (s *attackedPool) folder(v *vol) string { return filepath.Join(s.dir, "volumes", v.name) }

// state describes the files on the server that the driver must not change in calls for the attacked volume,
// which is nil for calls with IDs of no volume. It omits access times and link counts, which may change.
func (s *attackedPool) state(t *testing.T, attacked *vol) string {
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

// skip skips an entry of a walk, except that it walks into directories with the name volumes.
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

// callAll makes every call for a volume, and checks that each returns a clear code.
func (s *attackedPool) callAll(t *testing.T, v *vol) []reply {
	t.Helper()
	replies := s.callMost(t, v)
	err := s.delete(t, v)
	wantClearCode(t, "DeleteVolume", err)
	return append(replies, reply{"DeleteVolume", err})
}

// callMost makes the calls of callAll except DeleteVolume.
func (s *attackedPool) callMost(t *testing.T, v *vol) (replies []reply) {
	t.Helper()
	for _, c := range []struct {
		name string
		do   func(*testing.T, *vol) error
	}{
		{"ControllerGetVolume", s.getVolume},
		{"ControllerGetVolumeHealth", s.getVolumeHealth},
		{"ListVolumes", func(t *testing.T, _ *vol) error { return s.listVolumes(t) }},
		{"ControllerPublishVolume", s.controllerPublish},
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
		{"ControllerUnpublishVolume", func(t *testing.T, v *vol) error { return s.controllerUnpublish(t, v, s.name) }},
	} {
		err := c.do(t, v)
		wantClearCode(t, c.name, err)
		replies = append(replies, reply{c.name, err})
	}
	return replies
}

// wantClearCode fails unless a call succeeded or returned one of clearCodes.
func wantClearCode(t *testing.T, call string, err error) {
	t.Helper()
	if err != nil {
		t.Logf("%s: %v", call, err)
	}
	if !slices.Contains(clearCodes, status.Code(err)) {
		t.Errorf("%s: got error %v, want one of the codes %v", call, err, clearCodes)
	}
}

// wantNotMounted fails if the volume is mounted although NodeStageVolume failed with the error staged.
func (s *attackedPool) wantNotMounted(t *testing.T, v *vol, staged error) {
	t.Helper()
	if at := mountTableAt(t, s.staging(v)); staged != nil && at != "" {
		t.Errorf("got mount %s although NodeStageVolume failed: %v", at, staged)
	}
}

// mountTableAt returns the lines of the mount table for a mount point.
func mountTableAt(t *testing.T, path string) string {
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

// clearCodes are the codes that tell the caller what is wrong. Internal and Unknown do not.
var clearCodes = []codes.Code{codes.OK, codes.NotFound, codes.FailedPrecondition, codes.DataLoss, codes.Unavailable, codes.AlreadyExists, codes.InvalidArgument, codes.OutOfRange}

// attack is a change to a volume's folder that an attacker makes.
type attack struct {
	name string
	do   func(t *testing.T, folder string)
	// stage is the code that NodeStageVolume must return, and text a text that its error must contain.
	stage codes.Code
	text  string
}

// wantHarmless attacks a volume, makes every call for it, and checks that no other file has changed.
func (s *attackedPool) wantHarmless(t *testing.T, a attack, v *vol) {
	t.Helper()
	a.do(t, s.folder(v))
	before := s.state(t, v)
	for _, r := range s.callAll(t, v) {
		if r.call == "NodeStageVolume" {
			wantCode(t, r.err, a.stage, a.text)
		}
	}
	s.wantState(t, v, before)
	s.removeFolder(t, v)
}

// wantState fails unless state still returns want.
func (s *attackedPool) wantState(t *testing.T, attacked *vol, want string) {
	t.Helper()
	if got := s.state(t, attacked); got != want {
		t.Errorf("files outside the attacked volume have changed: got\n%s\nwant\n%s", got, want)
	}
}

// wantNoMounts fails if the volume is staged or published.
func (s *attackedPool) wantNoMounts(t *testing.T, v *vol) {
	t.Helper()
	if at := mountTableAt(t, s.staging(v)) + mountTableAt(t, s.target(v)); at != "" {
		t.Errorf("got mounts %s of the attacked volume, want none", at)
	}
}

// removeFolder removes the remains of an attacked volume.
func (s *attackedPool) removeFolder(t *testing.T, v *vol) {
	t.Helper()
	s.wantNoMounts(t, v)
	for _, path := range []string{s.folder(v), s.folder(v) + ".away"} {
		must(t, os.RemoveAll(path))
	}
}

// replace returns an attack that removes a file of a volume and calls plant for its path.
func replace(file string, plant func(path string) error) func(*testing.T, string) {
	return func(t *testing.T, folder string) {
		t.Helper()
		path := filepath.Join(folder, file)
		must(t, os.RemoveAll(path))
		must(t, os.MkdirAll(filepath.Dir(path), 0o700))
		must(t, plant(path))
	}
}

// The following functions are arguments of replace, or return one. They create a file of a type at a path.
// Paths in parameters are relative to the directory of the new file.

func link(to string) func(path string) error {
	return func(path string) error { return os.Symlink(to, path) }
}

func hardLink(of string) func(path string) error {
	return func(path string) error { return os.Link(filepath.Join(filepath.Dir(path), of), path) }
}

func fifo(path string) error      { return syscall.Mkfifo(path, 0o600) }
func socket(path string) error    { return syscall.Mknod(path, syscall.S_IFSOCK|0o600, 0) }
func directory(path string) error { return os.Mkdir(path, 0o700) }
func nothing(string) error        { return nil }

func device(kind uint32, major, minor int) func(path string) error {
	return func(path string) error { return syscall.Mknod(path, kind|0o600, major<<8|minor) }
}

func text(s string) func(path string) error {
	return func(path string) error { return os.WriteFile(path, []byte(s), 0o600) }
}

// sized creates a file of n bytes without data.
func sized(n int64) func(path string) error {
	return func(path string) error { return errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, n)) }
}

// linkFolder returns an attack that replaces the volume's folder by a link.
func linkFolder(to string) func(*testing.T, string) {
	return func(t *testing.T, folder string) {
		t.Helper()
		must(t, os.Rename(folder, folder+".away"))
		must(t, os.Symlink(to, folder))
	}
}

// editRecord returns an attack that changes fields of the volume's record.
func editRecord(change func(record map[string]any)) func(*testing.T, string) {
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

// noPermissions is an attack that removes all permissions and changes the owner.
func noPermissions(t *testing.T, folder string) {
	t.Helper()
	must(t, filepath.WalkDir(folder, func(path string, _ fs.DirEntry, err error) error {
		return errors.Join(err, os.Chown(path, 4711, 4711), os.Chmod(path, 0))
	}))
}

// onRecords contains the attacks on a volume's folder and record.
var onRecords = []attack{
	{"folder is a link", linkFolder("victim"), codes.DataLoss, ""},
	{"folder is an absolute link", linkFolder("/etc"), codes.DataLoss, ""},
	{"record is missing", replace("volume.json", nothing), codes.DataLoss, "volume.json"},
	{"record is a link", replace("volume.json", link("../victim/volume.json")), codes.DataLoss, ""},
	{"record is a link to a file of the host", replace("volume.json", link("/etc/hostname")), codes.DataLoss, ""},
	{"record is a FIFO", replace("volume.json", fifo), codes.DataLoss, "regular file"},
	{"record is a socket", replace("volume.json", socket), codes.DataLoss, "regular file"},
	{"record is a device", replace("volume.json", device(syscall.S_IFCHR, 1, 5)), codes.DataLoss, "regular file"},
	{"record is a directory", replace("volume.json", directory), codes.DataLoss, ""},
	{"record is huge", replace("volume.json", sized(1<<40)), codes.DataLoss, "too large"},
	{"record is empty", replace("volume.json", text("")), codes.DataLoss, ""},
	{"record is a hard link to another record", replace("volume.json", hardLink("../victim/volume.json")), codes.DataLoss, "victim"},
	{"record has another ID", editRecord(func(r map[string]any) { r["id"] = "nfs:nas:victim" }), codes.DataLoss, "victim"},
	{"record has a negative size", editRecord(func(r map[string]any) { r["sizeBytes"] = -1 }), codes.DataLoss, "sizeBytes"},
	{"record has an unknown version", editRecord(func(r map[string]any) { r["version"] = 99 }), codes.DataLoss, "version"},
	{"record has an unknown field", editRecord(func(r map[string]any) { r["path"] = "/etc" }), codes.DataLoss, ""},
	{"attachment is a FIFO", replace("attached/node", fifo), codes.DataLoss, "attached"},
	{"attachment is huge", replace("attached/node", sized(1<<40)), codes.DataLoss, "attached"},
	{"attachment is garbage", replace("attached/node", text("garbage")), codes.DataLoss, "attached"},
}

// onImages contains the attacks on volumes that are images.
var onImages = []attack{
	{"image is a link to another image", replace("image", link("../victim-image/image")), codes.DataLoss, "regular file"},
	{"image is a link to a file of the host", replace("image", link("/etc/hostname")), codes.DataLoss, "regular file"},
	{"image is a hard link to another image", replace("image", hardLink("../victim-image/image")), codes.DataLoss, "hard links"},
	{"image is a FIFO", replace("image", fifo), codes.DataLoss, "regular file"},
	{"image is a socket", replace("image", socket), codes.DataLoss, "regular file"},
	{"image is a directory", replace("image", directory), codes.DataLoss, "regular file"},
	{"image is a character device", replace("image", device(syscall.S_IFCHR, 1, 5)), codes.DataLoss, "regular file"},
	{"image is a block device", replace("image", device(syscall.S_IFBLK, 254, 0)), codes.DataLoss, "regular file"},
	{"image is missing", replace("image", nothing), codes.DataLoss, "missing"},
	{"image is too short", replace("image", sized(4096)), codes.DataLoss, "truncated"},
	{"attachments are a link", replace("attached", link("../victim/attached")), codes.DataLoss, "attached"},
	{"attachment of another node", replace("attached/node", text(`{"version":1,"node":"node-9"}`)), codes.FailedPrecondition, "node-9"},
	{"lock is a FIFO", replace("lock", fifo), codes.FailedPrecondition, "lock"},
	{"lock is a link", replace("lock", link("../victim-image/image")), codes.FailedPrecondition, "lock"},
	{"no permissions", noPermissions, codes.OK, ""},
}

func (s *attackedPool) testImages(t *testing.T) {
	for _, a := range onImages {
		t.Run(a.name, func(t *testing.T) {
			v := s.machine.image(t, "nas", "attacked-image", "ext4", 32*mib)
			s.wantHarmless(t, a, v)
		})
	}
}

// onDirectories contains the attacks on volumes that are directories, in addition to onRecords.
var onDirectories = []attack{
	{"data is a link to another volume", replace("data", link("../victim/data")), codes.DataLoss, "data"},
	{"data is a link to a parent", replace("data", link("../../..")), codes.DataLoss, "data"},
	{"data is a link to another export", replace("data", link("/other")), codes.DataLoss, "data"},
	{"data is a link to a directory that is not exported", replace("data", link("../../../unexported")), codes.DataLoss, "data"},
	{"data is a FIFO", replace("data", fifo), codes.DataLoss, "data"},
	{"data is a file", replace("data", text("x")), codes.DataLoss, "data"},
	{"data is missing", replace("data", nothing), codes.DataLoss, "missing"},
	{"subDir contains ..", editRecord(func(r map[string]any) { r["directory"].(map[string]any)["subDir"] = "../../unexported" }), codes.DataLoss, "subDir"},
	{"subDir is another volume", editRecord(func(r map[string]any) { r["directory"].(map[string]any)["subDir"] = "volumes/victim/data" }), codes.DataLoss, "subDir"},
	{"subDir is absolute", editRecord(func(r map[string]any) { r["directory"].(map[string]any)["subDir"] = "/other" }), codes.DataLoss, "subDir"},
	{"no permissions", noPermissions, codes.OK, ""},
}

func (s *attackedPool) testDirectories(t *testing.T) {
	for _, a := range slices.Concat(onDirectories, onRecords) {
		if strings.HasPrefix(a.name, "attachment") { // a directory has one attachment file per node, with another name
			continue
		}
		t.Run(a.name, func(t *testing.T) {
			s.wantHarmless(t, a, s.directory(t, "nas", "attacked"))
		})
	}
	for _, place := range []string{"team", "team/claim"} {
		for _, to := range []string{"victim-files", "../volumes", "/other", "../.."} {
			t.Run(place+" is a link to "+to, func(t *testing.T) { s.testSubDir(t, place, to) })
		}
	}
}

// testSubDir replaces a directory in the path of a subDir by a link.
func (s *attackedPool) testSubDir(t *testing.T, place, to string) {
	v := s.create(t, "attacked", mib, filesystem("", manyNodes), map[string]string{"backend": "nfs", "pool": "nas", "subDir": "tenants/team/claim"})
	path := filepath.Join(s.dir, "tenants", place)
	must(t, os.Rename(path, path+".away"))
	must(t, os.Symlink(to, path))
	must(t, s.controllerPublish(t, v))
	err := s.stage(t, v)
	wantCode(t, err, codes.DataLoss, "tenants/team/claim")
	s.wantNotMounted(t, v, err)
	must(t, s.unstage(t, v))
	must(t, s.controllerUnpublish(t, v, s.name))
	through := map[string]string{"backend": "nfs", "pool": "nas", "subDir": "tenants/" + place + "/new"}
	_, err = s.tryCreate(t, "through", mib, v.capability, through)
	wantCode(t, err, codes.FailedPrecondition, "subDir")
	if place == "team" {
		wantCode(t, s.delete(t, v), codes.FailedPrecondition, "link")
		must(t, os.Remove(path))
		must(t, os.Rename(path+".away", path))
	}
	must(t, s.delete(t, v)) // if the last part of the path is a link, the link is deleted
	s.awaitTrash(t)
	must(t, os.RemoveAll(filepath.Join(s.dir, "tenants")))
}

// testStaged attacks volumes while they are in use. The volumes can still be unpublished and unstaged,
// and no other file changes.
func (s *attackedPool) testStaged(t *testing.T) {
	for _, a := range []attack{
		{name: "image is a link to another image", do: replace("image", link("../victim-image/image"))},
		{name: "image is a hard link to another image", do: replace("image", hardLink("../victim-image/image"))},
		{name: "image is a FIFO", do: replace("image", fifo)},
		{name: "folder is a link", do: linkFolder("victim-image")},
		{name: "folder is missing", do: func(t *testing.T, folder string) { t.Helper(); must(t, os.RemoveAll(folder)) }},
		{name: "record is a FIFO", do: replace("volume.json", fifo)},
		{name: "no permissions", do: noPermissions},
	} {
		for _, kind := range []string{"image", "directory"} {
			t.Run(kind+", "+a.name, func(t *testing.T) { s.testStagedVolume(t, a, kind) })
		}
	}
}

// testStagedVolume attacks a volume of a kind, image or directory, while it is in use.
func (s *attackedPool) testStagedVolume(t *testing.T, a attack, kind string) {
	var v *vol
	if kind == "image" {
		v = s.machine.image(t, "nas", "attacked-image", "ext4", 32*mib)
	} else {
		v = s.directory(t, "nas", "attacked")
		if strings.HasPrefix(a.name, "image is a link") {
			a.do = replace("data", link("../victim/data"))
		}
	}
	s.up(t, v)
	write(t, s.file(v, "mine"), "mine")
	a.do(t, s.folder(v))
	before := s.state(t, v)
	wantClearCode(t, "NodeGetVolumeStats", s.stats(t, v))
	_, err := s.tryHealth(t, v)
	wantClearCode(t, "NodeGetVolumeHealth", err)
	wantClearCode(t, "ControllerExpandVolume", s.expand(t, v, 48*mib))
	_, err = s.node.NodeExpandVolume(deadline(t), &csi.NodeExpandVolumeRequest{VolumeId: v.id, VolumePath: s.target(v), StagingTargetPath: s.staging(v), VolumeCapability: v.capability})
	wantClearCode(t, "NodeExpandVolume", err)
	if err := s.delete(t, v); err == nil && a.name != "folder is missing" {
		t.Error("DeleteVolume of a volume in use: got success, want an error")
	}
	s.unmount(t, v)
	wantClearCode(t, "ControllerUnpublishVolume", s.controllerUnpublish(t, v, s.name))
	wantClearCode(t, "DeleteVolume", s.delete(t, v))
	s.wantState(t, v, before)
	s.removeFolder(t, v)
}

// testPool attacks the folders and the marker of the pool.
func (s *attackedPool) testPool(t *testing.T) {
	v := s.directory(t, "nas", "attacked")
	for _, tc := range []struct {
		name, path string
		plant      func(path string) error
	}{
		{"volumes is a link to another export", "volumes", link("../other")},
		{"volumes is a link to the host", "volumes", link("/etc")},
		{"volumes is empty", "volumes", directory},
		{"marker is a FIFO", "pool.json", fifo},
		{"marker is a link", "pool.json", link("/etc/hostname")},
		{"marker is huge", "pool.json", sized(1 << 40)},
		{".trivet is a link", ".trivet", link("../other")},
	} {
		t.Run(tc.name, func(t *testing.T) {
			path := filepath.Join(s.dir, tc.path)
			must(t, os.Rename(path, path+".away"))
			must(t, tc.plant(path))
			s.callMost(t, v)
			s.wantNoMounts(t, v)
			must(t, os.RemoveAll(path))
			must(t, os.Rename(path+".away", path))
			eventually(t, func() error { return s.controllerPublish(t, v) }) // the driver opens the pool again
			must(t, s.controllerUnpublish(t, v, s.name))
		})
	}
	eventually(t, func() error { return s.delete(t, v) })
	s.awaitTrash(t)
}

// testIDs makes calls with IDs of volumes that do not exist.
func (s *attackedPool) testIDs(t *testing.T) {
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
					t.Errorf("%s of a volume that does not exist: got success, want an error", r.call)
				}
			}
			s.wantNoMounts(t, v)
		})
	}
	s.wantState(t, nil, before)
}

// needVolume contains the calls that must fail for a volume that does not exist.
var needVolume = []string{
	"NodeStageVolume", "NodePublishVolume", "NodeGetVolumeStats", "ControllerExpandVolume", "ControllerPublishVolume", "ControllerGetVolume",
}

// testStatic checks that the path of a statically provisioned volume must not contain a symbolic link.
func (s *attackedPool) testStatic(t *testing.T) {
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

// testTrash checks that a volume that cannot be removed does not keep other volumes in the trash.
func (s *attackedPool) testTrash(t *testing.T) {
	deep := s.directory(t, "nas", "deep")
	at := filepath.Join(s.folder(deep), "data")
	for range 12 { // 24 KiB in total, more than PATH_MAX
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
	err := retry.For(t.Context(), waitTimeout, func() (bool, error) {
		return len(left()) != 1, fmt.Errorf("got %v in the trash, want one volume", left())
	})
	if err != nil && len(left()) != 1 {
		t.Error(err)
	}
	again := s.directory(t, "nas", "stuck") // a new volume can have the same name
	must(t, s.delete(t, again))
	found, _ := filepath.Glob(trash + "/stuck.*/data/fixed")
	if len(found) != 1 {
		t.Fatalf("got paths %v of the immutable file, want one", found)
	}
	run(t, "chattr", "-i", found[0])
	s.stop(t) // the next driver retries at once, without the back-off of this one
	s.run(t)
	must(t, s.listVolumes(t))
	s.awaitTrash(t)
}

// mkdirDeep creates a directory and its parents. Unlike os.MkdirAll, it supports paths that are longer
// than the kernel accepts.
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

// awaitTrash waits until the trash of the pool is empty.
func (s *attackedPool) awaitTrash(t *testing.T) {
	t.Helper()
	awaitEmpty(t, filepath.Join(s.dir, ".trivet/trash"))
}

// awaitEmpty waits until a directory is empty.
func awaitEmpty(t *testing.T, dir string) {
	t.Helper()
	names := func() []os.DirEntry {
		entries, err := os.ReadDir(dir)
		must(t, err)
		return entries
	}
	err := retry.For(context.Background(), waitTimeout, func() (bool, error) {
		return len(names()) > 0, fmt.Errorf("got %v in %s, want an empty directory", names(), dir)
	})
	if err != nil && len(names()) > 0 {
		t.Error(err)
	}
}
