package router_test

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/volume"
)

// begin starts a ControllerGetVolume. The channel receives its error.
func (w *testCluster) begin(ctx context.Context, id string) <-chan error {
	done := make(chan error, 1)
	go func() { done <- w.sendWith(ctx, getRequest(id)) }()
	return done
}

// beginBlocked starts a ControllerGetVolume and waits until its handler is blocked.
func (w *testCluster) beginBlocked(ctx context.Context, b *blocked, id string) <-chan error {
	call := w.begin(ctx, id)
	<-b.entered
	return call
}

// wantPending fails the test if a call has ended.
func wantPending(t *testing.T, call <-chan error) {
	t.Helper()
	select {
	case err := <-call:
		t.Fatalf("the call has ended with %v, want it to be pending", err)
	default:
	}
}

// TestSlowNode: the deadline and the cancellation of a caller reach the node's handler, and calls to other
// nodes do not wait for it.
func TestSlowNode(t *testing.T) {
	w, b, id, other := blockedGet(t)
	ctx, cancel := context.WithCancel(t.Context())
	call := w.beginBlocked(ctx, b, id)
	onB := w.mustCreateOn("b", "v")
	must(t, w.get(onB))
	must(t, w.publish("b", onB))
	must(t, w.unpublish("a", id))
	if _, err := w.list(1); err != nil {
		t.Error(err)
	}
	wantPending(t, call)
	cancel()
	wantCode(t, <-call, codes.Canceled, `node "a"`)
	if err := <-b.ended; !errors.Is(err, context.Canceled) {
		t.Errorf("the handler on the node ended with %v, want a canceled or expired context", err)
	}
	wantPending(t, other)
	ctx, cancel = context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	call = w.beginBlocked(ctx, b, id)
	if err := <-b.ended; !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the handler on the node ended with %v, want a canceled or expired context", err)
	}
	wantCode(t, <-call, codes.DeadlineExceeded, `node "a"`)
}

// TestCodes: the router returns a node's error unchanged, but adds the node to errors that the connection may
// have caused, and to those about the capacity.
func TestCodes(t *testing.T) {
	w, b, id, call := blockedGet(t)
	for _, tc := range []struct {
		nodeError error
		code      codes.Code
		message   string
	}{
		{volume.ErrInvalid, codes.InvalidArgument, "some reason"},
		{volume.ErrNotFound, codes.NotFound, "some reason"},
		{volume.ErrIncompatible, codes.AlreadyExists, "some reason"},
		{volume.ErrOutOfRange, codes.OutOfRange, `node "a": some reason`},
		{volume.ErrExhausted, codes.ResourceExhausted, `node "a": some reason`},
		{volume.ErrPrecondition, codes.FailedPrecondition, "some reason"},
		{volume.ErrPending, codes.Aborted, "some reason"},
		{volume.ErrDamaged, codes.DataLoss, "some reason"},
		{volume.ErrUnavailable, codes.Unavailable, `node "a": some reason`},
		{context.DeadlineExceeded, codes.DeadlineExceeded, `node "a": some reason`},
		{context.Canceled, codes.Unavailable, `node "a": some reason`}, // the caller did not cancel
	} {
		b.release <- volume.Errorf(tc.nodeError, "some reason")
		if err := <-call; status.Code(err) != tc.code || status.Convert(err).Message() != tc.message {
			t.Errorf("node error %v: got %v, want %v %q", tc.nodeError, err, tc.code, tc.message)
		}
		call = w.beginBlocked(t.Context(), b, id)
	}
}

// TestMovedDriver: when the address of a node's driver changes, pending calls continue on the old connection, and
// later calls use the new address.
func TestMovedDriver(t *testing.T) {
	w, b, id, call := blockedGet(t)
	w.start("a", w.pool("default", "a2", "1Gi"))
	w.updateHostsAndWait()
	await(t, "the pool of the driver at the new address", func() bool {
		return w.create("w", preferring("a")) == nil && w.get("loop:"+w.poolID("a", "default")+":w") == nil
	})
	wantPending(t, call)
	b.release <- volume.Errorf(volume.ErrNotFound, "there is none")
	wantCode(t, <-call, codes.NotFound, "there is none")
	wantCode(t, w.get(id), codes.FailedPrecondition, "no node has pool")
}

// TestNodeRemovedDuringCall: a pending call to a node that is removed fails immediately with UNAVAILABLE, and its
// handler on the node is canceled.
func TestNodeRemovedDuringCall(t *testing.T) {
	w, b, _, call := blockedGet(t)
	w.removeHosts("a")
	wantCode(t, <-call, codes.Unavailable, `node "a"`)
	if err := <-b.ended; !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the handler on the node ended with %v, want a canceled or expired context", err)
	}
}

// TestConnectionBroken: a call ends when its connection breaks, and the next call uses a new connection.
func TestConnectionBroken(t *testing.T) {
	w, b, id, direct := blockedGet(t)
	p := w.proxy("a")
	w.updateHosts()
	w.awaitNode("a")
	await(t, "a connection through the proxy", func() bool { return p.used() })
	call := w.beginBlocked(t.Context(), b, id)
	p.cut()
	wantCode(t, <-call, codes.Unavailable, `node "a"`)
	if err := <-b.ended; !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the handler on the node ended with %v, want a canceled or expired context", err)
	}
	wantPending(t, direct)
	call = w.begin(t.Context(), id)
	await(t, "the next call to reach the node", func() bool {
		select {
		case <-b.entered:
			return true
		case err := <-call:
			wantCode(t, err, codes.Unavailable, `node "a"`)
			call = w.begin(t.Context(), id)
		default:
		}
		return false
	})
	for range 2 {
		b.release <- volume.Errorf(volume.ErrNotFound, "there is none")
	}
	wantCode(t, <-call, codes.NotFound)
	wantCode(t, <-direct, codes.NotFound)
}

