package pool

import (
	"os"
	"strings"
	"time"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/volume"
)

// DefaultTrimRate is the rate if none is configured, in bytes per second.
const DefaultTrimRate = 256 << 20

// Trimming is when and how fast the volumes of a pool are trimmed.
type Trimming struct {
	Schedule
	// Rate is the average number of bytes per second.
	Rate int64
}

// Trims reports whether a key about trimming is set.
func (c Config) Trims() bool { return c.Trim != "" || c.TrimWindow != "" || c.TrimBytesPerSecond != "" }

// Trimming parses the keys about trimming. The error is ErrInvalid, about the returned key.
func (c Config) Trimming() (t Trimming, key string, err error) {
	if t.Schedule, key, err = parseSchedule("trim", c.Trim, c.TrimWindow); err != nil {
		return t, key, err
	}
	t.Rate = DefaultTrimRate
	if c.TrimBytesPerSecond != "" {
		if t.Rate, err = volume.ParseSize(c.TrimBytesPerSecond); err != nil || t.Rate == 0 {
			return t, "trimBytesPerSecond", volume.Errorf(volume.ErrInvalid, "trimBytesPerSecond %q: expected a size above zero, such as 100Mi", c.TrimBytesPerSecond)
		}
	}
	return t, "", nil
}

// trimmedFile in a volume's folder contains the time at which the last complete trim of the volume began.
const trimmedFile = "trimmed"

// Trimmed returns the time at which the last complete trim of a volume began, or its creation.
func (p *Pool) Trimmed(v volume.Volume) (time.Time, error) {
	b, err := p.files.Read(p.volumes, v.ID.Name+"/"+trimmedFile)
	if beneath.IsNotExist(err) {
		return v.Created, nil
	}
	if err != nil {
		return time.Time{}, err
	}
	at, err := time.Parse(time.RFC3339, strings.TrimSpace(string(b)))
	if err != nil { // the file is only a hint: an unreadable time is as none
		return v.Created, nil //nolint:nilerr // see above
	}
	return at, nil
}

// SetTrimmed durably records the time at which a complete trim of a volume began.
func (p *Pool) SetTrimmed(name string, at time.Time) error {
	return p.inFolder(name, func(folder *os.Root) error {
		return atomicfile.Write(folder, trimmedFile, []byte(at.UTC().Format(time.RFC3339)+"\n"))
	})
}
