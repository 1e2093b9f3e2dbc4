package router_test

import (
	"context"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// late is a backend that makes a volume and answers when nobody listens any more.
type late struct {
	backend.Backend
	made chan struct{}
}

func (l *late) make(pools *pool.Set) backend.Backend {
	l.Backend = loop.New(pools)
	return l
}

func (l *late) Create(ctx context.Context, spec volume.Spec) (volume.Volume, error) {
	v, err := l.Backend.Create(ctx, spec)
	l.made <- struct{}{}
	<-ctx.Done()
	return v, err
}

// TestUnansweredCreate: a volume that a node may have made, and cannot say, is not
// made on another until the node is gone; when it is back, it has it.
func TestUnansweredCreate(t *testing.T) {
	for _, back := range []bool{true, false} {
		w := newWorld(t)
		l := &late{made: make(chan struct{}, 9)}
		a := w.startWith("a", l.make, w.pool("default", "a", "2Gi"))
		w.start("b", w.pool("default", "b", "1Gi"))
		w.know()
		ctx, cancel := context.WithCancel(t.Context())
		call := make(chan error, 1)
		go func() {
			_, err := w.CreateVolume(ctx, request("v"))
			call <- err
		}()
		<-l.made
		cancel()
		wantCode(t, <-call, codes.Canceled)
		a.Stop(t)
		await(t, "the node to be waited for", func() bool {
			_, err := w.CreateVolume(t.Context(), request("v"))
			wantCode(t, err, codes.Unavailable, `"a"`)
			return strings.Contains(err.Error(), "may have been made")
		})
		if len(w.folders("b")) != 0 {
			t.Error("the volume was made twice")
		}
		want := "b"
		if back {
			w.start("a", w.pool("default", "a", "2Gi"))
			w.know()
			want = "a"
		} else {
			w.forget("a")
		}
		resp, err := w.CreateVolume(t.Context(), request("v"))
		must(t, err)
		if got := resp.GetVolume().GetAccessibleTopology()[0].GetSegments()[translate.TopologyKey]; got != want {
			t.Errorf("back %t: it is on %s", back, got)
		}
	}
}
