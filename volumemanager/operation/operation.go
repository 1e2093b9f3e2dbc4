// Package operation runs what takes time, one at a time for each key, and keeps what
// failed from being tried again too soon.
package operation

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"

	"k8s.io/klog/v2"
)

// Operation is something to be done that may take long.
type Operation struct {
	// Name is its kind: volume_mount, volume_unmount, device_mount, device_unmount,
	// volume_attach, volume_detach, volume_expand, volume_provision, volume_delete,
	// volume_recycle, and such.
	Name string
	// Plugin is the name of the volume plugin that does it.
	Plugin string
	// Object is what it is done to, as event.Event has it.
	Object string
	// Routine ones are logged if they fail only.
	Routine bool
	// Do has a time limit of its own, and ends soon after ctx does.
	Do func(ctx context.Context) error
	// After, if not nil, is called when the key is free again, with what Do ended with: a
	// panic is an error.
	After func(ctx context.Context, err error)
}

// ErrPending means: an operation of the same key is not done yet.
var ErrPending = errors.New("an operation is pending")

// BackoffError means: it failed, and is not to be tried again yet.
type BackoffError struct {
	// Until is when it may be tried.
	Until time.Time
	// Last is what it failed with.
	Last error
}

func (e *BackoffError) Error() string {
	return fmt.Sprintf("%v (tried again %s)", e.Last, e.Until.Format(time.RFC3339))
}

func (e *BackoffError) Unwrap() error { return e.Last }

// The kubelet's.
const (
	firstDelay = 500 * time.Millisecond
	maxDelay   = 2*time.Minute + 2*time.Second
)

// Executor runs operations.
type Executor struct {
	ctx  context.Context
	done func(o Operation, err error, took time.Duration)

	mu    sync.Mutex
	keys  map[string]*key
	swept time.Time
	// running counts operations until they have told that they are done; ended is raised
	// when it becomes less.
	running int
	ended   *sync.Cond
}

// key has no entry while nothing of it is pending or failed.
type key struct {
	pending bool
	// failures are by the operation's name.
	failures map[string]failure
}

type failure struct {
	delay time.Duration
	until time.Time
	last  error
}

// New makes an Executor. Operations get a context of ctx, and once that has ended none
// begins. done, if not nil, is called after each, when its key is free again.
func New(ctx context.Context, done func(o Operation, err error, took time.Duration)) *Executor {
	e := &Executor{ctx: ctx, done: done, keys: map[string]*key{}, swept: time.Now()}
	e.ended = sync.NewCond(&e.mu)
	return e
}

// Run starts an operation, and does not wait for it. It is refused with ErrPending while
// one of its key runs, with a *BackoffError for a while after the same operation of its
// key failed, and with the context's error after its end.
func (e *Executor) Run(name string, o Operation) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.ctx.Err(); err != nil {
		return err
	}
	k := e.keys[name]
	if k == nil {
		k = &key{}
		e.keys[name] = k
	}
	if k.pending {
		return ErrPending
	}
	if f, failed := k.failures[o.Name]; failed && time.Now().Before(f.until) {
		return &BackoffError{Until: f.until, Last: f.last}
	}
	k.pending = true
	e.running++
	go e.run(e.ctx, name, o)
	return nil
}

func (e *Executor) run(ctx context.Context, name string, o Operation) {
	log := klog.LoggerWithValues(klog.FromContext(ctx), "operation", o.Name, "plugin", o.Plugin, "object", o.Object)
	ctx = klog.NewContext(ctx, log)
	start := time.Now()
	err := do(ctx, o)
	took := time.Since(start)
	until := e.finish(name, o.Name, err)
	switch {
	case err != nil:
		log.Error(err, "Operation failed", "took", took, "again", until)
	case !o.Routine:
		log.Info("Operation done", "took", took)
	}
	if o.After != nil {
		o.After(ctx, err)
	}
	if e.done != nil {
		e.done(o, err, took)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.running--
	e.ended.Broadcast()
}

// do makes an error of a panic: one plugin's mistake is not to end all the others' work.
func do(ctx context.Context, o Operation) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v (a mistake in the program: report it with the log)", r)
			klog.FromContext(ctx).Error(err, "Operation panicked", "stack", string(debug.Stack()))
		}
	}()
	return o.Do(ctx)
}

// finish frees a key, and tells when a failed operation may be tried again.
func (e *Executor) finish(name, operation string, err error) (until time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	k := e.keys[name]
	k.pending = false
	if err == nil {
		delete(k.failures, operation)
	} else {
		until = k.fail(operation, err)
	}
	if len(k.failures) == 0 {
		delete(e.keys, name)
	}
	e.sweep()
	return until
}

func (k *key) fail(operation string, err error) (until time.Time) {
	delay := firstDelay
	if before, again := k.failures[operation]; again {
		delay = min(2*before.delay, maxDelay)
	}
	if k.failures == nil {
		k.failures = map[string]failure{}
	}
	until = time.Now().Add(delay)
	k.failures[operation] = failure{delay: delay, until: until, last: err}
	return until
}

// sweep drops failures that nobody has asked about for long: their objects are gone.
func (e *Executor) sweep() {
	now := time.Now()
	if now.Sub(e.swept) < maxDelay {
		return
	}
	e.swept = now
	for name, k := range e.keys {
		for operation, f := range k.failures {
			if now.Sub(f.until) > maxDelay {
				delete(k.failures, operation)
			}
		}
		if !k.pending && len(k.failures) == 0 {
			delete(e.keys, name)
		}
	}
}

// Pending tells whether an operation of the key runs.
func (e *Executor) Pending(name string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	k := e.keys[name]
	return k != nil && k.pending
}

// Forget makes the failures of a key count no more: what they came of has changed.
func (e *Executor) Forget(name string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	k := e.keys[name]
	switch {
	case k == nil:
	case k.pending:
		k.failures = nil
	default:
		delete(e.keys, name)
	}
}

// Wait returns once the context of New has ended and nothing runs any more.
func (e *Executor) Wait() {
	<-e.ctx.Done()
	e.mu.Lock()
	defer e.mu.Unlock()
	for e.running > 0 {
		e.ended.Wait()
	}
}
