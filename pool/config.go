package pool

import (
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/trivet-csi/trivet/pool/ledger"
	"github.com/trivet-csi/trivet/volume"
)

// Config is one pool in the configuration file.
type Config struct {
	Name string `yaml:"name"`
	// One of Directory, NFS and Section is set, and describes where the pool is.
	Directory Directory `yaml:"directory"`
	NFS       *NFS      `yaml:"nfs"`
	// Section is nil for a pool that has its data in its directory. Sections contains the section
	// before it is decoded; the map key is the section's Kind.
	Section  Section        `yaml:"-" json:"-"`
	Sections map[string]any `yaml:",inline" json:"-"`
	// Size limits the pool to less than its filesystem's size. Empty means no limit.
	Size string `yaml:"size"`
	// Reserve is the space that is never promised to volumes: a size, or a percentage of the
	// pool's size.
	Reserve string `yaml:"reserve"`
	// Overcommit is the number of times that each byte may be promised; 0 means 1.
	Overcommit float64 `yaml:"overcommit"`
	// MaxVolumes is the largest number of volumes. 0 means no limit.
	MaxVolumes int `yaml:"maxVolumes"`
	// UUID is the UUID that the pool must have. If it is empty, the UUID of the pool that was first
	// opened under this name is required.
	UUID string `yaml:"uuid"`
	// RequireMount refuses a directory that is not a mount point.
	RequireMount bool `yaml:"requireMount"`
	// Quota is QuotaAuto (the default), QuotaRequired or QuotaOff: whether directory volumes are
	// limited to their size.
	Quota string `yaml:"quota"`
	// FreezeLimit is the longest time for which a filesystem is frozen while it is copied for a
	// snapshot (time.ParseDuration). 0s means that no filesystem is frozen, and empty means
	// DefaultFreezeLimit.
	FreezeLimit string `yaml:"freezeLimit"`
	// Trim is how often the space of deleted files returns to the pool: Never (the default), Daily, Weekly or Monthly.
	Trim string `yaml:"trim"`
	// TrimWindow is the time of the day, in UTC, in which volumes are trimmed, such as 01:00-05:00. Empty means the
	// whole day.
	TrimWindow string `yaml:"trimWindow"`
	// TrimBytesPerSecond is the average rate at which volumes are trimmed. Empty means DefaultTrimRate.
	TrimBytesPerSecond string `yaml:"trimBytesPerSecond"`
	// Check is how often the filesystems of volumes are checked: Never (the default), Daily, Weekly or Monthly.
	Check string `yaml:"check"`
	// CheckWindow is the time of the day, in UTC, in which they are checked. Empty means the whole day.
	CheckWindow string `yaml:"checkWindow"`
	// BackgroundBytesPerSecond is the rate at which the driver copies, sends, receives, wipes and checks volumes while others use
	// the disk. Empty means DefaultBackgroundRate.
	BackgroundBytesPerSecond string `yaml:"backgroundBytesPerSecond"`
	// Ephemeral allows inline volumes in this pool. A pod needs no permissions to use one.
	Ephemeral bool `yaml:"ephemeral"`

	earlier []Config // see Earlier
}

// Directory is a pool on a filesystem of this node.
type Directory struct {
	Path string `yaml:"path"`
}

// NFS is a pool on an export, which all nodes mount.
type NFS struct {
	// Server is a host name or an IP address. An IPv6 address may have brackets.
	Server string `yaml:"server"`
	// Export is the absolute path on the server.
	Export string `yaml:"export"`
	// MountOptions are used for every mount of the export.
	MountOptions []string `yaml:"mountOptions"`
	// Init creates the pool on the export at the first use, if the export is empty.
	Init bool `yaml:"init"`
	// Fencing prevents two nodes from writing one image: FencingLocks (the default) or
	// FencingNone.
	Fencing string `yaml:"fencing"`
	// Outage is the time without an answer of the server after which NodeUnstageVolume discards
	// data that was not sent to the server (time.ParseDuration).
	Outage string `yaml:"outage"`
}

const (
	// FencingLocks uses locks that the server releases when a node's lease expires.
	FencingLocks = "locks"
	// FencingNone leaves fencing to the administrator.
	FencingNone = "none"

	// DefaultOutage is the outage if none is configured.
	DefaultOutage = 10 * time.Minute
)

// OutageTime is Outage, or its default.
func (n *NFS) OutageTime() time.Duration {
	d, err := time.ParseDuration(n.Outage)
	if err != nil || d <= 0 {
		return DefaultOutage
	}
	return d
}

// DefaultFreezeLimit is the freeze limit if none is configured.
const DefaultFreezeLimit = 10 * time.Second

// maxFreezeLimit is shorter than the timeout of 60 seconds that the sidecars have in Kubernetes.
const maxFreezeLimit = 50 * time.Second

