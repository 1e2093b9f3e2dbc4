// Package operation runs long operations, one at a time for each key, with back-off after a
// failure.
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

// Operation is work that may take long.
type Operation struct {
	// Name is the kind of operation: volume_mount, volume_unmount, device_mount, device_unmount,
	// volume_attach, volume_detach, volume_expand, volume_provision, volume_delete,
	// volume_recycle and others.
	Name string
	// Plugin is the name of the volume plugin.
	Plugin string
	// Object is the object of the operation, as in event.Event.
	Object string
	// Routine operations are logged only if they fail.
	Routine bool
	// Do has its own time limit, and returns soon after ctx ends.
	Do func(ctx context.Context) error
	// After, if not nil, is called with the error of Do when the key is free again. A panic
	// is an error.
	After func(ctx context.Context, err error)
}

// ErrPending is returned while an operation with the same key runs.
var ErrPending = errors.New("an operation is pending")

// BackoffError is returned if the operation failed and must not be retried yet.
type BackoffError struct {
	// Until is the time of the next retry.
	Until time.Time
	// Last is the error of the last attempt.
	Last error
}

func (e *BackoffError) Error() string {
	return fmt.Sprintf("%v (tried again %s)", e.Last, e.Until.Format(time.RFC3339))
}

func (e *BackoffError) Unwrap() error { return e.Last }

// The kubelet's values.
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
	// running counts operations whose callbacks have not returned; ended is signalled when it
	// decreases.
	running int
	ended   *sync.Cond
}

// key exists while an operation of the key runs, or after one failed.
type key struct {
	pending bool
	// failures are keyed by the operation's name.
	failures map[string]failure
}

type failure struct {
	delay time.Duration
	until time.Time
	last  error
}

// New returns an Executor. The contexts of operations derive from ctx, and none starts after ctx
// has ended. done, if not nil, is called after each operation, when its key is free again.
func New(ctx context.Context, done func(o Operation, err error, took time.Duration)) *Executor {
	e := &Executor{ctx: ctx, done: done, keys: map[string]*key{}, swept: time.Now()}
	e.ended = sync.NewCond(&e.mu)
	return e
}

// Run starts an operation and does not wait for it. It returns ErrPending while an operation of
// the key runs, a *BackoffError during the back-off after the same operation of the key failed,
// and the context's error after the context has ended.
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
		log.Error(err, "Operation failed", "took", took, "retryAt", until)
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

// do turns a panic into an error: a bug in one plugin must not stop the others.
func do(ctx context.Context, o Operation) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v (this is a bug: report it with the log)", r)
			klog.FromContext(ctx).Error(err, "Operation panicked", "stack", string(debug.Stack()))
		}
	}()
	return o.Do(ctx)
}

// finish frees a key and returns when a failed operation may be retried.
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

// sweep drops failures that were not asked for during a long time: their objects do not exist any
// more.
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

// Pending reports whether an operation of the key runs.
func (e *Executor) Pending(name string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	k := e.keys[name]
	return k != nil && k.pending
}

// Forget ends the back-off of a key, because the cause of its failures has changed.
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

// Wait returns when the context of New has ended and no operation runs.
func (e *Executor) Wait() {
	<-e.ctx.Done()
	e.mu.Lock()
	defer e.mu.Unlock()
	for e.running > 0 {
		e.ended.Wait()
	}
}
