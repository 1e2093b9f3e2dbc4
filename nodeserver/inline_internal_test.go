package nodeserver

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

const (
	stalledInline  = "csi-0000000000000000000000000000000000000000000000000000000000000001"
	answeredInline = "csi-0000000000000000000000000000000000000000000000000000000000000002"
)

// leftovers is a backend with two inline volumes that an earlier process left. Detach of the stalled
// volume blocks, as if the volume's disk did not answer.
type leftovers struct {
	backend.Backend
	stalled chan struct{} // closed when Detach blocks
	release chan struct{} // closing it ends the blocked Detach
	deleted chan struct{} // receives a value when the answered volume is deleted
}

func (leftovers) Name() string { return "leftovers" }

func (leftovers) InlinePool(name string) (string, error) { return name, nil }

func (leftovers) Inline(id string) (volume.Volume, error) {
	return volume.Volume{ID: volume.ID{Backend: "leftovers", Name: id}}, nil
}

func (leftovers) Inlines() ([]string, error) { return []string{stalledInline, answeredInline}, nil }

func (leftovers) Present(context.Context, volume.Volume) (mount.Source, bool, error) {
	return nil, false, nil
}

func (l leftovers) Detach(_ context.Context, v volume.Volume) error {
	if v.ID.Name == stalledInline {
		close(l.stalled)
		<-l.release
	}
	return nil
}

func (l leftovers) Delete(_ context.Context, id volume.ID) error {
	if id.Name == answeredInline {
		l.deleted <- struct{}{}
	}
	return nil
}

// registry returns a registry with one backend.
func registry(b backend.Backend) *backend.Registry {
	kind := backend.Kind{Name: "b", New: func(*pool.Set) backend.Backend { return b }}
	return backend.Kinds{kind}.Registry(nil)
}

// TestInlineBesideStalledDisk: while the disk of one inline volume does not answer, other volumes are
// cleaned up and unpublished, and calls for the stalled volume end at their deadline.
func TestInlineBesideStalledDisk(t *testing.T) {
	l := leftovers{stalled: make(chan struct{}), release: make(chan struct{}), deleted: make(chan struct{}, 2)}
	s := New(registry(l), "node", 1)
	cleaned := make(chan error)
	go func() { cleaned <- s.CleanUpInline(context.Background(), time.Millisecond) }()
	<-l.stalled
	<-l.deleted
	if err := <-cleaned; !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("CleanUpInline: got error %v, want context.DeadlineExceeded", err)
	}
	unpublish := func(id string) error {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		target := filepath.Join(t.TempDir(), "target")
		_, err := s.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
		return err
	}
	if err := unpublish(answeredInline); err != nil {
		t.Errorf("unpublishing the other volume: %v", err)
	}
	if err := unpublish(stalledInline); !errors.Is(err, volume.ErrPending) {
		t.Errorf("unpublishing the stalled volume: got error %v, want ErrPending", err)
	}
	close(l.release)
	if err := s.CleanUpInline(t.Context(), time.Minute); err != nil {
		t.Errorf("CleanUpInline after the disk has answered: %v", err)
	}
}

// unmounted is a backend whose volumes are directories of an NFS server that is not mounted.
type unmounted struct{ backend.Backend }

func (unmounted) Name() string { return "nfs" }

func (unmounted) Get(_ context.Context, id volume.ID) (volume.Volume, error) {
	return volume.Volume{ID: id}, nil
}

func (unmounted) Present(context.Context, volume.Volume) (mount.Source, bool, error) {
	return &mount.NFSSource{NFS: mount.NFS{Server: "nas.invalid", Path: "/e"}}, true, nil
}

func (unmounted) Detach(context.Context, volume.Volume) error { return nil }

// TestReleaseDirectory: Release succeeds for a directory that is not mounted: no other mount on this node counts
// as a mount of the directory.
func TestReleaseDirectory(t *testing.T) {
	id, err := volume.ParseID("nfs:nas:v")
	if err != nil {
		t.Fatal(err)
	}
	released, err := New(registry(unmounted{}), "node", 1).Release(t.Context(), id, "/nowhere")
	if err != nil || !released {
		t.Errorf("got released %t, error %v, want true", released, err)
	}
}
