package router

import (
	"errors"
	"testing"

	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/connectivity"
)

// countingConn is a balancer.SubConn that counts the calls of Connect.
type countingConn struct {
	balancer.SubConn
	connects int
}

func (c *countingConn) Connect() { c.connects++ }

// TestLinkStates: a link reports when its connection is made, has failed and is lost, but not each failed attempt. It connects
// again after a failed attempt, and calls fail until it has succeeded.
func TestLinkStates(t *testing.T) {
	refused := errors.New("connection refused")
	sub := &countingConn{}
	l := &link{node: "a"}
	c := &connection{link: l, sub: sub, attempted: make(chan struct{})}
	l.current = c
	for _, step := range []struct {
		name     string
		state    connectivity.State
		err      error
		changed  bool
		connects int // by setState
		pick     error
	}{
		{"the first attempt", connectivity.Connecting, nil, false, 0, balancer.ErrNoSubConnAvailable},
		{"it succeeds", connectivity.Ready, nil, true, 0, nil},
		{"the connection is lost", connectivity.Idle, nil, true, 0, balancer.ErrNoSubConnAvailable},
		{"an attempt", connectivity.Connecting, nil, false, 0, balancer.ErrNoSubConnAvailable},
		{"it fails", connectivity.TransientFailure, refused, true, 0, refused},
		{"the delay ends", connectivity.Idle, nil, false, 1, refused},
		{"the next attempt", connectivity.Connecting, nil, false, 0, refused},
		{"it fails too", connectivity.TransientFailure, refused, false, 0, refused},
		{"the next delay ends", connectivity.Idle, nil, false, 1, refused},
		{"it succeeds again", connectivity.Ready, nil, true, 0, nil},
		{"the connection is lost again", connectivity.Idle, nil, true, 0, balancer.ErrNoSubConnAvailable},
	} {
		before := sub.connects
		if changed := l.setState(c, balancer.SubConnState{ConnectivityState: step.state, ConnectionError: step.err}); changed != step.changed {
			t.Errorf("%s: got changed %v, want %v", step.name, changed, step.changed)
		}
		if got := sub.connects - before; got != step.connects {
			t.Errorf("%s: Connect was called %d times, want %d", step.name, got, step.connects)
		}
		picked, err := l.pick()
		if !errors.Is(err, step.pick) || (err == nil) != (picked.SubConn == sub) {
			t.Errorf("%s: a call got connection %v and error %v, want error %v", step.name, picked.SubConn, err, step.pick)
		}
		if attempted := isClosed(c.attempted); attempted == errors.Is(step.pick, balancer.ErrNoSubConnAvailable) {
			t.Errorf("%s: got attempted %v", step.name, attempted)
		}
	}
	l.replace("address", &connection{link: l, sub: &countingConn{}}, nil)
	if l.setState(c, balancer.SubConnState{ConnectivityState: connectivity.Ready}) || l.connected() {
		t.Error("the state of the previous connection changed the link")
	}
}

// isClosed reports whether a channel is closed.
func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
