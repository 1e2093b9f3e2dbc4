package kube

import (
	"context"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
)

// bodyLevel is the verbosity at which client-go logs request and response bodies.
const bodyLevel = 8

// withoutBodies returns a context whose logger never logs request and response bodies, because the
// body of the Secret contains the CA's private key.
func withoutBodies(ctx context.Context) context.Context {
	log := klog.FromContext(ctx)
	return klog.NewContext(ctx, log.WithSink(cappedSink{log.GetSink()}))
}

// cappedSink drops log lines at bodyLevel and above.
type cappedSink struct{ logr.LogSink }

// Enabled implements logr.LogSink.
func (s cappedSink) Enabled(level int) bool { return level < bodyLevel && s.LogSink.Enabled(level) }

// WithValues implements logr.LogSink.
func (s cappedSink) WithValues(values ...any) logr.LogSink {
	return cappedSink{s.LogSink.WithValues(values...)}
}

// WithName implements logr.LogSink.
func (s cappedSink) WithName(name string) logr.LogSink { return cappedSink{s.LogSink.WithName(name)} }
