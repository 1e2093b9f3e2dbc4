package nodeserver

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/mount"
	"github.com/trivet-csi/trivet/volume"
)

const (
	stalledInline  = "csi-0000000000000000000000000000000000000000000000000000000000000001"
	answeredInline = "csi-0000000000000000000000000000000000000000000000000000000000000002"
)

// leftovers is a backend of inline volumes that an earlier process left. Freeing the device
// of the stalled one waits for its disk.
type leftovers struct {
	backend.Backend
	reached, until, deleted chan struct{}
}

func (leftovers) Name() string { return "leftovers" }

func (leftovers) InlinePool(name string) (string, error) { return name, nil }

func (leftovers) Inline(id string) (volume.Volume, error) {
	return volume.Volume{ID: volume.ID{Backend: "leftovers", Name: id}}, nil
}

func (leftovers) Inlines() ([]string, error) { return []string{stalledInline, answeredInline}, nil }

func (leftovers) Present(context.Context, volume.Volume) (mount.Source, bool, error) {
	return mount.Source{}, false, nil
}

func (l leftovers) Detach(_ context.Context, v volume.Volume) error {
	if v.ID.Name == stalledInline {
		close(l.reached)
		<-l.until
	}
	return nil
}

func (l leftovers) Delete(_ context.Context, id volume.ID) error {
	if id.Name == answeredInline {
		l.deleted <- struct{}{}
	}
	return nil
}

// TestInlineBesideStalledDisk: while the disk of one inline volume does not answer, others
// are settled and unpublished, and calls for the stalled one end with their deadline.
func TestInlineBesideStalledDisk(t *testing.T) {
	l := leftovers{reached: make(chan struct{}), until: make(chan struct{}), deleted: make(chan struct{}, 2)}
	s := New(backend.NewRegistry(l), "node", 1)
	settled := make(chan error)
	go func() { settled <- s.Settle(context.Background(), time.Millisecond) }()
	<-l.reached
	<-l.deleted
	if err := <-settled; !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Settle: %v, want that it is not finished", err)
	}
	unpublish := func(id string) error {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		target := filepath.Join(t.TempDir(), "target")
		_, err := s.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: target})
		return err
	}
	if err := unpublish(answeredInline); err != nil {
		t.Errorf("unpublish the other volume: %v", err)
	}
	if err := unpublish(stalledInline); !errors.Is(err, volume.ErrPending) {
		t.Errorf("unpublish the stalled volume: %v, want ErrPending", err)
	}
	close(l.until)
	if err := s.Settle(t.Context(), time.Minute); err != nil {
		t.Errorf("Settle after the disk has answered: %v", err)
	}
}
