package pool

import (
	"testing"
	"time"
)

func schedule(t *testing.T, every, window string) Schedule {
	t.Helper()
	got, key, err := parseSchedule("trim", every, window)
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

// TestScheduleWindow: a window ends at its second time, also on the next day.
func TestScheduleWindow(t *testing.T) {
	for _, tc := range []struct {
		window, now string
		want        time.Duration
	}{
		{"", "12:00:00", Forever},
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
			if got := schedule(t, "", tc.window).Left(at(t, tc.now).In(zone)); got != tc.want {
				t.Errorf("window %q at %s: got %v left, want %v", tc.window, tc.now, got, tc.want)
			}
		}
	}
}

// TestScheduleDue: a volume is due again after the interval, and with a window up to two hours earlier.
func TestScheduleDue(t *testing.T) {
	now := at(t, "03:00:00")
	for _, tc := range []struct {
		every, window string
		since         time.Duration
		want          bool
	}{
		{"", "", 1000 * day, false},
		{Never, "", 1000 * day, false},
		{Daily, "", day, true},
		{Daily, "", day - time.Second, false},
		{Daily, "01:00-05:00", day - windowSlack, true},
		{Daily, "01:00-05:00", day - windowSlack - time.Second, false},
		{Weekly, "", 7 * day, true},
		{Weekly, "", 6 * day, false},
		{Monthly, "", 30 * day, true},
		{Monthly, "", 29 * day, false},
		{Monthly, "", -time.Minute, true}, // the clock was wrong
	} {
		if got := schedule(t, tc.every, tc.window).Due(now.Add(-tc.since), now); got != tc.want {
			t.Errorf("%q, window %q, %v after the last one: got due %t, want %t", tc.every, tc.window, tc.since, got, tc.want)
		}
	}
}