// FreezeTime is FreezeLimit, or its default.
func (c Config) FreezeTime() time.Duration {
	d, err := time.ParseDuration(c.FreezeLimit)
	if err != nil {
		return DefaultFreezeLimit
	}
	return d
}

// Kind is the kind of a pool: where its data is.
type Kind string

// The kinds of pools that have their data in their directory. The kind of any other pool is the
// key of its section.
const (
	KindDirectory Kind = "directory"
	KindExport    Kind = "export"
)

// Kind is the pool's kind.
func (c Config) Kind() Kind {
	switch {
	case c.NFS != nil:
		return KindExport
	case c.Section != nil:
		return c.Section.Kind()
	}
	return KindDirectory
}

// Shared tells whether the pool is on an export, which all nodes mount.
func (c Config) Shared() bool { return c.NFS != nil }

// place is the path, export or section of the pool, for messages.
func (c Config) place() string {
	switch {
	case c.Shared():
		return c.NFS.Server + ":" + c.NFS.Export
	case c.Directory.Path == "" && c.Section != nil: // Within, which sets the path, was not called
		return c.Section.String()
	}
	return c.Directory.Path
}

const defaultReserve = "2%"

// Validate checks one pool's configuration. The error (ErrInvalid) begins with the invalid key,
// which is also the first result.
func (c Config) Validate() (key string, err error) {
	if !volume.ValidPoolName(c.Name) {
		return "name", volume.Errorf(volume.ErrInvalid, "name %q: expected 1 to 40 of a-z, 0-9 and -", c.Name)
	}
	if key, err := c.validateMedium(); err != nil {
		return key, err
	}
	if key, err := c.NFS.validate(); err != nil {
		return key, err
	}
	if c.Section != nil {
		if key, err := c.Section.Validate(c); err != nil {
			return key, err
		}
	}
	return c.validateLimits()
}

// validateMedium checks that the pool has one medium, and no key that only other media support.
func (c Config) validateMedium() (key string, err error) {
	switch {
	case c.NFS != nil && c.Directory.Path != "":
		return "nfs", volume.Errorf(volume.ErrInvalid, "nfs and directory are both given: remove one of them, or make two pools")
	case c.Section != nil && (c.NFS != nil || c.Directory.Path != ""):
		return string(c.Section.Kind()), volume.Errorf(volume.ErrInvalid, "%s is given beside nfs or directory: remove one of them, or make two pools", c.Section.Kind())
	case c.NFS == nil && c.Section == nil && !filepath.IsAbs(c.Directory.Path):
		return "directory", volume.Errorf(volume.ErrInvalid, "directory.path %q: expected an absolute path", c.Directory.Path)
	case c.Quota != "" && c.Directory.Path == "":
		return "quota", volume.Errorf(volume.ErrInvalid, "quota is for directory pools: remove it; the server of an export sets its quotas, and a device limits itself")
	case c.NFS != nil:
		return c.validateExport()
	}
	return "", nil
}

// validateExport checks that a pool on an export has no key that only pools of a node support.
func (c Config) validateExport() (key string, err error) {
	switch {
	case c.RequireMount:
		return "requireMount", volume.Errorf(volume.ErrInvalid, "requireMount is for directory pools: remove it, an nfs pool is always mounted")
	case c.Ephemeral:
		return "ephemeral", volume.Errorf(volume.ErrInvalid, "ephemeral is for pools of a node: remove it, inline volumes are on the node of their pod")
	case c.Trims():
		return "trim", volume.Errorf(volume.ErrInvalid, "trim is for pools of a node: remove it, and use mountOptions: [discard] in the StorageClass; the driver does not trim volumes whose server may stop to answer")
	case c.Checks():
		return "check", volume.Errorf(volume.ErrInvalid, "check is for pools of a node: remove it, and check the filesystem of the export on its server")
	case c.BackgroundBytesPerSecond != "":
		return "backgroundBytesPerSecond", volume.Errorf(volume.ErrInvalid, "backgroundBytesPerSecond is for pools of a node: remove it, the driver does not know the disks of an export")
	}
	return "", nil
}

