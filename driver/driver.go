// Package driver runs the driver's process: its configuration, the gRPC servers with their
// interceptors, HTTP, start and shutdown. It implements no CSI calls.
package driver

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/cluster/router"
	"github.com/trivet-csi/trivet/cluster/status"
	"github.com/trivet-csi/trivet/cluster/transfer"
	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/export"
	"github.com/trivet-csi/trivet/identity"
	"github.com/trivet-csi/trivet/internal/grpcserver"
	"github.com/trivet-csi/trivet/internal/logging"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/linux/cgroup"
	"github.com/trivet-csi/trivet/nodeserver"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// defaultDrainTime limits the wait for running calls after a signal to stop. closeTime limits the
// closing of the pools afterwards. Their sum is less than the default termination grace period of a pod, 30 s.
const (
	defaultDrainTime = 20 * time.Second
	closeTime        = 5 * time.Second
)

// nodeListTimeout is how long the controller's driver reports that it is not ready while it has no
// list of nodes. Afterwards it reports ready, because a restart would not make the API server answer.
const nodeListTimeout = 30 * time.Second

// maxNodeID is the maximum length of a node ID in bytes (CSI specification, NodeGetInfo).
const maxNodeID = 256

// DefaultName is the default of --driver-name.
const DefaultName = "csi.trivet.dev"

// Options holds the flags and the configuration of a driver.
type Options struct {
	Endpoint    string
	NodeID      string
	StateDir    string
	HTTPAddress string // if it is empty, the driver does not serve HTTP
	// Registry is the directory of plugin sockets where the driver registers itself. If it is
	// empty, node-driver-registrar registers the driver.
	Registry string
	Name     string
	Version  string
	Services []string // "controller", "node" or both
	// DrainTime is the timeout of running calls at shutdown. 0 means 20 s.
	DrainTime time.Duration
	// HealthInterval is the time between two examinations of the volumes. 0 means 30 s.
	HealthInterval time.Duration
	// IdleTime is how long the driver runs without a connection before it ends. 0 means forever.
	IdleTime time.Duration
	Config   Config
	// PodUID and Namespace are those of the driver's pod in Kubernetes.
	PodUID, Namespace string
	// Worker is the path of the program that runs the worker processes of nfs pools, in the roles
	// that Roles returns. If it is empty, nfs pools are unavailable.
	Worker string
	// Log is the log of the worker processes.
	Log logging.Options
	// Kinds are the kinds of volumes that the driver serves.
	Kinds backend.Kinds
	// Cgroups is the hierarchy with the cgroups of the pods. If it is empty, it is cgroup.Root.
	Cgroups cgroup.Hierarchy
}

func (o Options) validate() error {
	switch {
	case o.NodeID == "" && o.serves("node"):
		return volume.Errorf(volume.ErrInvalid, "--node-id is missing: give the node's name")
	case len(o.NodeID) > maxNodeID:
		return volume.Errorf(volume.ErrInvalid, "--node-id has %d bytes: at most %d are allowed", len(o.NodeID), maxNodeID)
	case o.Registry != "" && !o.serves("node"):
		return volume.Errorf(volume.ErrInvalid, "--plugins-registry %q is for a driver that serves the node: remove it, or add node to --services", o.Registry)
	case len(o.Services) == 0:
		return volume.Errorf(volume.ErrInvalid, "--services is empty: it must be controller, node or both")
	}
	for _, s := range o.Services {
		if s != "controller" && s != "node" {
			return volume.Errorf(volume.ErrInvalid, "--services %q: must be controller, node or both", s)
		}
	}
	if k := o.Config.Kubernetes; k != nil && (k.Authority != "" || k.NodeService != "") && o.Namespace == "" {
		return volume.Errorf(volume.ErrPrecondition, "kubernetes: the environment has no POD_NAMESPACE: give it to the container by the downward API (metadata.namespace)")
	}
	return o.checkForwarding()
}

// checkKubelet returns an error if the kubelet's directory is wrong, or if mounts of this process do
// not propagate to the node.
func (o Options) checkKubelet() error {
	if o.Config.Kubernetes == nil || !o.serves("node") {
		return nil
	}
	kubelet := kube.Kubelet{Dir: o.Config.Kubernetes.KubeletDir, PodUID: o.PodUID}
	if err := kubelet.CheckDir(); err != nil {
		return err
	}
	return kubelet.CheckPropagation()
}

