package driver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

const (
	// scheduleInterval is how often the volumes of a pool are searched for those that are due.
	scheduleInterval = 5 * time.Minute
	// scheduleRetry is the time after a failed run before the task runs again for the volume, and skippedRetry that after the volume
	// was skipped. skippedRetry is below a day, so that the next window of a pool is later.
	scheduleRetry = time.Hour
	skippedRetry  = 20 * time.Hour
)

// task is what a scheduler repeats for the volumes of pools.
type task struct {
	// name is a verb, for logs.
	name string
	// ends is the cause of a run that ends because the driver stops, or because the window of the pool is over.
	ends error
	// scheduleOf returns when the volumes of a pool are due. It is called only with valid configurations.
	scheduleOf func(pool.Config) pool.Schedule
	// candidates returns the volumes of a pool for which the task can run now.
	candidates func(context.Context, *pool.Pool) ([]candidate, error)
	// oldest is the metric with the time of the last run for the volume whose last run was the longest time ago.
	oldest *prometheus.Desc
}

// candidate is a volume for which a task can run.
type candidate struct {
	id   volume.ID
	last time.Time // the beginning of the last complete run, or the creation of the volume
	run  func(context.Context) error
}

// scheduler runs a task for the volumes of pools when they are due, in each pool for one volume at a time.
type scheduler struct {
	task     task
	pools    *pool.Set
	interval time.Duration // scheduleInterval
	// ctx ends with Close.
	ctx  context.Context
	stop context.CancelCauseFunc
	runs sync.WaitGroup

	mu      sync.Mutex           // also for the state of the task
	oldests map[string]time.Time // by the name of the pool
}

// newScheduler returns a scheduler, which ends with Close.
func newScheduler(ctx context.Context, pools *pool.Set, t task) *scheduler {
	s := &scheduler{task: t, pools: pools, interval: scheduleInterval, oldests: map[string]time.Time{}}
	s.ctx, s.stop = context.WithCancelCause(ctx)
	return s
}

// start begins the scheduled runs.
func (s *scheduler) start(configs []pool.Config) {
	s.mu.Lock() // Close may be called at the same time
	defer s.mu.Unlock()
	if s.ctx.Err() != nil {
		return
	}
	for _, c := range configs {
		if when := s.task.scheduleOf(c); when.Scheduled() {
			s.runs.Go(func() { s.repeat(c.Name, when) })
		}
	}
}

// Close ends all runs, and waits for the scheduled ones.
func (s *scheduler) Close() {
	s.mu.Lock()
	s.stop(s.task.ends)
	s.mu.Unlock()
	s.runs.Wait()
}

