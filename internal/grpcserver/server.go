// Package grpcserver contains the server and the interceptors of every CSI call, in the driver and in
// the worker of an NFS export: logging, one mutating call per volume at a time, recovery from panics,
// and the table of status codes.
package grpcserver

import (
	"context"

	"google.golang.org/grpc"

	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/internal/trace"
)

const (
	// WindowSize is the HTTP/2 flow control window in bytes. Calls are small and local, so a fixed window is
	// sufficient and avoids gRPC's bandwidth probes.
	WindowSize = 256 << 10
	// streamWorkers is the number of goroutines that wait for calls, so that their stacks are
	// reused. Further concurrent calls get goroutines of their own.
	streamWorkers = 8
)

// New returns a server for a Unix socket.
func New(options ...grpc.ServerOption) *grpc.Server {
	return grpc.NewServer(append(options[:len(options):len(options)],
		grpc.InitialWindowSize(WindowSize), grpc.InitialConnWindowSize(WindowSize), grpc.NumStreamWorkers(streamWorkers))...)
}

// Chain returns the server options that pass all calls through interceptors, in order. A call with a stream
// of responses passes through them once, with its request. If spans are recorded, an interceptor before the others
// records one for each call.
func Chain(interceptors ...grpc.UnaryServerInterceptor) []grpc.ServerOption {
	if trace.Enabled() {
		interceptors = append([]grpc.UnaryServerInterceptor{traceCalls}, interceptors...)
	}
	streams := []grpc.StreamServerInterceptor{readRequest}
	for _, intercept := range interceptors {
		streams = append(streams, onStream(intercept))
	}
	return []grpc.ServerOption{grpc.ChainUnaryInterceptor(interceptors...), grpc.ChainStreamInterceptor(streams...)}
}

// readRequest reads the request of a stream, so that the interceptors that follow receive it.
func readRequest(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	request, err := relay.NewRequest(info.FullMethod)
	if err != nil {
		return err
	}
	if err := stream.RecvMsg(request); err != nil {
		return err
	}
	return handler(srv, relay.RequestStream{ServerStream: stream, Ctx: stream.Context(), Request: request})
}

// onStream converts a unary interceptor to a stream interceptor. The unary interceptor receives no responses.
func onStream(intercept grpc.UnaryServerInterceptor) grpc.StreamServerInterceptor {
	return func(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		s := stream.(relay.RequestStream)
		unary := &grpc.UnaryServerInfo{Server: srv, FullMethod: info.FullMethod}
		_, err := intercept(s.Ctx, s.Request, unary, func(ctx context.Context, _ any) (any, error) {
			return nil, handler(srv, relay.RequestStream{ServerStream: s.ServerStream, Ctx: ctx, Request: s.Request})
		})
		return err
	}
}
