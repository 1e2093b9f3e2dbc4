package status

import (
	"context"
	"encoding/json"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/trivet-csi/trivet/internal/grpcserver"
)

const (
	serviceName  = "trivet.v1.Status"
	reportMethod = "Report"
	fullMethod   = "/" + serviceName + "/" + reportMethod
)

// maxReport bounds the report of a node, in bytes of JSON.
const maxReport = 32 << 20

// Source returns the current report.
type Source func(context.Context) Report

// Register serves the report to other drivers. The message is the JSON of the report.
func Register(server grpc.ServiceRegistrar, source Source) {
	source, _ = shared(source)
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: serviceName,
		HandlerType: (*any)(nil),
		Methods:     []grpc.MethodDesc{{MethodName: reportMethod, Handler: source.handle}},
	}, struct{}{})
}

// handle does not use the server's interceptors, because a report is no CSI call: they would log and count it.
func (s Source) handle(_ any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
	req := &emptypb.Empty{}
	if err := decode(req); err != nil {
		return nil, err
	}
	return grpcserver.RecoverPanics(ctx, req, &grpc.UnaryServerInfo{FullMethod: fullMethod}, func(ctx context.Context, _ any) (any, error) {
		text, err := json.Marshal(s(ctx))
		return wrapperspb.Bytes(text), err
	})
}

// Fetch requests the report of another driver.
func Fetch(ctx context.Context, conn grpc.ClientConnInterface) (r Report, err error) {
	var text wrapperspb.BytesValue
	if err := conn.Invoke(ctx, fullMethod, &emptypb.Empty{}, &text, grpc.MaxCallRecvMsgSize(maxReport)); err != nil {
		return r, err
	}
	if err := json.Unmarshal(text.GetValue(), &r); err != nil {
		return Report{}, fmt.Errorf("the driver's report: %w", err)
	}
	return r, nil
}
