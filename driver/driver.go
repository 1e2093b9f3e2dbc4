package driver

import (
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
	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/identity"
	"github.com/trivet-csi/trivet/kube"
	"github.com/trivet-csi/trivet/nodeserver"
	"github.com/trivet-csi/trivet/pki"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/router"
	"github.com/trivet-csi/trivet/volume"
	"github.com/trivet-csi/trivet/worker"
)

// defaultDrainTime is how long calls under way may take after the driver was
// told to stop, closeTime how long its pools may after that; Kubernetes kills a
// pod after 30 seconds.
const (
	defaultDrainTime = 20 * time.Second
	closeTime        = 5 * time.Second
)

// Of the gRPC server: bytes of a flow-control window, and goroutines that wait
// for calls; more calls at once get their own.
const (
	windowSize    = 256 << 10
	streamWorkers = 8
)

// nodesPatience is how long a controller's driver is not ready because nobody has told
// it which nodes there are: restarting it would not bring the API server back.
const nodesPatience = 30 * time.Second

// maxNodeID is the longest node ID in bytes (CSI specification, NodeGetInfo).
const maxNodeID = 256

// DefaultName is the driver's name where nobody gives it another.
const DefaultName = "csi.trivet.dev"

// Options are what the command line says.
type Options struct {
	Endpoint    string
	NodeID      string
	StateDir    string
	HTTPAddress string // empty: no HTTP
	// Registry is the directory of plugin sockets where the driver registers itself;
	// empty: node-driver-registrar does that.
	Registry string
	Name     string
	Version  string
	Services []string // of "controller" and "node"
	// DrainTime bounds the wait for calls under way at the end; 0: 20 s.
	DrainTime time.Duration
	Config    Config
	// PodUID and Namespace are those of the pod which runs the driver in Kubernetes.
	PodUID, Namespace string
	// Worker is the command that runs the worker process of an nfs pool: this program,
	// `worker`, and flags. Without it such pools are unavailable.
	Worker []string
	// Backends makes the backends on the pools.
	Backends []func(*pool.Set) backend.Backend
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
		return volume.Errorf(volume.ErrInvalid, "--services is empty: want controller, node or both")
	}
	for _, s := range o.Services {
		if s != "controller" && s != "node" {
			return volume.Errorf(volume.ErrInvalid, "--services %q: want controller, node or both", s)
		}
	}
	if k := o.Config.Kubernetes; k != nil && k.needsNamespace() && o.Namespace == "" {
		return volume.Errorf(volume.ErrPrecondition, "kubernetes: the environment has no POD_NAMESPACE: give it to the container by the downward API (metadata.namespace)")
	}
	return o.checkForwarding()
}

// checkKubelet refuses to serve where volumes that are mounted would reach no pod.
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

// Driver is the running process.
type Driver struct {
	options Options
	config  Config
	state   *os.Root
	// pools are those on this node, workers serve those on servers.
	pools    *pool.Set
	backends *backend.Registry
	workers  *worker.Pools
	metrics  *metrics
	server   *grpc.Server
	// forwarded serves the controller's driver; nil: there is none.
	forwarded    *grpc.Server
	certificates *pki.Directory
	// router and owners are nil where nothing is forwarded.
	router *router.Server
	owners router.Owners
	// node is nil where the Node service is not served.
	node *nodeserver.Server
}

