package status

import (
	"context"
	"encoding/json"
	"fmt"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/trivet-csi/trivet/internal/grpcserver"
)

const (
	serviceName       = "trivet.v1.Status"
	reportMethod      = "Report"
	examinationMethod = "Examination"
)

// maxReport bounds an answer of a node, in bytes of JSON.
const maxReport = 32 << 20

// Source returns the current report.
type Source func(context.Context) Report

// Register serves the report, and the last examination of the node's volumes, to other drivers. Both messages are JSON.
// examination returns ErrUnavailable before the first examination; it is nil if the driver serves no node.
func Register(server grpc.ServiceRegistrar, source Source, examination func() (Examination, error)) {
	source, _ = shared(source)
	methods := []grpc.MethodDesc{method(reportMethod, func(ctx context.Context) (Report, error) { return source(ctx), nil })}
	if examination != nil {
		methods = append(methods, method(examinationMethod, func(context.Context) (Examination, error) { return examination() }))
	}
	server.RegisterService(&grpc.ServiceDesc{ServiceName: serviceName, HandlerType: (*any)(nil), Methods: methods}, struct{}{})
}

// method returns a method without arguments. It does not use the server's interceptors, because it is no CSI call: they would log
// and count it.
func method[T any](name string, f func(context.Context) (T, error)) grpc.MethodDesc {
	handle := func(_ any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
		req := &emptypb.Empty{}
		if err := decode(req); err != nil {
			return nil, err
		}
		return grpcserver.RecoverPanics(ctx, req, &grpc.UnaryServerInfo{FullMethod: fullName(name)}, func(ctx context.Context, _ any) (any, error) {
			answer, err := f(ctx)
			if err != nil {
				return nil, grpcstatus.Error(codes.Unavailable, err.Error())
			}
			text, err := json.Marshal(answer)
			return wrapperspb.Bytes(text), err
		})
	}
	return grpc.MethodDesc{MethodName: name, Handler: handle}
}

func fullName(method string) string { return "/" + serviceName + "/" + method }

// Fetch requests the report of another driver.
func Fetch(ctx context.Context, conn grpc.ClientConnInterface) (Report, error) {
	return fetch[Report](ctx, conn, reportMethod)
}

// FetchExamination requests the last examination of another driver.
func FetchExamination(ctx context.Context, conn grpc.ClientConnInterface) (Examination, error) {
	return fetch[Examination](ctx, conn, examinationMethod)
}

func fetch[T any](ctx context.Context, conn grpc.ClientConnInterface, method string) (T, error) {
	var answer, none T
	var text wrapperspb.BytesValue
	if err := conn.Invoke(ctx, fullName(method), &emptypb.Empty{}, &text, grpc.MaxCallRecvMsgSize(maxReport)); err != nil {
		return none, err
	}
	if err := json.Unmarshal(text.GetValue(), &answer); err != nil {
		return none, fmt.Errorf("the driver's answer to %s: %w", method, err)
	}
	return answer, nil
}
