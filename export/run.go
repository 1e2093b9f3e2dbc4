package export

import (
	"context"
	"encoding/json"
	"net"
	"os"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/internal/grpcserver"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/internal/trace"
	"github.com/trivet-csi/trivet/nodeserver"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// openPatience bounds the wait of a call for a pool that is being opened.
const openPatience = 10 * time.Second

// StagingPath returns the path where a kubelet stages a volume of a driver.
type StagingPath func(kubeletDir, driver, volumeID string) string

// Run is the worker process: it serves one pool until its connection to the driver ends.
func Run(ctx context.Context, job Job, conn net.Conn, kinds backend.Kinds, stagingPath StagingPath) error {
	state, err := os.OpenRoot(job.StateDir)
	if err != nil {
		return err
	}
	defer state.Close()
	bases, err := newBases(job.StateDir, job.Pool.Name, !job.SilentSince.IsZero())
	if err != nil {
		return err
	}
	w := &workerProcess{job: job, bases: bases, calls: make(chan struct{}, maxCalls), stuck: make(chan error, 1)}
	bases.clear(ctx)
	w.pools = pool.NewSharedSet(kinds.Forms(), job.Pool, state, pool.Shared{
		Mount: bases.mount, NodeID: job.NodeID, Maintains: job.Controller && !job.Static, SilentSince: job.SilentSince, MountsDir: job.MountsDir,
	})
	return w.serve(ctx, listen(conn), w.server(kinds, stagingPath))
}

// workerProcess is the state of a worker process.
type workerProcess struct {
	csi.UnimplementedIdentityServer
	job      Job
	pools    *pool.Set
	backends *backend.Registry
	bases    *bases
	calls    chan struct{} // holds a token for each running call
	stuck    chan error    // why the process must end at once
}

// server creates the gRPC server with the services that the driver has for its own pools.
func (w *workerProcess) server(kinds backend.Kinds, stagingPath StagingPath) *grpc.Server {
	w.backends = kinds.Registry(w.pools)
	controller := controllerserver.New(w.backends, w.job.NodeID, w.job.MaxVolumes)
	// A process without a node accepts any node, because the driver that sends the call has verified
	// that the node exists.
	controller.Nodes = func(node string) bool { return w.job.NodeID == "" || node == w.job.NodeID }
	node := nodeserver.New(w.backends, w.job.NodeID, w.job.MaxVolumes)
	node.Abandon = func() (bool, error) { return w.pools.Teardown(w.job.Pool.Name) }
	if w.job.KubeletDir != "" {
		controller.Release = func(ctx context.Context, id volume.ID) (bool, error) {
			return node.Release(ctx, id, stagingPath(w.job.KubeletDir, w.job.DriverName, id.String()))
		}
	}
	server := grpcserver.New(grpcserver.Chain(w.log, grpcserver.RecoverPanics, grpcserver.OneAtATime(), grpcserver.TranslateErrors, w.limit, w.awaitPool)...)
	csi.RegisterIdentityServer(server, w)
	relay.Register(server, relay.Controller(controller), relay.ControllerServices...)
	csi.RegisterNodeServer(server, node)
	return server
}

// serve serves until the connection ends, or until a call hangs (stuck).
func (w *workerProcess) serve(ctx context.Context, connection net.Listener, server *grpc.Server) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		if !w.job.Static {
			w.pools.Run(ctx)
		}
	}()
	if !w.job.Static && w.job.SilentSince.IsZero() { // no pool is opened for static volumes or a silent server
		go w.backends.Thaw(ctx, w.pools.AwaitReady)
	}
	disconnected := make(chan struct{})
	go func() {
		defer close(disconnected)
		_ = server.Serve(connection) // returns when the connection ends
	}()
	select {
	case err := <-w.stuck:
		return err // without waiting for the calls, because one hangs
	case <-disconnected:
	}
	stop()
	w.bases.leave(closed) //nolint:contextcheck // the context has ended
	return nil
}

// awaitPool delays a call while the pool is being opened, so that the call that starts the process
// does not fail.
func (w *workerProcess) awaitPool(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if !w.job.Static && !strings.HasPrefix(info.FullMethod, "/csi.v1.Identity/") {
		waiting, span := trace.Start(ctx, "wait for pool")
		patience, cancel := context.WithTimeout(waiting, openPatience)
		_ = w.pools.AwaitReady(patience) // the handler returns the error of the pool, which is more specific
		switch info.FullMethod {
		case csi.Controller_CreateVolume_FullMethodName, csi.Controller_GetCapacity_FullMethodName:
			w.pools.Initialise(patience)
		}
		cancel()
		span.End(nil)
	}
	return handler(ctx, req)
}

// GetPluginInfo implements csi.IdentityServer. The manifest contains the Report of the pool.
func (w *workerProcess) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	report, err := json.Marshal(w.report())
	if err != nil {
		return nil, err
	}
	return &csi.GetPluginInfoResponse{
		Name: w.job.DriverName, VendorVersion: w.job.Version, Manifest: map[string]string{ReportKey: string(report)},
	}, nil
}

// report returns the state of the pool.
func (w *workerProcess) report() (r Report) {
	s := w.pools.States()[0]
	err := s.Err
	if err == nil {
		err = s.Pool.Check()
	}
	if err == nil {
		r.Usage, err = s.Pool.Usage()
	}
	if err != nil {
		r.Err = err.Error()
		return r
	}
	r.Version, r.Volumes = s.Pool.Version(), s.Pool.VolumesByBackend()
	return r
}