// Run serves until ctx ends, and returns when calls under way have ended or
// drainTime is over.
func Run(ctx context.Context, o Options) error {
	// What serves outlives ctx, for the calls that are drained.
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

func newDriver(background context.Context, o Options) (*Driver, error) {
	if err := o.validate(); err != nil {
		return nil, err
	}
	if err := o.checkKubelet(); err != nil {
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
	d.pools = pool.NewSet(o.Config.Pools, state)
	d.workers = worker.New(background, o.workers())
	d.metrics = newMetrics(o.Name, o.Version, o.Services, d.pools)
	d.metrics.registry.MustRegister(workerCollector{d.workers})
	if o.forwards() {
		if d.owners, err = d.poolOwners(); err != nil {
			return nil, err
		}
	}
	d.makeServers(background)
	return d, nil
}

func openState(o Options) (*os.Root, error) {
	// The default pool is made in `pools` below.
	if err := os.MkdirAll(filepath.Join(o.StateDir, "pools"), 0o700); err != nil {
		return nil, fmt.Errorf("--state-dir %s: %w: give the driver a directory that it can write", o.StateDir, err)
	}
	state, err := os.OpenRoot(o.StateDir)
	if err == nil {
		err = checkWritable(state)
	}
	if err != nil {
		return nil, fmt.Errorf("--state-dir %s: %w: give the driver a directory that it can write", o.StateDir, err)
	}
	return state, nil
}

// checkWritable opens a file of the state directory for writing, which a
// read-only or vanished filesystem refuses.
func checkWritable(state *os.Root) error {
	f, err := state.OpenFile("usable", os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	return f.Close()
}

// makeServers makes what serves each of the services, and who may call it.
func (d *Driver) makeServers(background context.Context) {
	o := d.options
	var backends []backend.Backend
	for _, make := range o.Backends {
		backends = append(backends, make(d.pools))
	}
	d.backends = backend.NewRegistry(backends...)
	calls := around(recoverPanics, d.metrics.intercept, logCalls, newInFlight().intercept, translateErrors)
	// Calls are small and on one machine: a fixed window saves the probes for a
	// better one, and workers that stay save growing a stack for each call.
	calls = append(calls, grpc.ChainUnaryInterceptor(awaitPool))
	d.server = grpc.NewServer(append(calls, grpc.InitialWindowSize(windowSize), grpc.InitialConnWindowSize(windowSize), grpc.NumStreamWorkers(streamWorkers))...)
	who := &identity.Server{Name: o.Name, Version: o.Version, Ready: d.pools.Ready, Usable: d.usable, Pools: d.pools.UUIDs}
	controller := controllerserver.New(d.backends, o.NodeID, d.config.MaxVolumesPerNode)
	relay := &worker.Controller{Pools: d.workers, Local: controller}
	switch {
	case o.forwards():
		controller.Nodes = func(string) bool { return true } // the router knows better
		d.router = router.New(background, router.Options{
			Shared: relay, SharedPools: names(o.sharedPools()), Backends: d.backends.Names(), Owners: d.owners,
			Client: func(node string) *tls.Config { return d.certificates.Client(pki.NodeURI(o.Name, node)) },
		})
		started := time.Now()
		who.Ready = func() bool { return d.router.Ready() || time.Since(started) > nodesPatience }
		d.metrics.registry.MustRegister(nodeCollector{d.router})
		register(d.server, d.router)
	case o.isForwardedTo():
		d.forwarded = grpc.NewServer(append(d.forwardedOptions(), calls...)...)
		register(d.forwarded, &member{Services: controller, relay: relay})
		csi.RegisterIdentityServer(d.forwarded, who)
	default:
		register(d.server, relay)
	}
	csi.RegisterIdentityServer(d.server, who)
	if o.serves("node") {
		d.serveNode(controller)
	}
}

// register has a server serve all that a controller does.
func register(server *grpc.Server, s controllerserver.Services) {
	csi.RegisterControllerServer(server, s)
	csi.RegisterGroupControllerServer(server, s)
	csi.RegisterSnapshotMetadataServer(server, s)
}

func (d *Driver) serveNode(controller *controllerserver.Server) {
	// A volume without a record is on a server, and a worker's.
	node := nodeserver.New(d.backends.Recorded(), d.options.NodeID, d.config.MaxVolumesPerNode)
	node.InlineMemory = d.config.inlineMemory()
	d.node = node
	csi.RegisterNodeServer(d.server, &worker.Node{Pools: d.workers, Local: node})
	if k := d.config.Kubernetes; k != nil {
		kubelet := kube.Kubelet{Dir: k.KubeletDir}
		controller.Release = func(ctx context.Context, id volume.ID) (bool, error) {
			return node.Release(ctx, id, kubelet.StagingPath(d.options.Name, id.String()))
		}
	}
}

// serve returns nil after an orderly end. stop ends background.
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
	go func() { failed <- named(d.options.Endpoint, d.server.Serve(p.socket)) }()
	if d.forwarded != nil {
		go func() { failed <- named(d.config.Forwarding.Listen, d.forwarded.Serve(p.forwarding)) }()
	}
	var err error
	select {
	case <-ctx.Done():
	case err = <-failed: // it ended by itself
	}
	d.drain(log)
	stop()
	d.within(closeTime, log, tasks.Wait)
	return err
}

func named(port string, err error) error { return fmt.Errorf("serving %s: %w", port, err) }

// startTasks starts all that goes on beside the calls, until ctx ends.
func (d *Driver) startTasks(ctx context.Context, tasks *sync.WaitGroup, web net.Listener) {
	pools, closePools := context.WithCancel(context.WithoutCancel(ctx))
	tasks.Go(func() { d.pools.Run(pools) })
	tasks.Go(func() {
		defer closePools() // not while they are used
		thaw(ctx, d.pools, d.backends)
		if d.node != nil {
			d.settleInline(ctx)
		}
		<-ctx.Done()
	})
	tasks.Go(func() { <-ctx.Done(); d.workers.Wait() })
	if d.options.serves("controller") { // what was left half removed is removed
		d.workers.Start()
	}
	if web != nil {
		tasks.Go(func() { d.serveHTTP(ctx, web) })
	}
	if d.router != nil {
		tasks.Go(func() { d.followHosts(ctx) })
		if owners, ok := d.owners.(*kube.PoolOwners); ok {
			tasks.Go(func() { owners.Run(ctx, kube.InCluster) })
		}
		tasks.Go(func() { <-ctx.Done(); d.router.Wait() })
	}
	k := d.config.Kubernetes
	if k == nil {
		return
	}
	if k.Authority != "" {
		tasks.Go(func() { d.keepCertificates(ctx) })
	}
	if k.StartupTaint && d.options.serves("node") {
		tasks.Go(func() {
			if d.pools.AwaitReady(ctx) == nil { // before, no volume could be staged
				kube.RemoveStartupTaint(ctx, kube.InCluster, d.options.NodeID, d.options.Name)
			}
		})
	}
}

// drain ends the servers when the calls under way have ended, or their time is
// over: one that hangs in a system call cannot be ended, and does not keep the
// process from ending.
func (d *Driver) drain(log klog.Logger) {
	atMost := d.options.DrainTime
	if atMost == 0 {
		atMost = defaultDrainTime
	}
	log.Info("Stopping: waiting for calls under way", "atMost", atMost)
	d.within(atMost, log, func() {
		var servers sync.WaitGroup
		servers.Go(d.server.GracefulStop)
		if d.forwarded != nil {
			servers.Go(d.forwarded.GracefulStop)
		}
		servers.Wait()
	})
}

// within waits for a step of the end, at most for a time.
func (d *Driver) within(atMost time.Duration, log klog.Logger, step func()) {
	done := make(chan struct{})
	go func() { step(); close(done) }()
	select {
	case <-done:
	case <-time.After(atMost):
		log.Info("Stopping without waiting any longer", "waited", atMost)
	}
}

// usable is nil, or says why no call can work (Probe, /healthz).
func (d *Driver) usable() error {
	if err := checkWritable(d.state); err != nil {
		return volume.Errorf(volume.ErrPrecondition, "the state directory %s cannot be written: %w: check its disk", d.options.StateDir, err)
	}
	return nil
}

// ready is nil when every pool is open, and what is forwarded can be (/readyz).
func (d *Driver) ready() error {
	errs := []error{d.usable()}
	if d.config.Forwarding != nil {
		errs = append(errs, d.certificates.UsableAs(d.options.identity()))
	}
	if d.router != nil && !d.router.Ready() {
		errs = append(errs, errors.New("it is not known yet which nodes there are"))
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
