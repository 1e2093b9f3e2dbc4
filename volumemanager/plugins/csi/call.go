package csi

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	authenticationv1 "k8s.io/api/authentication/v1"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

const (
	// callTimeout limits one call, as in the kubelet.
	callTimeout = 2 * time.Minute
	// connectTimeout limits the connection to a driver and its first call.
	connectTimeout = 10 * time.Second
	// messageLimit is the maximum length of a driver's message in an error, in bytes.
	messageLimit = 1 << 10
)

// CallError is the failure of a call to a driver.
type CallError struct {
	Driver  string
	Call    string
	Code    codes.Code
	Message string
}

func (e *CallError) Error() string {
	return fmt.Sprintf("driver %s: %s: %s: %s", e.Driver, e.Call, e.Code, e.Message)
}

// final reports whether the driver has ended the call, so that no part of it still runs
// (csi-spec, "Error Scheme"). gRPC itself may also return the codes that are not final.
func (e *CallError) final() bool {
	switch e.Code {
	case codes.Canceled, codes.DeadlineExceeded, codes.Unavailable, codes.ResourceExhausted, codes.Aborted:
		return false
	default:
		return true
	}
}

// call makes one call to a driver. Its errors are *CallError, wrapped in a
// *plugins.UncertainError unless they are final.
func call[Q, A any](ctx context.Context, d *driver, do func(context.Context, *Q, ...grpc.CallOption) (*A, error), request *Q) (*A, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	answer, err := do(ctx, request)
	if err == nil {
		return answer, nil
	}
	s := status.Convert(err)
	callErr := &CallError{Driver: d.name, Call: callName(request), Code: s.Code(), Message: redacted(s.Message(), request)}
	if callErr.final() {
		return nil, callErr
	}
	return nil, &plugins.UncertainError{Err: callErr}
}

// certain returns the error of a call that changes nothing, without the *plugins.UncertainError around
// it.
func certain(err error) error {
	if u, ok := errors.AsType[*plugins.UncertainError](err); ok {
		return u.Err
	}
	return err
}

// callName returns NodeStageVolume for a *csi.NodeStageVolumeRequest.
func callName(request any) string {
	_, name, _ := strings.Cut(fmt.Sprintf("%T", request), ".")
	return strings.TrimSuffix(name, "Request")
}

// redacted returns a driver's message without secrets and tokens, because a message may
// quote the request.
func redacted(message string, request any) string {
	for _, secret := range secretValues(request) {
		message = strings.ReplaceAll(message, secret, "***")
	}
	if len(message) > messageLimit {
		message = strings.ToValidUTF8(message[:messageLimit], "") + "…"
	}
	return message
}

// secretValues returns the secrets and tokens of a request without surrounding white space,
// which drivers remove. The longest is first, because one may be part of another.
func secretValues(request any) []string {
	var values []string
	if r, ok := request.(interface{ GetSecrets() map[string]string }); ok {
		values = slices.Collect(maps.Values(r.GetSecrets()))
	}
	if r, ok := request.(interface{ GetVolumeContext() map[string]string }); ok {
		values = append(values, r.GetVolumeContext()[tokensKey])
	}
	var all []string
	for _, value := range values {
		all = append(all, strings.TrimSpace(value))
		var tokens map[string]authenticationv1.TokenRequestStatus
		if json.Unmarshal([]byte(value), &tokens) == nil {
			for _, t := range tokens {
				all = append(all, t.Token)
			}
		}
	}
	all = slices.DeleteFunc(all, func(s string) bool { return s == "" })
	slices.SortFunc(all, func(a, b string) int { return cmp.Compare(len(b), len(a)) })
	return all
}
