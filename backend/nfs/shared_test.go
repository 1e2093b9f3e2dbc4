package nfs_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/nfs"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// testBackend is the backend with a shared pool in a local directory. The calls before the first mount need
// no server.
type testBackend struct {
	*nfs.Backend
	dir string
}

// newTestBackend opens a new pool.
func newTestBackend(t *testing.T) testBackend {
	t.Helper()
	dir := filepath.Join(testenv.Filesystem(t, "xfs", "4G"), "export")
	must(t, os.Mkdir(dir, 0o755))
	return openTestBackend(t, dir)
}

// openTestBackend opens the pool in dir as another process does.
func openTestBackend(t *testing.T, dir string) testBackend {
	t.Helper()
	state, err := os.OpenRoot(t.TempDir())
	must(t, err)
	c := pool.Config{Name: "nas", NFS: &pool.NFS{Server: "nas.lan", Export: "/tank", Init: true, MountOptions: []string{"hard"}}}
	set := pool.NewSharedSet(backend.Kinds{nfs.Kind}.Forms(), c, state, pool.Shared{
		Mount: func(context.Context, pool.Config) (*os.File, string, error) {
			root, err := os.Open(dir)
			return root, "4.2", err
		},
		Maintains: true,
	})
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan struct{})
	go func() { defer close(done); set.Run(ctx) }()
	t.Cleanup(func() { stop(); <-done; state.Close() })
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		_, err := set.Named("nas")
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
	return testBackend{nfs.New(set).(*nfs.Backend), dir}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// wantKind fails the test unless errors.Is(err, kind). what names the call.
func wantKind(t *testing.T, what string, err, kind error) {
	t.Helper()
	if !errors.Is(err, kind) {
		t.Errorf("%s: got %v, want %v", what, err, kind)
	}
}

// spec returns a request with parameters, given as keys and values.
func spec(t *testing.T, name string, more ...string) volume.Spec {
	t.Helper()
	in := map[string]string{"backend": "nfs"}
	for i := 0; i < len(more); i += 2 {
		in[more[i]] = more[i+1]
	}
	p, err := backend.Kinds{nfs.Kind}.Parse(in)
	must(t, err)
	return volume.Spec{
		CoName: name, Capacity: volume.Range{Required: 1 << 20}, Parameters: p,
		Capabilities: []volume.Capability{{Mode: volume.MultiNodeMultiWriter}},
	}
}

func (b testBackend) create(t *testing.T, name string, more ...string) volume.Volume {
	t.Helper()
	v, err := b.Create(t.Context(), spec(t, name, more...))
	must(t, err)
	return v
}

func (b testBackend) data(v volume.Volume) string { return filepath.Join(b.dir, pool.DirectoryPath(v)) }

