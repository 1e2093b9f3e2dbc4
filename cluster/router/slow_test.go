package router_test

import (
	"context"
	"net"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// stuck is a backend whose Get blocks until it is let go, or its call ends.
type stuck struct {
	backend.Backend
	entered chan struct{}
	release chan error
	ended   chan error // why the call's context did
}

func newStuck() *stuck {
	return &stuck{entered: make(chan struct{}), release: make(chan error), ended: make(chan error, 1)}
}

func (s *stuck) kind() backend.Kind {
	kind := loop.Kind
	kind.New = func(pools *pool.Set) backend.Backend {
		s.Backend = loop.New(pools)
		return s
	}
	return kind
}

func (s *stuck) Get(ctx context.Context, _ volume.ID) (volume.Volume, error) {
	s.entered <- struct{}{}
	select {
	case err := <-s.release:
		return volume.Volume{}, err
	case <-ctx.Done():
		s.ended <- ctx.Err()
		return volume.Volume{}, ctx.Err()
	}
}

// wantEnd waits until the handler has seen the end of its call.
func (s *stuck) wantEnd(t *testing.T) {
	t.Helper()
	if err := <-s.ended; err == nil {
		t.Error("the handler's context has not ended")
	}
}

// slow is a world whose node a is stuck, with the ID of a volume there; b is not.
func slow(t *testing.T) (w *world, s *stuck, id string) {
	t.Helper()
	w, s = newWorld(t), newStuck()
	a := w.startWith("a", s.kind(), w.pool("default", "a", "1Gi"))
	w.start("b", w.pool("default", "b", "1Gi"))
	w.know()
	return w, s, "loop:default." + uuid(t, a, "default") + ":v"
}

// begin begins a call that only looks.
func (w *world) begin(ctx context.Context, id string) <-chan error {
	done := make(chan error, 1)
	go func() { done <- w.calls(ctx, id)["get"]() }()
	return done
}

// wantUnder fails the test if a call has ended.
func wantUnder(t *testing.T, call <-chan error) {
	t.Helper()
	select {
	case err := <-call:
		t.Fatalf("the call has ended: %v", err)
	default:
	}
}

// TestSlowNode: the caller's deadline and cancellation reach the node's handler, and
// nobody else waits for it.
func TestSlowNode(t *testing.T) {
	w, s, id := slow(t)
	ctx, cancel := context.WithCancel(t.Context())
	call := w.begin(ctx, id)
	<-s.entered
	onB := w.make("b", "v")
	must(t, w.get(onB))
	must(t, w.publish("b", onB))
	must(t, w.unpublish("a", id))
	if _, err := w.list(1); err != nil {
		t.Error(err)
	}
	wantUnder(t, call)
	cancel()
	wantCode(t, <-call, codes.Canceled, `node "a"`)
	s.wantEnd(t)
	ctx, cancel = context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	call = w.begin(ctx, id)
	<-s.entered
	s.wantEnd(t)
	wantCode(t, <-call, codes.DeadlineExceeded, `node "a"`)
}

// TestCodes: what a node answers comes back unchanged; only of what may be the way's
// fault the node is named.
func TestCodes(t *testing.T) {
	w, s, id := slow(t)
	for _, tc := range []struct {
		kind error
		want codes.Code
		says string
	}{
		{volume.ErrInvalid, codes.InvalidArgument, "some reason"},
		{volume.ErrNotFound, codes.NotFound, "some reason"},
		{volume.ErrIncompatible, codes.AlreadyExists, "some reason"},
		{volume.ErrOutOfRange, codes.OutOfRange, "some reason"},
		{volume.ErrExhausted, codes.ResourceExhausted, "some reason"},
		{volume.ErrPrecondition, codes.FailedPrecondition, "some reason"},
		{volume.ErrPending, codes.Aborted, "some reason"},
		{volume.ErrDamaged, codes.DataLoss, "some reason"},
		{volume.ErrUnavailable, codes.Unavailable, `node "a": some reason`},
		{context.DeadlineExceeded, codes.DeadlineExceeded, `node "a": some reason`},
		{context.Canceled, codes.Unavailable, `node "a": some reason`}, // nobody here did
	} {
		call := w.begin(t.Context(), id)
		<-s.entered
		s.release <- volume.Errorf(tc.kind, "some reason")
		if err := <-call; status.Code(err) != tc.want || status.Convert(err).Message() != tc.says {
			t.Errorf("%v became %v", tc.kind, err)
		}
	}
}

// TestMovedPod: a call that is under way when the node's driver moves ends where it
// is, and the next one goes to the new place.
func TestMovedPod(t *testing.T) {
	w, s, id := slow(t)
	call := w.begin(t.Context(), id)
	<-s.entered
	second := w.start("a", w.pool("default", "a2", "1Gi"))
	w.know()
	await(t, "the new pool", func() bool {
		_, err := w.CreateVolume(t.Context(), request("w", preferring("a")))
		return err == nil && code(w.get("loop:default."+uuid(t, second, "default")+":w")) == codes.OK
	})
	wantUnder(t, call)
	s.release <- volume.Errorf(volume.ErrNotFound, "there is none")
	wantCode(t, <-call, codes.NotFound, "there is none")
	wantCode(t, w.get(id), codes.FailedPrecondition, "no node has pool")
}

// TestRemovedUnderWay: a call to a node that is removed ends at once, on both sides,
// and not as if its caller had given up.
func TestRemovedUnderWay(t *testing.T) {
	w, s, id := slow(t)
	call := w.begin(t.Context(), id)
	<-s.entered
	w.forget("a")
	wantCode(t, <-call, codes.Unavailable, `node "a"`)
	s.wantEnd(t)
}

// TestKilledUnderWay: so does a call to a driver that is stopped and does not wait.
func TestKilledUnderWay(t *testing.T) {
	w, s := newWorld(t), newStuck()
	a := w.startWith("a", s.kind(), w.pool("default", "a", "1Gi"))
	w.know()
	id := "loop:default." + uuid(t, a, "default") + ":v"
	p := proxyTo(t, w.hosts["a"])
	w.hosts["a"] = p.address()
	w.tell()
	w.up()
	await(t, "a call through the proxy", func() bool { return p.connections() > 0 })
	call := w.begin(t.Context(), id)
	<-s.entered
	p.cut()
	wantCode(t, <-call, codes.Unavailable, `node "a"`)
	s.wantEnd(t)
	call = w.begin(t.Context(), id) // without a restart
	await(t, "the next call", func() bool {
		select {
		case <-s.entered:
			return true
		case err := <-call:
			wantCode(t, err, codes.Unavailable, `node "a"`)
			call = w.begin(t.Context(), id)
		default:
		}
		return false
	})
	s.release <- volume.Errorf(volume.ErrNotFound, "there is none")
	wantCode(t, <-call, codes.NotFound)
}

// proxy forwards TCP connections.
type proxy struct {
	listener net.Listener
	target   string
	gate     sync.RWMutex // locked: bytes stay where they are
	done     sync.WaitGroup

	mu    sync.Mutex
	conns []net.Conn
}

func proxyTo(t *testing.T, target string) *proxy {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	must(t, err)
	p := &proxy{listener: l, target: target}
	p.done.Go(p.accept)
	t.Cleanup(func() {
		_ = l.Close()
		p.cut()
		p.done.Wait()
	})
	return p
}

func (p *proxy) address() string { return p.listener.Addr().String() }

func (p *proxy) accept() {
	for {
		in, err := p.listener.Accept()
		if err != nil {
			return
		}
		out, err := net.Dial("tcp", p.target)
		if err != nil {
			_ = in.Close()
			continue
		}
		p.mu.Lock()
		p.conns = append(p.conns, in, out)
		p.mu.Unlock()
		p.done.Go(func() { p.copy(in, out) })
		p.done.Go(func() { p.copy(out, in) })
	}
}

func (p *proxy) copy(to, from net.Conn) {
	defer func() { _, _ = to.Close(), from.Close() }()
	buf := make([]byte, 16<<10)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		p.gate.RLock()
		_, err = to.Write(buf[:n])
		p.gate.RUnlock()
		if err != nil {
			return
		}
	}
}

