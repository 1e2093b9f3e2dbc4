package otlp

import (
	"context"
	"errors"
	"strings"
	"testing"

	sdk "go.opentelemetry.io/otel/sdk/trace"
	"k8s.io/klog/v2/ktesting"
)

// scripted returns one error for each batch.
type scripted struct {
	sdk.SpanExporter
	errs []error
}

func (s *scripted) ExportSpans(context.Context, []sdk.ReadOnlySpan) error {
	err := s.errs[0]
	s.errs = s.errs[1:]
	return err
}

// TestChangesLogged: only a change between failure and success is logged.
func TestChangesLogged(t *testing.T) {
	refused := errors.New("connection refused")
	client := &scripted{errs: []error{nil, refused, refused, nil, nil, refused}}
	log := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	e := &exporter{SpanExporter: client, endpoint: "http://collector", log: log}
	for len(client.errs) > 0 {
		if err := e.ExportSpans(t.Context(), nil); err != nil {
			t.Errorf("got %v, want nil", err)
		}
	}
	text := log.GetSink().(ktesting.Underlier).GetBuffer().String()
	if strings.Count(text, "Traces cannot be sent") != 2 || strings.Count(text, "Traces are sent again") != 1 {
		t.Errorf("got log %s, want 2 failures and 1 success between them", text)
	}
}
