package driver

import (
	"context"
	"errors"
	"os"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// scheduleTest is a scheduler whose runs are recorded.
type scheduleTest struct {
	*scheduler

	when    pool.Schedule
	failed  failures
	results map[string]error // by the name of the volume
	ran     []string
}

func newScheduleTest(t *testing.T) *scheduleTest {
	t.Helper()
	when, _, err := pool.Config{Check: pool.Daily}.Checking()
	must(t, err)
	s := &scheduleTest{scheduler: newScheduler(t.Context(), nil, task{name: "check", ends: errCheckEnds}), when: when, failed: failures{}, results: map[string]error{}}
	t.Cleanup(s.Close)
	return s
}

// run runs the task for volumes whose last runs were some hours ago, and returns the names of those for which it ran.
func (s *scheduleTest) run(hours map[string]int) []string {
	var all []candidate
	for name, ago := range hours {
		all = append(all, candidate{volume.ID{Name: name}, time.Now().Add(-time.Duration(ago) * time.Hour), func(context.Context) error {
			s.ran = append(s.ran, name)
			return s.results[name]
		}})
	}
	s.ran = nil
	s.runDue("p", all, s.when, s.failed)
	return s.ran
}

// TestScheduleOrder: the task runs for the volumes that are due, the one first whose last run was the longest time ago.
func TestScheduleOrder(t *testing.T) {
	s := newScheduleTest(t)
	if got, want := s.run(map[string]int{"a": 25, "b": 23, "c": 27, "d": 26}), []string{"c", "d", "a"}; !slices.Equal(got, want) {
		t.Errorf("got runs for %v, want %v", got, want)
	}
}

// TestScheduleFair: if the windows are too short for all volumes, each of them has its turn, also one whose run was interrupted. A
// volume that needs more than a window uses one of five.
func TestScheduleFair(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScheduleTest(t)
		var err error
		s.when, _, err = pool.Config{Check: pool.Daily, CheckWindow: "00:00-01:00"}.Checking() // the clock begins at midnight
		must(t, err)
		last, ended := map[string]time.Time{}, map[string]int{}
		for range 10 {
			midnight := time.Now()
			var all []candidate
			for _, name := range []string{"a", "b", "large", "c", "d"} {
				needs := 40 * time.Minute
				if name == "large" {
					needs = 2 * time.Hour
				}
				all = append(all, candidate{volume.ID{Name: name}, last[name], func(ctx context.Context) error {
					begun := time.Now()
					select {
					case <-ctx.Done():
						return context.Cause(ctx)
					case <-time.After(needs):
						last[name] = begun
						ended[name]++
						return nil
					}
				}})
			}
			s.runDue("p", all, s.when, s.failed)
			<-time.After(time.Until(midnight.AddDate(0, 0, 1)))
		}
		for _, name := range []string{"a", "b", "c", "d"} {
			if ended[name] != 2 {
				t.Errorf("got %v complete runs in 10 windows, want 2 for each of four volumes", ended)
				break
			}
		}
	})
}

// TestScheduleNotBegun: a run that has only waited for its turn until the end of the window does not count.
func TestScheduleNotBegun(t *testing.T) {
	s := newScheduleTest(t)
	earlier := failure{at: time.Now().Add(-2 * scheduleRetry), reason: "earlier"}
	s.failed[volume.ID{Name: "b"}] = earlier
	s.results = map[string]error{"a": errNotBegun, "b": errNotBegun}
	s.run(map[string]int{"a": 25, "b": 25})
	if len(s.failed) != 1 || s.failed[volume.ID{Name: "b"}] != earlier {
		t.Errorf("got failures %v, want only the earlier one of volume b", s.failed)
	}
}

// TestScheduleFailures: a run that has failed is repeated after an hour, and after those for other volumes whose last run was before
// it. A run that another call has ended is repeated at once, and one for a volume that was skipped after a day.
func TestScheduleFailures(t *testing.T) {
	s := newScheduleTest(t)
	hours := map[string]int{"failed": 99, "skipped": 98, "held": 97, "other": 25}
	s.results = map[string]error{"failed": os.ErrInvalid, "skipped": volume.ErrPrecondition, "held": errCheckEnds}
	if got, want := s.run(hours), []string{"failed", "skipped", "held", "other"}; !slices.Equal(got, want) {
		t.Errorf("first: got runs for %v, want %v", got, want)
	}
	if got, want := s.run(hours), []string{"held", "other"}; !slices.Equal(got, want) {
		t.Errorf("after failures: got runs for %v, want %v", got, want)
	}
	earlier := func(by time.Duration) {
		for id, f := range s.failed {
			f.at = f.at.Add(-by)
			s.failed[id] = f
		}
	}
	earlier(scheduleRetry)
	if got, want := s.run(hours), []string{"held", "other", "failed"}; !slices.Equal(got, want) {
		t.Errorf("an hour after failures: got runs for %v, want %v", got, want)
	}
	earlier(skippedRetry - scheduleRetry)
	if got, want := s.run(hours), []string{"held", "other", "skipped", "failed"}; !slices.Equal(got, want) {
		t.Errorf("a day after failures: got runs for %v, want %v", got, want)
	}
	s.run(map[string]int{"other": 25})
	if len(s.failed) != 0 {
		t.Errorf("got failures %v of volumes that cannot be used any more, want none", s.failed)
	}
}

