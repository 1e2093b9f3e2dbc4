package grpcserver

import (
	"context"
	"errors"
	"syscall"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/internal/command"
	"github.com/trivet-csi/trivet/volume"
)

// statusCodes maps errors to gRPC status codes. The first match applies: an error of this driver takes
// precedence over an errno that it wraps. Do not map errors to status codes elsewhere.
var statusCodes = []struct {
	err  error
	code codes.Code
}{
	{volume.ErrInvalid, codes.InvalidArgument},
	{volume.ErrUnauthenticated, codes.Unauthenticated},
	{volume.ErrUnavailable, codes.Unavailable},
	{volume.ErrNotFound, codes.NotFound},
	{volume.ErrIncompatible, codes.AlreadyExists},
	{volume.ErrOutOfRange, codes.OutOfRange},
	{volume.ErrExhausted, codes.ResourceExhausted},
	{volume.ErrPrecondition, codes.FailedPrecondition},
	{volume.ErrPending, codes.Aborted},
	{volume.ErrStaleToken, codes.Aborted},
	{volume.ErrDamaged, codes.DataLoss},
	{command.ErrMissing, codes.FailedPrecondition},
	{context.Canceled, codes.Canceled},
	{context.DeadlineExceeded, codes.DeadlineExceeded},
	{syscall.ENOSPC, codes.ResourceExhausted},
	{syscall.EDQUOT, codes.ResourceExhausted},
	{syscall.EROFS, codes.FailedPrecondition},
	{syscall.EPERM, codes.FailedPrecondition},
}

// toStatus converts a domain error to a gRPC error. status.details stays empty, as the CSI
// specification requires ("Error Scheme").
func toStatus(err error) error {
	if _, ok := status.FromError(err); ok { // true also if err is nil
		return err
	}
	for _, row := range statusCodes {
		if errors.Is(err, row.err) {
			return status.Error(row.code, err.Error())
		}
	}
	return status.Error(codes.Internal, err.Error())
}

// TranslateErrors is the interceptor that converts errors to status codes.
func TranslateErrors(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	resp, err := handler(ctx, req)
	if err != nil {
		return nil, toStatus(err)
	}
	return resp, nil
}
