package pool

import (
	"math"
	"strings"
	"time"

	"github.com/trivet-csi/trivet/volume"
)

// The values of Config.Trim and Config.Check.
const (
	Never   = "never"
	Daily   = "daily"
	Weekly  = "weekly"
	Monthly = "monthly"
)

const (
	day = 24 * time.Hour
	// windowSlack is how much earlier than after a whole interval a volume is due again if there is a window. Without it,
	// each run would be later than the one before, until one misses the window.
	windowSlack = 2 * time.Hour
)

// intervals are the times between two runs for a volume. A key that is not set is empty.
var intervals = map[string]time.Duration{"": 0, Never: 0, Daily: day, Weekly: 7 * day, Monthly: 30 * day}

// Schedule is when a task that the driver repeats is due for the volumes of a pool.
type Schedule struct {
	// interval is 0 if the task runs only on demand.
	interval time.Duration
	// from and to are times of the day. They are equal if there is no window.
	from, to time.Duration
}

// parseSchedule parses the values of a key, such as trim, and of the key of its window, such as trimWindow. The error is
// ErrInvalid, about the returned key.
func parseSchedule(key, every, window string) (s Schedule, invalid string, err error) {
	var ok bool
	if s.interval, ok = intervals[every]; !ok {
		return s, key, volume.Errorf(volume.ErrInvalid, "%s %q: expected %s, %s, %s or %s", key, every, Never, Daily, Weekly, Monthly)
	}
	if window == "" {
		return s, "", nil
	}
	key += "Window"
	from, to, _ := strings.Cut(window, "-")
	begin, beginErr := time.Parse("15:04", from)
	end, endErr := time.Parse("15:04", to)
	if beginErr != nil || endErr != nil || begin.Equal(end) {
		return s, key, volume.Errorf(volume.ErrInvalid, "%s %q: expected two different times of the day in UTC, such as 01:00-05:00", key, window)
	}
	s.from, s.to = timeOfDay(begin), timeOfDay(end)
	return s, "", nil
}

// timeOfDay returns the time since midnight in UTC.
func timeOfDay(t time.Time) time.Duration {
	t = t.UTC()
	return t.Sub(t.Truncate(day))
}

// Scheduled reports whether the task runs without a request.
func (s Schedule) Scheduled() bool { return s.interval > 0 }

// Forever is the time that is left without a window.
const Forever time.Duration = math.MaxInt64

// Left returns how much of the window is left. It is 0 outside the window, and Forever if there is no window.
func (s Schedule) Left(now time.Time) time.Duration {
	if s.from == s.to {
		return Forever
	}
	since := (timeOfDay(now) - s.from + day) % day
	return max(0, (s.to-s.from+day)%day-since)
}

// Due reports whether the task must run for a volume whose last run began at a time. A time in the future, of a clock that
// was wrong, does not count.
func (s Schedule) Due(last, now time.Time) bool {
	interval := s.interval
	if s.from != s.to {
		interval -= windowSlack
	}
	return s.Scheduled() && (last.After(now) || now.Sub(last) >= interval)
}