// TestScheduleOldest: a volume that was skipped does not count.
func TestScheduleOldest(t *testing.T) {
	at := func(hour int) time.Time { return time.Date(2026, 3, 1, hour, 0, 0, 0, time.UTC) }
	lasts := map[volume.ID]time.Time{{Name: "skipped"}: at(1), {Name: "b"}: at(3), {Name: "failed"}: at(2)}
	failed := failures{{Name: "skipped"}: {skipped: true}, {Name: "failed"}: {}}
	if got := failed.oldest(lasts); !got.Equal(at(2)) {
		t.Errorf("got %v, want %v", got, at(2))
	}
	if got := failed.oldest(map[volume.ID]time.Time{{Name: "skipped"}: at(1)}); !got.IsZero() {
		t.Errorf("got %v without a volume that can be used, want none", got)
	}
}

// oldest returns the metric of the pool.
func (s *scheduleTest) oldest() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.oldests["p"]
}

// TestScheduleOldestInPass: the metric follows the runs while others have not begun. Volumes that were deleted, or are skipped, do
// not count any more.
func TestScheduleOldestInPass(t *testing.T) {
	s := newScheduleTest(t)
	now := time.Now()
	at := func(days int) time.Time { return now.AddDate(0, 0, -days) }
	recent, due := at(0), at(2)
	gone := func(err error) func(context.Context) error { return func(context.Context) error { return err } }
	s.runDue("p", []candidate{
		{volume.ID{Name: "deleted"}, at(5), gone(volume.Errorf(volume.ErrNotFound, "deleted"))},
		{volume.ID{Name: "skipped"}, at(4), gone(volume.Errorf(volume.ErrPrecondition, "not mounted"))},
		{volume.ID{Name: "oldest"}, at(3), func(context.Context) error {
			if got := s.oldest(); !got.Equal(at(3)) {
				t.Errorf("got %v after the deleted and the skipped volume, want %v", got, at(3))
			}
			return nil
		}},
		{volume.ID{Name: "due"}, due, func(context.Context) error {
			if got := s.oldest(); !got.Equal(due) {
				t.Errorf("got %v in the next run, want %v", got, due)
			}
			return nil
		}},
		{volume.ID{Name: "recent"}, recent, nil},
	}, s.when, s.failed)
	if got := s.oldest(); !got.Equal(recent) {
		t.Errorf("got %v after all runs, want %v", got, recent)
	}
	if _, ok := s.failed[volume.ID{Name: "deleted"}]; ok {
		t.Error("the deleted volume counts as failed")
	}
	s.runDue("p", []candidate{{volume.ID{Name: "deleted"}, at(5), gone(volume.Errorf(volume.ErrNotFound, "deleted"))}}, s.when, s.failed)
	if got := s.oldest(); !got.IsZero() {
		t.Errorf("got %v when the only volume was deleted, want none", got)
	}
}

// TestScheduleWindow: no run begins outside the window, and a run ends with it. Without a window, a run has no limit.
func TestScheduleWindow(t *testing.T) {
	s := newScheduleTest(t)
	clock := func(d time.Duration) string { return time.Now().UTC().Add(d).Format("15:04") }
	window := func(from, to time.Duration) (when pool.Schedule) {
		when, _, err := pool.Config{Check: pool.Daily, CheckWindow: clock(from) + "-" + clock(to)}.Checking()
		must(t, err)
		return when
	}
	s.runDue("p", []candidate{{volume.ID{Name: "a"}, time.Now().Add(-25 * time.Hour), func(ctx context.Context) error {
		if deadline, limited := ctx.Deadline(); limited {
			t.Errorf("without a window: got the end %v, want none", deadline)
		}
		return nil
	}}}, s.when, s.failed)
	s.when = window(2*time.Hour, 3*time.Hour)
	if got := s.run(map[string]int{"a": 25}); len(got) != 0 {
		t.Errorf("outside the window: got runs for %v, want none", got)
	}
	s.when = window(-time.Hour, time.Hour)
	s.runDue("p", []candidate{{volume.ID{Name: "a"}, time.Now().Add(-25 * time.Hour), func(ctx context.Context) error {
		deadline, ok := ctx.Deadline()
		if left := time.Until(deadline); !ok || left < 58*time.Minute || left > time.Hour {
			t.Errorf("got %v left, want until the end of the window", left)
		}
		s.ran = append(s.ran, "a")
		return nil
	}}}, s.when, s.failed)
	if !slices.Equal(s.ran, []string{"a"}) {
		t.Errorf("in the window: got runs for %v, want one", s.ran)
	}
}

// TestScheduleClose: Close ends a run, and waits for it.
func TestScheduleClose(t *testing.T) {
	s := newScheduleTest(t)
	var ended error
	entered := make(chan struct{})
	s.runs.Go(func() {
		s.runDue("p", []candidate{{volume.ID{Name: "a"}, time.Time{}, func(ctx context.Context) error {
			close(entered)
			<-ctx.Done()
			ended = context.Cause(ctx)
			return ended
		}}}, s.when, s.failed)
	})
	<-entered
	s.Close()
	if !errors.Is(ended, errCheckEnds) {
		t.Errorf("got cause %v of the end, want %v", ended, errCheckEnds)
	}
}
