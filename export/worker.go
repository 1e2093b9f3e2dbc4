package export

import (
	"context"
	"errors"
	"maps"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/volume"
)

// intervals contains the intervals and timeouts with which a Worker is supervised.
type intervals struct {
	// check is the interval between two checks of a worker.
	check time.Duration
	// fastPing is the ping interval while the server does not answer or a call has been running for
	// longer than fastPing.
	fastPing time.Duration
	// slowPing is the interval of all other pings, and of reports.
	slowPing time.Duration
	// silentAfter is the time without an answer to pings after which the server counts as silent. It is
	// longer than a restart of the server.
	silentAfter time.Duration
	// idleTime is the time without a call after which the worker of an unconfigured pool ends.
	idleTime time.Duration
	// reportTimeout limits a request for the report of a worker.
	reportTimeout time.Duration
	// restartDelay is the delay before a restart of a worker that ended soon after its start. It
	// doubles with each such restart, up to maxRetry.
	restartDelay time.Duration
	// stopTimeout is the time after which a worker that has not ended is killed.
	stopTimeout time.Duration
}

var defaultIntervals = intervals{
	check: 500 * time.Millisecond, fastPing: time.Second, slowPing: 15 * time.Second, silentAfter: 5 * time.Second,
	idleTime: 5 * time.Minute, reportTimeout: time.Second, restartDelay: 500 * time.Millisecond, stopTimeout: 4 * time.Second,
}

const (
	// maxAbandoned limits the killed processes of a pool that have not ended, because a thread sleeps
	// uninterruptibly in the kernel. At the limit no process is started.
	maxAbandoned = 2
	// maxRetry is the maximum delay before a worker that ends repeatedly is started again.
	maxRetry = 30 * time.Second
)

// The reasons for the start of a process, as in the metrics.
const (
	startFirst     = "first"
	startEnded     = "ended"     // the previous process had ended
	startSilent    = "silent"    // the server had become silent
	startAnswering = "answering" // a silent server answered again
)

// Worker supervises the process of one pool. The first call starts the process.
type Worker struct {
	job       Job
	server    *server
	intervals intervals
	launch    func(Job) (*process, error)
	ctx       context.Context // ends with the driver, or when the worker is closed
	stop      context.CancelFunc

	mu      sync.Mutex
	process *process // nil if none runs
	closed  bool
	// abandoned is the number of processes that were killed and have not ended.
	abandoned int
	calls     map[*call]struct{} // running
	// lastCall, pinged and lastCheck are the start times of the last call, ping and check.
	lastCall, pinged, lastCheck time.Time
	// unansweredSince is the time of the first ping after the last answer. It is zero if the last
	// ping was answered.
	unansweredSince time.Time
	pingErr         error // of the last failed ping
	// silentSince is the time since which a silent server has not answered. It is zero if the server
	// does not count as silent.
	silentSince time.Time
	// shortRuns is the number of consecutive processes that ended soon after their start. No
	// process is started before notBefore.
	shortRuns int
	notBefore time.Time
	lastExit  error

	starts      map[string]int // number of started processes by reason
	startReason string         // reason for the next start
	// report and health are the last ones received. reported is the time of the last request.
	report    *Report
	health    []*csi.NodeGetStorageHealthResponse_StorageBackendHealth
	reported  time.Time
	reporting bool
}

// call is a running call.
type call struct{ since time.Time }

func newWorker(ctx context.Context, job Job, intervals intervals, launch func(Job) (*process, error)) *Worker {
	w := &Worker{
		job: job, server: newServer(job), intervals: intervals, launch: launch,
		calls: map[*call]struct{}{}, starts: map[string]int{}, startReason: startFirst, lastCall: time.Now(),
	}
	w.ctx, w.stop = context.WithCancel(ctx)
	return w
}

// workerService is the relay.Service of a worker's process. While the server is silent, calls fail
// unless teardown is set, as it is for unpublish and unstage.
type workerService struct {
	worker   *Worker
	teardown bool
}

// Call implements relay.Service.
func (s workerService) Call(ctx context.Context, method string, req proto.Message) (resp proto.Message, err error) {
	err = s.invoke(ctx, func(ctx context.Context, p *process) (err error) {
		resp, err = p.service.Call(ctx, method, req)
		return err
	})
	if err != nil {
		return nil, err
	}
	return resp, nil
}

