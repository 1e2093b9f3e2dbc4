// Package relaytest contains the typed clients of a relay.Service in this process, for tests.
package relaytest

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/internal/relay"
)

// Controller returns the clients of a controller. They do not support calls with a stream of responses; use
// Service.Stream for these.
func Controller(s relay.Service) controllerserver.Clients {
	return controllerserver.NewClients(conn{s})
}

// Node returns the client of a node service.
func Node(s relay.Service) csi.NodeClient { return csi.NewNodeClient(conn{s}) }

// conn is a connection whose calls a Service answers.
type conn struct{ service relay.Service }

// Invoke implements grpc.ClientConnInterface. Errors are not converted to status codes.
func (c conn) Invoke(ctx context.Context, method string, req, reply any, _ ...grpc.CallOption) error {
	resp, err := c.service.Call(ctx, method, req.(proto.Message))
	if err == nil {
		proto.Merge(reply.(proto.Message), resp)
	}
	return err
}

// NewStream implements grpc.ClientConnInterface.
func (c conn) NewStream(context.Context, *grpc.StreamDesc, string, ...grpc.CallOption) (grpc.ClientStream, error) {
	return nil, status.Error(codes.Unimplemented, "use Service.Stream")
}
