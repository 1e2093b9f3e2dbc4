package backendtest

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// testHostilePoolContent changes the content of the pool as a tenant with write access to the pool can. The driver
// neither changes nor mounts anything outside the volume.
func testHostilePoolContent(t *testing.T, d *Driver, kind Kind) {
	victim := newVolume(t, d, kind, kind.widestMode())
	precious := filepath.Join(victim.directory(), "precious")
	write(t, precious, pattern(30))
	outside := filepath.Join(t.TempDir(), "outside") // outside the pool and the export
	must(t, os.Mkdir(outside, 0o777))
	write(t, filepath.Join(outside, "precious"), pattern(31))
	beside := filepath.Join(d.Pool(), "beside")
	must(t, os.Mkdir(beside, 0o777))
	write(t, filepath.Join(beside, "precious"), pattern(32))

	// with returns a function that creates a volume with more parameters.
	with := func(more ...string) func(t *testing.T) *testVolume {
		return func(t *testing.T) *testVolume {
			t.Helper()
			return newVolumeOfClass(t, d, kind, kind.widestMode(), kind.Parameters(more...))
		}
	}
	inSubDir := with("subDir", "hostile/team/claim")
	for _, tc := range []struct {
		name   string
		create func(t *testing.T) *testVolume
		attack func(t *testing.T, l *testVolume) (undo func())
		code   codes.Code // of NodeStageVolume
	}{
		{"a link to another volume", with(), linked((*testVolume).directory, victim.directory()), codes.DataLoss},
		{"a relative link", with(), linked((*testVolume).directory, "../../../beside"), codes.DataLoss},
		{"a link to the host", with(), linked((*testVolume).directory, outside), codes.DataLoss},
		{"a link in the path", inSubDir, linked(func(*testVolume) string { return filepath.Join(d.Pool(), "hostile/team") }, beside), codes.DataLoss},
		{"a link at the end", inSubDir, linked(func(*testVolume) string { return filepath.Join(d.Pool(), "hostile/team/claim") }, beside), codes.DataLoss},
		{"a link for the folder", with(), linked(func(l *testVolume) string { return filepath.Dir(l.directory()) }, filepath.Dir(victim.directory())), codes.DataLoss},
		{"a file for the directory", with(), replaced, codes.DataLoss},
		{"the record of another volume", with(), rewritten([]byte(victim.name() + `"`)), codes.DataLoss},
		{"a record with ..", with(), edited(`"directory": {`, `"directory": {"subDir": "../../etc", `), codes.DataLoss},
		{"a record with the folder of another volume", with(), edited(`"directory": {`, `"directory": {"subDir": "volumes/`+victim.name()+`/data", `), codes.DataLoss},
		{"a record that is not JSON", with(), edited(`{`, ``), codes.DataLoss},
		{"a directory without permissions", with(), forbidden, codes.OK},
	} {
		t.Run(tc.name, func(t *testing.T) {
			l := tc.create(t)
			undo := tc.attack(t, l)
			err := l.stage(t.Context())
			if err == nil && tc.code != codes.OK || err != nil && status.Code(err) != tc.code {
				t.Errorf("NodeStageVolume: got %v, want %v", err, tc.code)
			}
			if tc.code != codes.OK && mountsAt(t, l.staging) != 0 {
				t.Errorf("got mount %s, want none", testenv.Run(t, "findmnt", "-n", l.staging))
			}
			must(t, l.unstage(t.Context()))
			_ = l.delete(t.Context()) // may fail, but must not affect files outside the volume
			undo()
		})
	}
	t.Run("links inside", func(t *testing.T) {
		l := with()(t)
		l.stageAndPublish(t)
		for name, to := range map[string]string{"a": outside, "b": victim.directory(), "c": "/", "d": "../../.."} {
			must(t, os.Symlink(to, filepath.Join(l.target, name)))
		}
		l.unpublishAndUnstage(t)
		remove(t, d, l.id)
		await(t, "the volume to be removed", func() bool { return len(d.findFiles(t, l.name())) == 0 })
	})
	pool := strings.TrimSuffix(victim.id, ":"+victim.name())
	for _, id := range []string{pool + ":../victim", pool + ":", "nfs:..:x", "nfs:=x=/../..:x", strings.Replace(victim.id, kind.target.Class["backend"], "loop", 1)} {
		_, err := d.Node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: t.TempDir(), VolumeCapability: victim.cap})
		if err == nil {
			t.Errorf("NodeStageVolume of %q succeeded, want an error", id)
		}
		_, _ = d.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
	}
	// Files that an attack has moved away prevent the removal of their volumes' limits.
	must(t, os.RemoveAll(filepath.Join(d.Pool(), "hostile")))
	d.awaitTrash(t)
	wantContent(t, precious, pattern(30))
	wantContent(t, filepath.Join(outside, "precious"), pattern(31))
	wantContent(t, filepath.Join(beside, "precious"), pattern(32))
	victim.stageAndPublish(t)
	wantContent(t, filepath.Join(victim.target, "precious"), pattern(30))
}

