package kube_test

import (
	"errors"
	"net/url"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/trivet-csi/trivet/cluster/kube"
)

// TestUnanswered: a call is repeated after an error of the connection or of an overloaded API server, and not after a refusal.
func TestUnanswered(t *testing.T) {
	pods := schema.GroupResource{Resource: "pods"}
	for name, tc := range map[string]struct {
		err  error
		want bool
	}{
		"connection": {&url.Error{Op: "Get", URL: "https://server", Err: errors.New("connection refused")}, true},
		"etcd":       {apierrors.NewInternalError(errors.New("leader changed")), true},
		"overloaded": {apierrors.NewServiceUnavailable("shutting down"), true},
		"not found":  {apierrors.NewNotFound(pods, "p"), false},
		"forbidden":  {apierrors.NewForbidden(pods, "p", nil), false},
		"budget":     {apierrors.NewTooManyRequests("disruption budget", 10), false},
	} {
		if got := kube.Unanswered(tc.err); got != tc.want {
			t.Errorf("%s: got %t for %v, want %t", name, got, tc.err, tc.want)
		}
	}
}
