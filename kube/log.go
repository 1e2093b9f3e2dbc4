package kube

import (
	"context"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
)

// bodyLevel is the verbosity from which client-go logs what it sends and gets.
const bodyLevel = 8

// withoutBodies is a context in which no verbosity shows them: a CA's key is among
// them.
func withoutBodies(ctx context.Context) context.Context {
	log := klog.FromContext(ctx)
	return klog.NewContext(ctx, log.WithSink(discreet{log.GetSink()}))
}

// discreet ends below bodyLevel.
type discreet struct{ logr.LogSink }

// Enabled implements logr.LogSink.
func (d discreet) Enabled(level int) bool { return level < bodyLevel && d.LogSink.Enabled(level) }

// WithValues implements logr.LogSink.
func (d discreet) WithValues(values ...any) logr.LogSink {
	return discreet{d.LogSink.WithValues(values...)}
}

// WithName implements logr.LogSink.
func (d discreet) WithName(name string) logr.LogSink { return discreet{d.LogSink.WithName(name)} }
