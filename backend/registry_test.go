package backend_test

import (
	"errors"
	"testing"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// describing is a backend that has only static volumes.
type describing struct{ backend.Backend }

func (describing) Name() string { return "d" }

func (describing) StaticVolume(id string, _ map[string]string) (volume.Volume, bool, error) {
	return volume.Volume{CoName: id}, true, nil
}

func (describing) StaticAt(string) (mount.Source, error) { return nil, nil } //nolint:nilnil // no static volume is mounted

// TestWithoutStatic: a registry without static volumes does not find them.
func TestWithoutStatic(t *testing.T) {
	r := backend.Kinds{{Name: "d", New: func(*pool.Set) backend.Backend { return describing{} }}}.Registry(nil)
	if _, v, static, err := r.Described(t.Context(), "handle", nil); err != nil || !static || v.CoName != "handle" {
		t.Errorf("%+v, %t, %v", v, static, err)
	}
	if _, v, static, err := r.WithoutStatic().Described(t.Context(), "handle", nil); !errors.Is(err, volume.ErrNotFound) || static {
		t.Errorf("without static volumes: %+v, %t, %v", v, static, err)
	}
}
