package kube_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/url"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/trivet-csi/trivet/cluster/kube"
)

// TestTimeout: a call ends after the timeout of the configuration if the API server does not answer.
func TestTimeout(t *testing.T) {
	end := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-end }))
	t.Cleanup(server.Close)
	t.Cleanup(func() { close(end) })
	client, err := kube.New(&rest.Config{Host: server.URL, Timeout: 20 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	_, err = client.Node(ctx, "node-1")
	var failed *url.Error
	if !errors.As(err, &failed) || !failed.Timeout() || ctx.Err() != nil {
		t.Errorf("got %v, %v, want the timeout of the configuration", err, ctx.Err())
	}
}