// repeat runs the task for the volumes of a pool when they are due.
func (s *scheduler) repeat(name string, when pool.Schedule) {
	tick := time.NewTicker(s.interval)
	defer tick.Stop()
	failed := failures{}
	lastLogged := ""
	for {
		err := s.search(name, when, failed)
		if err != nil && err.Error() != lastLogged {
			klog.FromContext(s.ctx).Error(err, "Searching the volumes that are due failed; retrying", "task", s.task.name, "pool", name, "interval", s.interval)
		}
		lastLogged = fmt.Sprint(err)
		select {
		case <-s.ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// errNotBegun means that a run has only waited for its turn.
var errNotBegun = errors.New("it was waiting for its turn")

// failures are the last runs for volumes if they have failed, or have not ended in a window in which they were the first.
type failures map[volume.ID]failure

type failure struct {
	at      time.Time
	reason  string
	skipped bool // the task cannot run for the volume (ErrPrecondition), perhaps only now
}

// waits reports whether it is too early to repeat a run.
func (f failure) waits(now time.Time) bool {
	if f.skipped {
		return now.Sub(f.at) < skippedRetry
	}
	return now.Sub(f.at) < scheduleRetry
}

// lastRun returns when the last run for a candidate was, whether it was complete or not.
func (f failures) lastRun(c candidate) time.Time {
	if at := f[c.id].at; at.After(c.last) {
		return at
	}
	return c.last
}

// oldest returns when the last complete run was for the volume for which it was the longest time ago, without those that were
// skipped. It is zero without a volume. lasts are the times of the last complete runs.
func (f failures) oldest(lasts map[volume.ID]time.Time) (oldest time.Time) {
	for id, last := range lasts {
		if !f[id].skipped && (oldest.IsZero() || last.Before(oldest)) {
			oldest = last
		}
	}
	return oldest
}

// search runs the task for the volumes of a pool that are due.
func (s *scheduler) search(name string, when pool.Schedule, failed failures) error {
	p, err := s.pools.Named(name)
	if err != nil || p.Check() != nil {
		return nil //nolint:nilerr // metrics and health report a pool that is not open
	}
	all, err := s.task.candidates(s.ctx, p)
	if err != nil {
		return err
	}
	s.runDue(name, all, when, failed)
	return nil
}

// setOldest sets the metric of a pool.
func (s *scheduler) setOldest(name string, at time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.oldests[name] = at
}

// runDue runs the task for those of the candidates of a pool that are due, the one first whose last run was the longest time
// ago. It stops at the end of the window. A run that has failed also counts for the order, and one that has not ended in the window
// only if it was the first: so a volume that needs more than the rest of a window is the first in a later one, and a volume that
// needs more than a window does not keep the others from their turn. The metric of the pool follows the runs.
func (s *scheduler) runDue(name string, all []candidate, when pool.Schedule, failed failures) {
	maps.DeleteFunc(failed, func(id volume.ID, _ failure) bool {
		return !slices.ContainsFunc(all, func(c candidate) bool { return c.id == id })
	})
	slices.SortFunc(all, func(a, b candidate) int { return failed.lastRun(a).Compare(failed.lastRun(b)) })
	lasts := map[volume.ID]time.Time{}
	for _, c := range all {
		lasts[c.id] = c.last
	}
	s.setOldest(name, failed.oldest(lasts))
	left := when.Left(time.Now())
	if left == 0 {
		return
	}
	ctx := s.ctx
	if left != pool.Forever {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, left, s.task.ends)
		defer cancel()
	}
	first := true
	for _, c := range all {
		before, retried := failed[c.id]
		began := time.Now()
		if ctx.Err() != nil || !when.Due(c.last, began) || retried && before.waits(began) {
			continue
		}
		err := c.run(ctx)
		switch {
		case errors.Is(err, errNotBegun):
			continue
		case err == nil:
			lasts[c.id] = began
			delete(failed, c.id)
		case errors.Is(err, volume.ErrNotFound): // it was deleted meanwhile
			delete(lasts, c.id)
			delete(failed, c.id)
		case ctx.Err() == nil && errors.Is(err, s.task.ends):
			delete(failed, c.id)
		default:
			if first || ctx.Err() == nil {
				failed[c.id] = failure{time.Now(), err.Error(), errors.Is(err, volume.ErrPrecondition)}
			}
			s.log(ctx, c, err, before)
		}
		first = false
		s.setOldest(name, failed.oldest(lasts))
	}
}

// log logs that a run was stopped at the end of the window, or that its volume was skipped for another reason than before. The task
// logs other errors.
func (s *scheduler) log(ctx context.Context, c candidate, err error, before failure) {
	log := klog.FromContext(ctx)
	switch {
	case s.ctx.Err() != nil:
	case ctx.Err() != nil:
		log.Info("Stopped at the end of the window", "task", s.task.name, "volume", c.id)
	case errors.Is(err, volume.ErrPrecondition) && err.Error() != before.reason:
		log.Info("Skipped a volume", "task", s.task.name, "volume", c.id, "reason", err.Error())
	}
}

// Collect sends the metric of the task.
func (s *scheduler) Collect(ch chan<- prometheus.Metric) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, at := range s.oldests {
		if !at.IsZero() {
			gauge(ch, s.task.oldest, float64(at.Unix()), name)
		}
	}
}