// TestLifecycle creates, publishes, expands and deletes a volume with two processes. Repeated calls succeed, and
// calls that contradict the state of the volume are refused.
func TestLifecycle(t *testing.T) {
	b := newTestBackend(t)
	ctx := t.Context()
	v := b.create(t, "v", "mode", "0750", "uid", "3")
	if v.ID.String() != "nfs:nas:v" || v.Capacity != 1<<20 || v.Directory.Mode != 0o750 || v.Directory.UID != 3 {
		t.Errorf("got %+v with directory %+v, want nfs:nas:v with mode 0750 and uid 3", v, v.Directory)
	}
	again, err := b.Create(ctx, spec(t, "v", "mode", "0750", "uid", "3"))
	if err != nil || again.ID != v.ID || *again.Directory != *v.Directory {
		t.Errorf("second Create: got %+v, %v; want %+v", again, err, v)
	}
	_, err = b.Create(ctx, spec(t, "v", "mode", "0777"))
	wantKind(t, "create with another mode", err, volume.ErrIncompatible)
	other := openTestBackend(t, b.dir) // another process
	got, err := other.Get(ctx, v.ID)
	if err != nil || got.CoName != "v" || *got.Directory != *v.Directory {
		t.Errorf("Get of the other process: got %+v, %v; want %+v", got, err, v)
	}
	must(t, b.Publish(ctx, v, backend.Publication{Node: "a", MultiNode: true}))
	must(t, other.Publish(ctx, v, backend.Publication{Node: "b", MultiNode: true, ReadOnly: true}))
	nodes, err := b.PublishedNodes(ctx, v)
	slices.Sort(nodes)
	if err != nil || !slices.Equal(nodes, []string{"a", "b"}) {
		t.Errorf("got published nodes %q, %v; want a and b", nodes, err)
	}
	wantKind(t, "publish in a mode for one node", other.Publish(ctx, v, backend.Publication{Node: "c"}), volume.ErrPrecondition)
	wantKind(t, "delete", b.Delete(ctx, v.ID), volume.ErrPrecondition)
	must(t, b.Unpublish(ctx, v.ID, "a"))
	wantKind(t, "delete", b.Delete(ctx, v.ID), volume.ErrPrecondition)
	must(t, other.Unpublish(ctx, v.ID, ""))
	grown, err := other.Expand(ctx, v, volume.Range{Required: 5<<20 + 1})
	if err != nil || grown.Capacity != 5<<20+1 {
		t.Errorf("Expand: got %d bytes, %v; want %d", grown.Capacity, err, 5<<20+1)
	}
	_, err = b.Expand(ctx, v, volume.Range{Required: 1, Limit: 2})
	wantKind(t, "shrink", err, volume.ErrOutOfRange)
	_, err = b.Expand(ctx, v, volume.Range{Required: 1 << 50})
	wantKind(t, "expand beyond the pool", err, volume.ErrOutOfRange)
	for range 2 {
		must(t, b.Delete(ctx, v.ID))
	}
	_, err = other.Get(ctx, v.ID)
	wantKind(t, "get after delete", err, volume.ErrNotFound)
}

// TestList: a page continues after the last volume of the page before. A page after a volume of another pool is
// refused.
func TestList(t *testing.T) {
	b := newTestBackend(t)
	for _, name := range []string{"a", "b", "c"} {
		b.create(t, name)
	}
	first, more, err := b.List(t.Context(), volume.ID{}, 2)
	if err != nil || !more || len(first) != 2 {
		t.Fatalf("first page: got %+v, %t, %v; want two volumes and more", first, more, err)
	}
	rest, more, err := b.List(t.Context(), first[1].ID, 2)
	if err != nil || more || len(rest) != 1 || rest[0].ID.Name != "c" {
		t.Errorf("second page: got %+v, %t, %v; want only c", rest, more, err)
	}
	_, _, err = b.List(t.Context(), volume.ID{Backend: "nfs", Pool: "other", Name: "a"}, 2)
	wantKind(t, "list after a volume of another pool", err, volume.ErrStaleToken)
}

// TestIDs: an ID that differs from a volume's ID in one part does not identify the volume.
func TestIDs(t *testing.T) {
	b := newTestBackend(t)
	v := b.create(t, "v")
	for _, id := range []volume.ID{
		{Backend: "nfs", Pool: "nas", Name: "w"},
		{Backend: "loop", Pool: "nas", Name: "v"},
	} {
		_, err := b.Get(t.Context(), id)
		wantKind(t, id.String(), err, volume.ErrNotFound)
		must(t, b.Delete(t.Context(), id))
	}
	_, err := b.Get(t.Context(), volume.ID{Backend: "nfs", Pool: "nas", PoolUUID: "01234567", Name: "v"})
	wantKind(t, "get with the UUID of a node-local pool", err, volume.ErrUnavailable)
	if _, err := os.Stat(b.data(v)); err != nil {
		t.Error(err)
	}
}

