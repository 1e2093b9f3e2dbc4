package pool

import (
	"math"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/trivet-csi/trivet/volume"
)

// Config is one pool in the configuration file.
type Config struct {
	Name      string    `yaml:"name"`
	Directory Directory `yaml:"directory"`
	// Size bounds the pool below its filesystem's size; empty: that size.
	Size string `yaml:"size"`
	// Reserve is kept free of promises: a size, or a percentage of the pool's.
	Reserve string `yaml:"reserve"`
	// Overcommit is how often each byte may be promised; 0 stands for 1.
	Overcommit float64 `yaml:"overcommit"`
	// MaxVolumes bounds the number of volumes; 0: no bound.
	MaxVolumes int `yaml:"maxVolumes"`
	// UUID pins the pool's identity; empty: the one found the first time.
	UUID string `yaml:"uuid"`
	// RequireMount refuses a directory that is not a mount point.
	RequireMount bool `yaml:"requireMount"`
}

// Directory is a pool on a filesystem of this node.
type Directory struct {
	Path string `yaml:"path"`
}

const defaultReserve = "2%"

// Validate checks one pool's configuration; the error (ErrInvalid) begins with
// the key at fault, which key also returns.
func (c Config) Validate() (key string, err error) {
	switch {
	case !volume.ValidPoolName(c.Name):
		return "name", volume.Errorf(volume.ErrInvalid, "name %q: want 1 to 40 of a-z, 0-9 and -", c.Name)
	case !filepath.IsAbs(c.Directory.Path):
		return "directory", volume.Errorf(volume.ErrInvalid, "directory.path %q: want an absolute path", c.Directory.Path)
	case math.IsNaN(c.Overcommit) || c.Overcommit < 0 || (c.Overcommit > 0 && c.Overcommit < 1) || c.Overcommit > 1000:
		return "overcommit", volume.Errorf(volume.ErrInvalid, "overcommit %v: want 1 (every byte promised once) to 1000", c.Overcommit)
	case c.MaxVolumes < 0:
		return "maxVolumes", volume.Errorf(volume.ErrInvalid, "maxVolumes %d: want 0 (no bound) or more", c.MaxVolumes)
	case c.UUID != "" && !validUUID(c.UUID):
		return "uuid", volume.Errorf(volume.ErrInvalid, "uuid %q: want the 36 characters that pool.json has", c.UUID)
	}
	if c.Size != "" {
		if n, err := volume.ParseSize(c.Size); err != nil || n == 0 {
			return "size", volume.Errorf(volume.ErrInvalid, "size %q: want a size above zero, such as 500Gi", c.Size)
		}
	}
	if _, err := parseReserve(c.Reserve); err != nil {
		return "reserve", err
	}
	return "", nil
}

// limits are the numbers of a configuration.
type limits struct {
	size    int64 // 0: none
	reserve reserve
}

func (c Config) limits() (l limits, err error) {
	if c.Size != "" {
		if l.size, err = volume.ParseSize(c.Size); err != nil {
			return l, err
		}
	}
	l.reserve, err = parseReserve(c.Reserve)
	return l, err
}

// reserve is a number of bytes or a part of the pool.
type reserve struct{ bytes, percent int64 }

func (r reserve) of(total int64) int64 { return r.bytes + total/100*r.percent }

func (c Config) overcommit() float64 {
	if c.Overcommit == 0 {
		return 1
	}
	return c.Overcommit
}

// parseReserve reads a reserve: "10Gi", or "2%" of the pool.
func parseReserve(s string) (reserve, error) {
	if s == "" {
		s = defaultReserve
	}
	digits, percent := strings.CutSuffix(s, "%")
	if !percent {
		n, err := volume.ParseSize(s)
		if err != nil {
			return reserve{}, volume.Errorf(volume.ErrInvalid, "reserve %q: want a size such as 10Gi or a percentage such as 2%%", s)
		}
		return reserve{bytes: n}, nil
	}
	p, err := strconv.ParseUint(digits, 10, 8)
	if err != nil || p > 99 {
		return reserve{}, volume.Errorf(volume.ErrInvalid, "reserve %q: want 0%% to 99%%", s)
	}
	return reserve{percent: int64(p)}, nil
}
