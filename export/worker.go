package export

import (
	"context"
	"errors"
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

// pace is how long what takes.
type pace struct {
	// tick is how often a worker is looked at.
	tick time.Duration
	// doubt is how long a call may take before its server is asked, and the time
	// between two questions then.
	doubt time.Duration
	// idle is the time between two questions while all is well.
	idle time.Duration
	// silence is how long a server that restarts may take to answer.
	silence time.Duration
	// rest is how long the worker of a pool in no configuration stays without a call.
	rest time.Duration
	// report bounds how long a worker may take to tell about its pool.
	report time.Duration
	// retry is how soon a worker that ended at once is started again.
	retry time.Duration
	// stop is how long a worker may take to end by itself.
	stop time.Duration
}

var usual = pace{
	tick: 500 * time.Millisecond, doubt: time.Second, idle: 15 * time.Second, silence: 5 * time.Second,
	rest: 5 * time.Minute, report: time.Second, retry: 500 * time.Millisecond, stop: 4 * time.Second,
}

const (
	// maxDying bounds how many processes of a pool were killed and have not ended, when
	// another is started: a thread of theirs waits in the kernel where no signal reaches
	// it.
	maxDying = 2
	// maxRetry bounds the wait for a worker that ends again and again.
	maxRetry = 30 * time.Second
)

// Why a process was started, as the metrics have it.
const (
	startFirst     = "first"
	startEnded     = "ended"     // the one before had ended by itself
	startSilent    = "silent"    // the server had gone silent
	startAnswering = "answering" // it answers again
)

// Worker supervises the process of one pool. It is started by the first call.
type Worker struct {
	job    Job
	server *server
	pace   pace
	launch func(Job) (*process, error)
	ctx    context.Context // ends when the driver does
	stop   context.CancelFunc

	mu      sync.Mutex
	process *process // nil: none runs
	closed  bool
	// dying is the number of processes that were killed and have not ended.
	dying int
	calls map[*call]struct{}
	// lastCall is when the last one came, pinged when the server was asked last, looked
	// when look was called.
	lastCall, pinged, looked time.Time
	// unanswered is when the first question was sent since the last answer; zero: the
	// last one was answered.
	unanswered time.Time
	lastErr    error // of a question
	// silentSince is zero while the server answers.
	silentSince time.Time
	// quick counts how often in a row the process ended soon after its start; until
	// notBefore none is started.
	quick     int
	notBefore time.Time
	lastExit  error

	starts map[string]int // by why
	why    string         // of the next one
	// report and health are what the process last said of its pool, asked at reported.
	report    *Report
	health    []*csi.NodeGetStorageHealthResponse_StorageBackendHealth
	reported  time.Time
	reporting bool
}

// call is one under way.
type call struct{ since time.Time }

func newWorker(ctx context.Context, job Job, pace pace, launch func(Job) (*process, error)) *Worker {
	w := &Worker{
		job: job, server: newServer(job), pace: pace, launch: launch,
		calls: map[*call]struct{}{}, starts: map[string]int{}, why: startFirst, lastCall: time.Now(),
	}
	w.ctx, w.stop = context.WithCancel(ctx)
	return w
}

// workerService is the Service of a worker's process. While the server is silent it makes
// only calls that take a volume down: the process has its own way for those.
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

// invoke makes one call in the process, and explains its end if the process ends first.
func (s workerService) invoke(ctx context.Context, do func(context.Context, *process) error) error {
	p, leave, err := s.worker.enter(s.teardown)
	if err != nil {
		return err
	}
	defer leave()
	under, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(p.ctx, cancel)() //nolint:contextcheck // the process may end before the call
	err = do(under, p)
	switch {
	case err == nil, ctx.Err() != nil:
		return err
	case p.ctx.Err() != nil:
		return context.Cause(p.ctx) //nolint:contextcheck // as above
	case status.Code(err) == codes.Unavailable && p.broken(ctx):
		return s.worker.lost(p)
	}
	return err
}

// enter finds the process for a call, and starts one if there is none.
func (w *Worker) enter(teardown bool) (p *process, leave func(), err error) {
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

func (w *Worker) errorf(format string, args ...any) error {
	return volume.Errorf(volume.ErrUnavailable, "pool %q: "+format, append([]any{w.job.Pool.Name}, args...)...)
}

// errSilent says since when the server is.
func (w *Worker) errSilent() error {
	return w.errorf("server %s has not answered since %s (%s): %w: check that it runs, and the network to it",
		w.job.Pool.NFS.Server, w.silentSince.Format(time.DateTime), time.Since(w.silentSince).Round(time.Second), w.lastErr)
}

// start starts a process if none runs.
func (w *Worker) start() error {
	switch {
	case w.closed || w.ctx.Err() != nil:
		return w.errorf("the driver is stopping")
	case w.process != nil:
		return nil
	case w.dying >= w.mayDie():
		return w.errorf("%d processes that served it were killed and have not ended, for they wait for server %s in the kernel: none is started until one has; if it lasts restart the node", w.dying, w.job.Pool.NFS.Server)
	case time.Now().Before(w.notBefore):
		return w.errorf("its worker process ends soon after its start (%w): it is started again in a moment", w.lastExit)
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
	w.starts[w.why]++
	w.why = startEnded
	w.reported = time.Time{}
	go w.await(p)
	return nil
}

// mayDie bounds w.dying for a start. While the server is silent it is one more: only a
// process that is started then makes those end.
func (w *Worker) mayDie() int {
	if w.silentSince.IsZero() {
		return maxDying
	}
	return maxDying + 1
}

// await sees the end of a process.
func (w *Worker) await(p *process) {
	<-p.ended
	w.mu.Lock()
	defer w.mu.Unlock()
	if p.killed {
		w.dying--
	} else {
		w.endedByItself(p)
	}
	p.fail(w.errorf("its worker process has ended: try again"))
	p.conn.Close()
}

func (w *Worker) endedByItself(p *process) {
	w.process = nil
	w.lastExit = p.exit()
	if w.lastExit == nil {
		w.lastExit = errors.New("exit status 0")
	}
	if w.ctx.Err() == nil && !w.closed {
		klog.FromContext(w.ctx).Error(w.lastExit, "A worker process ended by itself", "pool", w.job.Pool.Name)
	}
	w.quick++
	if time.Since(p.started) > maxRetry {
		w.quick = 0
	}
	if w.quick > 0 { // one that did not last is not tried with every call
		w.notBefore = time.Now().Add(min(w.pace.retry<<min(w.quick-1, 10), maxRetry))
	}
	p.fail(w.errorf("its worker process has ended (%w): try again", w.lastExit))
}

// lost is the answer to a call whose process does not speak any more.
func (w *Worker) lost(p *process) error {
	select {
	case <-p.ctx.Done():
	case <-time.After(w.pace.stop):
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.kill(p, startEnded, w.errorf("the connection to its worker process broke: try again"))
	return context.Cause(p.ctx)
}

// kill ends a process whatever it does; its calls fail with err. why is that of the
// next start.
func (w *Worker) kill(p *process, why string, err error) {
	if p == nil || w.process != p {
		return
	}
	w.process, w.why = nil, why
	w.dying++
	p.killed = true
	p.fail(err)
	p.kill()
}

// watch looks after the worker until the driver ends, or it is not needed any more.
func (w *Worker) watch(idle func(*Worker) bool) {
	tick := time.NewTicker(w.pace.tick)
	defer tick.Stop()
	for w.ctx.Err() == nil && !idle(w) {
		w.look(time.Now())
		select {
		case <-tick.C:
		case <-w.ctx.Done():
		}
	}
	w.close()
}

func (w *Worker) close() {
	w.mu.Lock()
	w.closed = true
	p := w.process
	w.mu.Unlock()
	if p != nil {
		p.stop(w.pace.stop)
	}
	w.stop()
}

// look asks what is due to be asked, and draws conclusions.
func (w *Worker) look(now time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if now.Sub(w.looked) > w.pace.silence/2 { // whoever has not run for long has not listened
		w.unanswered = time.Time{}
	}
	w.looked = now
	if w.due(now) {
		w.pinged = now
		if w.unanswered.IsZero() {
			w.unanswered = now
		}
		go w.ping()
	}
	if w.silentSince.IsZero() && !w.unanswered.IsZero() && now.Sub(w.unanswered) >= w.pace.silence {
		w.turnSilent()
	}
	if w.reportDue(now) {
		w.reported, w.reporting = now, true
		go w.ask(w.process)
	}
}

// due tells whether the server is to be asked.
func (w *Worker) due(now time.Time) bool {
	since := now.Sub(w.pinged)
	switch {
	case since < w.pace.doubt:
		return false
	case !w.unanswered.IsZero(), !w.silentSince.IsZero(), w.waiting(now):
		return true
	}
	return (w.process != nil || w.dying > 0) && since >= w.pace.idle
}

// waiting tells whether a call takes long.
func (w *Worker) waiting(now time.Time) bool {
	for c := range w.calls {
		if now.Sub(c.since) >= w.pace.doubt {
			return true
		}
	}
	return false
}

func (w *Worker) ping() {
	ctx, cancel := context.WithTimeout(w.ctx, w.pace.silence)
	defer cancel()
	err := w.server.ping(ctx)
	w.mu.Lock()
	defer w.mu.Unlock()
	if err != nil {
		w.lastErr = err
		return
	}
	w.unanswered = time.Time{}
	if !w.silentSince.IsZero() {
		w.turnAnswering()
	}
}

func (w *Worker) turnSilent() {
	w.silentSince = w.unanswered
	if w.lastErr == nil {
		w.lastErr = context.DeadlineExceeded
	}
	klog.FromContext(w.ctx).Error(w.lastErr, "An NFS server does not answer", "pool", w.job.Pool.Name, "server", w.job.Pool.NFS.Server, "since", w.silentSince)
	if w.process == nil && w.dying == 0 {
		return
	}
	w.kill(w.process, startSilent, w.errSilent())
	w.why = startSilent
	// The next one makes the calls of those before fail, which could not end else.
	if err := w.start(); err != nil {
		klog.FromContext(w.ctx).Error(err, "Starting a worker for a silent server failed", "pool", w.job.Pool.Name)
	}
}

func (w *Worker) turnAnswering() {
	klog.FromContext(w.ctx).Info("An NFS server answers again", "pool", w.job.Pool.Name, "server", w.job.Pool.NFS.Server, "silent", time.Since(w.silentSince))
	w.silentSince, w.lastErr = time.Time{}, nil
	w.why = startAnswering
	if w.process != nil && w.process.silent {
		w.kill(w.process, startAnswering, w.errorf("server %s answers again: try again", w.job.Pool.NFS.Server))
	}
}

// reportDue: a pool that is not open yet may be in a moment.
func (w *Worker) reportDue(now time.Time) bool {
	if w.process == nil || w.process.silent || w.reporting || w.job.Static {
		return false
	}
	every := w.pace.idle
	if w.report == nil || w.report.Err != "" {
		every = w.pace.doubt
	}
	return now.Sub(w.reported) >= every
}

func (w *Worker) ask(p *process) {
	ctx, cancel := context.WithTimeout(p.ctx, w.pace.report)
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

// storageHealth is what is wrong with the pool, for all that is known.
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

// condition is what a silent server means for the health of volumes; nil while it
// answers.
func (w *Worker) condition() []backend.Condition {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.silentSince.IsZero() {
		return nil
	}
	return []backend.Condition{{Severity: backend.Inaccessible, Reason: backend.ReasonServerSilent, Message: w.errSilent().Error()}}
}

// State is a pool and how its worker is.
type State struct {
	Pool, Server string
	// Answers: the server does, for all that is known.
	Answers bool
	// Running: a process runs.
	Running bool
	// Report is the last one; nil: there was none yet.
	Report *Report
	// Starts counts processes by why they were started.
	Starts map[string]int
	// Abandoned is the number of processes that were killed and have not ended.
	Abandoned int
	// Calls are those under way.
	Calls int
}

func (w *Worker) state() State {
	w.mu.Lock()
	defer w.mu.Unlock()
	starts := make(map[string]int, len(w.starts))
	for why, n := range w.starts {
		starts[why] = n
	}
	return State{
		Pool: w.job.Pool.Name, Server: w.job.Pool.NFS.Server, Answers: w.silentSince.IsZero(), Running: w.process != nil,
		Report: w.report, Starts: starts, Abandoned: w.dying, Calls: len(w.calls),
	}
}

// resting tells whether the worker has had no call for long, and closes it to more if
// so.
func (w *Worker) resting() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.calls) > 0 || time.Since(w.lastCall) < w.pace.rest {
		return false
	}
	w.closed = true
	return true
}

// touch keeps the worker from resting.
func (w *Worker) touch() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lastCall = time.Now()
}
