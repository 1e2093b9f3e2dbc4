package pool_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// export simulates an export: a directory that each process opens separately.
type export struct {
	dir string
	cfg pool.Config
}

// Values for the argument maintains of process and wantRefused.
const (
	maintaining = true
	nodeOnly    = false
)

func newExport(t *testing.T) export {
	t.Helper()
	return export{t.TempDir(), pool.Config{Name: "nas", NFS: &pool.NFS{Server: "nas.lan", Export: "/tank", Init: true}}}
}

func (e export) mount(context.Context, pool.Config) (*os.File, string, error) {
	f, err := os.Open(e.dir)
	return f, "4.2", err
}

// process simulates a process that serves a node and, with maintains, also maintains the pool.
func (e export) process(t *testing.T, maintains bool) *pool.Set {
	t.Helper()
	return e.run(t, pool.Shared{Mount: e.mount, NodeID: "n", Maintains: maintains, MountsDir: "/run/mounts"})
}

// run simulates a process until the end of the test.
func (e export) run(t *testing.T, s pool.Shared) *pool.Set {
	t.Helper()
	set := pool.NewSharedSet(pool.Forms, e.cfg, stateRoot(t), s)
	t.Cleanup(run(t, set))
	return set
}

// open opens the pool in a new process that maintains it.
func (e export) open(t *testing.T) *pool.Pool {
	t.Helper()
	p, err := e.process(t, maintaining).Named("nas")
	must(t, err)
	return p
}

// wantRefused fails the test unless opening the pool in a new process fails with an error that wantError
// accepts.
func (e export) wantRefused(t *testing.T, maintains bool, kind error, says ...string) {
	t.Helper()
	s := e.process(t, maintains)
	_, err := s.Named(e.cfg.Name)
	wantError(t, err, volume.ErrUnavailable)
	wantError(t, s.States()[0].Err, kind, says...)
}

// names lists a folder of the export, separated by spaces.
func (e export) names(t *testing.T, dir string) string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(e.dir, dir))
	must(t, err)
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return strings.Join(names, " ")
}

// awaitEmptyTrash waits until the trash of the export is empty.
func (e export) awaitEmptyTrash(t *testing.T) {
	t.Helper()
	await(t, "the trash to be emptied", func() bool { return e.names(t, ".trivet/trash") == "" })
}

// wantEmptyTmp fails the test unless the pool's folder tmp is empty.
func (e export) wantEmptyTmp(t *testing.T) {
	t.Helper()
	if names := e.names(t, ".trivet/tmp"); names != "" {
		t.Errorf(".trivet/tmp contains %q, want nothing", names)
	}
}

func (e export) mkdir(t *testing.T, path string) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Join(e.dir, path), 0o755))
}

func (e export) write(t *testing.T, path string) {
	t.Helper()
	must(t, os.WriteFile(filepath.Join(e.dir, path), nil, 0o600))
}

func (e export) has(path string) bool {
	_, err := os.Lstat(filepath.Join(e.dir, path))
	return err == nil
}

// directory is the record of a directory volume.
func directory(p *pool.Pool, name, subDir string, onDelete volume.OnDelete) volume.Volume {
	v := pool.SharedVolume(p, name)
	v.Directory.SubDir, v.Directory.OnDelete = subDir, onDelete
	return v
}

// open777 is the prepare function of CreateDirectory that gives all users access to a new directory.
func open777(dir *os.File, empty bool) error {
	if !empty {
		return nil
	}
	return dir.Chmod(0o777)
}

// addDirectory creates a directory volume.
func addDirectory(t *testing.T, p *pool.Pool, name, subDir string, onDelete volume.OnDelete) volume.Volume {
	t.Helper()
	v := directory(p, name, subDir, onDelete)
	must(t, p.CreateDirectory(t.Context(), v, nil, open777))
	return v
}

