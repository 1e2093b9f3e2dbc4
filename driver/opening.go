package driver

import (
	"context"

	"google.golang.org/grpc"

	"github.com/trivet-csi/trivet/pool"
)

// awaitPool has a call that comes before its pool was opened wait for that, up to its
// deadline. A pool that hangs delays only the calls for its own volumes: lists, which
// concern all pools, do not wait.
func awaitPool(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	resp, err := handler(ctx, req)
	if pool.AwaitAttempt(ctx, err) {
		return handler(ctx, req)
	}
	return resp, err
}
