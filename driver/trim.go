package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// trimBusy is the pause before a step of a trim is repeated because another call was changing the volume.
const trimBusy = time.Second

// errTrimEnds is the cause of a trim that ends because its volume is unstaged, the driver stops, or the window is over.
var errTrimEnds = volume.Errorf(volume.ErrUnavailable, "the trim was ended, because the volume is being unstaged, the driver stops, or the window of the pool is over")

// trims returns the space of deleted files to the pools: as scheduled in their configuration, and on demand. A volume is
// trimmed in steps. Between two steps it pauses as the rate of the pool requires, and at least as long as a step took, so
// that other I/O of the pool waits at most half of the time. A step is a piece in the budget of the disk, in which only its time
// counts: the bytes that it returns are not read or written. It has no idle I/O priority, because the kernel locks parts of the
// filesystem that the volume's pods need.
type trims struct {
	*scheduler

	backends *backend.Registry
	// The following fields are protected by scheduler.mu.
	volumes map[volume.ID]*trimState
	byPool  map[string]*poolTrims // the map does not change
}

// trimState is the state of a volume that is being trimmed, or must not be.
type trimState struct {
	holds  int // calls that must not be disturbed by a trim
	cancel context.CancelCauseFunc
	done   chan struct{} // nil while the volume is not being trimmed
}

// poolTrims is the state of the trims of a pool.
type poolTrims struct {
	// turn has one element while a volume of the pool is trimmed, so that the rate applies to all together.
	turn chan struct{}
	// The following fields are protected by scheduler.mu.
	bytes, failures float64
}

// newTrims returns the trims of a driver. They end with Close.
func newTrims(ctx context.Context, pools *pool.Set, backends *backend.Registry, configs []pool.Config) *trims {
	t := &trims{backends: backends, volumes: map[volume.ID]*trimState{}, byPool: map[string]*poolTrims{}}
	t.scheduler = newScheduler(ctx, pools, task{
		name: "trim", ends: errTrimEnds, oldest: trimOldest, candidates: t.candidates,
		scheduleOf: func(c pool.Config) pool.Schedule { trimming, _, _ := c.Trimming(); return trimming.Schedule },
	})
	for _, c := range configs {
		if !c.Shared() {
			t.byPool[c.Name] = &poolTrims{turn: make(chan struct{}, 1)}
		}
	}
	return t
}

// trimmable is a volume that can be trimmed.
type trimmable struct {
	p *pool.Pool
	b backend.Trimmer
	v volume.Volume
}

// candidates returns the mounted volumes of a pool that have space to return, for the scheduler.
func (t *trims) candidates(ctx context.Context, p *pool.Pool) (all []candidate, err error) {
	volumes, err := t.mounted(ctx, p)
	if err != nil {
		return nil, err
	}
	for _, c := range volumes {
		last, err := p.Trimmed(c.v)
		if err != nil {
			return nil, err
		}
		all = append(all, candidate{c.v.ID, last, func(ctx context.Context) error {
			_, err := t.trim(ctx, c)
			return err
		}})
	}
	return all, nil
}

// mounted returns the mounted volumes of a pool that have space to return.
func (t *trims) mounted(ctx context.Context, p *pool.Pool) (all []trimmable, err error) {
	for _, b := range backend.As[backend.Trimmer](t.backends) {
		volumes, _, err := p.List(b.(backend.Backend).Name(), "", math.MaxInt)
		if err != nil {
			return nil, err
		}
		for _, v := range volumes {
			if v.Version == 0 || b.CheckTrim(v) != nil { // a volume with a damaged record has a condition
				continue
			}
			if staged, err := isAttached(ctx, b.(backend.Backend), v); err == nil && staged {
				all = append(all, trimmable{p, b, v})
			}
		}
	}
	return all, nil
}

// isAttached reports whether a volume is attached to this node.
func isAttached(ctx context.Context, b backend.Backend, v volume.Volume) (bool, error) {
	source, ok, err := b.Present(ctx, v)
	if err != nil || !ok {
		return false, err
	}
	return true, source.Close()
}

