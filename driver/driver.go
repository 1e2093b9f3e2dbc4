package driver

import (
	"context"
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
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// defaultDrainTime is how long calls under way may take after the driver was
// told to stop, closeTime how long its pools may after that; Kubernetes kills a
// pod after 30 seconds.
const (
	defaultDrainTime = 20 * time.Second
	closeTime        = 3 * time.Second
)

// Of the gRPC server: bytes of a flow-control window, and goroutines that wait
// for calls; more calls at once get their own.
const (
	windowSize    = 256 << 10
	streamWorkers = 8
)

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
	Name        string
	Version     string
	Services    []string // of "controller" and "node"
	// DrainTime bounds the wait for calls under way at the end; 0: 20 s.
	DrainTime time.Duration
	Config    Config
	// PodUID is that of the pod which runs the driver in Kubernetes.
	PodUID string
	// Backends makes the backends on the pools.
	Backends []func(*pool.Set) backend.Backend
}

func (o Options) validate() error {
	switch {
	case o.NodeID == "":
		return volume.Errorf(volume.ErrInvalid, "--node-id is missing: give the node's name")
	case len(o.NodeID) > maxNodeID:
		return volume.Errorf(volume.ErrInvalid, "--node-id has %d bytes: at most %d are allowed", len(o.NodeID), maxNodeID)
	case len(o.Services) == 0:
		return volume.Errorf(volume.ErrInvalid, "--services is empty: want controller, node or both")
	}
	for _, s := range o.Services {
		if s != "controller" && s != "node" {
			return volume.Errorf(volume.ErrInvalid, "--services %q: want controller, node or both", s)
		}
	}
	return nil
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
	pools   *pool.Set
	metrics *metrics
	server  *grpc.Server
}

// Run serves until ctx ends, and returns when calls under way have ended or
// drainTime is over.
func Run(ctx context.Context, o Options) error {
	d, err := newDriver(o)
	if err != nil {
		return err
	}
	defer d.state.Close()
	socket, err := listen(ctx, o.Endpoint)
	if err != nil {
		return err
	}
	var web net.Listener
	if o.HTTPAddress != "" {
		if web, err = (&net.ListenConfig{}).Listen(ctx, "tcp", o.HTTPAddress); err != nil {
			return errors.Join(fmt.Errorf("--http-address %s: %w", o.HTTPAddress, err), socket.Close())
		}
	}
	return d.serve(ctx, socket, web)
}

func newDriver(o Options) (*Driver, error) {
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
	d.pools = pool.NewSet(o.Config.Pools, state, o.serves("controller"))
	d.metrics = newMetrics(o.Name, o.Version, d.pools)
	d.server = d.newServer()
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

func (d *Driver) newServer() *grpc.Server {
	o := d.options
	var backends []backend.Backend
	for _, make := range o.Backends {
		backends = append(backends, make(d.pools))
	}
	registry := backend.NewRegistry(backends...)
	server := grpc.NewServer(
		grpc.ChainUnaryInterceptor(recoverPanics, d.metrics.intercept, logCalls, newInFlight().intercept, translateErrors),
		// Calls are small and on one machine: a fixed window saves the probes for
		// a better one, and workers that stay save growing a stack for each call.
		grpc.InitialWindowSize(windowSize), grpc.InitialConnWindowSize(windowSize), grpc.NumStreamWorkers(streamWorkers),
	)
	csi.RegisterIdentityServer(server, &identity.Server{
		Name: o.Name, Version: o.Version, Controller: o.serves("controller"),
		Ready: d.pools.Ready, Usable: d.usable,
	})
	controller := controllerserver.New(registry, o.NodeID, d.config.MaxVolumesPerNode)
	node := nodeserver.New(registry, o.NodeID, d.config.MaxVolumesPerNode)
	if o.serves("controller") {
		csi.RegisterControllerServer(server, controller)
	}
	if o.serves("node") {
		csi.RegisterNodeServer(server, node)
		if k := d.config.Kubernetes; k != nil {
			kubelet := kube.Kubelet{Dir: k.KubeletDir}
			controller.Release = func(ctx context.Context, id volume.ID) (bool, error) {
				return node.Release(ctx, id, kubelet.StagingPath(o.Name, id.String()))
			}
		}
	}
	return server
}

// serve returns nil after an orderly end.
func (d *Driver) serve(ctx context.Context, socket, web net.Listener) error {
	log := klog.FromContext(ctx)
	log.Info("Serving", "driver", d.options.Name, "version", d.options.Version, "endpoint", d.options.Endpoint,
		"node", d.options.NodeID, "services", d.options.Services)
	// The pools outlive ctx, for the calls that are drained.
	background, stop := context.WithCancel(context.WithoutCancel(ctx))
	var tasks sync.WaitGroup
	tasks.Go(func() { d.pools.Run(background) })
	if web != nil {
		tasks.Go(func() { d.serveHTTP(background, web) })
	}
	if k := d.config.Kubernetes; k != nil && k.StartupTaint && d.options.serves("node") {
		tasks.Go(func() {
			if d.pools.AwaitReady(background) == nil { // before, no volume could be staged
				kube.RemoveStartupTaint(background, kube.InCluster, d.options.NodeID, d.options.Name)
			}
		})
	}
	failed := make(chan error, 1)
	go func() { failed <- d.server.Serve(socket) }()
	var err error
	select {
	case <-ctx.Done():
		d.drain(log)
	case err = <-failed: // it ended by itself
		err = fmt.Errorf("serving %s: %w", d.options.Endpoint, err)
		d.drain(log)
	}
	stop()
	d.within(closeTime, log, tasks.Wait)
	return err
}

// drain ends the server when the calls under way have ended, or their time is
// over: one that hangs in a system call cannot be ended, and does not keep the
// process from ending.
func (d *Driver) drain(log klog.Logger) {
	atMost := d.options.DrainTime
	if atMost == 0 {
		atMost = defaultDrainTime
	}
	log.Info("Stopping: waiting for calls under way", "atMost", atMost)
	d.within(atMost, log, d.server.GracefulStop)
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

// ready is nil when every pool is open (/readyz).
func (d *Driver) ready() error {
	errs := []error{d.usable()}
	for _, s := range d.pools.States() {
		err := s.Err
		if err == nil {
			err = s.Pool.Check()
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
