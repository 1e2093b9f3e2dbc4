// Package otlp sends the spans of this process to an OpenTelemetry collector.
package otlp

import (
	"cmp"
	"context"
	"fmt"
	"net/url"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/internal/trace"
)

// Process describes this process to the collector.
type Process struct {
	Version string
	Node    string // name of the node; empty for a process without one
}

// Start sends spans as the standard environment variables say (OTEL_EXPORTER_OTLP_ENDPOINT and others). Without an
// endpoint it does nothing. A wrong setting is logged, and the process continues without spans. stop sends the
// spans that remain, for at most a timeout. Call Start before servers and clients are created.
func Start(ctx context.Context, p Process) (stop func(timeout time.Duration)) {
	log := klog.FromContext(ctx)
	endpoint, err := enabled()
	if err != nil {
		log.Error(err, "Traces are disabled")
	}
	if endpoint == "" {
		return func(time.Duration) {}
	}
	otel.SetLogger(log)
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.Info("OpenTelemetry reports a problem", "reason", err.Error()) }))
	client, err := newExporter(ctx)
	if err != nil {
		log.Error(err, "Traces are disabled")
		return func(time.Duration) {}
	}
	if u, err := url.Parse(endpoint); err == nil {
		endpoint = u.Redacted() // it is logged
	}
	e := &exporter{SpanExporter: client, endpoint: endpoint, log: log}
	provider := sdk.NewTracerProvider(sdk.WithBatcher(e), sdk.WithResource(p.resource(ctx)))
	trace.Use(provider.Tracer("github.com/trivet-csi/trivet"))
	log.Info("Sending traces", "endpoint", endpoint)
	return func(timeout time.Duration) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout)
		defer cancel()
		if err := provider.Shutdown(ctx); err != nil {
			e.setError(err)
		}
	}
}

// enabled returns the configured endpoint; empty if spans are not exported.
func enabled() (endpoint string, err error) {
	endpoint = variable("ENDPOINT")
	if endpoint == "" || strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") {
		return "", nil
	}
	switch e := os.Getenv("OTEL_TRACES_EXPORTER"); e {
	case "", "otlp":
		return endpoint, nil
	case "none":
		return "", nil
	default:
		return "", fmt.Errorf("OTEL_TRACES_EXPORTER=%q: must be otlp or none", e)
	}
}

// variable returns a variable of the exporter. The one for traces precedes the one for all signals.
func variable(name string) string {
	return cmp.Or(os.Getenv("OTEL_EXPORTER_OTLP_TRACES_"+name), os.Getenv("OTEL_EXPORTER_OTLP_"+name))
}

// newExporter creates the exporter of the configured protocol. The exporters read all other variables.
func newExporter(ctx context.Context) (sdk.SpanExporter, error) {
	switch protocol := variable("PROTOCOL"); protocol {
	case "grpc":
		return otlptracegrpc.New(ctx)
	case "", "http/protobuf":
		return otlptracehttp.New(ctx)
	default:
		return nil, fmt.Errorf("OTEL_EXPORTER_OTLP_PROTOCOL=%q: must be grpc or http/protobuf", protocol)
	}
}

// resource returns the attributes of all spans. OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES override them.
func (p Process) resource(ctx context.Context) *resource.Resource {
	attributes := []attribute.KeyValue{attribute.String("service.name", "trivet"), attribute.String("service.version", p.Version)}
	if p.Node != "" {
		attributes = append(attributes, attribute.String("host.name", p.Node))
	}
	r, err := resource.New(ctx, resource.WithTelemetrySDK(), resource.WithAttributes(attributes...), resource.WithFromEnv())
	if err != nil {
		otel.Handle(err) // r contains the other attributes
	}
	return r
}

// exporter logs when the export begins to fail, and when it works again. Spans that cannot be sent are dropped.
type exporter struct {
	sdk.SpanExporter
	endpoint string
	log      klog.Logger
	failing  atomic.Bool
}

// ExportSpans implements sdk.SpanExporter. It returns nil after an error, which would be logged for each batch.
func (e *exporter) ExportSpans(ctx context.Context, spans []sdk.ReadOnlySpan) error {
	e.setError(e.SpanExporter.ExportSpans(ctx, spans))
	return nil
}

// MarshalLog implements logr.Marshaler. The log must not contain the headers of the client, which can be secret.
func (e *exporter) MarshalLog() any { return e.endpoint }

// setError logs a change between success and failure.
func (e *exporter) setError(err error) {
	switch before := e.failing.Swap(err != nil); {
	case err != nil && !before:
		e.log.Info("Traces cannot be sent and are dropped; retrying", "endpoint", e.endpoint, "reason", err.Error())
	case err == nil && before:
		e.log.Info("Traces are sent again", "endpoint", e.endpoint)
	}
}