// trim trims one volume completely. It returns the bytes that the kernel has discarded.
func (t *trims) trim(ctx context.Context, c trimmable) (total uint64, err error) {
	ctx, end, err := t.begin(ctx, c.v.ID)
	if err != nil {
		return 0, err
	}
	defer end()
	state := t.byPool[c.p.Name()]
	select {
	case state.turn <- struct{}{}:
		defer func() { <-state.turn }()
	case <-ctx.Done():
		return 0, fmt.Errorf("%w: %w", context.Cause(ctx), errNotBegun)
	}
	began := time.Now()
	total, err = t.trimSteps(ctx, c, state)
	if err == nil {
		err = c.p.SetTrimmed(c.v.ID.Name, began)
	}
	log := klog.FromContext(ctx)
	switch {
	case err == nil:
		log.Info("Trimmed", "volume", c.v.ID, "bytes", total, "duration", time.Since(began).Round(time.Millisecond))
	case !ordinaryEnd(err):
		log.Error(err, "Trimming failed", "volume", c.v.ID)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if err != nil && !ordinaryEnd(err) {
		state.failures++
	}
	return total, err
}

// ordinaryEnd reports whether a trim has ended because of another call, or because the volume is not mounted writable.
func ordinaryEnd(err error) bool {
	return errors.Is(err, errTrimEnds) || errors.Is(err, context.Canceled) || errors.Is(err, volume.ErrPrecondition) || errors.Is(err, volume.ErrNotFound)
}

// trimSteps trims a volume step by step.
func (t *trims) trimSteps(ctx context.Context, c trimmable, state *poolTrims) (total uint64, err error) {
	trimming, _, err := c.p.Config().Trimming()
	if err != nil {
		return 0, err
	}
	budget, err := c.b.TrimBudget(c.v)
	if err != nil {
		return 0, err
	}
	for at := uint64(0); ; {
		var step blockdev.Trimmed
		var took time.Duration
		err := budget.Do(ctx, func() (_ int64, err error) {
			began := time.Now()
			step, err = c.b.TrimStep(c.v, at)
			took = time.Since(began)
			return 0, err
		})
		pause := max(took, time.Duration(float64(step.Bytes)/float64(trimming.Rate)*float64(time.Second)))
		switch {
		case errors.Is(err, volume.ErrPending):
			pause = trimBusy
		case err != nil && errors.Is(err, ctx.Err()):
			return total, context.Cause(ctx)
		case err != nil:
			return total, err
		case step.Done:
			return total, nil
		default:
			at = step.Next
		}
		total += step.Bytes
		t.mu.Lock()
		state.bytes += float64(step.Bytes)
		t.mu.Unlock()
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

// begin registers the trim of a volume. end must be called when the trim has ended.
func (t *trims) begin(ctx context.Context, id volume.ID) (trimCtx context.Context, end func(), err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.stateOf(id)
	switch {
	case t.ctx.Err() != nil:
		return nil, nil, context.Cause(t.ctx)
	case s.holds > 0:
		return nil, nil, errTrimEnds
	case s.done != nil:
		return nil, nil, volume.Errorf(volume.ErrPending, "volume %s is being trimmed by another call, or waits for its turn", id)
	}
	trimCtx, s.cancel = context.WithCancelCause(ctx)
	s.done = make(chan struct{})
	return trimCtx, func() {
		s.cancel(nil)
		t.mu.Lock()
		defer t.mu.Unlock()
		close(s.done)
		s.done = nil
		t.forget(id)
	}, nil
}

// Hold ends the trim of a volume after its current step, or when ctx ends, and prevents another one until release is called.
func (t *trims) Hold(ctx context.Context, id volume.ID) (release func()) {
	t.mu.Lock()
	s := t.stateOf(id)
	s.holds++
	done := s.done
	if done != nil {
		s.cancel(errTrimEnds)
	}
	t.mu.Unlock()
	if done != nil {
		select {
		case <-done:
		case <-ctx.Done():
		}
	}
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		s.holds--
		t.forget(id)
	}
}

// stateOf returns the state of a volume. The caller holds t.mu.
func (t *trims) stateOf(id volume.ID) *trimState {
	if t.volumes[id] == nil {
		t.volumes[id] = &trimState{}
	}
	return t.volumes[id]
}

// forget removes the state of a volume that is not used. The caller holds t.mu.
func (t *trims) forget(id volume.ID) {
	if s := t.volumes[id]; s != nil && s.holds == 0 && s.done == nil {
		delete(t.volumes, id)
	}
}

var (
	trimBytes    = prometheus.NewDesc("trivet_trim_bytes_total", "Bytes that the kernel has discarded when this process trimmed volumes.", []string{"pool"}, nil)
	trimFailures = prometheus.NewDesc("trivet_trim_failures_total", "Trims of volumes that have failed. Each is retried after an hour.", []string{"pool"}, nil)
	trimOldest   = prometheus.NewDesc("trivet_trim_oldest_timestamp_seconds", "Pool with trim: Unix time of the last trim of the mounted volume that was not trimmed for the longest time, or of its creation; without volumes that cannot be trimmed.", []string{"pool"}, nil)
)

// Describe implements prometheus.Collector.
func (t *trims) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{trimBytes, trimFailures, trimOldest} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (t *trims) Collect(ch chan<- prometheus.Metric) {
	t.scheduler.Collect(ch)
	t.mu.Lock()
	defer t.mu.Unlock()
	for name, p := range t.byPool {
		ch <- prometheus.MustNewConstMetric(trimBytes, prometheus.CounterValue, p.bytes, name)
		ch <- prometheus.MustNewConstMetric(trimFailures, prometheus.CounterValue, p.failures, name)
	}
}

// TrimRequest names the volumes to trim. Without any, all mounted volumes are trimmed that have space to return.
type TrimRequest struct {
	// Volumes are IDs.
	Volumes []string `json:"volumes,omitempty"`
	// Pool limits the request to the volumes of a pool, unless Volumes are given.
	Pool string `json:"pool,omitempty"`
}

// TrimResult is the result of the trim of one volume.
type TrimResult struct {
	ID   string `json:"id"`
	Name string `json:"name,omitempty"`
	Pool string `json:"pool,omitempty"`
	// TrimmedBytes are the bytes that the kernel has discarded. ext4 and btrfs do not discard blocks again that are unused
	// since an earlier trim.
	TrimmedBytes int64 `json:"trimmedBytes"`
	// Problem is the reason why the volume was not trimmed completely.
	Problem string `json:"problem,omitempty"`
}

// demand trims the volumes of a request. The error means that the request is invalid, or that a pool cannot be read.
func (t *trims) demand(ctx context.Context, r TrimRequest) ([]TrimResult, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(t.ctx, func() { cancel(errTrimEnds) })() //nolint:contextcheck // the end of either context ends the trim
	if len(r.Volumes) == 0 {
		return t.trimPools(ctx, r.Pool)
	}
	results := []TrimResult{}
	for _, id := range r.Volumes {
		results = append(results, t.trimByID(ctx, id))
	}
	return results, nil
}

// trimPools trims all volumes of a pool, or of all pools if name is empty.
func (t *trims) trimPools(ctx context.Context, name string) ([]TrimResult, error) {
	if t.byPool[name] == nil && name != "" {
		return nil, volume.Errorf(volume.ErrInvalid, "pool %q: no pool of this node has that name", name)
	}
	results := []TrimResult{}
	for _, s := range t.pools.States() {
		if name != "" && s.Name != name {
			continue
		}
		err := s.Err
		if err == nil {
			err = s.Pool.Check()
		}
		var all []trimmable
		if err == nil {
			all, err = t.mounted(ctx, s.Pool)
		}
		if err != nil {
			return nil, err
		}
		for _, c := range all {
			n, err := t.trim(ctx, c)
			results = append(results, trimResult(c.v, n, err))
		}
	}
	return results, nil
}

// trimByID trims the volume with an ID.
func (t *trims) trimByID(ctx context.Context, id string) TrimResult {
	found, v, err := t.backends.Volume(ctx, id)
	if err != nil {
		return TrimResult{ID: id, Problem: err.Error()}
	}
	b, ok := found.(backend.Trimmer)
	if !ok {
		err = volume.Errorf(volume.ErrPrecondition, "volume %s: volumes of backend %s have no space to return", v.ID, found.Name())
		return trimResult(v, 0, err)
	}
	var n uint64
	if err = b.CheckTrim(v); err == nil {
		n, err = t.trimFound(ctx, b, v)
	}
	return trimResult(v, n, err)
}

// trimFound trims a volume that CheckTrim accepts.
func (t *trims) trimFound(ctx context.Context, b backend.Trimmer, v volume.Volume) (uint64, error) {
	p, err := t.pools.ByID(v.ID)
	if err != nil {
		return 0, err
	}
	return t.trim(ctx, trimmable{p, b, v})
}

func trimResult(v volume.Volume, bytes uint64, err error) TrimResult {
	r := TrimResult{ID: v.ID.String(), Name: cmp.Or(v.CoName, v.ID.Name), Pool: v.ID.Pool, TrimmedBytes: int64(bytes)}
	if err != nil {
		r.Problem = err.Error()
	}
	return r
}
