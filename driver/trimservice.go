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

const (
	trimService    = "trivet.v1.Trim"
	trimMethod     = "Trim"
	fullTrimMethod = "/" + trimService + "/" + trimMethod
)

// maxTrimResults bounds the answer of a driver, in bytes of JSON.
const maxTrimResults = 32 << 20

// register serves requests to trim volumes; the messages are JSON. Only the socket of the driver serves them: the network
// has no call that changes volumes for a user, and the rights to run a program in the driver's pod suffice.
func (t *trims) register(server grpc.ServiceRegistrar) {
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: trimService,
		HandlerType: (*any)(nil),
		Methods:     []grpc.MethodDesc{{MethodName: trimMethod, Handler: t.handle}},
	}, struct{}{})
}

// handle does not use the server's interceptors, because a request to trim is no CSI call: they would log and count it.
func (t *trims) handle(_ any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
	text := &wrapperspb.BytesValue{}
	if err := decode(text); err != nil {
		return nil, err
	}
	var r TrimRequest
	if err := json.Unmarshal(text.GetValue(), &r); err != nil {
		return nil, grpcstatus.Error(codes.InvalidArgument, err.Error())
	}
	return grpcserver.RecoverPanics(ctx, text, &grpc.UnaryServerInfo{FullMethod: fullTrimMethod}, func(ctx context.Context, _ any) (any, error) {
		results, err := t.demand(ctx, r)
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

// Trim requests a driver to trim volumes, and returns the results when all are trimmed.
func Trim(ctx context.Context, conn grpc.ClientConnInterface, r TrimRequest) (results []TrimResult, err error) {
	request, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	var answer wrapperspb.BytesValue
	err = conn.Invoke(ctx, fullTrimMethod, wrapperspb.Bytes(request), &answer, grpc.MaxCallRecvMsgSize(maxTrimResults))
	if grpcstatus.Code(err) == codes.Unimplemented {
		return nil, volume.Errorf(volume.ErrUnavailable, "the driver cannot trim volumes: it does not serve a node, or its version is older")
	}
	if err != nil {
		return nil, errors.New(grpcstatus.Convert(err).Message())
	}
	if err := json.Unmarshal(answer.GetValue(), &results); err != nil {
		return nil, fmt.Errorf("reading the answer of the driver: %w", err)
	}
	return results, nil
}
