package driver

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/kube"
	"github.com/trivet-csi/trivet/mount"
	"github.com/trivet-csi/trivet/nodeserver"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
	"github.com/trivet-csi/trivet/worker"
)

const (
	// maxWorkerCalls bounds the calls that a worker works on at once, and so its
	// threads that may hang.
	maxWorkerCalls = 64
	// openPatience is how long a call waits for a pool that is just being opened.
	openPatience = 10 * time.Second
	// overtime is how long a call may go on when nobody waits for it any more, until it
	// is asked whether something behind the server hangs; answerTime is how long what is
	// mounted has to answer then.
	overtime   = time.Minute
	answerTime = 10 * time.Second
)

// RunWorker is the process that serves one pool: until the connection to the driver
// that started it is gone.
func RunWorker(ctx context.Context, job worker.Job, backends []func(*pool.Set) backend.Backend) error {
	connection, err := worker.Listen()
	if err != nil {
		return err
	}
	defer connection.Close() //nolint:errcheck // the driver is told, or gone
	state, err := os.OpenRoot(job.StateDir)
	if err != nil {
		return err
	}
	defer state.Close()
	bases, err := newBases(job.StateDir, job.Pool.Name, !job.SilentSince.IsZero())
	if err != nil {
		return err
	}
	w := &workerProcess{job: job, bases: bases, calls: make(chan struct{}, maxWorkerCalls), stuck: make(chan error, 1)}
	bases.clear(ctx)
	w.pools = pool.NewSharedSet(job.Pool, state, pool.Shared{
		Mount: bases.mount, NodeID: job.NodeID, Cleans: job.Controller && !job.Static, SilentSince: job.SilentSince, MountsDir: job.MountsDir,
	})
	return w.serve(ctx, connection, w.server(backends))
}

// workerProcess is what runs in a worker.
type workerProcess struct {
	csi.UnimplementedIdentityServer
	job      worker.Job
	pools    *pool.Set
	backends *backend.Registry
	bases    *bases
	calls    chan struct{}
	stuck    chan error
}

// server makes the services, as the driver makes them for its own pools.
func (w *workerProcess) server(makers []func(*pool.Set) backend.Backend) *grpc.Server {
	var backends []backend.Backend
	for _, make := range makers {
		backends = append(backends, make(w.pools))
	}
	w.backends = backend.NewRegistry(backends...)
	controller := controllerserver.New(w.backends, w.job.NodeID, w.job.MaxVolumes)
	// Which nodes there are is known where a call comes from.
	controller.Nodes = func(node string) bool { return w.job.NodeID == "" || node == w.job.NodeID }
	node := nodeserver.New(w.backends, w.job.NodeID, w.job.MaxVolumes)
	node.Teardown = func() (bool, error) { return w.pools.Teardown(w.job.Pool.Name) }
	if w.job.KubeletDir != "" {
		kubelet := kube.Kubelet{Dir: w.job.KubeletDir}
		controller.Release = func(ctx context.Context, id volume.ID) (bool, error) {
			return node.Release(ctx, id, kubelet.StagingPath(w.job.DriverName, id.String()))
		}
	}
	server := grpc.NewServer(append(around(w.log, recoverPanics, newInFlight().intercept, translateErrors, w.bound, w.awaitPool),
		grpc.InitialWindowSize(windowSize), grpc.InitialConnWindowSize(windowSize), grpc.NumStreamWorkers(streamWorkers))...)
	csi.RegisterIdentityServer(server, w)
	register(server, controller)
	csi.RegisterNodeServer(server, node)
	return server
}

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
	if !w.job.Static && w.job.SilentSince.IsZero() { // else no pool is opened
		go thaw(ctx, w.pools, w.backends)
	}
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		_ = server.Serve(connection) // it ends with the connection
	}()
	select {
	case err := <-w.stuck:
		return err // at once: what hangs cannot be waited for
	case <-gone:
	}
	stop()
	w.bases.leave(closed) //nolint:contextcheck // the end comes after the context's
	return nil
}

// log gives what is logged in a call the names of its pool and of what it is about; the
// call itself is logged by the driver.
func (w *workerProcess) log(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	kind, id := subject(req)
	log := klog.LoggerWithValues(klog.FromContext(ctx), "pool", w.job.Pool.Name, "method", path.Base(info.FullMethod), kind, id)
	return handler(klog.NewContext(ctx, log), req)
}

