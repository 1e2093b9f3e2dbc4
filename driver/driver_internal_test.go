package driver

import (
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/grpcserver"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// streamer sends max_results messages. The snapshot ID of the request determines how the stream ends.
type streamer struct {
	csi.UnimplementedSnapshotMetadataServer
}

func (streamer) GetMetadataAllocated(req *csi.GetMetadataAllocatedRequest, stream csi.SnapshotMetadata_GetMetadataAllocatedServer) error {
	for i := range req.GetMaxResults() {
		if err := stream.Send(&csi.GetMetadataAllocatedResponse{VolumeCapacityBytes: int64(i)}); err != nil {
			return err
		}
	}
	switch req.GetSnapshotId() {
	case "panics":
		panic("for a test")
	case "missing":
		return volume.Errorf(volume.ErrNotFound, "no snapshot %q", req.GetSnapshotId())
	case "foreign":
		return status.Error(codes.Unavailable, "a foreign status")
	case "waits":
		<-stream.Context().Done()
		return stream.Context().Err()
	}
	return nil
}

// TestStreams: calls with a stream of responses pass through the same interceptors as other calls. The
// interceptors receive the request, count the call, convert errors to codes, and convert panics to errors.
func TestStreams(t *testing.T) {
	m := newMetrics("d", "v", nil, pool.NewSet(nil, nil, nil))
	var seen []string
	note := func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		_, id := grpcserver.Subject(req)
		seen = append(seen, id)
		return handler(ctx, req)
	}
	server := grpcserver.New(grpcserver.Chain(grpcserver.RecoverPanics, m.intercept, grpcserver.LogCalls, grpcserver.OneAtATime(), grpcserver.TranslateErrors, note)...)
	csi.RegisterSnapshotMetadataServer(server, streamer{})
	client := serve(t, server)
	for id, want := range map[string]codes.Code{"good": codes.OK, "panics": codes.Internal, "missing": codes.NotFound, "foreign": codes.Unavailable} {
		seen = nil
		n, err := receive(t.Context(), client, id, 3)
		if n != 3 || status.Code(err) != want {
			t.Errorf("%s: got %d messages, error %v, want 3 messages, code %v", id, n, err, want)
		}
		if len(seen) != 1 || seen[0] != id {
			t.Errorf("the interceptor received requests for %q, want one for %q", seen, id)
		}
		if want != codes.Internal && counted(t, m, want) != 1 {
			t.Errorf("%s was not counted once with code %v", id, want)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := client.GetMetadataAllocated(ctx, &csi.GetMetadataAllocatedRequest{SnapshotId: "waits", MaxResults: 1})
	if err == nil {
		_, err = stream.Recv()
	}
	must(t, err)
	cancel()
	server.GracefulStop() // waits for the handler
	if counted(t, m, codes.Canceled) != 1 {
		t.Error("the cancelled call was not counted")
	}
}

// serve starts a server on a socket and returns its client.
func serve(t *testing.T, server *grpc.Server) csi.SnapshotMetadataClient {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", path)
	must(t, err)
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(l) }()
	conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
	must(t, err)
	t.Cleanup(func() {
		conn.Close()
		server.Stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return csi.NewSnapshotMetadataClient(conn)
}

// receive returns the number of messages of a call, and its error.
func receive(ctx context.Context, client csi.SnapshotMetadataClient, id string, messages int32) (n int, err error) {
	stream, err := client.GetMetadataAllocated(ctx, &csi.GetMetadataAllocatedRequest{SnapshotId: id, MaxResults: messages})
	for err == nil {
		if _, err = stream.Recv(); err == nil {
			n++
		}
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return n, err
}

// counted returns the number of calls that the metrics contain with a status code.
func counted(t *testing.T, m *metrics, code codes.Code) (n uint64) {
	t.Helper()
	families, err := m.registry.Gather()
	must(t, err)
	for _, f := range families {
		for _, metric := range f.GetMetric() {
			for _, label := range metric.GetLabel() {
				if strings.HasSuffix(f.GetName(), "operations_seconds") && label.GetName() == "grpc_status_code" && label.GetValue() == code.String() {
					n += metric.GetHistogram().GetSampleCount()
				}
			}
		}
	}
	return n
}

// TestIdle: the timeout begins at the start, and again whenever the last connection ends. Connections after
// the timeout have no effect.
func TestIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		i := newIdle(3 * time.Second)
		time.Sleep(2 * time.Second)
		i.HandleConn(t.Context(), &stats.ConnBegin{})
		i.HandleConn(t.Context(), &stats.ConnBegin{})
		time.Sleep(10 * time.Second)
		i.HandleConn(t.Context(), &stats.ConnEnd{})
		time.Sleep(10 * time.Second)
		i.HandleConn(t.Context(), &stats.ConnEnd{})
		time.Sleep(2 * time.Second)
		i.HandleConn(t.Context(), &stats.ConnBegin{})
		i.HandleConn(t.Context(), &stats.ConnEnd{})
		<-i.ended()
		if took := time.Since(began); took != 27*time.Second {
			t.Errorf("the idle timeout ended after %v, want 27s", took)
		}
		// The second timeout must not close the channel of ended again, which would panic.
		i.HandleConn(t.Context(), &stats.ConnBegin{})
		i.HandleConn(t.Context(), &stats.ConnEnd{})
		time.Sleep(4 * time.Second)
	})
	var none *idle
	if none.ended() != nil {
		t.Error("ended of a nil handler is not nil")
	}
}

// TestWithoutNFS: in Kubernetes, exports are mounted only with kubernetes.nfs or with an nfs pool.
func TestWithoutNFS(t *testing.T) {
	nas := []pool.Config{{Name: "nas", NFS: &pool.NFS{Server: "nas.lan", Export: "/e"}}}
	local := []pool.Config{{Name: "default", Directory: pool.Directory{Path: "/p"}}}
	for _, tc := range []struct {
		name    string
		c       Config
		refused bool
	}{
		{"outside Kubernetes", Config{Pools: local}, false},
		{"kubernetes.nfs is false", Config{Pools: local, Kubernetes: &Kubernetes{}}, true},
		{"kubernetes.nfs is true", Config{Pools: local, Kubernetes: &Kubernetes{NFS: true}}, false},
		{"kubernetes.nfs is false, with an nfs pool", Config{Pools: nas, Kubernetes: &Kubernetes{}}, false},
	} {
		if err := (Options{Config: tc.c}).withoutNFS(); (err != nil) != tc.refused {
			t.Errorf("%s: got error %v, want an error: %t", tc.name, err, tc.refused)
		}
	}
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// silent is a backend that cannot find out whether a volume is on this node.
type silent struct{ backend.Backend }

func (silent) Present(context.Context, volume.Volume) (mount.Source, bool, error) {
	return nil, false, errors.New("no answer")
}

// TestUnknownCountsAsStaged: a move must not take a volume for unused whose state is not known.
func TestUnknownCountsAsStaged(t *testing.T) {
	if _, staged := present(t.Context(), silent{}, volume.Volume{}, nil); !staged {
		t.Error("got a volume that is not staged, want that it counts as staged")
	}
}