// TestSharedInit: only a process that maintains the pool creates it, if nfs.init allows that and the
// export is empty.
func TestSharedInit(t *testing.T) {
	e := newExport(t)
	e.wantRefused(t, nodeOnly, volume.ErrUnavailable, "not a pool yet")
	e.cfg.NFS.Init = false
	e.wantRefused(t, maintaining, volume.ErrPrecondition, "init: true", "trivet pool init", "nas.lan:/tank")
	e.cfg.NFS.Init = true
	e.write(t, "letter.txt")
	e.wantRefused(t, maintaining, volume.ErrPrecondition, "letter.txt", "empty directory")
	must(t, os.Remove(filepath.Join(e.dir, "letter.txt")))
	e.mkdir(t, "lost+found")
	p := e.open(t)
	if !p.Shared() || p.Version() != "4.2" || p.ID("nfs", "v").String() != "nfs:nas:v" {
		t.Errorf("got shared %t, version %q, ID %s; want true, 4.2, nfs:nas:v", p.Shared(), p.Version(), p.ID("nfs", "v"))
	}
	node := e.process(t, nodeOnly) // the pool exists now
	if _, err := node.ByID(p.ID("nfs", "v")); err != nil {
		t.Errorf("in a process that only serves a node: %v", err)
	}
	_, err := node.ByID(volume.ID{Backend: "nfs", Pool: "nas", PoolUUID: p.ShortUUID(), Name: "v"})
	wantError(t, err, volume.ErrUnavailable)
	if node.MountsDir() != "/run/mounts" || node.NodeID() != "n" {
		t.Errorf("got mounts directory %q and node %q, want /run/mounts and n", node.MountsDir(), node.NodeID())
	}
	must(t, os.Remove(filepath.Join(e.dir, "pool.json")))
	e.wantRefused(t, maintaining, volume.ErrPrecondition, ".trivet", "backup")
	another := newExport(t) // empty, although the configuration contains the UUID of a pool
	another.cfg.UUID = p.UUID()
	another.wantRefused(t, maintaining, volume.ErrPrecondition, p.UUID())
}

// TestDirectInit: a pool is created beside the directories of another driver, unless the pool needs one
// of their names. A volume ID alone does not create a pool.
func TestDirectInit(t *testing.T) {
	e := newExport(t)
	name, err := volume.DirectPool("nas.lan", "/tank")
	must(t, err)
	e.cfg, _ = pool.DirectConfig(name)
	e.mkdir(t, "pvc-1")
	e.mkdir(t, "volumes")
	s := e.process(t, maintaining)
	s.Initialise(t.Context())
	wantError(t, s.States()[0].Err, volume.ErrPrecondition, `"volumes"`)
	must(t, os.Remove(filepath.Join(e.dir, "volumes")))
	s = e.process(t, maintaining)
	_, err = s.ByID(volume.ID{Backend: "nfs", Pool: name, Name: "forged"})
	wantError(t, err, volume.ErrUnavailable, "not a pool")
	if e.names(t, ".") != "pvc-1" {
		t.Errorf("before Initialise the export contains %q, want only pvc-1", e.names(t, "."))
	}
	s.Initialise(t.Context())
	p, err := s.Named(name)
	must(t, err)
	v := addDirectory(t, p, "v", "", volume.OnDeleteDelete)
	if v.ID.String() != "nfs:=nas.lan=/tank:v" || !e.has("pvc-1") {
		t.Errorf("got volume %s, and pvc-1 exists: %t; want nfs:=nas.lan=/tank:v and true", v.ID, e.has("pvc-1"))
	}
}

// TestInitAtOnce: several processes that initialise an export at once create one pool.
func TestInitAtOnce(t *testing.T) {
	e := newExport(t)
	uuids := make([]string, 8)
	var all sync.WaitGroup
	for i := range uuids {
		all.Go(func() {
			f, err := os.Open(e.dir)
			if err == nil {
				uuids[i], err = pool.InitShared(f, e.cfg)
			}
			if err != nil {
				t.Error(err)
			}
			_ = f.Close()
		})
	}
	all.Wait()
	for _, u := range uuids {
		if u != uuids[0] {
			t.Errorf("got the UUIDs %q, want the same in all processes", uuids)
		}
	}
	if left := e.names(t, "."); left != "pool.json" {
		t.Errorf("the export contains %q, want only pool.json", left)
	}
}

