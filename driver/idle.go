package driver

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc/stats"
)

// idle is a stats.Handler that closes over when a server has had no connection for the time in
// after.
type idle struct {
	after time.Duration
	over  chan struct{}

	mu          sync.Mutex
	connections int
	timer       *time.Timer
}

func newIdle(after time.Duration) *idle {
	i := &idle{after: after, over: make(chan struct{})}
	i.timer = time.AfterFunc(after, i.end)
	return i
}

// ended returns a channel that is closed when the server must end; nil for a nil handler.
func (i *idle) ended() <-chan struct{} {
	if i == nil {
		return nil
	}
	return i.over
}

func (i *idle) end() {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.connections > 0 { // accepted while the timer fired
		return
	}
	select {
	case <-i.over:
	default:
		close(i.over)
	}
}

// HandleConn implements stats.Handler.
func (i *idle) HandleConn(_ context.Context, s stats.ConnStats) {
	i.mu.Lock()
	defer i.mu.Unlock()
	switch s.(type) {
	case *stats.ConnBegin:
		i.connections++
		i.timer.Stop()
	case *stats.ConnEnd:
		if i.connections--; i.connections == 0 {
			i.timer.Reset(i.after)
		}
	}
}

// TagConn implements stats.Handler.
func (i *idle) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

// TagRPC implements stats.Handler.
func (i *idle) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

// HandleRPC implements stats.Handler.
func (i *idle) HandleRPC(context.Context, stats.RPCStats) {}
