package sixthkind

import (
	"context"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Name is the kind's name in StorageClasses and volume IDs.
const Name = "sixth"

// Kind describes the volumes.
var Kind = backend.Kind{
	Name: Name, Doc: "a directory of a node that nothing limits",
	Media: []pool.Kind{pool.KindDirectory}, Directories: true,
	New: func(pools *pool.Set) backend.Backend {
		own := func(c pool.Config) bool { return c.Kind() == pool.KindDirectory }
		explain := func(_ *pool.Pool, err error) error { return err }
		return &Backend{backend.Pools{Backend: Name, Set: pools, Own: own, Explain: explain}}
	},
}

// Backend makes the volumes. The embedded type reads records, lists volumes, and records
// where they are published.
type Backend struct{ backend.Pools }

// The interfaces that the backend implements: the first is required, and the others are
// found by type assertion.
var (
	_ backend.Backend       = (*Backend)(nil)
	_ backend.Publisher     = (*Backend)(nil)
	_ backend.Expander      = (*Backend)(nil)
	_ backend.HealthChecker = (*Backend)(nil)
	_ backend.Limiter       = (*Backend)(nil)
)

var bounds = volume.Bounds{Min: volume.MiB, Granule: 4096}

// Supports implements backend.Backend: directories, used by one node.
func (b *Backend) Supports(c volume.Capability) error {
	switch {
	case c.Mode.MultiNode():
		return volume.Errorf(volume.ErrInvalid, "access mode %s: a volume of backend %s is on one node", c.Mode, Name)
	case c.Block, c.FSType != "":
		return volume.Errorf(volume.ErrInvalid, "block %t, fs_type %q: volumes of backend %s are directories: use volumeMode Filesystem without fsType", c.Block, c.FSType, Name)
	}
	return volume.CheckMountFlags(c.MountFlags)
}

// Capacity implements backend.Backend.
func (b *Backend) Capacity(_ context.Context, q backend.CapacityQuery) (backend.Capacity, error) {
	return b.Room(q.Parameters, bounds)
}

// Enforced implements backend.Limiter: nothing limits a volume to its size.
func (b *Backend) Enforced(volume.Volume) string { return backend.EnforcedNot }
