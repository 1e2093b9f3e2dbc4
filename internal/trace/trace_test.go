package trace_test

import (
	"context"
	"errors"
	"testing"

	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	oteltrace "go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/semaphore"

	"github.com/trivet-csi/trivet/internal/trace"
)

// step is a step with a span.
func step(ctx context.Context) (err error) {
	ctx, span := trace.Start(ctx, "step")
	span.Set("key", "value")
	defer span.End(&err)
	return ctx.Err()
}

// TestCost: without a tracer, a step and a job allocate nothing.
func TestCost(t *testing.T) {
	if trace.Enabled() {
		t.Fatal("spans are recorded before Use")
	}
	ctx := t.Context()
	n := testing.AllocsPerRun(1000, func() {
		if err := step(ctx); err != nil {
			t.Fatal(err)
		}
		job, span := trace.StartJob(ctx, "job")
		span.Link(trace.Span{})
		span.End(nil)
		if job != ctx {
			t.Fatal("the context has changed")
		}
	})
	if n != 0 {
		t.Errorf("got %v allocations, want 0", n)
	}
}

// TestSpans: only steps of a call are recorded. A job is the root of another trace. A wait for a semaphore is a
// step, a free semaphore is none.
func TestSpans(t *testing.T) {
	recorder := tracetest.NewSpanRecorder()
	trace.Use(sdk.NewTracerProvider(sdk.WithSpanProcessor(recorder)).Tracer("test"))
	if err := step(t.Context()); err != nil || len(recorder.Started()) != 0 {
		t.Errorf("got error %v and %d spans without a call, want none", err, len(recorder.Started()))
	}
	ctx, call := trace.StartCall(t.Context(), "Call", oteltrace.SpanKindServer)
	ctx, cancel := context.WithCancel(ctx)
	s := semaphore.NewWeighted(1)
	if err := trace.Acquire(ctx, s, "wait"); err != nil {
		t.Fatal(err)
	}
	_, job := trace.StartJob(ctx, "job")
	job.End(nil)
	cancel()
	if err := trace.Acquire(ctx, s, "wait"); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v for a canceled wait, want context.Canceled", err)
	}
	if err := step(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want context.Canceled", err)
	}
	call.End(nil)
	spans := recorder.Ended()
	if len(spans) != 4 {
		t.Fatalf("got %d spans, want the job, the second wait, the step and the call", len(spans))
	}
	root := spans[3].SpanContext()
	if j := spans[0]; j.Parent().IsValid() || j.SpanContext().TraceID() == root.TraceID() || len(j.Links()) != 1 || j.Links()[0].SpanContext.SpanID() != root.SpanID() {
		t.Errorf("got job %v with links %v, want a root with a link to %v", j.Parent(), j.Links(), root)
	}
	for i, name := range []string{"wait", "step"} {
		if s := spans[i+1]; s.Name() != name || s.Parent().SpanID() != root.SpanID() || s.Status().Description != "context canceled" {
			t.Errorf("got %s below %v with status %v, want the canceled %s below %v", s.Name(), s.Parent(), s.Status(), name, root)
		}
	}
}
