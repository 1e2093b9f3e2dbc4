package kube

import (
	"context"
	"errors"
	"math"
	"net/url"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"
)

// backoff starts short for a server that has just started, and grows so that a failing API
// server does not get more load.
var backoff = wait.Backoff{Duration: 50 * time.Millisecond, Factor: 1.5, Jitter: 0.1, Cap: 30 * time.Second, Steps: math.MaxInt32}

// errorLog logs errors. If the same error repeats, it is logged once.
type errorLog struct {
	log     klog.Logger
	message string
	last    string // text of the error that was logged last; empty after a success
}

// report logs err, unless err is nil (after a success) or equal to the last one, or ctx has ended.
func (l *errorLog) report(ctx context.Context, err error) {
	switch {
	case ctx.Err() != nil:
	case err == nil:
		l.last = ""
	case err.Error() != l.last:
		l.last = err.Error()
		l.log.Error(err, l.message)
	}
}

// rareErrorInterval is the time for which rareErrors logs no further error.
const rareErrorInterval = 10 * time.Minute

// rareErrors logs one of the errors of an interval. Goroutines may use it concurrently.
type rareErrors struct {
	mu   sync.Mutex
	last time.Time
}

// log logs an error, unless one was logged in the last rareErrorInterval.
func (r *rareErrors) log(ctx context.Context, err error, message string, keysAndValues ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if time.Since(r.last) >= rareErrorInterval {
		r.last = time.Now()
		klog.FromContext(ctx).Error(err, message, keysAndValues...)
	}
}

// signal is raised when something changes. Several changes before it is received count as one.
type signal chan struct{}

func newSignal() signal { return make(signal, 1) }

func (s signal) raise() {
	select {
	case s <- struct{}{}:
	default:
	}
}

// dial connects, and retries until it succeeds. It returns nil if ctx ends first.
func dial(ctx context.Context, connect func() (*Client, error)) *Client {
	var c *Client
	errs := errorLog{log: klog.FromContext(ctx), message: "Connecting to the API server failed; retrying"}
	_ = backoff.DelayFunc().Until(ctx, true, true, func(ctx context.Context) (done bool, _ error) {
		var err error
		c, err = connect()
		errs.report(ctx, err)
		return err == nil, nil
	}) // Until fails only when ctx ends
	return c
}

// maxPause bounds the time between two calls of a reconcileLoop, because timers do not notice a changed
// clock or a suspended machine.
const maxPause = time.Hour

// reconcileLoop calls reconcile until ctx ends: immediately, after each change, and when the time that
// reconcile returned has passed. After an error, it waits for a delay of retries instead of that time. It logs
// errors with message.
func reconcileLoop(ctx context.Context, changed signal, retries wait.Backoff, message string, reconcile func(context.Context) (time.Duration, error)) {
	errs := errorLog{log: klog.FromContext(ctx), message: message}
	delay := retries.DelayFunc()
	for ctx.Err() == nil {
		next, err := reconcile(ctx)
		if !lostRace(err) {
			errs.report(ctx, err)
		}
		if err != nil {
			next = delay()
		} else {
			delay = retries.DelayFunc()
		}
		pause(ctx, changed, min(next, maxPause))
	}
}

// pause waits until something changes, ctx ends, or the given time has passed.
func pause(ctx context.Context, changed signal, atMost time.Duration) {
	timer := time.NewTimer(atMost)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-changed:
	case <-timer.C:
	}
}

// Unanswered reports whether an error means that the API server does not answer now, so that the call can be repeated.
func Unanswered(err error) bool {
	var failed *url.Error // a request without a response
	return errors.As(err, &failed) || apierrors.IsServerTimeout(err) || apierrors.IsTimeout(err) || apierrors.IsServiceUnavailable(err) || apierrors.IsInternalError(err)
}

// lostRace reports whether a write failed because another client changed or created the object first.
// The watch reports that change.
func lostRace(err error) bool {
	return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err)
}
