package lvm

import (
	"path/filepath"
	"regexp"

	"golang.org/x/sync/semaphore"

	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// key is the key of the section in a pool's configuration.
const key = "lvm"

// Group is the section of a pool of logical volumes in the configuration.
type Group struct {
	// VolumeGroup is the name of an existing volume group.
	VolumeGroup string `yaml:"volumeGroup"`

	// mounted means that this process has mounted the records of a pool.
	mounted bool
}

// groupPattern matches the names that LVM allows.
var groupPattern = regexp.MustCompile(`^[a-zA-Z0-9_.+][a-zA-Z0-9_.+-]{0,126}$`)

// Kind implements pool.Section.
func (g *Group) Kind() pool.Kind { return key }

// Backend implements pool.Section.
func (g *Group) Backend() string { return Name }

// String implements pool.Section.
func (g *Group) String() string { return "volume group " + g.VolumeGroup }

// Records implements pool.Section. The records are on a logical volume, which is mounted at this path.
func (g *Group) Records(stateDir, pool string) string { return filepath.Join(stateDir, key, pool) }

// Validate implements pool.Section.
func (g *Group) Validate(c pool.Config) (invalid string, err error) {
	if c.Size != "" || c.Reserve != "" || c.Overcommit != 0 || c.RequireMount {
		return key, volume.Errorf(volume.ErrInvalid, "a pool of a volume group does not support size, reserve, overcommit and requireMount: remove them; the free extents of the group are its capacity")
	}
	if !groupPattern.MatchString(g.VolumeGroup) || g.VolumeGroup == "." || g.VolumeGroup == ".." {
		return key + ".volumeGroup", volume.Errorf(volume.ErrInvalid, "lvm.volumeGroup %q: expected the name of a volume group (vgs)", g.VolumeGroup)
	}
	return "", nil
}

// Open implements pool.Section.
func (g *Group) Open(c pool.Config) pool.Storage {
	return &storage{cfg: c, name: g.VolumeGroup, maintained: func() bool { return g.mounted }, changing: semaphore.NewWeighted(1)}
}
