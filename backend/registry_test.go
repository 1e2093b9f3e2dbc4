package backend_test

import (
	"errors"
	"testing"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// staticBackend is a backend that has only static volumes.
type staticBackend struct{ backend.Backend }

func (staticBackend) Name() string { return "d" }

func (staticBackend) StaticVolume(id string, _ map[string]string) (volume.Volume, bool, error) {
	return volume.Volume{CoName: id}, true, nil
}

func (staticBackend) StaticAt(string) (mount.Source, error) { return nil, nil } //nolint:nilnil // no static volume is mounted

// TestWithoutStatic: Described finds a static volume, unless the registry was created by WithoutStatic.
func TestWithoutStatic(t *testing.T) {
	r := backend.Kinds{{Name: "d", New: func(*pool.Set) backend.Backend { return staticBackend{} }}}.Registry(nil)
	if _, v, static, err := r.Described(t.Context(), "handle", nil); err != nil || !static || v.CoName != "handle" {
		t.Errorf("with static volumes: got %+v, %t, %v; want volume handle", v, static, err)
	}
	if _, v, static, err := r.WithoutStatic().Described(t.Context(), "handle", nil); !errors.Is(err, volume.ErrNotFound) || static {
		t.Errorf("without static volumes: got %+v, %t, %v; want ErrNotFound", v, static, err)
	}
}