// proxied returns a test cluster with node b, and with node a behind a proxy.
func proxied(t *testing.T) (*testCluster, *proxy) {
	t.Helper()
	w := newEmptyCluster(t)
	w.start("a")
	w.start("b")
	p := w.proxy("a")
	w.updateHostsAndWait()
	return w, p
}

// TestHalfOpen: calls on a connection that transfers no data wait until their deadlines. They do not delay calls
// to other nodes.
func TestHalfOpen(t *testing.T) {
	w, p := proxied(t)
	onA, onB, other := w.mustCreateOn("a", "v"), w.mustCreateOn("b", "v"), w.mustCreateOn("a", "other")
	p.gate.Lock()
	canceled, cancel := context.WithCancel(t.Context())
	calls := []<-chan error{w.begin(canceled, onA), w.begin(canceled, onA)}
	limited, cancelLimited := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancelLimited()
	for _, req := range append(volumeRequests(onA), &csi.ListVolumesRequest{}) {
		if c := code(w.sendWith(limited, req)); c != codes.DeadlineExceeded && c != codes.Unavailable {
			t.Errorf("%T: got %v, want DeadlineExceeded or Unavailable", req, c)
		}
	}
	must(t, w.get(onB))
	must(t, w.publish("b", onB))
	w.mustCreateOn("b", "w")
	for _, call := range calls {
		wantPending(t, call)
	}
	cancel()
	for _, call := range calls {
		wantCode(t, <-call, codes.Canceled, `node "a"`)
	}
	p.gate.Unlock()
	must(t, w.get(other)) // a delayed DeleteVolume may have deleted v
}

// TestSlowManifest: while a node does not answer GetPluginInfo, each call that waits for the answer ends at its
// own deadline, even if another call without a deadline waits too.
func TestSlowManifest(t *testing.T) {
	w, p := proxied(t)
	p.gate.Lock()
	defer p.gate.Unlock()
	await(t, "a call to wait for the node's pools", func() bool {
		brief, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		_ = w.sendWith(brief, getRequest(unknownVolume))
		return brief.Err() != nil
	})
	canceled, cancel := context.WithCancel(t.Context())
	first := w.begin(canceled, unknownVolume)
	limited, cancelLimited := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancelLimited()
	second := w.begin(limited, unknownVolume)
	<-limited.Done()
	select {
	case err := <-second:
		if err == nil {
			t.Error("a call for an unknown volume succeeded")
		}
	case err := <-first:
		t.Fatalf("the call without a deadline ended first with %v", err)
	}
	cancel()
	if err := <-first; err == nil {
		t.Error("a call for an unknown volume succeeded")
	}
}

// TestRemovedNodesLeaveNothing: the goroutines of removed nodes end.
func TestRemovedNodesLeaveNothing(t *testing.T) {
	w := newCluster(t, "a")
	before := runtime.NumGoroutine()
	for range 20 {
		for _, name := range []string{"b", "c", "d"} {
			w.hosts[name] = w.addresses["a"] // the driver at this address has the certificate of a
		}
		w.setHost("e", backendtest.FreeAddress(t))
		for _, name := range []string{"b", "e"} {
			_, err := w.capacity(name)
			wantCode(t, err, codes.Unavailable, `"`+name+`"`)
		}
		w.removeHosts("b", "c", "d", "e")
	}
	await(t, "the goroutines of removed nodes to end", func() bool { return runtime.NumGoroutine() <= before+5 })
}

// TestHostsChangeUnderLoad: calls that run while nodes change fail only with the expected codes.
func TestHostsChangeUnderLoad(t *testing.T) {
	w := newCluster(t, "a", "b")
	onA, onB := w.mustCreateOn("a", "v"), w.mustCreateOn("b", "v")
	stop := make(chan struct{})
	var tasks sync.WaitGroup
	for _, call := range []func() error{
		func() error { _, err := w.list(1); return err },
		func() error { return w.get(onA) },
		func() error { return w.publish("b", onB) },
		func() error { return w.create("v", preferring("b")) },
		func() error { w.States(); return nil },
	} {
		tasks.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				switch err := call(); code(err) {
				case codes.OK, codes.Unavailable, codes.FailedPrecondition, codes.ResourceExhausted:
				default:
					t.Errorf("got an unexpected error %v: %v", code(err), err)
				}
			}
		})
	}
	for range 50 {
		w.removeHosts("a")
		w.setHost("a", "")
		w.addHost("a")
	}
	close(stop)
	tasks.Wait()
	w.updateHostsAndWait()
	must(t, w.get(onA))
	must(t, w.get(onB))
}

// TestHalfOpenIsDetected: keepalive detects a connection that transfers no data. Calls then fail immediately,
// and they succeed again when data is transferred.
func TestHalfOpenIsDetected(t *testing.T) {
	w, p := proxied(t)
	id := w.mustCreateOn("a", "v")
	p.gate.Lock()
	wantCode(t, w.get(id), codes.Unavailable, `node "a"`) // without a deadline
	w.awaitDisconnect("a")
	wantCode(t, w.get(id), codes.Unavailable, `node "a" cannot be reached`)
	p.gate.Unlock()
	await(t, "a successful call to node a", func() bool { return w.get(id) == nil })
}