// TestSilentServer: the export of a server that does not answer is not mounted, and the teardown by force
// begins after nfs.outage, which is 10 minutes by default.
func TestSilentServer(t *testing.T) {
	e := newExport(t)
	for name, tc := range map[string]struct {
		since time.Time
		force bool
	}{
		"silent for a minute": {time.Now().Add(-time.Minute), false},
		"silent for an hour":  {time.Now().Add(-time.Hour), true},
	} {
		t.Run(name, func(t *testing.T) {
			s := e.run(t, pool.Shared{SilentSince: tc.since, Mount: func(context.Context, pool.Config) (*os.File, string, error) {
				t.Error("the export was mounted")
				return nil, "", errors.New("silent")
			}})
			_, err := s.Named("")
			wantError(t, err, volume.ErrUnavailable, "nas.lan has not answered since "+tc.since.Format(time.TimeOnly))
			force, err := s.Teardown("nas")
			if force != tc.force || (err == nil) != tc.force {
				t.Errorf("Teardown: got %t, %v; want %t", force, err, tc.force)
			}
		})
	}
	if force, err := e.process(t, maintaining).Teardown("nas"); force || err != nil {
		t.Errorf("Teardown for a server that answers: got %t, %v; want false", force, err)
	}
}

// TestReplacedExport: a pool whose marker disappears is closed, and no new pool is created. It is opened
// again when the marker is restored.
func TestReplacedExport(t *testing.T) {
	e := newExport(t)
	s := e.process(t, maintaining)
	p, err := s.Named("nas")
	must(t, err)
	v := add(t, p, "v")
	away := e.dir + ".away"
	must(t, os.Mkdir(away, 0o755))
	for _, name := range strings.Fields(e.names(t, ".")) {
		must(t, os.Rename(filepath.Join(e.dir, name), filepath.Join(away, name)))
	}
	_, err = p.Lookup("none")
	wantError(t, err, volume.ErrUnavailable, "marker")
	await(t, "the pool to be closed", func() bool { return s.States()[0].Pool == nil })
	_, err = s.ByID(v.ID)
	wantError(t, err, volume.ErrUnavailable)
	for _, name := range []string{"pool.json", ".trivet", "volumes", "snapshots"} {
		must(t, os.Rename(filepath.Join(away, name), filepath.Join(e.dir, name)))
	}
	await(t, "the pool to be open again", func() bool { _, err := s.ByID(v.ID); return err == nil })
	must(t, os.Remove(away))
}

// TestSharedLedger: each process counts the bytes that another process has promised, also for a call
// that is still running.
func TestSharedLedger(t *testing.T) {
	e := newExport(t)
	e.cfg.Size, e.cfg.Reserve = "10Mi", "0"
	a, b := e.open(t), e.open(t)
	v := record(a, "v", 6<<20)
	must(t, a.Create(t.Context(), v, func(dir *os.Root) error {
		wantError(t, b.Create(t.Context(), record(b, "w", 5<<20), image(5<<20)), volume.ErrExhausted, "room for 4 MiB more")
		return image(6 << 20)(dir)
	}))
	wantError(t, b.Create(t.Context(), record(b, "w", 5<<20), image(5<<20)), volume.ErrExhausted)
	must(t, b.Create(t.Context(), record(b, "w", 2<<20), image(2<<20)))
	w, err := a.Lookup("w")
	must(t, err)
	must(t, a.Grow(t.Context(), w, 4<<20, func() error {
		wantError(t, b.Create(t.Context(), record(b, "x", 1<<20), image(1<<20)), volume.ErrExhausted)
		return nil
	}))
	wantError(t, b.Create(t.Context(), record(b, "x", 1<<20), image(1<<20)), volume.ErrExhausted)
	must(t, a.Remove(t.Context(), v))
	must(t, b.Create(t.Context(), record(b, "x", 6<<20), image(6<<20)))
	if u := usage(t, b); u.Promised != 10<<20 || u.Room != 0 {
		t.Errorf("usage: got %+v, want 10 MiB promised and no room", u)
	}
	e.wantEmptyTmp(t)
}

// TestPromisedOnce: concurrent calls of several processes do not promise a byte twice.
func TestPromisedOnce(t *testing.T) {
	e := newExport(t)
	e.cfg.Size, e.cfg.Reserve = "20Mi", "0"
	pools := []*pool.Pool{e.open(t), e.open(t), e.open(t)}
	var all sync.WaitGroup
	var mu sync.Mutex
	made := 0
	for i := range 60 {
		p := pools[i%len(pools)]
		all.Go(func() {
			err := p.CreateDirectory(t.Context(), directory(p, fmt.Sprintf("v%d", i), "", volume.OnDeleteDelete), nil, open777)
			if err != nil && !errors.Is(err, volume.ErrExhausted) {
				t.Error(err)
			}
			if err == nil {
				mu.Lock()
				made++
				mu.Unlock()
			}
		})
	}
	all.Wait()
	if exist := len(strings.Fields(e.names(t, "volumes"))); made != 20 || exist != 20 {
		t.Errorf("%d creates succeeded and %d volumes exist, want 20", made, exist)
	}
}

