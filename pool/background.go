package pool

import (
	"os"

	"github.com/trivet-csi/trivet/linux/background"
	"github.com/trivet-csi/trivet/volume"
)

// DefaultBackgroundRate is the rate if none is configured, and minBackgroundRate the lowest, in bytes per second. With less, a transfer
// could send nothing for so long that it seems to have ended.
const (
	DefaultBackgroundRate = 256 << 20
	minBackgroundRate     = 1 << 20
)

// backgroundRate parses BackgroundBytesPerSecond.
func (c Config) backgroundRate() (int64, error) {
	if c.BackgroundBytesPerSecond == "" {
		return DefaultBackgroundRate, nil
	}
	rate, err := volume.ParseSize(c.BackgroundBytesPerSecond)
	if err != nil || rate < minBackgroundRate {
		return 0, volume.Errorf(volume.ErrInvalid, "backgroundBytesPerSecond %q: expected a size from 1Mi, such as 100Mi", c.BackgroundBytesPerSecond)
	}
	return rate, nil
}

// Background returns the budget of a new task of the pool on the disks below some files or devices. It is nil for a pool on an export,
// whose disks are those of its server.
func (c Config) Background(on ...*os.File) *background.Budget {
	if c.Shared() {
		return nil
	}
	rate, err := c.backgroundRate()
	if err != nil { // Validate was not called
		rate = DefaultBackgroundRate
	}
	return background.On(rate, on...)
}

// Background does the same as Config.Background.
func (p *Pool) Background(on ...*os.File) *background.Budget { return p.cfg.Background(on...) }
