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

// TestVolumesOfOtherBackends: in a shared pool, calls with this backend and the name of another backend's
// volume in the ID neither find nor change that volume.
func TestVolumesOfOtherBackends(t *testing.T) {
	p, b := sharedPool(t)
	v := volume.Volume{
		Version: volume.RecordVersion, ID: p.ID(nfs.Name, "other"), CoName: "other", Capacity: 1 << 20,
		Directory: &volume.Directory{OnDelete: volume.OnDeleteDelete, Mode: 0o777},
	}
	must(t, p.CreateDirectory(t.Context(), v, nil, func(*os.File, bool) error { return nil }))
	must(t, p.Attachments.Attach("other", pool.Attachment{Node: "a", MultiNode: true}))
	forged := p.ID(loop.Name, "other")
	ctx := t.Context()
	wantNotFound := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, volume.ErrNotFound) {
			t.Errorf("%s: got %v, want ErrNotFound", what, err)
		}
	}
	_, err := b.Get(ctx, forged)
	wantNotFound("get", err)
	_, err = b.(backend.Expander).Expand(ctx, volume.Volume{ID: forged}, volume.Range{Required: 2 << 20})
	wantNotFound("expand", err)
	must(t, b.(backend.Publisher).Unpublish(ctx, forged, ""))
	must(t, b.Delete(ctx, forged))
	_, err = b.Create(ctx, volume.Spec{CoName: "other", Capabilities: []volume.Capability{{FSType: "ext4"}}, Parameters: volume.Parameters{Values: map[string]string{"allocation": "thin"}}})
	if !errors.Is(err, volume.ErrIncompatible) {
		t.Errorf("create: got %v, want ErrIncompatible", err)
	}
	if _, err := p.Lookup("other"); err != nil {
		t.Errorf("the other backend's volume: %v", err)
	}
	if at, err := p.Attachments.List("other"); err != nil || len(at) != 1 {
		t.Errorf("attachments of the other backend's volume: got %v, %v; want one", at, err)
	}
}

// sharedPool opens a shared pool in a directory, which simulates an export.
func sharedPool(t *testing.T) (*pool.Pool, backend.Backend) {
	t.Helper()
	dir := t.TempDir()
	set := pool.NewSharedSet(backend.Kinds{loop.Kind, nfs.Kind}.Forms(), pool.Config{Name: "nas", NFS: &pool.NFS{Server: "nas.lan", Export: "/tank", Init: true}}, nil, pool.Shared{
		Mount: func(context.Context, pool.Config) (*os.File, string, error) {
			root, err := os.Open(dir)
			return root, "4.2", err
		},
		Maintains: true,
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