// TestSameVolumeAtOnce: of two processes that create the same volume, one succeeds.
func TestSameVolumeAtOnce(t *testing.T) {
	e := newExport(t)
	a, b := e.open(t), e.open(t)
	v := directory(a, "v", "", volume.OnDeleteDelete)
	err := a.CreateDirectory(t.Context(), v, nil, func(*os.File, bool) error {
		return b.CreateDirectory(t.Context(), v, nil, open777)
	})
	wantError(t, err, pool.ErrExists, "another process")
	wantError(t, err, volume.ErrPending)
	if got, err := a.Lookup("v"); err != nil || got.CreationID == "" {
		t.Errorf("got %+v, %v; want a record with a token", got, err)
	}
	e.wantEmptyTmp(t)
	must(t, a.Remove(t.Context(), v))
	must(t, b.Remove(t.Context(), v)) // a has deleted it already
	e.awaitEmptyTrash(t)
}

// TestSharedAttachments: processes see each other's attachments, and refuse incompatible ones.
func TestSharedAttachments(t *testing.T) {
	e := newExport(t)
	a, b := e.open(t), e.open(t)
	addDirectory(t, a, "v", "", volume.OnDeleteDelete)
	multi := func(node string) pool.Attachment { return pool.Attachment{Node: node, MultiNode: true} }
	single := func(node string) pool.Attachment { return pool.Attachment{Node: node} }
	for range 2 { // the second time, the attachments exist already
		must(t, a.Attachments.Attach("v", multi("n1")))
		must(t, b.Attachments.Attach("v", multi("n2")))
	}
	wantError(t, b.Attachments.Attach("v", single("n3")), volume.ErrPrecondition, "n1", "unpublish")
	wantError(t, b.Attachments.Attach("v", single("n1")), volume.ErrIncompatible)
	wantError(t, b.Attachments.Attach("v", pool.Attachment{Node: "n1", MultiNode: true, ReadOnly: true}), volume.ErrIncompatible)
	nodes := func() string {
		all, err := b.Attachments.List("v")
		must(t, err)
		var names []string
		for _, a := range all {
			names = append(names, a.Node)
		}
		return strings.Join(names, " ")
	}
	if got := nodes(); got != "n1 n2" && got != "n2 n1" {
		t.Errorf("published to %q, want n1 and n2", got)
	}
	must(t, b.Attachments.Detach("v", "n1"))
	must(t, a.Attachments.Detach("v", "n1"))
	if got := nodes(); got != "n2" {
		t.Errorf("published to %q, want n2", got)
	}
	must(t, a.Attachments.Detach("v", ""))
	must(t, a.Attachments.Attach("v", single("n1")))
	must(t, b.Attachments.Attach("v", single("n1")))
	wantError(t, b.Attachments.Attach("v", single("n2")), volume.ErrPrecondition)
	wantError(t, b.Attachments.Attach("v", multi("n2")), volume.ErrPrecondition)
	must(t, b.Attachments.Detach("v", "n2"))
	if got := nodes(); got != "n1" {
		t.Errorf("published to %q, want n1", got)
	}
	must(t, b.Attachments.Detach("v", "n1"))
	if at, err := a.Attachments.List("v"); err != nil || len(at) != 0 || a.AttachedCount("nfs") != 0 {
		t.Errorf("published to %v (error %v), %d counted; want no node", at, err, a.AttachedCount("nfs"))
	}
	must(t, a.Attachments.Detach("none", "n1"))
}

