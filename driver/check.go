package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

const (
	// hangTime is the time after the end of its context until a check that has not returned counts as failed.
	hangTime = 5 * time.Minute
	// turnTime is the longest time for which a check that has not returned delays the checks in other pools.
	turnTime = 24 * time.Hour
)

var errCheckHangs = volume.Errorf(volume.ErrUnavailable, "the check has not returned %s after its end: a disk does not answer, and a scheduled check delays the others of its pool until it returns: see the kernel's log, and restart the node if the disk does not answer again", hangTime)

// errCheckEnds is the cause of a check that ends because the driver stops, or because the window is over.
var errCheckEnds = volume.Errorf(volume.ErrUnavailable, "the check was ended, because the driver stops, or the window of the pool is over: check the volume again")

// Values of CheckResult.Result.
const (
	CheckClean   = "clean"
	CheckDamaged = "damaged"
	CheckFailed  = "failed"
)

// checks are the checks of the filesystems of volumes: as scheduled in the configuration of their pools, and on demand. Nothing
// waits for a check, because it uses only a copy of its volume.
type checks struct {
	*scheduler

	backends *backend.Registry
	// turn has one element while a volume is checked, so that only one check program needs memory at a time. A check that does not
	// return, or takes longer than turnTime, does not keep the turn (takeTurn, watch).
	turn chan struct{}
	// scheduler.mu protects the fields below. running contains the volumes whose check has not returned.
	running map[volume.ID]bool
	counts  map[countedCheck]float64
}

// countedCheck identifies the number of checks in a pool that had a result.
type countedCheck struct{ pool, result string }

// newChecks returns the checks of a driver. They end with Close.
func newChecks(ctx context.Context, pools *pool.Set, backends *backend.Registry, configs []pool.Config) *checks {
	c := &checks{backends: backends, turn: make(chan struct{}, 1), running: map[volume.ID]bool{}, counts: map[countedCheck]float64{}}
	c.scheduler = newScheduler(ctx, pools, task{
		name: "check", ends: errCheckEnds, oldest: checkOldest, candidates: c.candidates,
		scheduleOf: func(config pool.Config) pool.Schedule { s, _, _ := config.Checking(); return s },
	})
	for _, config := range configs {
		if config.Shared() {
			continue
		}
		for _, result := range []string{CheckClean, CheckDamaged, CheckFailed} {
			c.counts[countedCheck{config.Name, result}] = 0
		}
	}
	return c
}

// candidates returns the volumes of a pool that can be checked, for the scheduler.
func (c *checks) candidates(_ context.Context, p *pool.Pool) (all []candidate, err error) {
	for _, b := range backend.As[backend.FilesystemChecker](c.backends) {
		volumes, _, err := p.List(b.(backend.Backend).Name(), "", math.MaxInt)
		if err != nil {
			return nil, err
		}
		for _, v := range volumes {
			if v.Version == 0 || b.Checkable(v) != nil { // a volume with a damaged record has a condition
				continue
			}
			last, ok, err := p.Checked(v)
			if err != nil || !ok { // health reports a result that cannot be read
				last.At = v.Created
			}
			all = append(all, candidate{v.ID, last.At, func(ctx context.Context) error {
				_, err := c.byID(ctx, v.ID.String()) // the volume can have changed meanwhile
				return err
			}})
		}
	}
	return all, nil
}

// CheckRequest names the volumes to check.
type CheckRequest struct {
	// Volumes are IDs.
	Volumes []string `json:"volumes"`
}

// CheckResult is the result of the check of one volume.
type CheckResult struct {
	ID   string `json:"id"`
	Name string `json:"name,omitempty"`
	Pool string `json:"pool,omitempty"`
	// Result is CheckClean, CheckDamaged or CheckFailed.
	Result string `json:"result"`
	// Began is the time of the state that was checked.
	Began   time.Time `json:"began"`
	Seconds float64   `json:"seconds"`
	// Errors is the beginning of the output of the check program if the filesystem is damaged.
	Errors string `json:"errors,omitempty"`
	// Problem is the reason why the check has failed.
	Problem string `json:"problem,omitempty"`
	// LastCheck and LastResult are those of the last check before this one.
	LastCheck  time.Time `json:"lastCheck,omitzero"`
	LastResult string    `json:"lastResult,omitempty"`
}

// demand checks the volumes of a request.
func (c *checks) demand(ctx context.Context, r CheckRequest) ([]CheckResult, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(c.ctx, func() { cancel(errCheckEnds) })() //nolint:contextcheck // the end of either context ends the check
	if len(r.Volumes) == 0 {
		return nil, volume.Errorf(volume.ErrInvalid, "the request names no volume")
	}
	results := []CheckResult{}
	for _, id := range r.Volumes {
		r, _ := c.byID(ctx, id) // r contains the error
		results = append(results, r)
	}
	return results, nil
}

// byID checks the volume with an ID.
func (c *checks) byID(ctx context.Context, id string) (r CheckResult, err error) {
	r = CheckResult{ID: id, Result: CheckFailed}
	found, v, err := c.backends.Volume(ctx, id)
	if err == nil {
		r.Name, r.Pool = cmp.Or(v.CoName, v.ID.Name), v.ID.Pool
		err = c.check(ctx, found, v, &r)
	}
	if err != nil {
		r.Problem = err.Error()
	}
	return r, err
}