func (o Options) serves(service string) bool { return slices.Contains(o.Services, service) }

// Driver is the state of the driver process.
type Driver struct {
	options  Options
	config   Config
	state    *os.Root  // the state directory
	pools    *pool.Set // the pools of this node
	backends *backend.Registry
	workers  *export.Pools // the worker processes of the nfs pools
	metrics  *metrics
	server   *grpc.Server
	// forwarded serves calls of the controller's driver; nil unless this is a node's driver.
	forwarded *grpc.Server
	// sender sends volumes to other nodes; nil unless this is a node's driver.
	sender       *transfer.Server
	certificates *pki.Directory
	// router and owners are nil unless this is the controller's driver.
	router *router.Server
	owners router.Owners
	// nodeLoss is nil unless claims of lost nodes are released.
	nodeLoss *kube.NodeLoss
	// transferEvents is nil unless this is the controller's driver, and events are enabled.
	transferEvents *kube.TransferEvents
	// examiner is nil if the Node service is not served, and nodeHealth unless this is the controller's driver.
	examiner   *examiner
	nodeHealth *nodeHealth
	// healthEvents is nil unless the driver serves the controller, and events are enabled.
	healthEvents *kube.HealthEvents
	// lists answers the lists of volumes and snapshots for the report, without those of other nodes.
	lists relay.Service
	// idle is nil if Options.IdleTime is 0.
	idle *idle
	// node, trims and checks are nil if the Node service is not served.
	node   *nodeserver.Server
	trims  *trims
	checks *checks
}

// Run serves until ctx ends, or until the driver is idle (IdleTime). It returns when the running calls have
// returned, or after DrainTime.
func Run(ctx context.Context, o Options) error {
	// The servers outlive ctx until the running calls are drained.
	background, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	d, err := newDriver(background, o)
	if err != nil {
		return err
	}
	defer d.state.Close()
	ports, err := o.listen(ctx)
	if err != nil {
		return err
	}
	return d.serve(ctx, background, stop, ports)
}

// newDriver creates the driver without starting it. background is the context of its tasks and outlives that of Run.
func newDriver(background context.Context, o Options) (*Driver, error) {
	if err := cmp.Or(o.validate(), o.checkKubelet()); err != nil {
		return nil, err
	}
	state, err := openState(o)
	if err != nil {
		return nil, err
	}
	d := &Driver{options: o, config: o.Config, state: state}
	if f := o.Config.Forwarding; f != nil {
		d.certificates = pki.OpenDirectory(f.CertificatesDir(o.StateDir))
	}
	d.pools = pool.NewSet(o.Kinds.Forms(), o.Config.Pools, state)
	d.workers = export.New(background, o.workers())
	d.metrics = newMetrics(o.Name, o.Version, o.Services, d.pools)
	d.metrics.registry.MustRegister(workerCollector{d.workers})
	if o.forwards() {
		if d.owners, err = d.poolOwners(); err != nil {
			return nil, errors.Join(err, state.Close())
		}
	}
	d.makeServers(background)
	return d, nil
}

// openState creates and opens the state directory.
func openState(o Options) (*os.Root, error) {
	// The default pool is a directory in pools.
	err := os.MkdirAll(filepath.Join(o.StateDir, "pools"), 0o700)
	var state *os.Root
	if err == nil {
		state, err = os.OpenRoot(o.StateDir)
	}
	if err == nil {
		if err = checkWritable(state); err != nil {
			_ = state.Close()
		}
	}
	if err != nil {
		return nil, fmt.Errorf("--state-dir %s: %w: give the driver a directory that it can write", o.StateDir, err)
	}
	return state, nil
}

