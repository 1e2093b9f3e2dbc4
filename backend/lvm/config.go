package lvm

import (
	"path/filepath"
	"regexp"

	"golang.org/x/sync/semaphore"

	"github.com/trivet-csi/trivet/linux/dm"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// key is the key of the section in a pool's configuration.
const key = "lvm"

// Group is the section of a pool of logical volumes in the configuration.
type Group struct {
	// VolumeGroup is the name of an existing volume group.
	VolumeGroup string `yaml:"volumeGroup"`
	// ThinPool is the name of an existing thin pool of the group, if the volumes are thin.
	ThinPool string `yaml:"thinPool"`

	// mounted means that this process has mounted the records of a pool.
	mounted bool
}

// namePattern matches the names that LVM allows.
var namePattern = regexp.MustCompile(`^[a-zA-Z0-9_.+][a-zA-Z0-9_.+-]{0,126}$`)

func validName(name string) bool { return namePattern.MatchString(name) && name != "." && name != ".." }

// Kind implements pool.Section.
func (g *Group) Kind() pool.Kind { return key }

// Backend implements pool.Section.
func (g *Group) Backend() string { return Name }

// String implements pool.Section.
func (g *Group) String() string {
	if g.ThinPool != "" {
		return "thin pool " + g.thinPath()
	}
	return "volume group " + g.VolumeGroup
}

// thinPath names the thin pool as lvm(8) does.
func (g *Group) thinPath() string { return g.VolumeGroup + "/" + g.ThinPool }

// Records implements pool.Section. The records are on a logical volume, which is mounted at this path.
func (g *Group) Records(stateDir, pool string) string { return filepath.Join(stateDir, key, pool) }

// Validate implements pool.Section.
func (g *Group) Validate(c pool.Config) (invalid string, err error) {
	switch {
	case c.RequireMount:
		return key, volume.Errorf(volume.ErrInvalid, "a pool of a volume group does not support requireMount: remove it")
	case g.ThinPool == "" && (c.Size != "" || c.Reserve != "" || c.Overcommit != 0):
		return key, volume.Errorf(volume.ErrInvalid, "a pool of a volume group without a thin pool does not support size, reserve and overcommit: remove them; the free extents of the group are its capacity")
	case g.ThinPool == "" && c.Trims():
		return "trim", volume.Errorf(volume.ErrInvalid, "trim is not supported by a pool of a volume group without a thin pool: remove it; a logical volume keeps its extents")
	case g.ThinPool == "" && c.Checks():
		return "check", volume.Errorf(volume.ErrInvalid, "check is not supported by a pool of a volume group without a thin pool: remove it; a thick logical volume has no snapshot that could be checked while it is in use")
	case !validName(g.VolumeGroup):
		return key + ".volumeGroup", volume.Errorf(volume.ErrInvalid, "lvm.volumeGroup %q: expected the name of a volume group (vgs)", g.VolumeGroup)
	case g.ThinPool != "" && !validName(g.ThinPool):
		return key + ".thinPool", volume.Errorf(volume.ErrInvalid, "lvm.thinPool %q: expected the name of a thin pool (lvs)", g.ThinPool)
	}
	return "", nil
}

// Open implements pool.Section.
func (g *Group) Open(c pool.Config) pool.Storage {
	if g.ThinPool != "" {
		return thinStorage{g.open(c)}
	}
	return g.open(c)
}

func (g *Group) open(c pool.Config) *storage {
	return &storage{cfg: c, name: g.VolumeGroup, thin: g.ThinPool, maintained: func() bool { return g.mounted }, changing: semaphore.NewWeighted(1), growing: map[string]bool{}, sent: map[dm.VolumeID]*sentCopy{}}
}