// check checks a volume when it is its turn, records and counts the result.
func (c *checks) check(ctx context.Context, found backend.Backend, v volume.Volume, r *CheckResult) error {
	b, ok := found.(backend.FilesystemChecker)
	if !ok {
		return volume.Errorf(volume.ErrPrecondition, "volume %s: a volume of backend %s has no device that can be copied while it is in use: check the filesystem of the pool, of the server or of the disk with its own tools", v.ID, found.Name())
	}
	p, err := c.pools.ByID(v.ID)
	if err != nil {
		return err
	}
	end, err := c.begin(v.ID)
	if err != nil {
		return err
	}
	defer end()
	pass, err := c.takeTurn(ctx, v.ID)
	if err != nil {
		return err
	}
	defer pass()
	if last, ok, err := p.Checked(v); err == nil && ok {
		r.LastCheck, r.LastResult = last.At, resultOf(last.Damaged)
	}
	defer c.watch(ctx, *r, pass)()
	r.Began = time.Now().UTC().Truncate(time.Second)
	began := time.Now()
	r.Errors, err = b.CheckFilesystem(ctx, v)
	r.Seconds = time.Since(began).Seconds()
	if ctx.Err() != nil { // the check program was killed
		if err != nil { // also if the release of the copy has failed
			klog.FromContext(ctx).Info("A check was ended", "volume", v.ID, "error", err.Error())
		}
		return context.Cause(ctx)
	}
	if errors.Is(err, volume.ErrExhausted) {
		err = fmt.Errorf("the check needs a temporary copy, which counts with what the volume has allocated: %w", err)
	}
	damaged := r.Errors != "" // also if the release of the copy has failed
	if damaged || err == nil {
		recordErr := p.SetChecked(v.ID.Name, pool.Checked{At: r.Began, Damaged: damaged})
		if damaged || recordErr == nil {
			r.Result = resultOf(damaged)
		}
		err = errors.Join(err, recordErr)
	}
	c.count(ctx, *r, err)
	return err
}

// begin registers the check of a volume. end must be called when the check has returned.
func (c *checks) begin(id volume.ID) (end func(), err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running[id] {
		return nil, volume.Errorf(volume.ErrPending, "volume %s is being checked by another call, or waits for its turn", id)
	}
	c.running[id] = true
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.running, id)
	}, nil
}

// takeTurn waits until the other checks have returned, or have had their time. pass ends the turn, also if it is called again.
func (c *checks) takeTurn(ctx context.Context, id volume.ID) (pass func(), err error) {
	select {
	case c.turn <- struct{}{}:
	case <-ctx.Done():
		return nil, fmt.Errorf("%w: %w", context.Cause(ctx), errNotBegun)
	}
	end := sync.OnceFunc(func() { <-c.turn })
	over := time.AfterFunc(turnTime, func() {
		klog.FromContext(ctx).Info("A check has not returned, and no longer delays other checks", "volume", id, "duration", turnTime)
		end()
	})
	return func() {
		over.Stop()
		end()
	}, nil
}

// watch logs and counts a check that has not returned some time after the end of ctx, for example because a disk does not answer, and
// calls pass.
func (c *checks) watch(ctx context.Context, r CheckResult, pass func()) (returned func()) {
	done := make(chan struct{})
	go func() {
		select {
		case <-done:
			return
		case <-ctx.Done():
		}
		select {
		case <-done:
		case <-time.After(hangTime):
			c.count(ctx, r, errCheckHangs)
			pass()
		}
	}()
	return func() { close(done) }
}

func resultOf(damaged bool) string {
	if damaged {
		return CheckDamaged
	}
	return CheckClean
}

// count logs and counts a result, but not that a volume cannot be checked, or was deleted.
func (c *checks) count(ctx context.Context, r CheckResult, err error) {
	log := klog.FromContext(ctx)
	switch {
	case errors.Is(err, volume.ErrPrecondition), errors.Is(err, volume.ErrNotFound):
		return
	case err != nil:
		log.Error(err, "Checking a volume failed", "volume", r.ID)
	case r.Result == CheckDamaged:
		log.Error(nil, "The filesystem of a volume has errors", "volume", r.ID, "errors", r.Errors)
	default:
		log.Info("Checked", "volume", r.ID, "seconds", r.Seconds)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.counts[countedCheck{r.Pool, r.Result}]++
}

var (
	checksTotal = prometheus.NewDesc("trivet_checks_total", "Checks of the filesystems of volumes by this process, by result: clean, damaged, failed; alert when damaged grows.", []string{"pool", "result"}, nil)
	checkOldest = prometheus.NewDesc("trivet_check_oldest_timestamp_seconds", "Pool with check: Unix time of the last check of the volume that was not checked for the longest time, or of its creation; without volumes that cannot be checked.", []string{"pool"}, nil)
)

// Describe implements prometheus.Collector.
func (c *checks) Describe(ch chan<- *prometheus.Desc) {
	ch <- checksTotal
	ch <- checkOldest
}

// Collect implements prometheus.Collector.
func (c *checks) Collect(ch chan<- prometheus.Metric) {
	c.scheduler.Collect(ch)
	c.mu.Lock()
	defer c.mu.Unlock()
	for of, n := range c.counts {
		ch <- prometheus.MustNewConstMetric(checksTotal, prometheus.CounterValue, n, of.pool, of.result)
	}
}
