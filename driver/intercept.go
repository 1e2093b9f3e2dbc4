package driver

import (
	"context"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/pool"
)

// intercept measures a call.
func (m *metrics) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	running := m.inFlight.WithLabelValues(info.FullMethod)
	running.Inc()
	defer running.Dec()
	start := time.Now()
	resp, err := handler(ctx, req)
	m.seconds.WithLabelValues(m.driver, info.FullMethod, status.Code(err).String()).Observe(time.Since(start).Seconds())
	return resp, err
}

// awaitPool repeats a call that failed because its pool was not opened yet: once the pool is
// opened, if that is before the deadline of the call. A pool that hangs delays only the calls for
// its own volumes: lists, which concern all pools, do not wait.
func awaitPool(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	resp, err := handler(ctx, req)
	if pool.AwaitAttempt(ctx, err) {
		return handler(ctx, req)
	}
	return resp, err
}
