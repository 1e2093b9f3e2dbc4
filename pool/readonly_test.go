package pool_test

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// tree returns the modification times of all paths below a directory.
func tree(t *testing.T, dir string) map[string]time.Time {
	t.Helper()
	out := map[string]time.Time{}
	must(t, filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := os.Lstat(path)
		out[path] = info.ModTime()
		return err
	}))
	return out
}

func (e env) openReadOnly(t *testing.T) (*pool.Pool, error) {
	t.Helper()
	p, err := pool.OpenReadOnly(t.Context(), pool.Forms, e.cfg, e.state.Name())
	if err == nil {
		t.Cleanup(p.Close)
	}
	return p, err
}

// TestReadOnlyBesideWriter: a read-only pool shows the state of the writer, and changes nothing.
func TestReadOnlyBesideWriter(t *testing.T) {
	e := newEnv(t)
	p := e.open(t)
	v := add(t, p, "v")
	add(t, p, "w")
	must(t, p.Attachments.Attach("v", pool.Attachment{Node: "n"}))
	must(t, p.Images.BeginFormat("v"))
	must(t, p.Images.MarkFormatted("v", pool.Formatting))
	must(t, os.Mkdir(filepath.Join(e.cfg.Directory.Path, ".trivet/tmp/half"), 0o700))
	must(t, os.WriteFile(filepath.Join(e.cfg.Directory.Path, "volumes/w/volume.json"), []byte("{"), 0o600))
	must(t, os.Mkdir(filepath.Join(e.cfg.Directory.Path, "volumes/x"), 0o700))
	must(t, os.WriteFile(filepath.Join(e.cfg.Directory.Path, "volumes/stray"), nil, 0o600))
	add(t, p, "y")
	must(t, os.Remove(p.ImagePath("y")))
	add(t, p, "z")
	must(t, os.Truncate(p.ImagePath("z"), 4096))
	for _, name := range []string{"y", "z"} { // their state is shown although their images are damaged
		must(t, p.Images.BeginFormat(name))
		must(t, p.Images.MarkFormatted(name, pool.Formatting))
		must(t, p.Attachments.Attach(name, pool.Attachment{Node: "n"}))
	}

	before := tree(t, e.cfg.Directory.Path)
	l, err := e.openReadOnly(t)
	must(t, err)
	entries, err := l.Entries()
	must(t, err)
	making, removing, err := l.Leftovers()
	if err != nil || making != 1 || removing != 0 {
		t.Errorf("Leftovers: got %d in tmp, %d in the trash, %v; want 1 and 0", making, removing, err)
	}
	if got, want := usage(t, l).Attached, 3; got != want {
		t.Errorf("got %d controller-published volumes, want %d", got, want)
	}
	if l.UUID()[:8] != p.ShortUUID() {
		t.Errorf("got UUID %s, want %s…", l.UUID(), p.ShortUUID())
	}
	if after := tree(t, e.cfg.Directory.Path); !maps.Equal(before, after) {
		t.Errorf("reading changed the pool from\n%v\nto\n%v", before, after)
	}

	first := entries[1] // entries[0] is the file stray
	if first.Err != nil || first.Volume.ID != v.ID || first.State != pool.Formatted || !slices.Equal(first.Nodes, []string{"n"}) {
		t.Errorf("got %+v, want volume v, formatted and published to node n", first)
	}
	var damaged []string
	for _, e := range entries {
		if (e.Name == "y" || e.Name == "z") && (e.State != pool.Formatted || !slices.Equal(e.Nodes, []string{"n"})) {
			t.Errorf("volume with a damaged image: got %+v, want its state and node", e)
		}
		if errors.Is(e.Err, volume.ErrDamaged) {
			damaged = append(damaged, e.Name)
		} else if e.Err != nil {
			t.Errorf("%s: %v", e.Name, e.Err)
		}
	}
	if want := []string{"stray", "w", "x", "y", "z"}; !slices.Equal(damaged, want) {
		t.Errorf("damaged entries: got %q, want %q", damaged, want)
	}
	add(t, p, "after") // the writer still works
}

