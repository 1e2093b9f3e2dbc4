// Package webserver serves HTTP to unauthenticated clients: metrics, health, keys. It limits the
// number of connections, the size of requests, and the duration of each step.
package webserver

import (
	"context"
	"net"
	"net/http"
	"time"

	"github.com/trivet-csi/trivet/internal/connlimit"
)

const (
	// maxConnections is far below any limit of descriptors, and more than a Prometheus, a
	// kubelet and an administrator need.
	maxConnections = 64
	// maxHeader is the maximum size of the header of a request in bytes.
	maxHeader = 16 << 10
	// requestTime is the timeout of receiving a request, answerTime that of its response. A
	// profile adds its own duration.
	requestTime = 5 * time.Second
	answerTime  = 30 * time.Second
	// idleTime is longer than the usual scrape intervals: Prometheus keeps its connection.
	idleTime = 90 * time.Second
)

// Serve serves until ctx ends, and then returns nil.
func Serve(ctx context.Context, l net.Listener, handler http.Handler) error {
	server := newServer(ctx, handler)
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	if err := server.Serve(l); ctx.Err() == nil {
		return err
	}
	return nil
}

func newServer(ctx context.Context, handler http.Handler) *http.Server {
	limit := connlimit.New(maxConnections)
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
