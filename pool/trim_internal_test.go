package pool

import (
	"strings"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/volume"
)

func trimming(t *testing.T, c Config) Trimming {
	t.Helper()
	got, key, err := c.Trimming()
	if err != nil || key != "" {
		t.Fatalf("got key %q and error %v, want none", key, err)
	}
	return got
}

// at returns a time of the first of March in UTC.
func at(t *testing.T, clock string) time.Time {
	t.Helper()
	got, err := time.Parse(time.RFC3339, "2026-03-01T"+clock+"Z")
	if err != nil {
		t.Fatal(err)
	}
	return got
}

// TestTrimWindow: a window ends at its second time, also on the next day.
func TestTrimWindow(t *testing.T) {
	for _, tc := range []struct {
		window, now string
		want        time.Duration
	}{
		{"", "12:00:00", day},
		{"01:00-05:00", "00:59:59", 0},
		{"01:00-05:00", "01:00:00", 4 * time.Hour},
		{"01:00-05:00", "04:59:00", time.Minute},
		{"01:00-05:00", "05:00:00", 0},
		{"22:30-04:00", "23:00:00", 5 * time.Hour},
		{"22:30-04:00", "03:00:00", time.Hour},
		{"22:30-04:00", "12:00:00", 0},
		{"22:30-00:00", "23:30:00", 30 * time.Minute},
	} {
		for _, zone := range []*time.Location{time.UTC, time.FixedZone("", 5*60*60+30*60)} {
			if got := trimming(t, Config{TrimWindow: tc.window}).Left(at(t, tc.now).In(zone)); got != tc.want {
				t.Errorf("window %q at %s: got %v left, want %v", tc.window, tc.now, got, tc.want)
			}
		}
	}
}

// TestTrimDue: a volume is trimmed again after the interval, and with a window up to two hours earlier.
func TestTrimDue(t *testing.T) {
	now := at(t, "03:00:00")
	for _, tc := range []struct {
		trim, window string
		since        time.Duration
		want         bool
	}{
		{"", "", 1000 * day, false},
		{TrimNever, "", 1000 * day, false},
		{TrimDaily, "", day, true},
		{TrimDaily, "", day - time.Second, false},
		{TrimDaily, "01:00-05:00", day - windowSlack, true},
		{TrimDaily, "01:00-05:00", day - windowSlack - time.Second, false},
		{TrimWeekly, "", 7 * day, true},
		{TrimWeekly, "", 6 * day, false},
		{TrimMonthly, "", 30 * day, true},
		{TrimMonthly, "", 29 * day, false},
		{TrimMonthly, "", -time.Minute, true}, // the clock was wrong
	} {
		if got := trimming(t, Config{Trim: tc.trim, TrimWindow: tc.window}).Due(now.Add(-tc.since), now); got != tc.want {
			t.Errorf("trim %q, window %q, %v after the last one: got due %t, want %t", tc.trim, tc.window, tc.since, got, tc.want)
		}
	}
}

// TestTrimRate: the rate is configurable.
func TestTrimRate(t *testing.T) {
	for text, want := range map[string]int64{"": DefaultTrimRate, "10Mi": 10 << 20} {
		if got := trimming(t, Config{TrimBytesPerSecond: text}).Rate; got != want {
			t.Errorf("trimBytesPerSecond %q: got rate %d, want %d", text, got, want)
		}
	}
}

// TestTrimRefused: an error names the key.
func TestTrimRefused(t *testing.T) {
	for key, configs := range map[string][]Config{
		"trim":               {{Trim: "hourly"}, {Trim: "7d"}},
		"trimWindow":         {{TrimWindow: "01:00"}, {TrimWindow: "01:00-01:00"}, {TrimWindow: "1-5"}, {TrimWindow: "01:00-25:00"}},
		"trimBytesPerSecond": {{TrimBytesPerSecond: "0"}, {TrimBytesPerSecond: "fast"}},
	} {
		for _, c := range configs {
			if _, got, err := c.Trimming(); got != key || err == nil || !strings.HasPrefix(err.Error(), key+" ") {
				t.Errorf("%+v: got key %q and error %v, want %s", c, got, err, key)
			}
		}
	}
	c := Config{Name: "nas", NFS: &NFS{Server: "server.example", Export: "/export"}, Trim: TrimWeekly}
	if key, err := c.Validate(); key != "trim" {
		t.Errorf("an export with trim: got key %q and error %v, want trim", key, err)
	}
}

// TestTrimmed: the time of the last trim is durable, and is at first the creation of the volume.
func TestTrimmed(t *testing.T) {
	p, _ := openPlain(t)
	v := volume.Volume{ID: p.ID("loop", "v"), Created: at(t, "01:00:00")}
	must(t, p.root.Mkdir(volumesDir+"/v", 0o700))
	want := func(want time.Time) {
		t.Helper()
		got, err := p.Trimmed(v)
		must(t, err)
		if !got.Equal(want) {
			t.Errorf("got %v, want %v", got, want)
		}
	}
	want(v.Created)
	for _, clock := range []string{"02:00:00", "03:00:00"} {
		must(t, p.SetTrimmed("v", at(t, clock).In(time.FixedZone("", 3600))))
		want(at(t, clock))
	}
	must(t, p.root.WriteFile(volumePath("v", trimmedFile), []byte("damaged"), 0o600))
	want(v.Created)
}
