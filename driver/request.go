package driver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/trivet-csi/trivet/internal/grpcserver"
	"github.com/trivet-csi/trivet/volume"
)

// The methods for requests that are no CSI calls. The messages are JSON. Only the socket of the driver serves them: the network has
// no call that changes volumes for a user, and the rights to run a program in the driver's pod suffice.
const (
	trimMethod  = method("Trim")
	checkMethod = method("Check")
)

// method is the name of a method, and of its service.
type method string

func (m method) service() string { return "trivet.v1." + string(m) }

func (m method) path() string { return "/" + m.service() + "/" + string(m) }

// maxResults bounds the answer of a driver, in bytes of JSON.
const maxResults = 32 << 20

// serveRequests serves a method by a function. An error of the function means that the request is invalid (ErrInvalid), or that a
// pool cannot be read.
func serveRequests[Request, Result any](server grpc.ServiceRegistrar, m method, do func(context.Context, Request) ([]Result, error)) {
	// The handler does not use the server's interceptors, because the request is no CSI call: they would log and count it.
	handle := func(_ any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
		text := &wrapperspb.BytesValue{}
		if err := decode(text); err != nil {
			return nil, err
		}
		var r Request
		if err := json.Unmarshal(text.GetValue(), &r); err != nil {
			return nil, grpcstatus.Error(codes.InvalidArgument, err.Error())
		}
		return grpcserver.RecoverPanics(ctx, text, &grpc.UnaryServerInfo{FullMethod: m.path()}, func(ctx context.Context, _ any) (any, error) {
			results, err := do(ctx, r)
			switch {
			case errors.Is(err, volume.ErrInvalid):
				return nil, grpcstatus.Error(codes.InvalidArgument, err.Error())
			case err != nil:
				return nil, grpcstatus.Error(codes.Unavailable, err.Error())
			}
			answer, err := json.Marshal(results)
			return wrapperspb.Bytes(answer), err
		})
	}
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: m.service(),
		HandlerType: (*any)(nil),
		Methods:     []grpc.MethodDesc{{MethodName: string(m), Handler: handle}},
	}, struct{}{})
}

// request calls a method of a driver.
func request[Result any](ctx context.Context, conn grpc.ClientConnInterface, m method, r any) (results []Result, err error) {
	text, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	var answer wrapperspb.BytesValue
	err = conn.Invoke(ctx, m.path(), wrapperspb.Bytes(text), &answer, grpc.MaxCallRecvMsgSize(maxResults))
	if grpcstatus.Code(err) == codes.Unimplemented {
		return nil, volume.Errorf(volume.ErrUnavailable, "the driver has no method %s: it does not serve a node, or its version is older", m)
	}
	if err != nil {
		return nil, errors.New(grpcstatus.Convert(err).Message())
	}
	if err := json.Unmarshal(answer.GetValue(), &results); err != nil {
		return nil, fmt.Errorf("reading the answer of the driver: %w", err)
	}
	return results, nil
}

// Trim requests a driver to trim volumes, and returns the results when all are trimmed.
func Trim(ctx context.Context, conn grpc.ClientConnInterface, r TrimRequest) ([]TrimResult, error) {
	return request[TrimResult](ctx, conn, trimMethod, r)
}

// Check requests a driver to check volumes, and returns the results when all are checked.
func Check(ctx context.Context, conn grpc.ClientConnInterface, r CheckRequest) ([]CheckResult, error) {
	return request[CheckResult](ctx, conn, checkMethod, r)
}