// TestAttach: only the volume's own directory is attached, even if a user of the export has replaced
// it.
func TestAttach(t *testing.T) {
	b := newTestBackend(t)
	victim := b.create(t, "victim")
	outside := t.TempDir()
	for _, tc := range []struct {
		name string
		more []string
		at   func(volume.Volume) string // path that is replaced
		to   string                     // target of the link that replaces it; empty if it is only removed
	}{
		{name: "link to another volume", at: b.data, to: b.data(victim)},
		{name: "link out of the pool", at: b.data, to: outside},
		{name: "parent directory", at: b.data, to: "../.."},
		{name: "link in the path", more: []string{"subDir", "a/b/c"}, at: func(volume.Volume) string { return filepath.Join(b.dir, "a/b") }, to: outside},
		{name: "link at the end of the path", more: []string{"subDir", "d/e"}, at: b.data, to: b.data(victim)},
		{name: "directory missing", at: b.data},
	} {
		t.Run(tc.name, func(t *testing.T) {
			v := b.create(t, volume.NameFor(tc.name), tc.more...)
			attached, err := b.Attach(t.Context(), v, volume.Secrets{})
			must(t, err)
			source := attached.(*mount.NFSSource)
			if want := "nas.lan:/tank/" + pool.DirectoryPath(v); source.String() != want || !slices.Contains(source.Options, "nosharecache") || !slices.Contains(source.Options, "hard") {
				t.Errorf("Attach: got %+v, want %s with nosharecache and hard", source, want)
			}
			wantVerified(t, source.Verify, b.data(v), nil)
			path := tc.at(v)
			must(t, os.Rename(path, path+".away"))
			if tc.to != "" {
				must(t, os.Symlink(tc.to, path))
				wantVerified(t, source.Verify, b.data(v), volume.ErrDamaged) // os.Open follows the link, as a mount does
			}
			_, err = b.Attach(t.Context(), v, volume.Secrets{})
			wantKind(t, "attach", err, volume.ErrDamaged)
			if c := b.Health(t.Context(), v); len(c) == 0 || c[0].Reason != "DirectoryMissing" || c[0].Severity != backend.DataLoss {
				t.Errorf("got conditions %+v, want DirectoryMissing", c)
			}
			_ = os.Remove(path)
			must(t, os.Rename(path+".away", path))
			if c := b.Health(t.Context(), v); len(c) != 0 {
				t.Errorf("after the directory was restored: got conditions %+v, want none", c)
			}
			must(t, b.Delete(t.Context(), v.ID))
		})
	}
}

// wantVerified calls verify with the directory at path, and fails the test unless the error is kind.
func wantVerified(t *testing.T, verify func(*os.File) error, path string, kind error) {
	t.Helper()
	root, err := os.Open(path)
	if err != nil && kind != nil { // a path that cannot be opened cannot be mounted
		return
	}
	must(t, err)
	defer root.Close()
	if err := verify(root); !errors.Is(err, kind) {
		t.Errorf("Verify of %s: got %v, want %v", path, err, kind)
	}
}

// TestForgedRecords: a forged record is refused as damaged, and gives no access to another volume.
func TestForgedRecords(t *testing.T) {
	b := newTestBackend(t)
	victim := b.create(t, "victim")
	must(t, os.WriteFile(filepath.Join(b.data(victim), "precious"), []byte("x"), 0o600))
	for name, change := range map[string]func(*volume.Volume){
		"parent-directory": func(v *volume.Volume) { v.Directory.SubDir = "../../etc" },
		"other-volume-dir": func(v *volume.Volume) { v.Directory.SubDir = "volumes/victim/data" },
		"other-volume-id":  func(v *volume.Volume) { v.ID.Name = "victim" },
		"other-backend":    func(v *volume.Volume) { v.ID.Backend = "loop" },
		"no-directory":     func(v *volume.Volume) { v.Directory = nil },
	} {
		t.Run(name, func(t *testing.T) {
			v := b.create(t, name)
			change(&v)
			text, err := v.MarshalRecord()
			must(t, err)
			record := filepath.Join(b.dir, "volumes", name, "volume.json")
			must(t, os.WriteFile(record, text, 0o600))
			id := volume.ID{Backend: "nfs", Pool: "nas", Name: name}
			_, err = b.Get(t.Context(), id)
			wantKind(t, "get", err, volume.ErrDamaged)
			wantKind(t, "delete", b.Delete(t.Context(), id), volume.ErrDamaged)
			_, err = b.Create(t.Context(), spec(t, name))
			wantKind(t, "create", err, volume.ErrDamaged)
		})
	}
	if _, err := os.Stat(filepath.Join(b.data(victim), "precious")); err != nil {
		t.Error(err)
	}
	all, _, err := b.List(t.Context(), volume.ID{}, 100)
	if err != nil || len(all) != 6 { // the victim and five with forged records
		t.Errorf("got list %+v, %v; want 6 volumes", all, err)
	}
}