// TestAttachAtOnce: concurrent calls publish a volume to at most one node without MultiNode. If one
// does, no other call publishes the volume.
func TestAttachAtOnce(t *testing.T) {
	e := newExport(t)
	pools := []*pool.Pool{e.open(t), e.open(t)}
	for i := range 50 {
		name := fmt.Sprintf("v%d", i)
		addDirectory(t, pools[0], name, "", volume.OnDeleteDelete)
		var all sync.WaitGroup
		errs := make([]error, 4)
		for n := range errs {
			all.Go(func() {
				errs[n] = pools[n%2].Attachments.Attach(name, pool.Attachment{Node: fmt.Sprint(n), MultiNode: n > 1})
			})
		}
		all.Wait()
		left, err := pools[0].Attachments.List(name)
		must(t, err)
		single := 0
		for _, a := range left {
			var n int
			_, err := fmt.Sscan(a.Node, &n)
			must(t, err)
			if errs[n] != nil {
				t.Errorf("node %d: got %v from Attach, want success, because the volume is published to the node", n, errs[n])
			}
			if !a.MultiNode {
				single++
			}
		}
		for n, err := range errs {
			// ErrPending: the attachment with which this one conflicts was removed meanwhile.
			if err != nil && !errors.Is(err, volume.ErrPrecondition) && !errors.Is(err, volume.ErrPending) {
				t.Errorf("node %d: %v", n, err)
			}
		}
		if single > 1 || single == 1 && len(left) > 1 {
			t.Errorf("published to %+v, want one node, or several with MultiNode", left)
		}
	}
}

// TestSubDir: a directory is made or adopted at the subDir of its volume. Volumes share one only with
// onDelete retain.
func TestSubDir(t *testing.T) {
	e := newExport(t)
	a, b := e.open(t), e.open(t)
	addDirectory(t, a, "made", "team/a/web", volume.OnDeleteDelete)
	info, err := os.Stat(filepath.Join(e.dir, "team/a/web"))
	must(t, err)
	if info.Mode().Perm() != 0o777 {
		t.Errorf("mode of a new directory: got %v, want 0777", info.Mode())
	}
	e.mkdir(t, "old")
	e.write(t, "old/file")
	adopted := addDirectory(t, b, "adopted", "old", volume.OnDeleteRetain)
	info, err = os.Stat(filepath.Join(e.dir, "old"))
	must(t, err)
	if info.Mode().Perm() != 0o755 || !e.has("old/file") {
		t.Errorf("adopted directory: got mode %v, file exists %t; want 0755 and true", info.Mode(), e.has("old/file"))
	}
	f, err := a.OpenDirectory(adopted)
	must(t, err)
	if st, err := f.Stat(); err != nil || !os.SameFile(st, info) {
		t.Errorf("OpenDirectory did not open the adopted directory (error %v)", err)
	}
	must(t, f.Close())
	for subDir, onDelete := range map[string]volume.OnDelete{
		"team/a/web": volume.OnDeleteRetain, "team/a": volume.OnDeleteDelete, "team/a/web/in": volume.OnDeleteArchive,
		"old": volume.OnDeleteDelete,
	} {
		err := b.CreateDirectory(t.Context(), directory(b, "other", subDir, onDelete), nil, open777)
		wantError(t, err, volume.ErrPrecondition, subDir, "onDelete=retain")
	}
	addDirectory(t, b, "both", "old", volume.OnDeleteRetain)
	addDirectory(t, a, "beside", "team/a/we", volume.OnDeleteDelete) // not a parent of team/a/web
	if e.has("team/a/web/in") {
		t.Error("a refused directory was made")
	}
}

// TestSubDirAtOnce: of several concurrent creates with the same subDir, one succeeds.
func TestSubDirAtOnce(t *testing.T) {
	e := newExport(t)
	pools := []*pool.Pool{e.open(t), e.open(t), e.open(t)}
	for round := range 10 {
		var all sync.WaitGroup
		errs := make([]error, 9)
		for i := range errs {
			p := pools[i%len(pools)]
			v := directory(p, fmt.Sprintf("v%d-%d", round, i), fmt.Sprintf("d%d", round), volume.OnDeleteDelete)
			all.Go(func() { errs[i] = p.CreateDirectory(t.Context(), v, nil, open777) })
		}
		all.Wait()
		made := 0
		for _, err := range errs {
			if err == nil {
				made++
			} else {
				wantError(t, err, volume.ErrPrecondition)
			}
		}
		if made != 1 {
			t.Errorf("%d creates with the same subDir succeeded, want 1", made)
		}
	}
}