// validateLimits checks the keys that pools on all media have.
func (c Config) validateLimits() (key string, err error) {
	switch {
	case !slices.Contains([]string{"", QuotaAuto, QuotaRequired, QuotaOff}, c.Quota):
		return "quota", volume.Errorf(volume.ErrInvalid, "quota %q: expected %s, %s or %s", c.Quota, QuotaAuto, QuotaRequired, QuotaOff)
	case !validFreezeLimit(c.FreezeLimit):
		return "freezeLimit", volume.Errorf(volume.ErrInvalid, "freezeLimit %q: expected a time from 0s (never) to %v", c.FreezeLimit, maxFreezeLimit)
	case math.IsNaN(c.Overcommit) || c.Overcommit < 0 || (c.Overcommit > 0 && c.Overcommit < 1) || c.Overcommit > 1000:
		return "overcommit", volume.Errorf(volume.ErrInvalid, "overcommit %v: expected 1 (every byte promised once) to 1000", c.Overcommit)
	case c.MaxVolumes < 0:
		return "maxVolumes", volume.Errorf(volume.ErrInvalid, "maxVolumes %d: expected 0 (no limit) or more", c.MaxVolumes)
	case c.UUID != "" && !validUUID(c.UUID):
		return "uuid", volume.Errorf(volume.ErrInvalid, "uuid %q: expected the uuid in pool.json, which has 36 characters", c.UUID)
	}
	if c.Size != "" {
		if n, err := volume.ParseSize(c.Size); err != nil || n == 0 {
			return "size", volume.Errorf(volume.ErrInvalid, "size %q: expected a size above zero, such as 500Gi", c.Size)
		}
	}
	if _, err := parseReserve(c.Reserve); err != nil {
		return "reserve", err
	}
	if _, err := c.backgroundRate(); err != nil {
		return "backgroundBytesPerSecond", err
	}
	if _, key, err = c.Trimming(); err == nil {
		_, key, err = c.Checking()
	}
	return key, err
}

func validFreezeLimit(s string) bool {
	d, err := time.ParseDuration(s)
	return s == "" || err == nil && d >= 0 && d <= maxFreezeLimit
}

// validate checks the section of an export, except mountOptions, which are checked when it is
// mounted.
func (n *NFS) validate() (key string, err error) {
	if n == nil {
		return "", nil
	}
	// The errors of CanonicalServer and CanonicalExport begin with "=".
	if _, err := volume.CanonicalServer(n.Server); err != nil {
		return "nfs.server", volume.Errorf(volume.ErrInvalid, "nfs.server%w", err)
	}
	if _, err := volume.CanonicalExport(n.Export); err != nil {
		return "nfs.export", volume.Errorf(volume.ErrInvalid, "nfs.export%w", err)
	}
	if n.Fencing != "" && n.Fencing != FencingLocks && n.Fencing != FencingNone {
		return "nfs.fencing", volume.Errorf(volume.ErrInvalid, "nfs.fencing=%q: expected %s or %s", n.Fencing, FencingLocks, FencingNone)
	}
	if d, err := time.ParseDuration(n.Outage); n.Outage != "" && (err != nil || d < minOutage) {
		return "nfs.outage", volume.Errorf(volume.ErrInvalid, "nfs.outage=%q: expected a time of at least %v, such as 10m", n.Outage, minOutage)
	}
	return "", nil
}

// minOutage is the shortest outage: a server needs some seconds to restart.
const minOutage = 10 * time.Second

// DirectConfig is the configuration of a direct pool (volume.DirectPool); ok is false for any
// other name.
func DirectConfig(name string) (c Config, ok bool) {
	server, share, ok := volume.ParseDirectPool(name)
	return Config{Name: name, NFS: &NFS{Server: server, Export: share, Init: true}}, ok
}

// account is the configuration of the pool's ledger.
func (c Config) account() (l ledger.Config, err error) {
	l = ledger.Config{Name: c.Name, Overcommit: c.Overcommit, MaxVolumes: c.MaxVolumes, RaiseOvercommit: "raise its overcommit"}
	if volume.IsDirectPool(c.Name) {
		l.RaiseOvercommit = "make " + c.place() + " a pool in the driver's configuration, with an overcommit"
	}
	switch {
	case c.Shared():
		l.Accounting, l.Shared = ledger.Estimated, true
	case c.Section != nil:
		l.Accounting = ledger.Unlimited
	}
	if c.Size != "" {
		if l.Size, err = volume.ParseSize(c.Size); err != nil {
			return l, err
		}
	}
	l.Reserve, err = parseReserve(c.Reserve)
	return l, err
}

// parseReserve reads a reserve: "10Gi", or "2%" of the pool.
func parseReserve(s string) (ledger.Reserve, error) {
	if s == "" {
		s = defaultReserve
	}
	digits, percent := strings.CutSuffix(s, "%")
	if !percent {
		n, err := volume.ParseSize(s)
		if err != nil {
			return ledger.Reserve{}, volume.Errorf(volume.ErrInvalid, "reserve %q: expected a size such as 10Gi or a percentage such as 2%%", s)
		}
		return ledger.Reserve{Bytes: n}, nil
	}
	p, err := strconv.ParseUint(digits, 10, 8)
	if err != nil || p > 99 {
		return ledger.Reserve{}, volume.Errorf(volume.ErrInvalid, "reserve %q: expected 0%% to 99%%", s)
	}
	return ledger.Reserve{Percent: int64(p)}, nil
}
