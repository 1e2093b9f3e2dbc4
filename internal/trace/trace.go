// Package trace records what calls do as OpenTelemetry spans. Nothing is recorded, and nothing is allocated, until
// Use sets a tracer. The exporter is in package otlp, the interceptors of calls are in package grpcserver.
//
// A span never contains requests, the environment, or the arguments and the output of a command.
package trace

import (
	"context"
	"sync/atomic"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/semaphore"
)

// tracer is nil while nothing is recorded.
var tracer atomic.Pointer[trace.Tracer]

// Use records all later spans with a tracer. Servers and clients that were created before do not record their calls.
func Use(t trace.Tracer) { tracer.Store(&t) }

// Enabled reports whether spans are recorded.
func Enabled() bool { return tracer.Load() != nil }

// Span is the time of one call or step. The methods of the zero Span do nothing.
type Span struct{ span trace.Span }

// Start starts the span of a step of the call that ctx belongs to. Steps of background tasks, which belong to no
// call, are not recorded. The step is done with the returned context.
func Start(ctx context.Context, name string) (context.Context, Span) {
	t := tracer.Load()
	if t == nil || !InCall(ctx) {
		return ctx, Span{}
	}
	ctx, span := (*t).Start(ctx, name)
	return ctx, Span{span}
}

// StartJob starts the span of a job that can continue after the call that ctx belongs to. It is the root of a trace of
// its own, with a link to the call.
func StartJob(ctx context.Context, name string) (context.Context, Span) {
	t := tracer.Load()
	if t == nil || !InCall(ctx) {
		return ctx, Span{}
	}
	ctx, span := (*t).Start(ctx, name, trace.WithNewRoot(), trace.WithLinks(trace.LinkFromContext(ctx)))
	return ctx, Span{span}
}

// StartCall starts the span of a gRPC call: as a server, or as a client.
func StartCall(ctx context.Context, method string, kind trace.SpanKind) (context.Context, Span) {
	ctx, span := (*tracer.Load()).Start(ctx, method, trace.WithSpanKind(kind))
	return ctx, Span{span}
}

// Acquire acquires one unit of a semaphore. A wait is a step of the call.
func Acquire(ctx context.Context, s *semaphore.Weighted, name string) (err error) {
	if Enabled() && ctx.Err() == nil && s.TryAcquire(1) {
		return nil
	}
	ctx, span := Start(ctx, name)
	defer span.End(&err)
	return s.Acquire(ctx, 1)
}

// InCall reports whether ctx belongs to a call with a span.
func InCall(ctx context.Context) bool { return trace.SpanContextFromContext(ctx).IsValid() }

// Set sets an attribute of the span.
func (s Span) Set(key, value string) {
	if s.span != nil {
		s.span.SetAttributes(attribute.String(key, value))
	}
}

// Link links the span to another one.
func (s Span) Link(to Span) {
	if s.span != nil && to.span != nil {
		s.span.AddLink(trace.Link{SpanContext: to.span.SpanContext()})
	}
}

// End ends the span. If err is not nil and *err is not nil, the step has failed.
func (s Span) End(err *error) {
	if s.span == nil {
		return
	}
	if err != nil && *err != nil {
		s.span.SetStatus(codes.Error, (*err).Error())
	}
	s.span.End()
}

// ID returns the ID of the trace. The zero Span has none.
func (s Span) ID() string { return s.span.SpanContext().TraceID().String() }