// TestOnDelete: onDelete determines whether the data of a deleted volume is removed, archived or retained.
func TestOnDelete(t *testing.T) {
	for _, subDir := range []string{"", "team/web"} {
		for _, onDelete := range []volume.OnDelete{volume.OnDeleteDelete, volume.OnDeleteArchive, volume.OnDeleteRetain} {
			t.Run(fmt.Sprintf("onDelete=%s subDir=%s", onDelete, subDir), func(t *testing.T) {
				e := newExport(t)
				p := e.open(t)
				v := addDirectory(t, p, "v", subDir, onDelete)
				e.write(t, pool.DirectoryPath(v)+"/file")
				must(t, p.Remove(t.Context(), v))
				e.awaitEmptyTrash(t)
				await(t, "the bytes to be free", func() bool { return usage(t, p).Promised == 0 })
				var want []string // paths of the file below the export
				switch {
				case onDelete == volume.OnDeleteArchive:
					want = []string{"archived/v.*/data/file"}
				case onDelete == volume.OnDeleteRetain && subDir == "":
					want = []string{"retained/v.*/data/file"}
				case onDelete == volume.OnDeleteRetain:
					want = []string{"team/web/file"}
				}
				var got []string
				for _, pattern := range []string{"archived/v.*/data/file", "retained/v.*/data/file", "team/web/file", "volumes/v"} {
					found, err := filepath.Glob(filepath.Join(e.dir, pattern))
					must(t, err)
					if len(found) > 0 {
						got = append(got, pattern)
					}
				}
				if !slices.Equal(got, want) {
					t.Errorf("after the delete: got %q, want %q", got, want)
				}
				must(t, p.CreateDirectory(t.Context(), v, nil, open777)) // the name and the subDir can be used again
			})
		}
	}
}

// TestHostileExport: links and records that a tenant has written have no effect.
func TestHostileExport(t *testing.T) {
	e := newExport(t)
	p := e.open(t)
	addDirectory(t, p, "victim", "", volume.OnDeleteDelete)
	e.write(t, "volumes/victim/data/precious")
	outside := t.TempDir()
	link := func(to, at string) {
		must(t, os.Symlink(to, filepath.Join(e.dir, at)))
	}
	link("volumes/victim/data", "inside")
	link(outside, "outside")
	for _, subDir := range []string{"inside", "outside", "inside/x", "outside/x"} {
		wantError(t, p.CreateDirectory(t.Context(), directory(p, "w", subDir, volume.OnDeleteDelete), nil, open777), volume.ErrPrecondition, subDir)
	}
	v := addDirectory(t, p, "v", "", volume.OnDeleteDelete)
	sub := addDirectory(t, p, "sub", "a/b", volume.OnDeleteDelete)
	for _, x := range []struct {
		v        volume.Volume
		data, to string
	}{{v, "volumes/v/data", "../victim/data"}, {sub, "a/b", "../volumes/victim/data"}} {
		must(t, os.Remove(filepath.Join(e.dir, x.data)))
		link(x.to, x.data)
		_, err := p.OpenDirectory(x.v)
		wantError(t, err, volume.ErrDamaged, x.data)
		must(t, p.Remove(t.Context(), x.v))
	}
	deep := addDirectory(t, p, "deep", "", volume.OnDeleteDelete)
	path := "volumes/deep/data"
	for range 20 {
		path += strings.Repeat("/d", 20)
		e.mkdir(t, path)
		link("/", path+"/root")
		link(filepath.Join(e.dir, "volumes/victim"), path+"/victim")
	}
	must(t, p.Remove(t.Context(), deep))
	e.awaitEmptyTrash(t)
	// The record of a volume contains the subDir of another volume.
	forged := addDirectory(t, p, "forged", "forged-dir", volume.OnDeleteDelete)
	addDirectory(t, p, "owner", "owner-dir", volume.OnDeleteDelete)
	forged.Directory.SubDir = "owner-dir"
	wantError(t, p.Remove(t.Context(), forged), volume.ErrPrecondition, "owner")
	if !e.has("owner-dir") || !e.has("volumes/victim/data/precious") {
		t.Error("another volume's data was removed")
	}
}

