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

// testHostile changes the content of the pool as a tenant with write access to the export can.
// The driver changes and mounts nothing outside the volume.
func testHostile(t *testing.T, d *Driver, kind Kind) {
	victim := newLife(t, d, kind, kind.many())
	precious := filepath.Join(victim.directory(), "precious")
	write(t, precious, pattern(30))
	outside := filepath.Join(t.TempDir(), "outside") // of the pool and of the export
	must(t, os.Mkdir(outside, 0o777))
	write(t, filepath.Join(outside, "precious"), pattern(31))
	beside := filepath.Join(d.Pool(), "beside")
	must(t, os.Mkdir(beside, 0o777))
	write(t, filepath.Join(beside, "precious"), pattern(32))

	own := func(more ...string) func(t *testing.T) *life {
		return func(t *testing.T) *life {
			t.Helper()
			return newLifeWith(t, d, kind, kind.many(), kind.Parameters(more...))
		}
	}
	inSubDir := own("subDir", "hostile/team/claim")
	for _, tc := range []struct {
		name   string
		make   func(t *testing.T) *life
		attack func(t *testing.T, l *life) (undo func())
		code   codes.Code // of stage
	}{
		{"a link to another volume", own(), linked(func(l *life) string { return l.directory() }, victim.directory()), codes.DataLoss},
		{"a relative link", own(), linked(func(l *life) string { return l.directory() }, "../"+"../"+"../beside"), codes.DataLoss},
		{"a link to the host", own(), linked(func(l *life) string { return l.directory() }, outside), codes.DataLoss},
		{"a link in the path", inSubDir, linked(func(*life) string { return filepath.Join(d.Pool(), "hostile/team") }, beside), codes.DataLoss},
		{"a link at the end", inSubDir, linked(func(*life) string { return filepath.Join(d.Pool(), "hostile/team/claim") }, beside), codes.DataLoss},
		{"a link for the folder", own(), linked(func(l *life) string { return filepath.Dir(l.directory()) }, filepath.Dir(victim.directory())), codes.DataLoss},
		{"a file", own(), replaced, codes.DataLoss},
		{"the record of another volume", own(), rewritten([]byte(victim.name() + `"`)), codes.DataLoss},
		{"a record with ..", own(), edited(`"directory": {`, `"directory": {"subDir": "../../etc", `), codes.DataLoss},
		{"a record with the folder of another volume", own(), edited(`"directory": {`, `"directory": {"subDir": "volumes/`+victim.name()+`/data", `), codes.DataLoss},
		{"a record that is no JSON", own(), edited(`{`, ``), codes.DataLoss},
		{"no rights", own(), forbidden, codes.OK},
	} {
		t.Run(tc.name, func(t *testing.T) {
			l := tc.make(t)
			undo := tc.attack(t, l)
			err := l.stage(t.Context())
			if err == nil && tc.code != codes.OK || err != nil && status.Code(err) != tc.code {
				t.Errorf("stage: %v, want %v", err, tc.code)
			}
			if tc.code != codes.OK && mountsAt(t, l.staging) != 0 {
				t.Errorf("mounted: %s", testenv.Run(t, "findmnt", "-n", l.staging))
			}
			must(t, l.unstage(t.Context()))
			// DeleteVolume may be refused, or remove the volume's own data; see below.
			_ = l.delete(t.Context())
			undo()
		})
	}
	t.Run("links inside", func(t *testing.T) {
		l := own()(t)
		l.up(t)
		for name, to := range map[string]string{"a": outside, "b": victim.directory(), "c": "/", "d": "../../.."} {
			must(t, os.Symlink(to, filepath.Join(l.target, name)))
		}
		l.down(t)
		remove(t, d, l.id)
		await(t, "the volume to be removed", func() bool { return len(d.find(t, l.name())) == 0 })
	})
	pool := strings.TrimSuffix(victim.id, ":"+victim.name())
	for _, id := range []string{pool + ":../victim", pool + ":", "nfs:..:x", "nfs:=x=/../..:x", strings.Replace(victim.id, kind.target.Class["backend"], "loop", 1)} {
		_, err := d.Node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: t.TempDir(), VolumeCapability: victim.cap})
		if err == nil {
			t.Errorf("%q was staged", id)
		}
		_, _ = d.Control.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id})
	}
	// What an attack hides from the driver still counts on the limit of its volume.
	must(t, os.RemoveAll(filepath.Join(d.Pool(), "hostile")))
	d.awaitTrash(t)
	wantContent(t, precious, pattern(30))
	wantContent(t, filepath.Join(outside, "precious"), pattern(31))
	wantContent(t, filepath.Join(beside, "precious"), pattern(32))
	victim.up(t)
	wantContent(t, filepath.Join(victim.target, "precious"), pattern(30))
}

// linked replaces a directory by a link.
func linked(where func(*life) string, to string) func(*testing.T, *life) func() {
	return func(t *testing.T, l *life) func() {
		t.Helper()
		path := where(l)
		must(t, os.Rename(path, path+".away"))
		must(t, os.Symlink(to, path))
		return putBack(t, path)
	}
}

// putBack undoes a change of a path that is kept as .away, unless the driver has removed its
// parent.
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

func replaced(t *testing.T, l *life) func() {
	t.Helper()
	must(t, os.Rename(l.directory(), l.directory()+".away"))
	must(t, os.WriteFile(l.directory(), []byte("x"), 0o600))
	return putBack(t, l.directory())
}

func (l *life) record() string {
	return filepath.Join(l.d.Pool(), "volumes", l.name(), "volume.json")
}

// edited replaces a word of the record.
func edited(from, to string) func(*testing.T, *life) func() {
	return func(t *testing.T, l *life) func() {
		t.Helper()
		return overwrite(t, l, func(b []byte) []byte { return bytes.Replace(b, []byte(from), []byte(to), 1) })
	}
}

// rewritten changes the end of the ID in the record.
func rewritten(end []byte) func(*testing.T, *life) func() {
	return func(t *testing.T, l *life) func() {
		t.Helper()
		return overwrite(t, l, func(b []byte) []byte { return bytes.Replace(b, []byte(l.name()+`"`), end, 1) })
	}
}

func overwrite(t *testing.T, l *life, change func([]byte) []byte) func() {
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

func forbidden(t *testing.T, l *life) func() {
	t.Helper()
	must(t, os.Chmod(l.directory(), 0))
	return func() {}
}