// bound lets a number of calls through at once, and ends the process if one hangs long
// after its caller has given up. A call leaves only when its thread does.
func (w *workerProcess) bound(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	select {
	case w.calls <- struct{}{}:
	case <-ctx.Done():
		return nil, volume.Errorf(volume.ErrUnavailable, "pool %q: it is busy with %d calls: %w: try again", w.job.Pool.Name, maxWorkerCalls, ctx.Err())
	}
	defer func() { <-w.calls }()
	returned := make(chan struct{})
	defer close(returned)
	defer context.AfterFunc(ctx, func() {
		if hangs(returned, overtime, w.answers) {
			w.giveUp(path.Base(info.FullMethod))
		}
	})()
	return handler(ctx, req)
}

// hangs waits for a call, and tells whether it hangs: from time to time it asks what the
// call works with. While that answers the call is slow (a check of a large filesystem, a
// flush), and would begin again if the process ended.
func hangs(returned <-chan struct{}, every time.Duration, answers func() bool) bool {
	for {
		select {
		case <-returned:
			return false
		case <-time.After(every):
			if !answers() {
				return true
			}
		}
	}
}

// answers tells whether what is mounted from the server answers: the pool's base mount
// or, for volumes without records, each of theirs. An error is an answer.
func (w *workerProcess) answers() bool {
	at, err := w.mounts()
	if err != nil || len(at) == 0 {
		return false
	}
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		for _, path := range at {
			_, _ = mount.Statfs(path)
		}
	}()
	select {
	case <-answered:
		return true
	case <-time.After(answerTime):
		return false
	}
}

func (w *workerProcess) mounts() ([]string, error) {
	if !w.job.Static {
		return slices.Collect(w.bases.own()), nil
	}
	server, err := volume.CanonicalServer(w.job.Pool.NFS.Server)
	if err != nil {
		return nil, err
	}
	entries, err := mount.Of(mount.Source{NFS: &mount.NFS{Server: server, Path: w.job.Pool.NFS.Export}, Below: true})
	var at []string
	for _, e := range entries {
		at = append(at, e.Mountpoint)
	}
	return at, err
}

func (w *workerProcess) giveUp(method string) {
	select {
	case w.stuck <- fmt.Errorf("%s still hangs long after its end, and so does what is mounted, though server %s answers: what it exports may not: see its log", method, w.job.Pool.NFS.Server):
	default: // another did
	}
}

// awaitPool waits a while for a pool that is being opened, so that the call which
// starts the process need not be made twice.
func (w *workerProcess) awaitPool(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	if !w.job.Static && !strings.HasPrefix(info.FullMethod, "/csi.v1.Identity/") {
		patience, cancel := context.WithTimeout(ctx, openPatience)
		_ = w.pools.AwaitReady(patience) // the pool's own error says more
		switch info.FullMethod {
		case csi.Controller_CreateVolume_FullMethodName, csi.Controller_GetCapacity_FullMethodName:
			w.pools.Initialise(patience)
		}
		cancel()
	}
	return handler(ctx, req)
}

// GetPluginInfo implements csi.IdentityServer: what the driver wants to know of the
// pool.
func (w *workerProcess) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	report, err := json.Marshal(w.report())
	if err != nil {
		return nil, err
	}
	return &csi.GetPluginInfoResponse{
		Name: w.job.DriverName, VendorVersion: w.job.Version, Manifest: map[string]string{worker.ReportKey: string(report)},
	}, nil
}

func (w *workerProcess) report() (r worker.Report) {
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

// baseWords are for the mount through which a pool's records are read, after those of
// the configuration: what another node wrote has to be seen at once, and nobody
// executes anything there.
var baseWords = []string{"lookupcache=none", "actimeo=0", "nosharecache", "hard", "nosuid", "nodev", "noexec"}

func mountExport(ctx context.Context, c pool.Config) (*mount.Detached, string, error) {
	n := mount.NFS{Server: strings.Trim(c.NFS.Server, "[]"), Path: c.NFS.Export, Options: append(slices.Clone(c.NFS.MountOptions), baseWords...)}
	fs, version, err := mount.MountNFS(ctx, n, 0)
	if err != nil {
		return nil, "", fmt.Errorf("pool %q: %w", c.Name, refused(err))
	}
	return fs, version, nil
}

// MountExport mounts an export for its records, out of sight: it is gone with the
// process, or when the directory is closed. It is for a process that may be killed.
// Errors have those of mount.MountNFS in them, and the kind that a call answers.
func MountExport(ctx context.Context, c pool.Config) (root *os.File, version string, err error) {
	fs, version, err := mountExport(ctx, c)
	if err != nil {
		return nil, "", err
	}
	defer func() { err = errors.Join(err, fs.Close()) }()
	root, err = fs.OpenRoot()
	return root, version, err
}

// refused is backend.ExplainNFS for words of the configuration, which no caller can
// change.
func refused(err error) error {
	if errors.Is(err, mount.ErrBadOption) {
		return volume.Errorf(volume.ErrPrecondition, "nfs.mountOptions: %w", err)
	}
	return backend.ExplainNFS(err)
}
