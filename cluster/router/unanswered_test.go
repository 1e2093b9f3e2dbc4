package router_test

import (
	"context"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/cluster/router"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// late is a backend that makes volume v when it is let, whether or not somebody still
// waits for it, as making an image does.
type late struct {
	backend.Backend
	entered, release, made chan struct{}
}

func newLate() *late {
	return &late{entered: make(chan struct{}, 9), release: make(chan struct{}), made: make(chan struct{}, 9)}
}

func (l *late) kind() backend.Kind {
	kind := loop.Kind
	kind.New = func(pools *pool.Set) backend.Backend {
		l.Backend = loop.New(pools)
		return l
	}
	return kind
}

func (l *late) Create(ctx context.Context, spec volume.Spec) (volume.Volume, error) {
	if spec.CoName != "v" {
		return l.Backend.Create(ctx, spec)
	}
	l.entered <- struct{}{}
	<-l.release
	defer func() { l.made <- struct{}{} }()
	return l.Backend.Create(ctx, spec)
}

// doubt is a world where volume v is being made on a, and who asked has gone.
type doubt struct {
	*world
	*late
	a *backendtest.Driver
}

func newDoubt(t *testing.T) *doubt {
	t.Helper()
	d := &doubt{world: newWorld(t), late: newLate()}
	d.a = d.startWith("a", d.late.kind(), d.pool("default", "a", "2Gi"))
	d.start("b", d.pool("default", "b", "1900Mi"))
	d.know()
	ctx, cancel := context.WithCancel(t.Context())
	call := make(chan error, 1)
	go func() {
		_, err := d.CreateVolume(ctx, request("v"))
		call <- err
	}()
	<-d.entered
	cancel()
	wantCode(t, <-call, codes.Canceled)
	return d
}

// finish lets the volume be made, and stops its node.
func (d *doubt) finish() {
	close(d.release)
	<-d.made
	d.a.Stop(d.t)
}

// refused tries to create the volume until a code comes, and takes no success.
func (d *doubt) refused(want codes.Code, says string) {
	d.t.Helper()
	await(d.t, says, func() bool {
		_, err := d.CreateVolume(d.t.Context(), request("v"))
		if err == nil {
			d.t.Fatal("the volume was made again")
		}
		return code(err) == want && strings.Contains(err.Error(), says)
	})
}

// wantAt creates the volume, which has to be on a node, and on no other.
func (d *doubt) wantAt(node string) {
	d.t.Helper()
	var at string
	await(d.t, "the volume", func() bool {
		resp, err := d.CreateVolume(d.t.Context(), request("v"))
		if err == nil {
			at = resp.GetVolume().GetAccessibleTopology()[0].GetSegments()[translate.TopologyKey]
		}
		return err == nil
	})
	if at != node {
		d.t.Errorf("it is on %s, want %s", at, node)
	}
	if node == "a" && slices.Contains(d.folders("b"), "v") {
		d.t.Error("it was made on b as well")
	}
}

// TestUnansweredCreate: a volume that a node may have made, or is still making, is
// made on no other until that node is gone.
func TestUnansweredCreate(t *testing.T) {
	t.Run("node comes back", func(t *testing.T) {
		d := newDoubt(t)
		d.finish()
		d.refused(codes.Unavailable, "may have been made")
		d.start("a", d.pool("default", "a", "2Gi"))
		d.tell()
		d.wantAt("a")
	})
	t.Run("node is gone", func(t *testing.T) {
		d := newDoubt(t)
		d.finish()
		d.refused(codes.Unavailable, "may have been made")
		d.forget("a")
		d.wantAt("b")
	})
	t.Run("still under way", func(t *testing.T) {
		d := newDoubt(t)
		d.world.make("a", "other", sized(512*mib)) // b has more room now
		d.refused(codes.Aborted, "still under way")
		close(d.release)
		<-d.made
		d.wantAt("a")
	})
	t.Run("under way, then the node dies", func(t *testing.T) {
		d := newDoubt(t)
		d.refused(codes.Aborted, "still under way")
		d.finish()
		d.refused(codes.Unavailable, "may have been made")
	})
	t.Run("back without its disk", func(t *testing.T) {
		d := newDoubt(t)
		d.finish()
		without := d.pool("default", "a", "2Gi")
		without.RequireMount = true
		d.start("a", without)
		d.tell()
		d.refused(codes.Unavailable, "requireMount")
	})
	t.Run("registered anew", func(t *testing.T) {
		d := newDoubt(t)
		d.finish()
		address := d.hosts["a"]
		d.forget("a")
		d.hosts["a"] = address
		d.tell()
		d.refused(codes.Unavailable, "may have been made")
	})
}

// TestUnansweredOnMovedDisk: what the router itself refuses to ask a node is no answer of
// the node's: the volume stays in doubt.
func TestUnansweredOnMovedDisk(t *testing.T) {
	d := newDoubt(t)
	close(d.release)
	<-d.made
	d.move("a", "c")
	d.refused(codes.Unavailable, `is recorded for node "c", and "a" announces it`)
	d.a.Stop(t)
	d.down("a")
	for range 3 {
		d.refused(codes.Unavailable, `"a"`)
	}
}

// TestNobodyAskedYet: at the start no node counts as asked before it was, however
// many there are. Those that have been asked in vain by then are not named.
func TestNobodyAskedYet(t *testing.T) {
	w := newWorld(t)
	silent, err := net.Listen("tcp", "127.0.0.1:0") // it accepts, and shakes no hands
	must(t, err)
	defer func() { _ = silent.Close() }()
	var hosts []router.Host
	for i := range 200 {
		hosts = append(hosts, router.Host{Name: "n" + strings.Repeat("x", i), Address: silent.Addr().String()})
	}
	w.SetHosts(hosts)
	_, err = w.CreateVolume(t.Context(), request("v"))
	wantCode(t, err, codes.Unavailable, " more were not asked yet")
}

// TestGoneAndBack: of a node that is registered again nobody says that it is gone.
func TestGoneAndBack(t *testing.T) {
	w := newWorld(t)
	a := w.start("a", w.pool("default", "a", "1Gi"))
	w.start("b", w.pool("default", "b", "1Gi"))
	w.know()
	id := w.make("a", "v")
	a.Stop(t)
	address := w.hosts["a"]
	w.forget("a")
	wantCode(t, w.calls(t.Context(), id)["delete"](), codes.FailedPrecondition, "is gone")
	w.hosts["a"] = address
	w.tell()
	wantCode(t, w.calls(t.Context(), id)["delete"](), codes.Unavailable, `"a"`)
}

// TestClosedPool: a pool that is not open has no room, so that no pod is sent there.
func TestClosedPool(t *testing.T) {
	w := newWorld(t)
	closed := w.pool("default", "a", "2Gi")
	closed.RequireMount = true
	w.start("a", closed)
	w.tell()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	await(t, "no room", func() bool {
		resp, err := w.GetCapacity(ctx, &csi.GetCapacityRequest{AccessibleTopology: translate.Topology("a")})
		return err == nil && resp.GetAvailableCapacity() == 0
	})
}
