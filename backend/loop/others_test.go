package loop_test

import (
	"context"
	"errors"
	"os"
	"testing"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/backend/nfs"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// TestOthersVolumes: a shared pool has volumes of other backends, and an ID made up of
// the name of one is of no volume: nothing is done to it.
func TestOthersVolumes(t *testing.T) {
	p, b := sharedPool(t)
	v := volume.Volume{
		Version: volume.RecordVersion, ID: p.ID(nfs.Name, "theirs"), CoName: "theirs", Capacity: 1 << 20,
		Directory: &volume.Directory{OnDelete: volume.OnDeleteDelete, Mode: 0o777},
	}
	must(t, p.CreateDirectory(t.Context(), v, nil, func(*os.File, bool) error { return nil }))
	must(t, p.Attachments.Attach("theirs", pool.Attachment{Node: "a", MultiNode: true}))
	madeUp := p.ID(loop.Name, "theirs")
	ctx := t.Context()
	wantNotFound := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, volume.ErrNotFound) {
			t.Errorf("%s: %v", what, err)
		}
	}
	_, err := b.Get(ctx, madeUp)
	wantNotFound("get", err)
	_, err = b.(backend.Expander).Expand(ctx, volume.Volume{ID: madeUp}, volume.Range{Required: 2 << 20})
	wantNotFound("expand", err)
	must(t, b.(backend.Publisher).Unpublish(ctx, madeUp, ""))
	must(t, b.Delete(ctx, madeUp))
	_, err = b.Create(ctx, volume.Spec{CoName: "theirs", Capabilities: []volume.Capability{{FSType: "ext4"}}, Parameters: volume.Parameters{Values: map[string]string{"allocation": "thin"}}})
	if !errors.Is(err, volume.ErrIncompatible) {
		t.Errorf("create: %v", err)
	}
	if _, err := p.Lookup("theirs"); err != nil {
		t.Errorf("the other's volume: %v", err)
	}
	if at, err := p.Attachments.List("theirs"); err != nil || len(at) != 1 {
		t.Errorf("it is published to %v, %v", at, err)
	}
}

// sharedPool is a pool of all nodes, which here is a directory.
func sharedPool(t *testing.T) (*pool.Pool, backend.Backend) {
	t.Helper()
	dir := t.TempDir()
	set := pool.NewSharedSet(backend.Kinds{loop.Kind, nfs.Kind}.Forms(), pool.Config{Name: "nas", NFS: &pool.NFS{Server: "nas.lan", Export: "/tank", Init: true}}, nil, pool.Shared{
		Mount: func(context.Context, pool.Config) (*os.File, string, error) {
			root, err := os.Open(dir)
			return root, "4.2", err
		},
		Cleans: true,
	})
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); set.Run(ctx) }()
	t.Cleanup(func() { stop(); <-ended })
	must(t, set.AwaitReady(ctx))
	p, err := set.Named("nas")
	must(t, err)
	return p, loop.New(set)
}