// linked returns an attack that replaces the directory at a path by a symbolic link. The attack returns a
// function that undoes it.
func linked(at func(*testVolume) string, to string) func(*testing.T, *testVolume) func() {
	return func(t *testing.T, l *testVolume) func() {
		t.Helper()
		path := at(l)
		must(t, os.Rename(path, path+".away"))
		must(t, os.Symlink(to, path))
		return putBack(t, path)
	}
}

// putBack returns a function that renames path.away to path again, unless the driver has removed the parent
// directory.
func putBack(t *testing.T, path string) func() {
	t.Helper()
	return func() {
		if _, err := os.Lstat(path + ".away"); err != nil {
			return
		}
		_ = os.Remove(path) // it may not exist
		must(t, os.Rename(path+".away", path))
	}
}

// replaced is an attack that replaces the volume's directory by a file.
func replaced(t *testing.T, l *testVolume) func() {
	t.Helper()
	must(t, os.Rename(l.directory(), l.directory()+".away"))
	must(t, os.WriteFile(l.directory(), []byte("x"), 0o600))
	return putBack(t, l.directory())
}

// record is the path of the volume's record.
func (l *testVolume) record() string {
	return filepath.Join(l.d.Pool(), "volumes", l.name(), "volume.json")
}

// edited returns an attack that replaces a text in the record.
func edited(from, to string) func(*testing.T, *testVolume) func() {
	return func(t *testing.T, l *testVolume) func() {
		t.Helper()
		return overwrite(t, l, func(b []byte) []byte { return bytes.Replace(b, []byte(from), []byte(to), 1) })
	}
}

// rewritten returns an attack that replaces the end of the ID in the record.
func rewritten(end []byte) func(*testing.T, *testVolume) func() {
	return func(t *testing.T, l *testVolume) func() {
		t.Helper()
		return overwrite(t, l, func(b []byte) []byte { return bytes.Replace(b, []byte(l.name()+`"`), end, 1) })
	}
}

// overwrite changes the record, and returns a function that restores it.
func overwrite(t *testing.T, l *testVolume, change func([]byte) []byte) func() {
	t.Helper()
	before, err := os.ReadFile(l.record())
	must(t, err)
	after := change(before)
	if bytes.Equal(before, after) {
		t.Fatalf("the record did not change: %s", before)
	}
	must(t, os.WriteFile(l.record(), after, 0o600))
	return func() {
		if _, err := os.Stat(l.record()); err == nil {
			must(t, os.WriteFile(l.record(), before, 0o600))
		}
	}
}

// forbidden is an attack that removes all permissions of the volume's directory.
func forbidden(t *testing.T, l *testVolume) func() {
	t.Helper()
	must(t, os.Chmod(l.directory(), 0))
	return func() {}
}
