// Package relay forwards CSI calls, whatever their messages are, to an implementation in this process or
// over a connection. Full gRPC method names identify the calls.
package relay

import (
	"context"
	"fmt"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"github.com/trivet-csi/trivet/controllerserver"
)

// Service answers calls.
type Service interface {
	// Call makes a call with one response.
	Call(ctx context.Context, method string, req proto.Message) (proto.Message, error)
	// Stream makes a call with a stream of responses and passes each one to send.
	Stream(ctx context.Context, method string, req proto.Message, send func(any) error) error
}

// Call calls s.Call and returns the response with its type.
func Call[Resp proto.Message](ctx context.Context, s Service, method string, req proto.Message) (resp Resp, err error) {
	m, err := s.Call(ctx, method, req)
	if err != nil {
		return resp, err
	}
	return m.(Resp), nil
}

// remote is a Service at the other end of a connection.
type remote struct{ conn grpc.ClientConnInterface }

// Remote returns the Service at the other end of a connection.
func Remote(conn grpc.ClientConnInterface) Service { return remote{conn} }

// Call implements Service.
func (r remote) Call(ctx context.Context, method string, req proto.Message) (proto.Message, error) {
	types, ok := methods()[method]
	if !ok {
		return nil, unserved(method)
	}
	resp := types.response.New().Interface()
	if err := r.conn.Invoke(ctx, method, req, resp); err != nil {
		return nil, err
	}
	return resp, nil
}

