package router

import (
	"crypto/tls"
	"errors"
	"net"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
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

// TestProbes: the kernel probes a connection on which nothing is received, and closes it after one probe without an answer, because
// one node can stop the pings of gRPC to all nodes.
func TestProbes(t *testing.T) {
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	ls := newLinks(func(string) *tls.Config { return &tls.Config{MinVersion: tls.VersionTLS13, ServerName: "a"} })
	defer ls.close()
	l := &link{links: ls, node: "a", changed: func() {}}
	if err := l.setAddress(listener.Addr().String()); err != nil {
		t.Fatal(err)
	}
	go l.connect(t.Context())
	served, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = served.Close() }()
	if _, err := served.Read(make([]byte, 1)); err != nil { // the handshake has begun
		t.Fatal(err)
	}
	l.mu.Lock()
	raw, err := l.current.raw.(*net.TCPConn).SyscallConn()
	l.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	for _, option := range []struct {
		name                string
		level, number, want int
	}{
		{"SO_KEEPALIVE", syscall.SOL_SOCKET, syscall.SO_KEEPALIVE, 1},
		{"TCP_KEEPIDLE", syscall.IPPROTO_TCP, syscall.TCP_KEEPIDLE, 15},
		{"TCP_KEEPINTVL", syscall.IPPROTO_TCP, syscall.TCP_KEEPINTVL, 5},
		{"TCP_KEEPCNT", syscall.IPPROTO_TCP, syscall.TCP_KEEPCNT, 1},
		{"TCP_USER_TIMEOUT", syscall.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, 5000}, // set by gRPC
	} {
		var got int
		var failure error
		err := raw.Control(func(fd uintptr) { got, failure = syscall.GetsockoptInt(int(fd), option.level, option.number) })
		if err = errors.Join(err, failure); err != nil || got != option.want {
			t.Errorf("%s: got %d, %v, want %d", option.name, got, err, option.want)
		}
	}
}
