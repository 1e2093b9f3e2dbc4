package kube

import (
	"context"
	"math"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"
)

// backoff: what has just started is waited for closely, and an API server that is
// broken gets no more trouble.
var backoff = wait.Backoff{Duration: 50 * time.Millisecond, Factor: 1.5, Jitter: 0.1, Cap: 30 * time.Second, Steps: math.MaxInt32}

// complaints logs an error once while it stays the same.
type complaints struct {
	log     klog.Logger
	message string
	last    string
}

func (c *complaints) hear(ctx context.Context, err error) {
	switch {
	case ctx.Err() != nil:
	case err == nil:
		c.last = ""
	case err.Error() != c.last:
		c.last = err.Error()
		c.log.Error(err, c.message)
	}
}

// signal tells that something has changed, once for any number of changes.
type signal chan struct{}

func newSignal() signal { return make(signal, 1) }

func (s signal) raise() {
	select {
	case s <- struct{}{}:
	default:
	}
}

// dial connects, however often that has to be tried. It returns nil when ctx ends.
func dial(ctx context.Context, connect func() (*Client, error)) *Client {
	var c *Client
	errs := complaints{log: klog.FromContext(ctx), message: "No connection to Kubernetes; it is tried again"}
	_ = backoff.DelayFunc().Until(ctx, true, true, func(ctx context.Context) (done bool, _ error) {
		var err error
		c, err = connect()
		errs.hear(ctx, err)
		return err == nil, nil
	}) // fails only as ctx ends
	return c
}

// longest is how long nothing is looked at: timers do not see that a clock was set, or
// that the machine slept.
const longest = time.Hour

// attend calls act at once, after each change, after the time that act asked for,
// and, if it failed, as slowly says; until ctx ends.
func attend(ctx context.Context, changed signal, slowly wait.Backoff, message string, act func(context.Context) (time.Duration, error)) {
	errs := complaints{log: klog.FromContext(ctx), message: message}
	delay := slowly.DelayFunc()
	for ctx.Err() == nil {
		next, err := act(ctx)
		if !overtaken(err) {
			errs.hear(ctx, err)
		}
		if err != nil {
			next = delay()
		} else {
			delay = slowly.DelayFunc()
		}
		pause(ctx, changed, min(next, longest))
	}
}

// pause waits for a change, and no longer than that.
func pause(ctx context.Context, changed signal, atMost time.Duration) {
	timer := time.NewTimer(atMost)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-changed:
	case <-timer.C:
	}
}

// overtaken tells whether another replica was faster. Its change is on the way here.
func overtaken(err error) bool {
	return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err)
}
