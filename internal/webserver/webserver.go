// Package webserver serves HTTP to strangers: metrics, health, keys. It limits the
// number of connections, the size of requests, and the time that each step may take.
package webserver

import (
	"context"
	"net"
	"net/http"
	"time"

	"github.com/trivet-csi/trivet/internal/crowd"
)

const (
	// maxConnections is far below any limit of descriptors, and far above what a
	// Prometheus, a kubelet and an administrator open.
	maxConnections = 64
	// maxHeader bounds what a request says before its body, in bytes.
	maxHeader = 16 << 10
	// requestTime bounds the arrival of a request, answerTime its answer. A profile has
	// its own time besides.
	requestTime = 5 * time.Second
	answerTime  = 30 * time.Second
	// idleTime is longer than the usual intervals of a Prometheus, which keeps its
	// connection.
	idleTime = 90 * time.Second
)

// Serve serves until ctx ends, or returns why it cannot.
func Serve(ctx context.Context, l net.Listener, handler http.Handler) error {
	server := newServer(ctx, handler)
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	if err := server.Serve(l); ctx.Err() == nil {
		return err
	}
	return nil
}

func newServer(ctx context.Context, handler http.Handler) *http.Server {
	limit := crowd.NewLimit(maxConnections)
	return &http.Server{
		Handler:           handler,
		MaxHeaderBytes:    maxHeader,
		ReadHeaderTimeout: requestTime,
		ReadTimeout:       requestTime,
		WriteTimeout:      answerTime,
		IdleTimeout:       idleTime,
		BaseContext:       func(net.Listener) context.Context { return ctx },
		ConnState: func(c net.Conn, state http.ConnState) {
			switch state {
			case http.StateNew:
				limit.Add(c)
			case http.StateActive, http.StateIdle:
				limit.SetBusy(c, state == http.StateActive)
			case http.StateClosed, http.StateHijacked:
				limit.Remove(c)
			}
		},
	}
}
