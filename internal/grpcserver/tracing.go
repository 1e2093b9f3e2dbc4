package grpcserver

import (
	"context"
	"errors"
	"maps"
	"path"
	"slices"
	"strings"

	"go.opentelemetry.io/otel/propagation"
	oteltrace "go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/internal/trace"
)

// traceContext is the header traceparent of W3C, which names the span that a call belongs to.
var traceContext = propagation.TraceContext{}

// traceCalls is the interceptor that records a span for each call. The span has what LogCalls logs.
// Calls of the Identity service are not recorded, because they are probes.
func traceCalls(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if strings.HasPrefix(info.FullMethod, "/csi.v1.Identity/") {
		return handler(ctx, req)
	}
	if received, ok := metadata.FromIncomingContext(ctx); ok {
		ctx = traceContext.Extract(ctx, headers(received))
	}
	ctx, span := trace.StartCall(ctx, path.Base(info.FullMethod), oteltrace.SpanKindServer)
	if kind, id := Subject(req); id != "" {
		span.Set("trivet."+kind, id)
	}
	ctx = klog.NewContext(ctx, klog.LoggerWithValues(klog.FromContext(ctx), "trace", span.ID()))
	resp, err := handler(ctx, req)
	endCall(span, err)
	return resp, err
}

// TraceClient returns the options of a client that records a span for each call to a peer, if the call belongs to another
// one. peer returns the name of the peer of a call. The peer's spans are below it. A call with a stream of responses has no span of the client.
func TraceClient(kind string, peer func(context.Context) string) []grpc.DialOption {
	if !trace.Enabled() {
		return nil
	}
	return []grpc.DialOption{
		grpc.WithUnaryInterceptor(func(ctx context.Context, method string, req, resp any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
			if !trace.InCall(ctx) {
				return invoke(ctx, method, req, resp, conn, options...)
			}
			ctx, span := trace.StartCall(ctx, path.Base(method), oteltrace.SpanKindClient)
			span.Set("trivet."+kind, peer(ctx))
			err := invoke(withTraceContext(ctx), method, req, resp, conn, options...)
			endCall(span, err)
			return err
		}),
		grpc.WithStreamInterceptor(func(ctx context.Context, d *grpc.StreamDesc, conn *grpc.ClientConn, method string, open grpc.Streamer, options ...grpc.CallOption) (grpc.ClientStream, error) {
			return open(withTraceContext(ctx), d, conn, method, options...)
		}),
	}
}

// withTraceContext adds the span of ctx to the metadata of an outgoing call.
func withTraceContext(ctx context.Context) context.Context {
	md, _ := metadata.FromOutgoingContext(ctx) // a copy
	if md == nil {
		md = metadata.MD{}
	}
	traceContext.Inject(ctx, headers(md))
	return metadata.NewOutgoingContext(ctx, md)
}

// headers implements propagation.TextMapCarrier.
type headers metadata.MD

// Get implements propagation.TextMapCarrier.
func (h headers) Get(key string) string {
	if values := metadata.MD(h).Get(key); len(values) == 1 {
		return values[0]
	}
	return ""
}

// Set implements propagation.TextMapCarrier.
func (h headers) Set(key, value string) { metadata.MD(h).Set(key, value) }

// Keys implements propagation.TextMapCarrier.
func (h headers) Keys() []string { return slices.Collect(maps.Keys(h)) }

// endCall ends the span of a call with its status.
func endCall(span trace.Span, err error) {
	span.Set("rpc.response.status_code", status.Code(err).String())
	if err != nil {
		err = errors.New(status.Convert(err).Message())
	}
	span.End(&err)
}
