package local

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// hooked is a context that calls a function before it reports whether it has ended.
type hooked struct {
	context.Context
	hook func()
}

func (c *hooked) Err() error {
	c.hook()
	return c.Context.Err()
}

// TestBaseDeleted: a snapshot that is deleted while its files are compared is not used as a base.
func TestBaseDeleted(t *testing.T) {
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	dir := testenv.Filesystem(t, "xfs", "512M")
	state, err := os.OpenRoot(t.TempDir())
	must(err)
	set := pool.NewSet(volume.Forms{{Name: Name, OnNodes: true, Directory: true}}, []pool.Config{{Name: "default", Directory: pool.Directory{Path: dir}, Reserve: "0"}}, state)
	ctx, end := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { set.Run(ctx) })
	t.Cleanup(func() {
		end()
		running.Wait()
		must(state.Close())
	})
	must(set.AwaitReady(ctx))
	b := New(set).(*Backend)
	v, err := b.Create(ctx, volume.Spec{CoName: "v", Capacity: volume.Range{Required: 64 << 20}, Parameters: volume.Parameters{Backend: Name, Pool: "default"}})
	must(err)
	for _, name := range []string{"a", "b"} {
		must(os.WriteFile(filepath.Join(dir, "volumes", "v", "data", name), []byte(name), 0o600))
	}
	snapshots := map[string]volume.Snapshot{}
	for _, name := range []string{"older", "newer"} {
		set, err := b.Snapshot(ctx, []volume.Volume{v}, volume.SnapshotSpec{CoName: name})
		must(err)
		snapshots[name] = set.Snapshots[0]
	}
	p, err := set.Named("default")
	must(err)
	_, base, err := b.SnapshotManifest(p, snapshots["older"].ID)
	must(err)

	during := &hooked{ctx, func() {}}
	out, err := b.Send(during, volume.Source{Snapshot: true, ID: snapshots["newer"].ID})
	must(err)
	if !out.Since(base.Identity) {
		t.Error("the older snapshot is no base")
	}
	must(out.Close())

	out, err = b.Send(during, volume.Source{Snapshot: true, ID: snapshots["newer"].ID})
	must(err)
	defer out.Close()
	deleted := sync.OnceFunc(func() { must(b.DeleteSnapshots(ctx, snapshots["older"].ID)) })
	during.hook = deleted
	if out.Since(base.Identity) {
		t.Error("a snapshot that was deleted meanwhile is a base")
	}
}
