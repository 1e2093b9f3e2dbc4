package driver

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// around makes the options of a server all of whose calls go through interceptors, those
// with a stream of answers too.
func around(interceptors ...grpc.UnaryServerInterceptor) []grpc.ServerOption {
	streams := []grpc.StreamServerInterceptor{readRequest}
	for _, one := range interceptors {
		streams = append(streams, onStream(one))
	}
	return []grpc.ServerOption{grpc.ChainUnaryInterceptor(interceptors...), grpc.ChainStreamInterceptor(streams...)}
}

// answers is the stream of answers to a request that was read.
type answers struct {
	grpc.ServerStream
	ctx     context.Context
	request proto.Message
}

func (a *answers) Context() context.Context { return a.ctx }

// RecvMsg gives the handler the request.
func (a *answers) RecvMsg(m any) error {
	proto.Merge(m.(proto.Message), a.request)
	return nil
}

// requests makes what is asked by calls that are answered by a stream.
var requests = map[string]func() proto.Message{
	csi.SnapshotMetadata_GetMetadataAllocated_FullMethodName: func() proto.Message { return &csi.GetMetadataAllocatedRequest{} },
	csi.SnapshotMetadata_GetMetadataDelta_FullMethodName:     func() proto.Message { return &csi.GetMetadataDeltaRequest{} },
}

// readRequest reads the request, which the handler would else do after the interceptors.
func readRequest(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	empty := requests[info.FullMethod]
	if empty == nil {
		return status.Errorf(codes.Unimplemented, "%s is not served", info.FullMethod)
	}
	request := empty()
	if err := stream.RecvMsg(request); err != nil {
		return err
	}
	return handler(srv, &answers{stream, stream.Context(), request})
}

// onStream makes of an interceptor one for streams; there is no answer that it could see.
func onStream(intercept grpc.UnaryServerInterceptor) grpc.StreamServerInterceptor {
	return func(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		a := stream.(*answers)
		unary := &grpc.UnaryServerInfo{Server: srv, FullMethod: info.FullMethod}
		_, err := intercept(a.ctx, a.request, unary, func(ctx context.Context, _ any) (any, error) {
			return nil, handler(srv, &answers{a.ServerStream, ctx, a.request})
		})
		return err
	}
}