// TestLockAt: the lock of an image excludes other processes, which have another mount.
func TestLockAt(t *testing.T) {
	e := newExport(t)
	a, b := e.open(t), e.open(t)
	add(t, a, "v")
	folder, err := os.OpenRoot(filepath.Join(e.dir, "volumes/v"))
	must(t, err)
	defer folder.Close()
	image, err := a.Images.LockAt(folder, "v")
	must(t, err)
	_, err = b.Images.Lock("v")
	wantError(t, err, volume.ErrInUse, "another")
	must(t, image.Close())
	must(t, folder.Remove("image"))
	_, err = a.Images.LockAt(folder, "v")
	wantError(t, err, volume.ErrDamaged, "missing")
	must(t, folder.Symlink("volume.json", "image"))
	_, err = a.Images.LockAt(folder, "v")
	wantError(t, err, volume.ErrDamaged, "regular file")
}

// TestExportReadOnly: OpenExportReadOnly shows the volumes, and changes nothing.
func TestExportReadOnly(t *testing.T) {
	e := newExport(t)
	p := e.open(t)
	addDirectory(t, p, "v", "team/v", volume.OnDeleteDelete)
	add(t, p, "w")
	must(t, p.Attachments.Attach("v", pool.Attachment{Node: "n1", MultiNode: true}))
	must(t, p.Attachments.Attach("v", pool.Attachment{Node: "n2", MultiNode: true}))
	must(t, os.Remove(filepath.Join(e.dir, "team/v")))
	await(t, "the reaper to create its lock file", func() bool { return e.has(".trivet/reaper") })
	before := tree(t, e.dir)
	root, err := os.Open(e.dir)
	must(t, err)
	readOnly, err := pool.OpenExportReadOnly(t.Context(), pool.Forms, root, e.cfg, t.TempDir())
	must(t, err)
	defer readOnly.Close()
	entries, err := readOnly.Entries()
	must(t, err)
	if len(entries) != 2 || len(entries[0].Nodes) != 2 || entries[1].Err != nil {
		t.Errorf("got %+v, want v, which is published to two nodes, and w without an error", entries)
	}
	wantError(t, entries[0].Err, volume.ErrDamaged, "team/v")
	if u := usage(t, readOnly); u.Promised != 2<<20 {
		t.Errorf("usage: got %+v, want 2 MiB promised", u)
	}
	if after := tree(t, e.dir); !maps.Equal(before, after) {
		t.Errorf("reading changed the pool from\n%v\nto\n%v", before, after)
	}
}

// TestSharedLookupDuringCreate: a volume that another process creates is either missing or complete.
func TestSharedLookupDuringCreate(t *testing.T) {
	e := newExport(t)
	writer, reader := e.open(t), e.open(t)
	for i := range 20 {
		name := fmt.Sprintf("v%d", i)
		var lookups sync.WaitGroup
		for range 4 {
			lookups.Go(func() {
				err := volume.ErrNotFound
				for errors.Is(err, volume.ErrNotFound) {
					_, err = reader.Lookup(name)
				}
				if err != nil {
					t.Error(err)
				}
			})
		}
		addDirectory(t, writer, name, "", volume.OnDeleteDelete)
		lookups.Wait()
	}
}