// Stream implements relay.Service.
func (s workerService) Stream(ctx context.Context, method string, req proto.Message, send func(any) error) error {
	return s.invoke(ctx, func(ctx context.Context, p *process) error { return p.service.Stream(ctx, method, req, send) })
}

// invoke makes one call in the process. If the process ends during the call, the error says why.
func (s workerService) invoke(ctx context.Context, do func(context.Context, *process) error) error {
	p, release, err := s.worker.acquire(s.teardown)
	if err != nil {
		return err
	}
	defer release()
	callCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(p.ctx, cancel)() //nolint:contextcheck // the process may end before the call
	err = do(callCtx, p)
	switch {
	case err == nil, ctx.Err() != nil:
		return err
	case p.ctx.Err() != nil:
		return context.Cause(p.ctx) //nolint:contextcheck // as above
	case status.Code(err) == codes.Unavailable && p.broken(ctx):
		return s.worker.connectionLost(p)
	}
	return err
}

// acquire registers a call and returns the process. It starts a process if none runs. release ends the call. While
// the server is silent, acquire fails unless teardown is true.
func (w *Worker) acquire(teardown bool) (p *process, release func(), err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lastCall = time.Now()
	if !w.silentSince.IsZero() && !teardown {
		return nil, nil, w.errSilent()
	}
	if err := w.start(); err != nil {
		return nil, nil, err
	}
	c := &call{since: w.lastCall}
	w.calls[c] = struct{}{}
	return w.process, func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.calls, c)
	}, nil
}

// errorf returns ErrUnavailable with a text that begins with the name of the pool.
func (w *Worker) errorf(format string, args ...any) error {
	return volume.Errorf(volume.ErrUnavailable, "pool %q: "+format, append([]any{w.job.Pool.Name}, args...)...)
}

// errSilent returns the error of a call for a silent server.
func (w *Worker) errSilent() error {
	return w.errorf("server %s has not answered since %s (%s): %w: check that it runs, and the network to it",
		w.job.Pool.NFS.Server, w.silentSince.Format(time.DateTime), time.Since(w.silentSince).Round(time.Second), w.pingErr)
}

// start starts a process if none runs. The caller holds mu.
func (w *Worker) start() error {
	switch {
	case w.closed || w.ctx.Err() != nil:
		return w.errorf("the driver is stopping")
	case w.process != nil:
		return nil
	case w.abandoned >= w.abandonedLimit():
		return w.errorf("%d processes that served it were killed and have not ended, because they wait for server %s in the kernel: another is started when one of them has ended; restart the node if none ends", w.abandoned, w.job.Pool.NFS.Server)
	case time.Now().Before(w.notBefore):
		return w.errorf("its worker process ended soon after its start (%w): retry, it is restarted after a delay", w.lastExit)
	}
	job := w.job
	job.SilentSince = w.silentSince
	if !w.silentSince.IsZero() {
		job.SilentFor = time.Since(w.silentSince)
	}
	p, err := w.launch(job)
	if err != nil {
		return w.errorf("its worker process cannot be started: %w", err)
	}
	w.process = p
	w.starts[w.startReason]++
	w.startReason = startEnded
	w.reported = time.Time{}
	go w.awaitEnd(p)
	return nil
}

// abandonedLimit returns the limit of w.abandoned for a start. It is one higher while the server is
// silent, because the new process unmounts the mounts that block the abandoned processes.
func (w *Worker) abandonedLimit() int {
	if w.silentSince.IsZero() {
		return maxAbandoned
	}
	return maxAbandoned + 1
}

// awaitEnd updates the state when a process ends.
func (w *Worker) awaitEnd(p *process) {
	<-p.ended
	w.mu.Lock()
	defer w.mu.Unlock()
	if p.killed {
		w.abandoned--
	} else {
		w.exited(p)
	}
	p.fail(w.errorf("its worker process has ended: retry"))
	p.conn.Close()
}