func (p *proxy) connections() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.conns)
}

// cut ends all connections.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, c := range p.conns {
		_ = c.Close()
	}
	p.conns = nil
}

// TestHalfOpen: a connection on which nothing comes any more holds its own calls up,
// not longer than they want to wait, and no others.
func TestHalfOpen(t *testing.T) {
	w := newWorld(t)
	w.start("a", w.pool("default", "a", "1Gi"))
	w.start("b", w.pool("default", "b", "1Gi"))
	p := proxyTo(t, w.hosts["a"])
	w.hosts["a"] = p.address()
	w.know()
	onA, onB, stays := w.make("a", "v"), w.make("b", "v"), w.make("a", "stays")
	p.gate.Lock()
	patient, cancel := context.WithCancel(t.Context())
	calls := []<-chan error{w.begin(patient, onA), w.begin(patient, onA)}
	limited, cancelLimited := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancelLimited()
	for name, call := range w.calls(limited, onA) {
		if err := call(); status.Code(err) != codes.DeadlineExceeded && status.Code(err) != codes.Unavailable {
			t.Errorf("%s: %v", name, err)
		}
	}
	_, err := w.ListVolumes(limited, &csi.ListVolumesRequest{})
	if c := code(err); c != codes.DeadlineExceeded && c != codes.Unavailable {
		t.Errorf("list: %v", err)
	}
	must(t, w.get(onB))
	must(t, w.publish("b", onB))
	w.make("b", "w")
	for _, call := range calls {
		wantUnder(t, call)
	}
	cancel()
	for _, call := range calls {
		wantCode(t, <-call, codes.Canceled, `node "a"`)
	}
	p.gate.Unlock()
	must(t, w.get(stays)) // the other's delete may come through now
}

