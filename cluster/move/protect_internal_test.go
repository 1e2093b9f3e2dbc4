package move

import (
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestSchedule: each period that a CronJob can express has a schedule, which depends on the claim, and others are refused.
func TestSchedule(t *testing.T) {
	for every, want := range map[time.Duration]string{
		time.Minute: "0-59/1 * * * *", 15 * time.Minute: "7-59/15 * * * *", 30 * time.Minute: "7-59/30 * * * *",
		time.Hour: "7 0-23/1 * * *", 6 * time.Hour: "7 2-23/6 * * *", 24 * time.Hour: "7 8 * * *",
	} {
		if got, err := schedule(every, "u"); err != nil || len(strings.Fields(got)) != 5 || strings.Count(got, "/") != strings.Count(want, "/") {
			t.Errorf("%v: got %q, %v, want one as %q", every, got, err, want)
		}
	}
	one, err1 := schedule(time.Hour, "one")
	two, err2 := schedule(time.Hour, "two")
	if err1 != nil || err2 != nil || one == two {
		t.Errorf("got %q, %v and %q, %v, want different minutes for two claims", one, err1, two, err2)
	}
	for _, every := range []time.Duration{0, -time.Hour, time.Second, 90 * time.Second, 7 * time.Minute, 45 * time.Minute, 90 * time.Minute, 5 * time.Hour, 24*time.Hour + time.Minute, 48 * time.Hour} {
		if got, err := schedule(every, "u"); err == nil || !strings.Contains(err.Error(), "a CronJob cannot run with this period") {
			t.Errorf("%v: got %q, %v, want an error", every, got, err)
		}
	}
}

// TestPeriod: a period is printed without zero units.
func TestPeriod(t *testing.T) {
	for every, want := range map[time.Duration]string{10 * time.Minute: "10m", time.Hour: "1h", 24 * time.Hour: "24h", 30 * time.Minute: "30m"} {
		if got := Period(every); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

// TestNextCopy: a copy that is not complete is continued if it is still useful. Others that are not complete are deleted.
func TestNextCopy(t *testing.T) {
	complete := func(number int) protectedCopy {
		return protectedCopy{number: number, complete: true, handle: "v", node: "b"}
	}
	begun := protectedCopy{number: 3, handle: "v", node: "b"}
	changed := func(change func(*protectedCopy)) protectedCopy {
		c := begun
		change(&c)
		return c
	}
	for name, tc := range map[string]struct {
		all         []protectedCopy
		number      int
		superfluous []int
	}{
		"first":                  {nil, 1, nil},
		"after a complete one":   {[]protectedCopy{complete(1), complete(2)}, 3, nil},
		"continued":              {[]protectedCopy{complete(2), begun}, 3, nil},
		"only a snapshot":        {[]protectedCopy{complete(2), changed(func(c *protectedCopy) { c.node = "" })}, 3, nil},
		"another volume":         {[]protectedCopy{complete(2), changed(func(c *protectedCopy) { c.handle = "w" })}, 4, []int{3}},
		"another node":           {[]protectedCopy{complete(2), changed(func(c *protectedCopy) { c.node = "c" })}, 4, []int{3}},
		"being deleted":          {[]protectedCopy{complete(2), changed(func(c *protectedCopy) { c.ending = true })}, 4, []int{3}},
		"not complete and older": {[]protectedCopy{begun, complete(4)}, 5, []int{3}},
	} {
		number, superfluous := nextCopy(tc.all, "v", "b")
		if number != tc.number || !slices.Equal(superfluous, tc.superfluous) {
			t.Errorf("%s: got copy %d, and %v to delete, want %d and %v", name, number, superfluous, tc.number, tc.superfluous)
		}
	}
}

// TestOldCopies: the newest complete copies of the volume are kept, and no others.
func TestOldCopies(t *testing.T) {
	all := []protectedCopy{
		{number: 1, complete: true, handle: "v"},
		{number: 2, complete: true, handle: "v"},
		{number: 3, handle: "v"},
		{number: 4, complete: true, handle: "w"},
		{number: 5, complete: true, handle: "v", ending: true},
		{number: 6, complete: true, handle: "v"},
	}
	for keep, want := range map[int][]int{1: {1, 2, 3, 4, 5}, 2: {1, 3, 4, 5}, 9: {3, 4, 5}} {
		if got := oldCopies(all, "v", keep); !slices.Equal(got, want) {
			t.Errorf("keep %d: got %v, want %v", keep, got, want)
		}
	}
}

// TestCronJob: the CronJob runs this program for the claim with the UID, in a pod without privileges.
func TestCronJob(t *testing.T) {
	o := ProtectOptions{Options: Options{Namespace: "ns", ClaimName: "data", To: "b", SnapshotClass: "snap"}, Every: time.Hour, Kept: 3}
	spec := cronJob("7 * * * *", o, "u", "account", "image:1", map[string]any{protectLabel: "u"})
	if spec["concurrencyPolicy"] != "Forbid" || spec["schedule"] != "7 * * * *" {
		t.Errorf("got %v, want the schedule, and one Job at a time", spec)
	}
	pod := spec["jobTemplate"].(map[string]any)["spec"].(map[string]any)["template"].(map[string]any)["spec"].(map[string]any)
	container := pod["containers"].([]any)[0].(map[string]any)
	want := []any{"/usr/local/bin/kubectl-trivet", "protect", "--namespace", "ns", "data", "--once", "u", "--on", "b", "--keep", "3", "--snapshot-class", "snap"}
	if pod["serviceAccountName"] != "account" || container["image"] != "image:1" || !reflect.DeepEqual(container["command"], want) {
		t.Errorf("got %v, want the image, the account and the command %v", pod, want)
	}
	if len(jobName("01234567-89ab-cdef-0123-456789abcdef")) > 52 {
		t.Error("the name of the CronJob is longer than 52 characters")
	}
}
