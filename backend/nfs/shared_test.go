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

// ground is the backend on a shared pool in a directory: the calls before the first mount need no
// server.
type ground struct {
	*nfs.Backend
	dir string
}

func newGround(t *testing.T) ground {
	t.Helper()
	dir := filepath.Join(testenv.Filesystem(t, "xfs", "4G"), "export")
	must(t, os.Mkdir(dir, 0o755))
	return join(t, dir)
}

// join opens the pool as another process.
func join(t *testing.T, dir string) ground {
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
	return ground{nfs.New(set).(*nfs.Backend), dir}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantKind(t *testing.T, what string, err, kind error) {
	t.Helper()
	if !errors.Is(err, kind) {
		t.Errorf("%s: %v, want %v", what, err, kind)
	}
}

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

func (g ground) make(t *testing.T, name string, more ...string) volume.Volume {
	t.Helper()
	v, err := g.Create(t.Context(), spec(t, name, more...))
	must(t, err)
	return v
}

func (g ground) data(v volume.Volume) string { return filepath.Join(g.dir, pool.DirectoryPath(v)) }

func TestLife(t *testing.T) {
	g := newGround(t)
	ctx := t.Context()
	v := g.make(t, "v", "mode", "0750", "uid", "3")
	if v.ID.String() != "nfs:nas:v" || v.Capacity != 1<<20 || v.Directory.Mode != 0o750 || v.Directory.UID != 3 {
		t.Errorf("made %+v with %+v", v, v.Directory)
	}
	again, err := g.Create(ctx, spec(t, "v", "mode", "0750", "uid", "3"))
	if err != nil || again.ID != v.ID || *again.Directory != *v.Directory {
		t.Errorf("again %+v, %v", again, err)
	}
	_, err = g.Create(ctx, spec(t, "v", "mode", "0777"))
	wantKind(t, "another mode", err, volume.ErrIncompatible)
	other := join(t, g.dir) // another process
	got, err := other.Get(ctx, v.ID)
	if err != nil || got.CoName != "v" || *got.Directory != *v.Directory {
		t.Errorf("the other gets %+v, %v", got, err)
	}
	must(t, g.Publish(ctx, v, backend.Publication{Node: "a", MultiNode: true}))
	must(t, other.Publish(ctx, v, backend.Publication{Node: "b", MultiNode: true, ReadOnly: true}))
	nodes, err := g.PublishedNodes(ctx, v)
	slices.Sort(nodes)
	if err != nil || !slices.Equal(nodes, []string{"a", "b"}) {
		t.Errorf("published to %q, %v", nodes, err)
	}
	wantKind(t, "publish to one node", other.Publish(ctx, v, backend.Publication{Node: "c"}), volume.ErrPrecondition)
	wantKind(t, "delete", g.Delete(ctx, v.ID), volume.ErrPrecondition)
	must(t, g.Unpublish(ctx, v.ID, "a"))
	wantKind(t, "delete", g.Delete(ctx, v.ID), volume.ErrPrecondition)
	must(t, other.Unpublish(ctx, v.ID, ""))
	grown, err := other.Expand(ctx, v, volume.Range{Required: 5<<20 + 1})
	if err != nil || grown.Capacity != 5<<20+1 {
		t.Errorf("grown to %d, %v", grown.Capacity, err)
	}
	_, err = g.Expand(ctx, v, volume.Range{Required: 1, Limit: 2})
	wantKind(t, "shrink", err, volume.ErrOutOfRange)
	_, err = g.Expand(ctx, v, volume.Range{Required: 1 << 50})
	wantKind(t, "beyond the pool", err, volume.ErrOutOfRange)
	for range 2 {
		must(t, g.Delete(ctx, v.ID))
	}
	_, err = other.Get(ctx, v.ID)
	wantKind(t, "get", err, volume.ErrNotFound)
}

func TestList(t *testing.T) {
	g := newGround(t)
	for _, name := range []string{"a", "b", "c"} {
		g.make(t, name)
	}
	first, more, err := g.List(t.Context(), volume.ID{}, 2)
	if err != nil || !more || len(first) != 2 {
		t.Fatalf("%+v, %t, %v", first, more, err)
	}
	rest, more, err := g.List(t.Context(), first[1].ID, 2)
	if err != nil || more || len(rest) != 1 || rest[0].ID.Name != "c" {
		t.Errorf("%+v, %t, %v", rest, more, err)
	}
	_, _, err = g.List(t.Context(), volume.ID{Backend: "nfs", Pool: "other", Name: "a"}, 2)
	wantKind(t, "a token of another pool", err, volume.ErrStaleToken)
}

// TestIDs: an ID that combines parts of other IDs is not a volume.
func TestIDs(t *testing.T) {
	g := newGround(t)
	v := g.make(t, "v")
	for _, id := range []volume.ID{
		{Backend: "nfs", Pool: "nas", Name: "w"},
		{Backend: "loop", Pool: "nas", Name: "v"},
	} {
		_, err := g.Get(t.Context(), id)
		wantKind(t, id.String(), err, volume.ErrNotFound)
		must(t, g.Delete(t.Context(), id))
	}
	_, err := g.Get(t.Context(), volume.ID{Backend: "nfs", Pool: "nas", PoolUUID: "01234567", Name: "v"})
	wantKind(t, "node-local", err, volume.ErrUnavailable)
	if _, err := os.Stat(g.data(v)); err != nil {
		t.Error(err)
	}
}

// TestAttach: only the volume's own directory is attached, even if a user of the export has replaced
// it.
func TestAttach(t *testing.T) {
	g := newGround(t)
	victim := g.make(t, "victim")
	outside := t.TempDir()
	for _, tc := range []struct {
		name string
		more []string
		at   func(volume.Volume) string
		to   string
	}{
		{name: "another volume", at: g.data, to: g.data(victim)},
		{name: "outside", at: g.data, to: outside},
		{name: "upwards", at: g.data, to: "../.."},
		{name: "on the way", more: []string{"subDir", "a/b/c"}, at: func(volume.Volume) string { return filepath.Join(g.dir, "a/b") }, to: outside},
		{name: "at the end", more: []string{"subDir", "d/e"}, at: g.data, to: g.data(victim)},
		{name: "missing", at: g.data},
	} {
		t.Run(tc.name, func(t *testing.T) {
			v := g.make(t, volume.NameFor(tc.name), tc.more...)
			attached, err := g.Attach(t.Context(), v)
			must(t, err)
			source := attached.(*mount.NFSSource)
			if want := "nas.lan:/tank/" + pool.DirectoryPath(v); source.String() != want || !slices.Contains(source.Options, "nosharecache") || !slices.Contains(source.Options, "hard") {
				t.Errorf("attached %+v, want %s", source, want)
			}
			wantVerified(t, source.Verify, g.data(v), nil)
			path := tc.at(v)
			must(t, os.Rename(path, path+".away"))
			if tc.to != "" {
				must(t, os.Symlink(tc.to, path))
				wantVerified(t, source.Verify, g.data(v), volume.ErrDamaged) // os.Open follows the link, as a mount does
			}
			_, err = g.Attach(t.Context(), v)
			wantKind(t, "attach", err, volume.ErrDamaged)
			if c := g.Health(t.Context(), v); len(c) == 0 || c[0].Reason != "DirectoryMissing" || c[0].Severity != backend.DataLoss {
				t.Errorf("the health is %+v", c)
			}
			_ = os.Remove(path)
			must(t, os.Rename(path+".away", path))
			if c := g.Health(t.Context(), v); len(c) != 0 {
				t.Errorf("the repaired volume has %+v", c)
			}
			must(t, g.Delete(t.Context(), v.ID))
		})
	}
}

func wantVerified(t *testing.T, verify func(*os.File) error, path string, kind error) {
	t.Helper()
	root, err := os.Open(path)
	if err != nil && kind != nil { // it cannot be mounted either
		return
	}
	must(t, err)
	defer root.Close()
	if err := verify(root); !errors.Is(err, kind) {
		t.Errorf("verifying %s: %v, want %v", path, err, kind)
	}
}

// TestRecords: a forged record gives no access to another volume, and removes none.
func TestRecords(t *testing.T) {
	g := newGround(t)
	victim := g.make(t, "victim")
	must(t, os.WriteFile(filepath.Join(g.data(victim), "precious"), []byte("x"), 0o600))
	for name, change := range map[string]func(*volume.Volume){
		"up":       func(v *volume.Volume) { v.Directory.SubDir = "../../etc" },
		"anothers": func(v *volume.Volume) { v.Directory.SubDir = "volumes/victim/data" },
		"an-id":    func(v *volume.Volume) { v.ID.Name = "victim" },
		"backend":  func(v *volume.Volume) { v.ID.Backend = "loop" },
		"image":    func(v *volume.Volume) { v.Directory = nil },
	} {
		t.Run(name, func(t *testing.T) {
			v := g.make(t, name)
			change(&v)
			b, err := v.MarshalRecord()
			must(t, err)
			record := filepath.Join(g.dir, "volumes", name, "volume.json")
			must(t, os.WriteFile(record, b, 0o600))
			id := volume.ID{Backend: "nfs", Pool: "nas", Name: name}
			_, err = g.Get(t.Context(), id)
			wantKind(t, "get", err, volume.ErrDamaged)
			wantKind(t, "delete", g.Delete(t.Context(), id), volume.ErrDamaged)
			_, err = g.Create(t.Context(), spec(t, name))
			wantKind(t, "create", err, volume.ErrDamaged)
		})
	}
	if _, err := os.Stat(filepath.Join(g.data(victim), "precious")); err != nil {
		t.Error(err)
	}
	all, _, err := g.List(t.Context(), volume.ID{}, 100)
	if err != nil || len(all) != 6 {
		t.Errorf("listed are %+v, %v", all, err)
	}
}
