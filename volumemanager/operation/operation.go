// Package operation runs long operations, one at a time for each key, with back-off after a
// failure.
package operation

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime/debug"
	"sync"
	"time"

	"k8s.io/klog/v2"
)

// Operation is work that may take a long time.
type Operation struct {
	// Name is the kind of operation: volume_mount, volume_unmount, device_mount, device_unmount,
	// volume_attach, volume_detach, volume_expand, volume_provision, volume_delete,
	// volume_recycle and others.
	Name string
	// Plugin is the name of the volume plugin.
	Plugin string
	// Object is the object of the operation, in the format of event.Event.Object.
	Object string
	// Routine operations are logged only if they fail.
	Routine bool
	// Do must have its own time limit, and must return soon after ctx ends.
	Do func(ctx context.Context) error
	// After, if not nil, is called with the error of Do when the key is free again. A panic of Do
	// is converted to an error.
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
	return fmt.Sprintf("%v (next retry at %s)", e.Last, e.Until.Format(time.RFC3339))
}

func (e *BackoffError) Unwrap() error { return e.Last }

// The delays of the back-off, as in the kubelet.
const (
	firstDelay = 500 * time.Millisecond
	maxDelay   = 2*time.Minute + 2*time.Second
)

// Executor runs operations.
type Executor struct {
	ctx     context.Context
	done    func(o Operation, err error, took time.Duration)
	running sync.WaitGroup

	mu      sync.Mutex
	pending map[string]bool
	// failures holds the failed operations of each key by their names.
	failures map[string]map[string]failure
	// swept is the time of the last sweep.
	swept time.Time
}

// failure is the back-off of a failed operation.
type failure struct {
	delay time.Duration
	until time.Time
	// last is the error of the last attempt.
	last error
}

// New returns an Executor. The contexts of operations derive from ctx, and no operation starts after
// ctx has ended. done, if not nil, is called after each operation, when its key is free again.
func New(ctx context.Context, done func(o Operation, err error, took time.Duration)) *Executor {
	return &Executor{ctx: ctx, done: done, pending: map[string]bool{}, failures: map[string]map[string]failure{}, swept: time.Now()}
}

// Run starts an operation and does not wait for its end. It returns ErrPending while an operation of
// the key runs, a *BackoffError during the back-off after an operation of the key with the same name
// failed, and the context's error after the context has ended.
func (e *Executor) Run(key string, o Operation) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err := e.ctx.Err(); err != nil {
		return err
	}
	if e.pending[key] {
		return ErrPending
	}
	if f, failed := e.failures[key][o.Name]; failed && time.Now().Before(f.until) {
		return &BackoffError{Until: f.until, Last: f.last}
	}
	e.pending[key] = true
	e.running.Go(func() { e.run(e.ctx, key, o) })
	return nil
}

// run runs an operation, frees its key, and then calls After and done.
func (e *Executor) run(ctx context.Context, key string, o Operation) {
	log := klog.LoggerWithValues(klog.FromContext(ctx), "operation", o.Name, "plugin", o.Plugin, "object", o.Object)
	ctx = klog.NewContext(ctx, log)
	start := time.Now()
	err := do(ctx, o)
	took := time.Since(start)
	until := e.finish(key, o.Name, err)
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
}

// do converts a panic to an error: a bug in one plugin must not stop the others.
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
func (e *Executor) finish(key, operation string, err error) (until time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.pending, key)
	before, again := e.failures[key][operation]
	delete(e.failures[key], operation)
	if err != nil {
		delay := firstDelay
		if again {
			delay = min(2*before.delay, maxDelay)
		}
		if e.failures[key] == nil {
			e.failures[key] = map[string]failure{}
		}
		until = time.Now().Add(delay)
		e.failures[key][operation] = failure{delay: delay, until: until, last: err}
	}
	e.sweep()
	return until
}

// sweep removes failures that were not retried for maxDelay, because their objects do not exist any
// more.
func (e *Executor) sweep() {
	now := time.Now()
	if now.Sub(e.swept) < maxDelay {
		return
	}
	e.swept = now
	for key, failures := range e.failures {
		maps.DeleteFunc(failures, func(_ string, f failure) bool { return now.Sub(f.until) > maxDelay })
		if len(failures) == 0 {
			delete(e.failures, key)
		}
	}
}

// Pending reports whether an operation of the key runs.
func (e *Executor) Pending(key string) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.pending[key]
}

// Forget ends the back-off of a key, because the cause of its failures has changed.
func (e *Executor) Forget(key string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.failures, key)
}

// Wait returns when the context of New has ended and no operation runs.
func (e *Executor) Wait() {
	<-e.ctx.Done()
	e.mu.Lock()
	e.mu.Unlock() //nolint:staticcheck // wait until a call of Run that has checked the context has started its operation
	e.running.Wait()
}
