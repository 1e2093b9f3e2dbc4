package driver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/trivet-csi/trivet/volume"
)

const (
	trimService = "trivet.v1.Trim"
	trimMethod  = "Trim"
)

// trimStream describes the method of the service: one request, and the result of each volume. The messages are JSON.
func trimStream(handler grpc.StreamHandler) grpc.StreamDesc {
	return grpc.StreamDesc{StreamName: trimMethod, Handler: handler, ServerStreams: true}
}

// register serves requests to trim volumes. Only the socket of the driver serves them, because the files in front of it
// decide who may change volumes of the node.
func (t *trims) register(server grpc.ServiceRegistrar) {
	server.RegisterService(&grpc.ServiceDesc{ServiceName: trimService, HandlerType: (*any)(nil), Streams: []grpc.StreamDesc{trimStream(t.handle)}}, struct{}{})
}

func (t *trims) handle(_ any, stream grpc.ServerStream) error {
	var text wrapperspb.BytesValue
	if err := stream.RecvMsg(&text); err != nil {
		return err
	}
	var r TrimRequest
	if err := json.Unmarshal(text.GetValue(), &r); err != nil {
		return grpcstatus.Error(codes.InvalidArgument, err.Error())
	}
	err := t.demand(stream.Context(), r, func(result TrimResult) error {
		text, err := json.Marshal(result)
		if err != nil {
			return err
		}
		return stream.SendMsg(wrapperspb.Bytes(text))
	})
	switch {
	case errors.Is(err, volume.ErrInvalid):
		return grpcstatus.Error(codes.InvalidArgument, err.Error())
	case err != nil:
		return grpcstatus.Error(codes.Unavailable, err.Error())
	}
	return nil
}

// Trim requests a driver to trim volumes, and passes each result to report. It returns when all are trimmed.
func Trim(ctx context.Context, conn grpc.ClientConnInterface, r TrimRequest, report func(TrimResult)) error {
	request, err := json.Marshal(r)
	if err != nil {
		return err
	}
	description := trimStream(nil)
	stream, err := conn.NewStream(ctx, &description, "/"+trimService+"/"+trimMethod)
	if err != nil {
		return trimError(err)
	}
	if err := stream.SendMsg(wrapperspb.Bytes(request)); err != nil && !errors.Is(err, io.EOF) { // RecvMsg returns the error of the server
		return trimError(err)
	}
	if err := stream.CloseSend(); err != nil {
		return trimError(err)
	}
	for {
		var text wrapperspb.BytesValue
		if err := stream.RecvMsg(&text); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return trimError(err)
		}
		var result TrimResult
		if err := json.Unmarshal(text.GetValue(), &result); err != nil {
			return fmt.Errorf("reading the answer of the driver: %w", err)
		}
		report(result)
	}
}

// trimError returns the message of the driver without the terms of gRPC.
func trimError(err error) error {
	if grpcstatus.Code(err) == codes.Unimplemented {
		return volume.Errorf(volume.ErrUnavailable, "the driver cannot trim volumes: it does not serve a node, or its version is older")
	}
	return errors.New(grpcstatus.Convert(err).Message())
}
