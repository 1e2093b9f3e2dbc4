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
			t.Errorf("%s is %v", name, got)
		}
	}
	if s.MaxHeaderBytes <= 0 || s.MaxHeaderBytes > 1<<20 {
		t.Errorf("MaxHeaderBytes is %d", s.MaxHeaderBytes)
	}
}

// TestAnswerIsNotCut: connections without a request do not end one whose request is being
// answered.
func TestAnswerIsNotCut(t *testing.T) {
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
	asking := dial(t, l)
	if _, err := asking.Write([]byte("GET / HTTP/1.1\r\nHost: any\r\n\r\n")); err != nil {
		t.Fatal(err)
	}
	<-began
	first := dial(t, l)
	for range maxConnections {
		dial(t, l)
	}
	_ = first.SetReadDeadline(time.Now().Add(requestTime / 2)) // earlier than the timeout that closes it
	if _, err := first.Read(make([]byte, 1)); err == nil || isTimeout(err) {
		t.Errorf("the oldest idle connection: %v", err)
	}
	close(end)
	resp, err := http.ReadResponse(bufio.NewReader(asking), nil)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
}

func dial(t *testing.T, l net.Listener) net.Conn {
	t.Helper()
	c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	return c
}

func isTimeout(err error) bool {
	timeout, ok := err.(net.Error) //nolint:errorlint // of Read itself
	return ok && timeout.Timeout()
}
