package pool

import (
	"os"
	"strings"
	"time"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/volume"
)

// The values of Config.Trim.
const (
	TrimNever   = "never"
	TrimDaily   = "daily"
	TrimWeekly  = "weekly"
	TrimMonthly = "monthly"
)

// DefaultTrimRate is the rate if none is configured, in bytes per second.
const DefaultTrimRate = 256 << 20

const (
	day = 24 * time.Hour
	// windowSlack is how much earlier than after a whole interval a volume is trimmed again if there is a window. Without
	// it, each trim would be later than the one before, until one misses the window.
	windowSlack = 2 * time.Hour
)

// trimIntervals are the times between two trims of a volume. Config.Trim is empty if it is not set.
var trimIntervals = map[string]time.Duration{"": 0, TrimNever: 0, TrimDaily: day, TrimWeekly: 7 * day, TrimMonthly: 30 * day}

// Trimming is when and how fast the volumes of a pool are trimmed.
type Trimming struct {
	// interval is 0 if the volumes are trimmed only on demand.
	interval time.Duration
	// from and to are times of the day. They are equal if there is no window.
	from, to time.Duration
	// Rate is the average number of bytes per second.
	Rate int64
}

// Trims reports whether a key about trimming is set.
func (c Config) Trims() bool { return c.Trim != "" || c.TrimWindow != "" || c.TrimBytesPerSecond != "" }

// Trimming parses the keys about trimming. The error is ErrInvalid, about the returned key.
func (c Config) Trimming() (t Trimming, key string, err error) {
	var ok bool
	if t.interval, ok = trimIntervals[c.Trim]; !ok {
		return t, "trim", volume.Errorf(volume.ErrInvalid, "trim %q: expected %s, %s, %s or %s", c.Trim, TrimNever, TrimDaily, TrimWeekly, TrimMonthly)
	}
	if c.TrimWindow != "" {
		from, to, _ := strings.Cut(c.TrimWindow, "-")
		begin, beginErr := time.Parse("15:04", from)
		end, endErr := time.Parse("15:04", to)
		if beginErr != nil || endErr != nil || begin.Equal(end) {
			return t, "trimWindow", volume.Errorf(volume.ErrInvalid, "trimWindow %q: expected two different times of the day in UTC, such as 01:00-05:00", c.TrimWindow)
		}
		t.from, t.to = timeOfDay(begin), timeOfDay(end)
	}
	t.Rate = DefaultTrimRate
	if c.TrimBytesPerSecond != "" {
		if t.Rate, err = volume.ParseSize(c.TrimBytesPerSecond); err != nil || t.Rate == 0 {
			return t, "trimBytesPerSecond", volume.Errorf(volume.ErrInvalid, "trimBytesPerSecond %q: expected a size above zero, such as 100Mi", c.TrimBytesPerSecond)
		}
	}
	return t, "", nil
}

// timeOfDay returns the time since midnight in UTC.
func timeOfDay(t time.Time) time.Duration {
	t = t.UTC()
	return t.Sub(t.Truncate(day))
}

// Scheduled reports whether volumes are trimmed without a request.
func (t Trimming) Scheduled() bool { return t.interval > 0 }

// Left returns how much of the window is left. It is 0 outside the window, and a day if there is no window.
func (t Trimming) Left(now time.Time) time.Duration {
	if t.from == t.to {
		return day
	}
	since := (timeOfDay(now) - t.from + day) % day
	return max(0, (t.to-t.from+day)%day-since)
}

// Due reports whether a volume that was trimmed at a time must be trimmed again. A time in the future, of a clock that
// was wrong, does not count.
func (t Trimming) Due(last, now time.Time) bool {
	interval := t.interval
	if t.from != t.to {
		interval -= windowSlack
	}
	return t.Scheduled() && (last.After(now) || now.Sub(last) >= interval)
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