// exited updates the state when a process has ended without being killed. The caller holds mu.
func (w *Worker) exited(p *process) {
	w.process = nil
	w.lastExit = p.exit()
	if w.lastExit == nil {
		w.lastExit = errors.New("exit status 0")
	}
	if w.ctx.Err() == nil && !w.closed {
		klog.FromContext(w.ctx).Error(w.lastExit, "A worker process ended unexpectedly", "pool", w.job.Pool.Name)
	}
	w.shortRuns++
	if time.Since(p.started) > maxRetry {
		w.shortRuns = 0
	}
	if w.shortRuns > 0 { // at most 10 doublings, because more could overflow
		w.notBefore = time.Now().Add(min(w.intervals.restartDelay<<min(w.shortRuns-1, 10), maxRetry))
	}
	p.fail(w.errorf("its worker process has ended (%w): retry", w.lastExit))
}

// connectionLost returns the error of a call whose connection to the process broke, and kills the
// process.
func (w *Worker) connectionLost(p *process) error {
	select {
	case <-p.ctx.Done():
	case <-time.After(w.intervals.stopTimeout):
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.kill(p, startEnded, w.errorf("the connection to its worker process broke: retry"))
	return context.Cause(p.ctx)
}

// kill kills p if it is the current process. The calls in p fail with err. reason is the reason for the
// next start. The caller holds mu.
func (w *Worker) kill(p *process, reason string, err error) {
	if p == nil || w.process != p {
		return
	}
	w.process, w.startReason = nil, reason
	w.abandoned++
	p.killed = true
	p.fail(err)
	p.kill()
}

// watch checks the worker until the driver ends or retired returns true.
func (w *Worker) watch(retired func(*Worker) bool) {
	tick := time.NewTicker(w.intervals.check)
	defer tick.Stop()
	for w.ctx.Err() == nil && !retired(w) {
		w.check(time.Now())
		select {
		case <-tick.C:
		case <-w.ctx.Done():
		}
	}
	w.close()
}

// close ends the process and makes new calls fail.
func (w *Worker) close() {
	w.mu.Lock()
	w.closed = true
	p := w.process
	w.mu.Unlock()
	if p != nil {
		p.stop(w.intervals.stopTimeout)
	}
	w.stop()
}

// check sends the ping and the request for a report if they are due. It marks the server as silent if no
// ping was answered for silentAfter.
func (w *Worker) check(now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if now.Sub(w.lastCheck) > w.intervals.silentAfter/2 { // the driver was suspended and could not receive an answer
		w.unansweredSince = time.Time{}
	}
	w.lastCheck = now
	if w.pingDue(now) {
		w.pinged = now
		if w.unansweredSince.IsZero() {
			w.unansweredSince = now
		}
		go w.ping()
	}
	if w.silentSince.IsZero() && !w.unansweredSince.IsZero() && now.Sub(w.unansweredSince) >= w.intervals.silentAfter {
		w.markSilent()
	}
	if w.reportDue(now) {
		w.reported, w.reporting = now, true
		go w.requestReport(w.process)
	}
}

// pingDue reports whether it is time for a ping.
func (w *Worker) pingDue(now time.Time) bool {
	since := now.Sub(w.pinged)
	switch {
	case since < w.intervals.fastPing:
		return false
	case !w.unansweredSince.IsZero(), !w.silentSince.IsZero(), w.hasSlowCall(now):
		return true
	}
	return (w.process != nil || w.abandoned > 0) && since >= w.intervals.slowPing
}

// hasSlowCall reports whether a call has been running for longer than fastPing.
func (w *Worker) hasSlowCall(now time.Time) bool {
	for c := range w.calls {
		if now.Sub(c.since) >= w.intervals.fastPing {
			return true
		}
	}
	return false
}

// ping sends one ping and records the result.
func (w *Worker) ping() {
	ctx, cancel := context.WithTimeout(w.ctx, w.intervals.silentAfter)
	defer cancel()
	err := w.server.ping(ctx)
	w.mu.Lock()
	defer w.mu.Unlock()
	if err != nil {
		w.pingErr = err
		return
	}
	w.unansweredSince = time.Time{}
	if !w.silentSince.IsZero() {
		w.markAnswering()
	}
}

// markSilent records that the server is silent, and replaces the process. The caller holds mu.
func (w *Worker) markSilent() {
	w.silentSince = w.unansweredSince
	if w.pingErr == nil {
		w.pingErr = context.DeadlineExceeded
	}
	klog.FromContext(w.ctx).Error(w.pingErr, "An NFS server does not answer", "pool", w.job.Pool.Name, "server", w.job.Pool.NFS.Server, "since", w.silentSince)
	if w.process == nil && w.abandoned == 0 {
		return
	}
	w.kill(w.process, startSilent, w.errSilent())
	w.startReason = startSilent
	// The new process aborts the NFS calls of the killed ones, which otherwise could not end.
	if err := w.start(); err != nil {
		klog.FromContext(w.ctx).Error(err, "Starting a worker for a silent server failed", "pool", w.job.Pool.Name)
	}
}

// markAnswering records that the server answers again, and kills a process that was started while the server was
// silent. The caller holds mu.
func (w *Worker) markAnswering() {
	klog.FromContext(w.ctx).Info("An NFS server answers again", "pool", w.job.Pool.Name, "server", w.job.Pool.NFS.Server, "silent", time.Since(w.silentSince))
	w.silentSince, w.pingErr = time.Time{}, nil
	w.startReason = startAnswering
	if w.process != nil && w.process.silent {
		w.kill(w.process, startAnswering, w.errorf("server %s answers again: retry", w.job.Pool.NFS.Server))
	}
}

// reportDue reports whether it is time for a report. The interval is shorter for a pool that is not open.
func (w *Worker) reportDue(now time.Time) bool {
	if w.process == nil || w.process.silent || w.reporting || w.job.Static {
		return false
	}
	every := w.intervals.slowPing
	if w.report == nil || w.report.Err != "" {
		every = w.intervals.fastPing
	}
	return now.Sub(w.reported) >= every
}

// requestReport requests the report of the process and the health of its storage.
func (w *Worker) requestReport(p *process) {
	ctx, cancel := context.WithTimeout(p.ctx, w.intervals.reportTimeout)
	defer cancel()
	r, err := p.report(ctx)
	health, healthErr := p.node.NodeGetStorageHealth(ctx, &csi.NodeGetStorageHealthRequest{})
	w.mu.Lock()
	defer w.mu.Unlock()
	w.reporting = false
	if err == nil {
		w.report = &r
	}
	if healthErr == nil {
		w.health = health.GetBackendHealth()
	}
}

// storageHealth returns the last known conditions of the pool.
func (w *Worker) storageHealth() []*csi.NodeGetStorageHealthResponse_StorageBackendHealth {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.silentSince.IsZero() {
		return w.health
	}
	return []*csi.NodeGetStorageHealthResponse_StorageBackendHealth{{
		Status: csi.StorageHealthErrorType_STORAGE_UNREACHABLE, Reason: string(backend.ReasonServerSilent), Message: w.errSilent().Error(),
	}}
}

// condition returns the condition of the pool's volumes while the server is silent. It returns nil while the
// server answers.
func (w *Worker) condition() []backend.Condition {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.silentSince.IsZero() {
		return nil
	}
	return []backend.Condition{{Severity: backend.Inaccessible, Reason: backend.ReasonServerSilent, Message: w.errSilent().Error()}}
}

// State is the state of a pool and of its worker.
type State struct {
	Pool, Server string
	// Answers is false while the server is silent.
	Answers bool
	// Running reports whether a process runs.
	Running bool
	// Report is the last report; nil before the first one.
	Report *Report
	// Starts is the number of started processes by reason.
	Starts map[string]int
	// Abandoned is the number of processes that were killed and have not ended.
	Abandoned int
	// Calls is the number of running calls.
	Calls int
}

func (w *Worker) state() State {
	w.mu.Lock()
	defer w.mu.Unlock()
	return State{
		Pool: w.job.Pool.Name, Server: w.job.Pool.NFS.Server, Answers: w.silentSince.IsZero(), Running: w.process != nil,
		Report: w.report, Starts: maps.Clone(w.starts), Abandoned: w.abandoned, Calls: len(w.calls),
	}
}

// closeIfIdle makes new calls fail if there was no call for idleTime, and reports whether it did so.
func (w *Worker) closeIfIdle() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.calls) > 0 || time.Since(w.lastCall) < w.intervals.idleTime {
		return false
	}
	w.closed = true
	return true
}
