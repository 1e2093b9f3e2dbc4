package disk

import (
	"path/filepath"
	"strings"

	"golang.org/x/sync/semaphore"

	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// key is the key of the section in a pool's configuration.
const key = "disks"

// Disks is the section of a pool of disks in the configuration.
type Disks struct {
	// Match are globs of device nodes, such as /dev/disk/by-id/nvme-*.
	Match []string `yaml:"match"`
}

// Kind implements pool.Section.
func (d *Disks) Kind() pool.Kind { return key }

// Backend implements pool.Section.
func (d *Disks) Backend() string { return Name }

// String implements pool.Section.
func (d *Disks) String() string { return strings.Join(d.Match, ", ") }

// Records implements pool.Section.
func (d *Disks) Records(stateDir, pool string) string { return filepath.Join(stateDir, key, pool) }

// Validate implements pool.Section.
func (d *Disks) Validate(c pool.Config) (invalid string, err error) {
	if c.Size != "" || c.Reserve != "" || c.Overcommit != 0 || c.RequireMount {
		return key, volume.Errorf(volume.ErrInvalid, "a pool of disks does not support size, reserve, overcommit and requireMount: remove them; each volume is one whole disk")
	}
	if c.Trims() {
		return "trim", volume.Errorf(volume.ErrInvalid, "trim is not supported by pools of disks: remove it; each volume is one whole disk, so there is no space to return")
	}
	if c.Checks() {
		return "check", volume.Errorf(volume.ErrInvalid, "check is not supported by pools of disks: remove it; a whole disk has no snapshot that could be checked while the disk is in use")
	}
	if c.BackgroundBytesPerSecond != "" {
		return "backgroundBytesPerSecond", volume.Errorf(volume.ErrInvalid, "backgroundBytesPerSecond is not supported by pools of disks: remove it; no other volume is on the disk of a volume")
	}
	if c.Ephemeral {
		return "ephemeral", volume.Errorf(volume.ErrInvalid, "ephemeral is not supported by pools of disks: remove it, and give inline volumes a pool of a directory or of a volume group")
	}
	if len(d.Match) == 0 {
		return key + ".match", volume.Errorf(volume.ErrInvalid, "disks.match is empty: name the disks by globs, such as /dev/disk/by-id/nvme-*")
	}
	for _, glob := range d.Match {
		if _, err := filepath.Match(glob, ""); err != nil || !strings.HasPrefix(glob, "/dev/") {
			return key + ".match", volume.Errorf(volume.ErrInvalid, "disks.match %q: use a glob below /dev, such as /dev/disk/by-id/nvme-*", glob)
		}
	}
	return "", nil
}

// Open implements pool.Section.
func (d *Disks) Open(c pool.Config) pool.Storage {
	return &storage{cfg: c, match: d.Match, claiming: semaphore.NewWeighted(1)}
}