// checkWritable opens a file of the state directory for writing. That fails on a filesystem
// that is read-only or not mounted any more.
func checkWritable(state *os.Root) error {
	f, err := state.OpenFile("usable", os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	return f.Close()
}

// makeServers creates the gRPC servers and registers their services.
func (d *Driver) makeServers(background context.Context) {
	o := d.options
	d.backends = o.Kinds.Registry(d.pools)
	serverOptions := grpcserver.Chain(grpcserver.RecoverPanics, d.metrics.intercept, grpcserver.LogCalls, grpcserver.OneAtATime(), grpcserver.TranslateErrors)
	serverOptions = append(serverOptions, grpc.ChainUnaryInterceptor(awaitPool))
	if o.IdleTime > 0 { // only then, because a stats handler has a cost per call
		d.idle = newIdle(o.IdleTime)
		serverOptions = append(serverOptions, grpc.StatsHandler(d.idle))
	}
	d.server = grpcserver.New(serverOptions...)
	identityServer := &identity.Server{Name: o.Name, Version: o.Version, Ready: d.pools.Ready, Usable: d.usable, Pools: d.pools.UUIDs, Expected: d.pools.ExpectedUUIDs, Kinds: d.pools.Kinds()}
	controller := controllerserver.New(d.backends, o.NodeID, d.config.MaxVolumesPerNode)
	exports := &export.Relay{Pools: d.workers, Local: relay.Controller(controller)}
	d.lists = exports
	switch {
	case o.forwards():
		controller.Nodes = func(string) bool { return true } // the router checks that the node exists
		routing := router.Options{
			Shared: exports, SharedPools: PoolNames(o.sharedPools()), Kinds: o.Kinds, Owners: d.owners,
			Client:    func(node string) *tls.Config { return d.certificates.Client(pki.NodeURI(o.Name, node)) },
			Transfers: o.Kinds.Transfer,
			Sign:      func(t transfer.Ticket) ([]byte, error) { return t.Sign(d.certificates) },
		}
		if d.config.events() {
			d.transferEvents = kube.NewTransferEvents(o.Name)
			routing.OnTransfer = d.recordTransfer
		}
		d.router = router.New(background, routing)
		d.nodeHealth = newNodeHealth(d.router)
		started := time.Now()
		identityServer.Ready = func() bool { return d.router.Ready() || time.Since(started) > nodeListTimeout }
		d.metrics.registry.MustRegister(nodeCollector{d.router})
		if delay, _ := d.config.Kubernetes.nodeLossDelay(); delay > 0 { // validated before
			d.nodeLoss = kube.NewNodeLoss(kube.NodeLossOptions{Driver: o.Name, Delay: delay, CheckLost: d.router.CheckLost})
			d.metrics.registry.MustRegister(nodeLossCollector{d.nodeLoss})
		}
		relay.Register(d.server, d.router, relay.ControllerServices...)
	case o.receivesForwarded():
		d.sender = d.newSender()
		receiver := &transfer.Client{Driver: o.Name, Certificates: d.certificates, Limit: d.config.TransferLimit.limit()}
		controller.Incoming = receiver.Incoming
		d.metrics.registry.MustRegister(transferredBytes("sent", d.sender.Limit), transferredBytes("received", receiver.Limit))
		d.forwarded = grpc.NewServer(append(d.forwardingServerOptions(), serverOptions...)...)
		service := &forwardedService{Service: exports.Local, exports: exports}
		relay.Register(d.forwarded, service, relay.ControllerServices...)
		relay.Register(d.server, service, relay.ControllerServices...) // for FlexVolume
		d.lists = exports.Local                                        // the controller's driver lists the nfs pools
		status.Register(d.forwarded, d.report, d.examination)
		csi.RegisterIdentityServer(d.forwarded, identityServer)
	default:
		relay.Register(d.server, exports, relay.ControllerServices...)
	}
	csi.RegisterIdentityServer(d.server, identityServer)
	if o.serves("node") {
		d.serveNode(background, controller)
	}
	if o.serves("controller") && d.config.events() {
		d.healthEvents = kube.NewHealthEvents(o.Name)
	}
}

// serveNode registers the Node service. It also lets the Controller service unstage volumes on this node.
func (d *Driver) serveNode(background context.Context, controller *controllerserver.Server) {
	// Static volumes (without a record) are on NFS servers, so workers serve them.
	node := nodeserver.New(d.backends.WithoutStatic(), d.options.NodeID, d.config.MaxVolumesPerNode)
	node.InlineMemory, _ = volume.ParseSize(d.config.EphemeralMemory) // 0 if it is empty
	d.trims = newTrims(background, d.pools, d.backends, d.config.Pools)
	d.checks = newChecks(background, d.pools, d.backends, d.config.Pools)
	serveRequests(d.server, trimMethod, d.trims.demand)
	serveRequests(d.server, checkMethod, d.checks.demand)
	d.metrics.registry.MustRegister(d.trims, d.checks)
	node.HoldTrim = d.trims.Hold
	node.Cgroups = cmp.Or(d.options.Cgroups, cgroup.Root)
	controller.IOLimiter = node
	d.node = node
	calls := &export.Relay{Pools: d.workers, Local: relay.Node(node)}
	relay.Register(d.server, calls, &csi.Node_ServiceDesc)
	d.examiner = d.newExaminer(calls)
	d.metrics.registry.MustRegister(d.examiner)
	status.Register(d.server, d.report, d.examination)
	if k := d.config.Kubernetes; k != nil {
		kubelet := kube.Kubelet{Dir: k.KubeletDir}
		controller.Release = func(ctx context.Context, id volume.ID) (bool, error) {
			return node.Release(ctx, id, kubelet.StagingPath(d.options.Name, id.String()))
		}
	}
}

// serve returns nil after a graceful shutdown. stop cancels background.
func (d *Driver) serve(ctx, background context.Context, stop func(), p ports) error {
	log := klog.FromContext(ctx)
	log.Info("Serving", "driver", d.options.Name, "version", d.options.Version, "endpoint", d.options.Endpoint,
		"node", d.options.NodeID, "services", d.options.Services)
	var tasks sync.WaitGroup
	d.startTasks(background, &tasks, p.web)
	if p.registration != nil {
		tasks.Go(func() { d.serveRegistration(ctx, p.registration) })
	}
	failed := make(chan error, 2)
	go func() { failed <- servingError(d.options.Endpoint, d.server.Serve(p.socket)) }()
	if d.forwarded != nil {
		go func() { failed <- servingError(d.config.Forwarding.Listen, d.forwarded.Serve(p.forwarding)) }()
	}
	var err error
	select {
	case <-ctx.Done():
	case err = <-failed:
	case <-d.idle.ended():
		log.Info("Stopping: no connection", "for", d.options.IdleTime)
	}
	d.drain(log)
	stop()
	waitFor(closeTime, log, tasks.Wait)
	return err
}

func servingError(port string, err error) error { return fmt.Errorf("serving %s: %w", port, err) }

// startTasks starts the background tasks, which end with ctx.
func (d *Driver) startTasks(ctx context.Context, tasks *sync.WaitGroup, web net.Listener) {
	pools, closePools := context.WithCancel(context.WithoutCancel(ctx))
	tasks.Go(func() { d.pools.Run(pools) })
	tasks.Go(func() {
		defer closePools() // after the calls below, which use the pools
		var health sync.WaitGroup
		health.Go(func() { d.observeHealth(ctx) })
		d.backends.Thaw(ctx, d.pools.AwaitReady)
		if d.node != nil {
			d.trims.start(d.config.Pools)  //nolint:contextcheck // the trims have a context that Close ends
			d.checks.start(d.config.Pools) //nolint:contextcheck // as above
			health.Go(func() { d.restoreIOLimits(ctx) })
			d.cleanUpInline(ctx)
			d.node.Wait()
		}
		<-ctx.Done()
		if d.trims != nil {
			d.trims.Close()
			d.checks.Close()
		}
		health.Wait()
		if d.examiner != nil {
			d.examiner.calling.Wait()
		}
	})
	tasks.Go(func() { <-ctx.Done(); d.workers.Wait() })
	if d.options.serves("controller") { // also without calls: the workers finish interrupted deletions
		d.workers.Start()
	}
	if web != nil {
		tasks.Go(func() { d.serveHTTP(ctx, web) })
	}
	if d.router != nil {
		tasks.Go(func() { d.updateHosts(ctx) })
		if owners, ok := d.owners.(*kube.PoolOwners); ok {
			tasks.Go(func() { owners.Run(ctx, kube.InCluster) })
		}
		if d.transferEvents != nil {
			tasks.Go(func() { d.transferEvents.Run(ctx, kube.InCluster) })
		}
		if d.nodeLoss != nil {
			tasks.Go(func() { d.nodeLoss.Run(ctx, kube.InCluster) })
		}
		if k := d.config.Kubernetes; k != nil && k.ProtectClaims {
			tasks.Go(func() { d.protectClaims(ctx) })
		}
		tasks.Go(func() { <-ctx.Done(); d.router.Wait() })
	}
	if d.healthEvents != nil {
		tasks.Go(func() { d.healthEvents.Run(ctx, kube.InCluster) })
	}
	k := d.config.Kubernetes
	if k == nil {
		return
	}
	if k.Authority != "" {
		tasks.Go(func() { d.renewCertificates(ctx) })
	}
	if k.StartupTaint && d.options.serves("node") {
		tasks.Go(func() {
			if d.pools.AwaitReady(ctx) == nil { // no volume can be staged before
				kube.RemoveStartupTaint(ctx, kube.InCluster, d.options.NodeID, d.options.Name)
			}
		})
	}
}

// drain stops the servers when the running calls have returned, or after DrainTime. A call that
// hangs in a system call cannot be aborted and must not keep the process alive.
func (d *Driver) drain(log klog.Logger) {
	timeout := cmp.Or(d.options.DrainTime, defaultDrainTime)
	log.Info("Stopping: waiting for running calls", "timeout", timeout)
	waitFor(timeout, log, func() {
		var servers sync.WaitGroup
		servers.Go(d.server.GracefulStop)
		if d.trims != nil { // they must not wait for the end of the calls
			servers.Go(d.trims.Close)
			servers.Go(d.checks.Close)
		}
		if d.forwarded != nil {
			servers.Go(d.forwarded.GracefulStop)
			servers.Go(d.sender.Close) // the other nodes continue the transfers later
		}
		servers.Wait()
	})
}

// waitFor runs one step of the shutdown and returns when it ends or after the timeout.
func waitFor(timeout time.Duration, log klog.Logger, step func()) {
	done := make(chan struct{})
	go func() { step(); close(done) }()
	select {
	case <-done:
	case <-time.After(timeout):
		log.Info("Stopping although a step of the shutdown has not ended", "timeout", timeout)
	}
}

// usable returns an error if the state directory cannot be written, so that no call can succeed. Probe
// and /healthz report it.
func (d *Driver) usable() error {
	if err := checkWritable(d.state); err != nil {
		return volume.Errorf(volume.ErrPrecondition, "the state directory %s cannot be written: %w: check its disk", d.options.StateDir, err)
	}
	return nil
}

// ready returns an error unless every pool is open and forwarding works. /readyz reports it.
func (d *Driver) ready() error {
	errs := []error{d.usable()}
	if d.config.Forwarding != nil {
		errs = append(errs, d.certificates.UsableAs(d.options.identity()))
	}
	if d.router != nil && !d.router.Ready() {
		errs = append(errs, errors.New("the list of nodes has not been received yet"))
	}
	for _, s := range d.pools.States() {
		err := s.Err
		if err == nil {
			err = s.Pool.Check()
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// restoreInterval is the time between two calls of RestoreIOLimits.
const restoreInterval = 30 * time.Second

// restoreIOLimits restores the limits of I/O: an earlier process may have been killed while it changed them, or the cgroup of a
// pod created again.
func (d *Driver) restoreIOLimits(ctx context.Context) {
	if d.pools.AwaitReady(ctx) != nil {
		return
	}
	tick := time.NewTicker(restoreInterval)
	defer tick.Stop()
	lastLogged := ""
	for {
		message := ""
		if err := d.node.RestoreIOLimits(ctx); err != nil && ctx.Err() == nil {
			message = err.Error()
			if message != lastLogged {
				klog.FromContext(ctx).Error(err, "Restoring the I/O limits of pods failed; retrying", "interval", restoreInterval)
			}
		}
		lastLogged = message
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// cleanUpInterval is the time between two attempts to remove orphaned inline volumes.
const cleanUpInterval = 10 * time.Second

// cleanUpInline removes inline volumes that were orphaned by a restart of the node, or by a kill of
// the driver during their creation. The kubelet does not unpublish all of them.
func (d *Driver) cleanUpInline(ctx context.Context) {
	if d.pools.AwaitReady(ctx) != nil {
		return
	}
	tick := time.NewTicker(cleanUpInterval)
	defer tick.Stop()
	lastLogged := ""
	for {
		err := d.node.CleanUpInline(ctx, cleanUpInterval)
		if err == nil || ctx.Err() != nil {
			return
		}
		if err.Error() != lastLogged {
			lastLogged = err.Error()
			klog.FromContext(ctx).Error(err, "Removing orphaned inline volumes failed; retrying", "interval", cleanUpInterval)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