// TestNobodyWaitsForWhoAsks: a node that does not answer when it is asked for its
// pools holds no call up beyond its deadline, however many wait.
func TestNobodyWaitsForWhoAsks(t *testing.T) {
	w := newWorld(t)
	w.start("a", w.pool("default", "a", "1Gi"))
	p := proxyTo(t, w.hosts["a"])
	w.hosts["a"] = p.address()
	w.know()
	p.gate.Lock()
	defer p.gate.Unlock()
	const unknown = "loop:default.01234567:v"
	await(t, "somebody to ask again", func() bool {
		brief, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		_ = w.calls(brief, unknown)["get"]()
		return brief.Err() != nil
	})
	patient, cancel := context.WithCancel(t.Context())
	first := w.begin(patient, unknown)
	limited, cancelLimited := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancelLimited()
	second := w.begin(limited, unknown)
	<-limited.Done()
	select {
	case err := <-second:
		if err == nil {
			t.Error("a call for nobody's volume succeeded")
		}
	case err := <-first:
		t.Fatalf("a call with a deadline outlived one without: %v", err)
	}
	cancel()
	if err := <-first; err == nil {
		t.Error("a call for nobody's volume succeeded")
	}
}

// TestNothingLeft: of nodes that are no more, neither goroutines nor connections stay.
func TestNothingLeft(t *testing.T) {
	w := newWorld(t)
	w.start("a", w.pool("default", "a", "1Gi"))
	address := w.hosts["a"]
	w.know()
	before := runtime.NumGoroutine()
	for range 20 {
		for _, name := range []string{"b", "c", "d"} {
			w.hosts[name] = address // whose driver is another's
		}
		w.hosts["e"] = backendtest.FreeAddress(t)
		w.tell()
		for _, name := range []string{"b", "e"} {
			_, err := w.GetCapacity(t.Context(), &csi.GetCapacityRequest{AccessibleTopology: translate.Topology(name)})
			wantCode(t, err, codes.Unavailable, `"`+name+`"`)
		}
		w.forget("b", "c", "d", "e")
	}
	await(t, "the goroutines to end", func() bool { return runtime.NumGoroutine() <= before+5 })
}

// TestHostsChangeUnderLoad changes the nodes while calls are made, for the race
// detector; at the end all is as it was last told.
func TestHostsChangeUnderLoad(t *testing.T) {
	w := newWorld(t)
	w.start("a", w.pool("default", "a", "1Gi"))
	w.start("b", w.pool("default", "b", "1Gi"))
	w.know()
	onA, onB := w.make("a", "v"), w.make("b", "v")
	stop := make(chan struct{})
	var tasks sync.WaitGroup
	for _, call := range []func() error{
		func() error { _, err := w.list(1); return err },
		func() error { return w.get(onA) },
		func() error { return w.publish("b", onB) },
		func() error { _, err := w.CreateVolume(t.Context(), request("v", preferring("b"))); return err },
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
					t.Errorf("%v: %v", code(err), err)
				}
			}
		})
	}
	address := w.hosts["a"]
	for range 50 {
		w.forget("a")
		w.hosts["a"] = ""
		w.tell()
		w.hosts["a"] = address
		w.tell()
	}
	close(stop)
	tasks.Wait()
	w.know()
	must(t, w.get(onA))
	must(t, w.get(onB))
}

// TestHalfOpenIsNoticed: after a while calls on such a connection fail at once, and
// when something comes again they succeed.
func TestHalfOpenIsNoticed(t *testing.T) {
	w := newWorld(t)
	w.start("a", w.pool("default", "a", "1Gi"))
	p := proxyTo(t, w.hosts["a"])
	w.hosts["a"] = p.address()
	w.know()
	id := w.make("a", "v")
	p.gate.Lock()
	call := w.begin(t.Context(), id) // without a deadline
	wantCode(t, <-call, codes.Unavailable, `node "a"`)
	w.down("a")
	wantCode(t, w.get(id), codes.Unavailable, `node "a" cannot be reached`)
	p.gate.Unlock()
	await(t, "the node", func() bool { return w.get(id) == nil })
}
