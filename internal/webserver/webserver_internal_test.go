package webserver

import (
	"bufio"
	"context"
	"net"
	"net/http"
	"testing"
	"time"
)

// TestBounds: the server limits each step of a request.
func TestBounds(t *testing.T) {
	s := newServer(t.Context(), http.NotFoundHandler())
	for name, got := range map[string]time.Duration{
		"ReadHeaderTimeout": s.ReadHeaderTimeout, "ReadTimeout": s.ReadTimeout,
		"WriteTimeout": s.WriteTimeout, "IdleTimeout": s.IdleTimeout,
	} {
		if got <= 0 || got > 2*time.Minute {
			t.Errorf("%s: got %v, want at most 2m", name, got)
		}
	}
	if s.MaxHeaderBytes <= 0 || s.MaxHeaderBytes > 1<<20 {
		t.Errorf("MaxHeaderBytes: got %d, want at most 1 MiB", s.MaxHeaderBytes)
	}
}

// TestBusyConnectionKept: if idle connections exceed the limit, the server does not close a connection whose
// request it is answering.
func TestBusyConnectionKept(t *testing.T) {
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	began, end := make(chan struct{}), make(chan struct{})
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error)
	go func() {
		served <- Serve(ctx, l, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
			close(began)
			<-end
		}))
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	busy := dial(t, l)
	if _, err := busy.Write([]byte("GET / HTTP/1.1\r\nHost: any\r\n\r\n")); err != nil {
		t.Fatal(err)
	}
	<-began
	oldestIdle := dial(t, l)
	for range maxConnections {
		dial(t, l)
	}
	_ = oldestIdle.SetReadDeadline(time.Now().Add(requestTime / 2)) // the request timeout closes the connection later
	if _, err := oldestIdle.Read(make([]byte, 1)); err == nil || isTimeout(err) {
		t.Errorf("reading from the oldest idle connection: got %v, want an error because the server has closed it", err)
	}
	close(end)
	resp, err := http.ReadResponse(bufio.NewReader(busy), nil)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
}

// dial connects to the server.
func dial(t *testing.T, l net.Listener) net.Conn {
	t.Helper()
	c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// isTimeout reports whether an error is a timeout of the connection.
func isTimeout(err error) bool {
	timeout, ok := err.(net.Error) //nolint:errorlint // Read returns the error unwrapped
	return ok && timeout.Timeout()
}