// TestReadOnlyWithoutPool: OpenReadOnly refuses a missing or incomplete pool, and creates nothing.
func TestReadOnlyWithoutPool(t *testing.T) {
	e := newEnv(t)
	_, err := e.openReadOnly(t)
	wantError(t, err, fs.ErrNotExist, e.cfg.Directory.Path)
	if errors.Is(err, volume.ErrPrecondition) {
		t.Errorf("pool that never existed: got %v, want no ErrPrecondition", err)
	}
	must(t, os.Mkdir(e.cfg.Directory.Path, 0o700))
	_, err = e.openReadOnly(t)
	wantError(t, err, volume.ErrUnavailable, "not a pool yet")
	if names := tree(t, e.cfg.Directory.Path); len(names) != 1 { // only the directory itself
		t.Errorf("the directory contains %v, want nothing", names)
	}
	e.open(t).Close()
	p, err := pool.OpenReadOnly(t.Context(), pool.Forms, e.cfg, "/nowhere")
	must(t, err) // the state directory may be missing
	p.Close()
	must(t, os.Rename(filepath.Join(e.cfg.Directory.Path, "pool.json"), filepath.Join(e.cfg.Directory.Path, "kept.json")))
	_, err = e.openReadOnly(t)
	wantError(t, err, volume.ErrPrecondition, "is its disk mounted?", e.state.Name())
	must(t, os.Rename(filepath.Join(e.cfg.Directory.Path, "kept.json"), filepath.Join(e.cfg.Directory.Path, "pool.json")))
	for _, folder := range []string{".trivet/tmp", "volumes"} {
		must(t, os.RemoveAll(filepath.Join(e.cfg.Directory.Path, folder)))
		_, err = e.openReadOnly(t)
		wantError(t, err, volume.ErrUnavailable, "not complete", folder)
	}
}

// TestReadOnlyUnmounted: the error for a missing directory says whether a disk should be mounted there.
func TestReadOnlyUnmounted(t *testing.T) {
	e := newEnv(t)
	pinned, required := e, e
	pinned.cfg.UUID = uuid.NewString()
	required.cfg.RequireMount = true
	_, err := pinned.openReadOnly(t)
	wantError(t, err, volume.ErrPrecondition, e.cfg.Directory.Path, pinned.cfg.UUID, "mount its disk")
	_, err = required.openReadOnly(t)
	wantError(t, err, volume.ErrPrecondition, e.cfg.Directory.Path, "requireMount is set: mount its disk")
	e.open(t).Close()
	must(t, os.RemoveAll(e.cfg.Directory.Path))
	_, err = e.openReadOnly(t)
	wantError(t, err, volume.ErrPrecondition, e.cfg.Directory.Path, "mount its disk", "known-pools/p")
}

// TestReadOnlyFilesystem: a pool on a filesystem that is mounted read-only can be read.
func TestReadOnlyFilesystem(t *testing.T) {
	e := newEnv(t)
	disk := testenv.Filesystem(t, "ext4", "64M")
	e.cfg.Directory.Path = disk
	p := e.open(t)
	add(t, p, "v")
	p.Close()
	testenv.Run(t, "mount", "-o", "remount,ro", disk)
	l, err := e.openReadOnly(t)
	must(t, err)
	if entries, err := l.Entries(); err != nil || len(entries) != 1 || entries[0].Err != nil {
		t.Errorf("got %+v, %v; want one volume without an error", entries, err)
	}
	l.Close()
}

// TestRemembered: the state directory has the UUID of a pool after the pool was opened.
func TestRemembered(t *testing.T) {
	e := newEnv(t)
	known, err := pool.Remembered(e.state.Name())
	if err != nil || len(known) != 0 {
		t.Errorf("before the pool was opened: got %v, %v; want nothing", known, err)
	}
	p := e.open(t)
	known, err = pool.Remembered(e.state.Name())
	if err != nil || !strings.HasPrefix(known["p"], p.ShortUUID()) {
		t.Errorf("after the pool was opened: got %v, %v; want the UUID %s…", known, err, p.ShortUUID())
	}
}
