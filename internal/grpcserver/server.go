// Package grpcserver is what every CSI call passes through, in the driver and in the worker
// of an NFS export: logging, one mutating call per volume at a time, recovery from panics,
// and the table of status codes.
package grpcserver

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-csi/trivet/internal/relay"
)

const (
	// WindowSize is that of HTTP/2 flow control, in bytes. Calls are small and stay on one
	// machine: a fixed window saves gRPC's probes for a better one.
	WindowSize = 256 << 10
	// streamWorkers are goroutines that wait for calls, so that no stack grows for each
	// call; more calls at once get goroutines of their own.
	streamWorkers = 8
)

// New makes a server on a Unix socket.
func New(options ...grpc.ServerOption) *grpc.Server {
	return grpc.NewServer(append(options[:len(options):len(options)],
		grpc.InitialWindowSize(WindowSize), grpc.InitialConnWindowSize(WindowSize), grpc.NumStreamWorkers(streamWorkers))...)
}

// Chain makes the options by which all calls pass through interceptors, in their order. A
// call that is answered by a stream passes through them once, with its request.
func Chain(interceptors ...grpc.UnaryServerInterceptor) []grpc.ServerOption {
	streams := []grpc.StreamServerInterceptor{readRequest}
	for _, one := range interceptors {
		streams = append(streams, onStream(one))
	}
	return []grpc.ServerOption{grpc.ChainUnaryInterceptor(interceptors...), grpc.ChainStreamInterceptor(streams...)}
}

// readStream is a stream whose request has been read.
type readStream struct {
	grpc.ServerStream
	ctx     context.Context
	request proto.Message
}

func (s *readStream) Context() context.Context { return s.ctx }

// RecvMsg gives the handler the request.
func (s *readStream) RecvMsg(m any) error {
	proto.Merge(m.(proto.Message), s.request)
	return nil
}

// readRequest reads the request before the interceptors. Without it the handler would, after
// them.
func readRequest(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	request, err := relay.NewRequest(info.FullMethod)
	if err != nil {
		return err
	}
	if err := stream.RecvMsg(request); err != nil {
		return err
	}
	return handler(srv, &readStream{stream, stream.Context(), request})
}

// onStream makes an interceptor for streams, which does not see the responses.
func onStream(intercept grpc.UnaryServerInterceptor) grpc.StreamServerInterceptor {
	return func(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		s := stream.(*readStream)
		unary := &grpc.UnaryServerInfo{Server: srv, FullMethod: info.FullMethod}
		_, err := intercept(s.ctx, s.request, unary, func(ctx context.Context, _ any) (any, error) {
			return nil, handler(srv, &readStream{s.ServerStream, ctx, s.request})
		})
		return err
	}
}
