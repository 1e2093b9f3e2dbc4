package pool

import (
	"context"
	"fmt"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/internal/trace"
	"github.com/trivet-csi/trivet/volume"
)

// Jobs are the copies into a pool, and the zeroing of its new devices, that are under way. A job can take longer than a
// call waits, so it continues after the call that started it.
type Jobs struct {
	pool string // name of the pool, for errors

	mu      sync.Mutex
	running map[string]*Job // by name
	closed  bool
	ended   sync.WaitGroup
	copied  atomic.Int64 // bytes copied by all jobs since the start of this process
	// treeCopies has one slot for each copy of a directory that may be under way.
	treeCopies *semaphore.Weighted
}

// MaxTreeCopies is the number of directories that are copied file by file into one pool at a time.
const MaxTreeCopies = 4

func newJobs(pool string) *Jobs {
	return &Jobs{pool: pool, running: map[string]*Job{}, treeCopies: semaphore.NewWeighted(MaxTreeCopies)}
}

// Job is one copy, or the zeroing of one device.
type Job struct {
	cancel context.CancelFunc
	done   chan struct{}
	err    error // set before done is closed
	// waiting counts the calls that wait for the end of the job. alone is closed when no call
	// waits any more.
	waiting int
	alone   chan struct{}
	// queued is true while the job waits for a slot of treeCopies. slot is true after it got one, which
	// it keeps until it ends.
	queued atomic.Bool
	slot   bool

	all  *Jobs
	log  klog.Logger
	span trace.Span
	// left is the time since which no call waits for the end of the job.
	left time.Time
	// copied and expected are bytes. expected is 0 if it is not known.
	copied, expected atomic.Int64
	began            time.Time
	logged           time.Time // when the progress was last logged
}

// Alone is closed when no call waits for the end of the job any more. The job must then end work that
// must not continue without a call, such as a freeze.
func (j *Job) Alone() <-chan struct{} { return j.alone }

// Progress sets the number of bytes copied so far. Only the goroutine of the job calls it.
func (j *Job) Progress(bytes int64) {
	j.all.copied.Add(bytes - j.copied.Swap(bytes))
	if time.Since(j.logged) >= copyLogInterval {
		j.logged = time.Now()
		j.log.Info("Copying", "bytes", bytes, "since", j.began)
	}
}

// Expect sets the number of bytes that the job will copy.
func (j *Job) Expect(bytes int64) { j.expected.Store(bytes) }

// soFar describes the progress.
func (j *Job) soFar() string {
	text := volume.FormatSize(j.copied.Load())
	if n := j.expected.Load(); n > 0 {
		text += " of " + volume.FormatSize(n)
	}
	return text
}

// Unattended returns the time since which no call waits for the end of the job; 0 while a call waits.
func (j *Job) Unattended() time.Duration {
	j.all.mu.Lock()
	defer j.all.mu.Unlock()
	if j.waiting > 0 {
		return 0
	}
	return time.Since(j.left)
}

// AwaitSlot waits for one of the MaxTreeCopies slots. The job keeps its slot until it ends, so a
// second call does nothing. The goroutine of the job calls AwaitSlot before it locks a volume, so that
// a volume whose copy is queued can be staged.
func (j *Job) AwaitSlot(ctx context.Context) error {
	if j.slot {
		return nil
	}
	j.queued.Store(true)
	defer j.queued.Store(false)
	err := trace.Acquire(ctx, j.all.treeCopies, "wait for copy slot")
	j.slot = err == nil
	return err
}

// copyLogInterval is how often a copy under way is logged.
const copyLogInterval = 30 * time.Second

// Do starts the job of a name, or joins the running one, and waits for its end. If ctx ends first, or is about to end,
// the job continues, and the error is ErrPending. do must stop when its context ends.
func (s *Jobs) Do(ctx context.Context, name string, do func(ctx context.Context, j *Job) error) (err error) {
	j, err := s.job(ctx, name, do)
	if err != nil {
		return err
	}
	defer j.leave()
	ctx, span := trace.Start(ctx, "wait for job")
	span.Link(j.span)
	defer span.End(&err)
	waiting, cancel := beforeDeadline(ctx)
	defer cancel()
	select {
	case <-j.done:
		return j.err
	case <-waiting.Done():
		if j.queued.Load() {
			return volume.Errorf(volume.ErrPending, "the copy of %q in pool %q is queued: %d directories are being copied into the pool, and no more are copied at a time; retry: the call joins the queued copy",
				name, s.pool, MaxTreeCopies)
		}
		return volume.Errorf(volume.ErrPending, "%q in pool %q is being copied or zeroed: %s so far in %v; retry: the call joins the running job",
			name, s.pool, j.soFar(), time.Since(j.began).Round(time.Second))
	}
}

// beforeDeadline returns a context that ends a little before the deadline of ctx, so that the caller gets the progress as an answer.
func beforeDeadline(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, ok := ctx.Deadline()
	if !ok {
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(ctx, deadline.Add(-min(time.Second, time.Until(deadline)/10)))
}

// job joins a running job, or starts one.
func (s *Jobs) job(ctx context.Context, name string, do func(ctx context.Context, j *Job) error) (*Job, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if j := s.running[name]; j != nil {
		j.waiting++
		return j, nil
	}
	if s.closed {
		return nil, volume.Errorf(volume.ErrUnavailable, "pool %q is being closed", s.pool)
	}
	j := &Job{
		done: make(chan struct{}), alone: make(chan struct{}), waiting: 1, all: s,
		log: klog.LoggerWithValues(klog.FromContext(ctx), "pool", s.pool, "name", name), began: time.Now(), logged: time.Now(),
	}
	ctx, j.cancel = context.WithCancel(context.WithoutCancel(ctx))
	ctx, j.span = trace.StartJob(ctx, "job")
	j.span.Set("trivet.pool", s.pool)
	j.span.Set("trivet.name", name)
	s.running[name] = j
	s.ended.Go(func() {
		defer j.cancel()
		j.err = j.run(ctx, do)
		j.span.End(&j.err)
		if j.slot {
			s.treeCopies.Release(1)
		}
		s.mu.Lock()
		delete(s.running, name)
		s.mu.Unlock()
		close(j.done)
	})
	return j, nil
}

// run calls do. It turns a panic into an error of the job, because otherwise the panic would end the
// process and all its calls.
func (j *Job) run(ctx context.Context, do func(ctx context.Context, j *Job) error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v", r)
			j.log.Error(err, "Copying failed", "stack", string(debug.Stack()))
		}
	}()
	return do(ctx, j)
}

// leave ends the wait of one call for the job.
func (j *Job) leave() {
	j.all.mu.Lock()
	defer j.all.mu.Unlock()
	if j.waiting--; j.waiting != 0 {
		return
	}
	j.left = time.Now()
	select {
	case <-j.alone: // another call has joined and left since
	default:
		close(j.alone)
	}
}

// Cancel ends the job of a name, if there is one, and waits for its end.
func (s *Jobs) Cancel(name string) {
	s.mu.Lock()
	j := s.running[name]
	s.mu.Unlock()
	if j != nil {
		j.cancel()
		<-j.done
	}
}

// close cancels all jobs, and prevents new ones.
func (s *Jobs) close() {
	s.mu.Lock()
	s.closed = true
	for _, j := range s.running {
		j.cancel()
	}
	s.mu.Unlock()
	s.ended.Wait()
}

// state counts the copies under way, without those that wait for a slot, and the bytes
// copied so far.
func (s *Jobs) state() (running int, copied int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, j := range s.running {
		if !j.queued.Load() {
			running++
		}
	}
	return running, s.copied.Load()
}