// TestCancelledCalls: a call that changes a pool continues after its context has ended, and leaves no
// incomplete files.
func TestCancelledCalls(t *testing.T) {
	e := newExport(t)
	p := e.open(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := p.CreateDirectory(ctx, directory(p, "failed", "", volume.OnDeleteDelete), nil, func(*os.File, bool) error { return os.ErrPermission })
	if !errors.Is(err, os.ErrPermission) || errors.Is(err, context.Canceled) {
		t.Errorf("a create whose prepare function fails: got %v, want ErrPermission", err)
	}
	v := directory(p, "v", "a/b", volume.OnDeleteDelete)
	must(t, p.CreateDirectory(ctx, v, nil, open777))
	must(t, p.Grow(ctx, v, v.Capacity+1, func() error { return nil }))
	must(t, p.Remove(ctx, v))
	e.wantEmptyTmp(t)
	if u := usage(t, p); u.Volumes > 1 || e.has("a/b") { // the deleted volume may be in the trash
		t.Errorf("after the delete: got usage %+v, directory exists %t; want no directory", u, e.has("a/b"))
	}
}

// TestReusedName: after another process has deleted a volume and created a new one with the same name,
// the new one counts.
func TestReusedName(t *testing.T) {
	e := newExport(t)
	e.cfg.Size, e.cfg.Reserve = "20Mi", "0"
	a, b := e.open(t), e.open(t)
	x := addDirectory(t, a, "x", "old", volume.OnDeleteDelete)
	addDirectory(t, b, "of-b", "", volume.OnDeleteDelete)
	must(t, b.Remove(t.Context(), x))
	x = directory(b, "x", "new", volume.OnDeleteDelete)
	x.Capacity = 17 << 20
	must(t, b.CreateDirectory(t.Context(), x, nil, open777))
	y := directory(a, "y", "new", volume.OnDeleteDelete)
	wantError(t, a.CreateDirectory(t.Context(), y, nil, open777), volume.ErrPrecondition, `"x"`)
	y.Directory.SubDir, y.Capacity = "", 10<<20
	wantError(t, a.CreateDirectory(t.Context(), y, nil, open777), volume.ErrExhausted)
}

// TestTwoServerNames: a direct pool counts the bytes and the directories of volumes that were created
// under another name of the server.
func TestTwoServerNames(t *testing.T) {
	e := newExport(t)
	open := func(server string) *pool.Pool {
		t.Helper()
		name, err := volume.DirectPool(server, "/tank")
		must(t, err)
		e.cfg, _ = pool.DirectConfig(name)
		s := e.process(t, maintaining)
		s.Initialise(t.Context())
		p, err := s.Named(name)
		must(t, err)
		return p
	}
	x := addDirectory(t, open("nas.lan"), "x", "ns/claim", volume.OnDeleteDelete)
	b := open("10.0.0.1")
	if u := usage(t, b); u.Promised != x.Capacity {
		t.Errorf("usage: got %+v, want %d promised bytes", u, x.Capacity)
	}
	wantError(t, b.CreateDirectory(t.Context(), directory(b, "y", "ns/claim", volume.OnDeleteDelete), nil, open777), volume.ErrPrecondition, `"x"`)
	addDirectory(t, b, "z", "ns/other", volume.OnDeleteDelete)
	_, err := b.Lookup("x")
	wantError(t, err, volume.ErrDamaged)
}

// TestUnreadableRecord: while the record of a volume cannot be read, it may contain any subDir, so no
// volume with a subDir is created or deleted.
func TestUnreadableRecord(t *testing.T) {
	e := newExport(t)
	a := e.open(t)
	addDirectory(t, a, "x", "ns/claim", volume.OnDeleteDelete)
	other := addDirectory(t, a, "other", "ns/other", volume.OnDeleteDelete)
	path := filepath.Join(e.dir, "volumes/x/volume.json")
	readable, err := os.ReadFile(path)
	must(t, err)
	must(t, os.WriteFile(path, append([]byte(`{"later":1,`), readable[1:]...), 0o600))
	b := e.open(t)
	y := directory(b, "y", "ns/claim", volume.OnDeleteDelete)
	wantError(t, b.CreateDirectory(t.Context(), y, nil, open777), volume.ErrPrecondition, "volumes/x/volume.json", "restore")
	wantError(t, b.Remove(t.Context(), other), volume.ErrPrecondition, "not deleted", "volumes/x/volume.json")
	addDirectory(t, b, "retained", "ns/old", volume.OnDeleteRetain)
	addDirectory(t, b, "own", "", volume.OnDeleteDelete)
	must(t, os.WriteFile(path, readable, 0o600))
	wantError(t, b.CreateDirectory(t.Context(), y, nil, open777), volume.ErrPrecondition, "onDelete=retain")
	must(t, b.Remove(t.Context(), other))

	// A volume whose data is in its folder has no subDir, even if its record cannot be read.
	must(t, os.WriteFile(filepath.Join(e.dir, "volumes/own/volume.json"), nil, 0o600))
	c := e.open(t)
	addDirectory(t, c, "z", "ns/free", volume.OnDeleteDelete)
}

// TestRetainedSubDir: a retained subDir can be used again after its last volume was deleted, also by
// another process.
func TestRetainedSubDir(t *testing.T) {
	e := newExport(t)
	a, b := e.open(t), e.open(t)
	must(t, b.Remove(t.Context(), addDirectory(t, a, "x", "d", volume.OnDeleteRetain)))
	addDirectory(t, a, "y", "d", volume.OnDeleteDelete)
}
