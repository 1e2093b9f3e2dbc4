// Package webserver serves HTTP to unauthenticated clients, for example metrics and health. It limits the
// number of connections, the size of requests, and the duration of each step of a request.
package webserver

import (
	"context"
	"net"
	"net/http"
	"time"

	"github.com/trivet-csi/trivet/internal/connlimit"
)

const (
	// maxConnections is much lower than usual limits of open files, and more than a Prometheus, a kubelet
	// and an administrator need.
	maxConnections = 64
	// maxHeader is the maximum size of the header of a request, in bytes.
	maxHeader = 16 << 10
	// requestTime limits receiving a request. answerTime limits its response; net/http/pprof extends it by
	// the duration of a requested profile.
	requestTime = 5 * time.Second
	answerTime  = 30 * time.Second
	// idleTime is longer than the usual scrape intervals, so that Prometheus can reuse its connection.
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

// newServer returns a server with all limits of this package.
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
