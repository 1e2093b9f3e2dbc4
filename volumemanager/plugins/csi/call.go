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
	// callTimeout is how long a driver may take for one call: as the kubelet has it.
	callTimeout = 2 * time.Minute
	// connectTimeout is how long it may take to answer at all.
	connectTimeout = 10 * time.Second
	// messageLimit is how much of a driver's message is shown, in bytes.
	messageLimit = 1 << 10
)

// CallError is a call that a driver answered with an error, or did not answer.
type CallError struct {
	Driver  string
	Call    string
	Code    codes.Code
	Message string
}

func (e *CallError) Error() string {
	return fmt.Sprintf("driver %s: %s: %s: %s", e.Driver, e.Call, e.Code, e.Message)
}

// final tells whether the driver is done with the call, so that nothing of it is under way
// (csi-spec, "Error Scheme"). The codes that are not final may also come from gRPC itself.
func (e *CallError) final() bool {
	switch e.Code {
	case codes.Canceled, codes.DeadlineExceeded, codes.Unavailable, codes.ResourceExhausted, codes.Aborted:
		return false
	default:
		return true
	}
}

// call makes one call to a driver. Its errors are *CallError; those that are not final are
// in an *plugins.UncertainError.
func call[Q, A any](ctx context.Context, d *driver, do func(context.Context, *Q, ...grpc.CallOption) (*A, error), request *Q) (*A, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	answer, err := do(ctx, request)
	if err == nil {
		return answer, nil
	}
	s := status.Convert(err)
	failed := &CallError{Driver: d.name, Call: callName(request), Code: s.Code(), Message: presentable(s.Message(), request)}
	if failed.final() {
		return nil, failed
	}
	return nil, &plugins.UncertainError{Err: failed}
}

// certain is an error of a call that has nothing to undo, whether it was made or not.
func certain(err error) error {
	if u, ok := errors.AsType[*plugins.UncertainError](err); ok {
		return u.Err
	}
	return err
}

// callName makes NodeStageVolume of a *csi.NodeStageVolumeRequest.
func callName(request any) string {
	_, name, _ := strings.Cut(fmt.Sprintf("%T", request), ".")
	return strings.TrimSuffix(name, "Request")
}

// presentable is a driver's message without what must not be seen: one that repeats its
// request shows secrets, and tokens among the volume's attributes.
func presentable(message string, request any) string {
	for _, secret := range confidential(request) {
		message = strings.ReplaceAll(message, secret, "***")
	}
	if len(message) > messageLimit {
		message = strings.ToValidUTF8(message[:messageLimit], "") + "…"
	}
	return message
}

// confidential is what of a request must not be seen, as drivers may have cut it out: the
// longest first, since one may be a part of another.
func confidential(request any) []string {
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