// Stream implements Service.
func (r remote) Stream(ctx context.Context, method string, req proto.Message, send func(any) error) error {
	types, ok := methods()[method]
	if !ok {
		return unserved(method)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the call if send has failed
	stream, err := r.conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, method)
	if err != nil {
		return err
	}
	if err := stream.SendMsg(req); err != nil {
		return err
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	return controllerserver.Pass(func() (any, error) {
		resp := types.response.New().Interface()
		return resp, stream.RecvMsg(resp)
	}, send)
}

// messageTypes are the message types of a method.
type messageTypes struct{ request, response protoreflect.MessageType }

// methods returns the message types of all CSI methods by full method name. They are resolved once, because
// each look-up in protobuf's registry takes a lock.
var methods = sync.OnceValue(func() map[string]messageTypes {
	all := map[string]messageTypes{}
	services := csi.File_csi_proto.Services()
	for i := range services.Len() {
		for j := range services.Get(i).Methods().Len() {
			m := services.Get(i).Methods().Get(j)
			request, requestErr := protoregistry.GlobalTypes.FindMessageByName(m.Input().FullName())
			response, responseErr := protoregistry.GlobalTypes.FindMessageByName(m.Output().FullName())
			if requestErr == nil && responseErr == nil {
				all[fmt.Sprintf("/%s/%s", m.Parent().FullName(), m.Name())] = messageTypes{request, response}
			}
		}
	}
	return all
})

// NewRequest returns an empty request of a method.
func NewRequest(method string) (proto.Message, error) {
	types, ok := methods()[method]
	if !ok {
		return nil, unserved(method)
	}
	return types.request.New().Interface(), nil
}

// unserved returns the error for an unknown method.
func unserved(method string) error {
	return status.Errorf(codes.Unimplemented, "%s is not served", method)
}

// ControllerServices are the gRPC services of controllerserver.Services.
var ControllerServices = []*grpc.ServiceDesc{&csi.Controller_ServiceDesc, &csi.GroupController_ServiceDesc, &csi.SnapshotMetadata_ServiceDesc}

// local is a Service in this process.
type local struct {
	server  any
	unary   map[string]grpc.MethodDesc
	streams map[string]grpc.StreamDesc
}

// Controller returns a Service that calls a controller in this process.
func Controller(s controllerserver.Services) Service { return newLocal(s, ControllerServices...) }

// Node returns a Service that calls a node service in this process.
func Node(s csi.NodeServer) Service { return newLocal(s, &csi.Node_ServiceDesc) }

// newLocal returns a Service that calls server, which implements the gRPC services.
func newLocal(server any, services ...*grpc.ServiceDesc) local {
	l := local{server: server, unary: map[string]grpc.MethodDesc{}, streams: map[string]grpc.StreamDesc{}}
	for _, d := range services {
		for _, m := range d.Methods {
			l.unary[fullName(d, m.MethodName)] = m
		}
		for _, m := range d.Streams {
			l.streams[fullName(d, m.StreamName)] = m
		}
	}
	return l
}

// fullName returns the full name of a method of a gRPC service.
func fullName(d *grpc.ServiceDesc, method string) string { return "/" + d.ServiceName + "/" + method }

// Call implements Service. It passes req to the handler instead of the empty request that the handler decodes.
func (l local) Call(ctx context.Context, method string, req proto.Message) (proto.Message, error) {
	m, ok := l.unary[method]
	if !ok {
		return nil, unserved(method)
	}
	resp, err := m.Handler(l.server, ctx, func(any) error { return nil },
		func(ctx context.Context, _ any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
			return handle(ctx, req)
		})
	if err != nil {
		return nil, err
	}
	return resp.(proto.Message), nil
}

// Stream implements Service.
func (l local) Stream(ctx context.Context, method string, req proto.Message, send func(any) error) error {
	m, ok := l.streams[method]
	if !ok {
		return unserved(method)
	}
	return m.Handler(l.server, localStream{RequestStream{Ctx: ctx, Request: req}, send})
}

// RequestStream is the stream of a call whose request has been read.
type RequestStream struct {
	grpc.ServerStream
	Ctx     context.Context
	Request proto.Message
}

// Context implements grpc.ServerStream.
func (s RequestStream) Context() context.Context { return s.Ctx }

// RecvMsg passes the request to the handler.
func (s RequestStream) RecvMsg(m any) error {
	proto.Merge(m.(proto.Message), s.Request)
	return nil
}

// localStream passes the responses of a handler to send.
type localStream struct {
	RequestStream
	send func(any) error
}

func (s localStream) SendMsg(m any) error { return s.send(m) }

// Register registers a Service as the implementation of gRPC services.
func Register(r grpc.ServiceRegistrar, s Service, services ...*grpc.ServiceDesc) {
	for _, d := range services {
		relayed := &grpc.ServiceDesc{ServiceName: d.ServiceName, HandlerType: (*Service)(nil), Metadata: d.Metadata}
		for _, m := range d.Methods {
			relayed.Methods = append(relayed.Methods, grpc.MethodDesc{MethodName: m.MethodName, Handler: unaryHandler(fullName(d, m.MethodName))})
		}
		for _, m := range d.Streams {
			relayed.Streams = append(relayed.Streams, grpc.StreamDesc{StreamName: m.StreamName, ServerStreams: true, Handler: streamHandler(fullName(d, m.StreamName))})
		}
		r.RegisterService(relayed, s)
	}
}

// unaryHandler returns a handler that passes the calls of a method to a Service.
func unaryHandler(method string) grpc.MethodHandler {
	return func(s any, ctx context.Context, decode func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error) {
		req, err := NewRequest(method)
		if err != nil {
			return nil, err
		}
		if err := decode(req); err != nil {
			return nil, err
		}
		handle := func(ctx context.Context, req any) (any, error) {
			return s.(Service).Call(ctx, method, req.(proto.Message))
		}
		if interceptor == nil {
			return handle(ctx, req)
		}
		return interceptor(ctx, req, &grpc.UnaryServerInfo{Server: s, FullMethod: method}, handle)
	}
}

// streamHandler does the same as unaryHandler for a method with a stream of responses.
func streamHandler(method string) grpc.StreamHandler {
	return func(s any, stream grpc.ServerStream) error {
		req, err := NewRequest(method)
		if err != nil {
			return err
		}
		if err := stream.RecvMsg(req); err != nil {
			return err
		}
		return s.(Service).Stream(stream.Context(), method, req, stream.SendMsg)
	}
}
