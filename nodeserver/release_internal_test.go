package nodeserver

import (
	"context"
	"testing"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/volume"
)

// present is a backend of volumes that are directories of a server, and mounted nowhere.
type present struct{ backend.Backend }

func (present) Name() string { return "nfs" }

func (present) Get(_ context.Context, id volume.ID) (volume.Volume, error) {
	return volume.Volume{ID: id}, nil
}

func (present) Present(context.Context, volume.Volume) (mount.Source, bool, error) {
	return &mount.NFSSource{NFS: mount.NFS{Server: "nas.invalid", Path: "/e"}}, true, nil
}

func (present) Detach(context.Context, volume.Volume) error { return nil }

// TestReleaseDirectory: mounts of others on this node are not a directory's.
func TestReleaseDirectory(t *testing.T) {
	id, err := volume.ParseID("nfs:nas:v")
	if err != nil {
		t.Fatal(err)
	}
	released, err := New(registry(present{}), "node", 1).Release(t.Context(), id, "/nowhere")
	if err != nil || !released {
		t.Errorf("%t, %v", released, err)
	}
}
