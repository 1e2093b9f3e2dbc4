package backendtest

import (
	"bytes"
	"context"
	"flag"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/volume"
)

// Node is the name of the node on which the drivers of the tests run.
const Node = "node-1.example"

// Driver is a driver that runs in this process and listens on a socket.
type Driver struct {
	Options  driver.Options
	Identity csi.IdentityClient
	Control  controllerserver.Clients
	Node     csi.NodeClient

	// poolDir is the directory with the content of the driver's pool. If it is empty, that is the
	// directory of the configuration.
	poolDir string

	cancel context.CancelFunc
	done   chan error
	conn   *grpc.ClientConn
}

// Start starts a driver with one pool in dir and waits until it is ready. It is
// stopped when the test ends.
func Start(tb testing.TB, dir string, kinds ...backend.Kind) *Driver {
	tb.Helper()
	o := memberOptions(tb, "controller", kinds)
	o.NodeID, o.Services = Node, []string{"controller", "node"}
	o.Config.Pools = poolAt(filepath.Join(dir, "pool"))
	return StartWith(tb, o)
}

// StartWith starts a driver with the given options.
func StartWith(tb testing.TB, o driver.Options) *Driver {
	tb.Helper()
	captureLog()
	d := &Driver{Options: o}
	d.start(tb)
	tb.Cleanup(func() { d.Stop(tb) })
	return d
}

// Pool is the directory with the content of the driver's first pool.
func (d *Driver) Pool() string {
	if d.poolDir != "" {
		return d.poolDir
	}
	return d.Options.Config.Pools[0].Directory.Path
}

// privateMounts is the folder for the mounts of images on exports.
func (d *Driver) privateMounts() string { return filepath.Join(d.Options.StateDir, "nfs") + "/" }

// start runs the driver, connects to its socket, and waits until the driver is ready.
func (d *Driver) start(tb testing.TB) {
	tb.Helper()
	// tb.Context ends before the cleanups of the test, which need the driver.
	ctx, cancel := context.WithCancel(context.WithoutCancel(tb.Context()))
	d.cancel, d.done = cancel, make(chan error, 1)
	go func() { d.done <- driver.Run(ctx, d.Options) }()
	// The first attempt may precede the creation of the socket.
	quick := grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: time.Millisecond, Multiplier: 2, MaxDelay: 100 * time.Millisecond}, MinConnectTimeout: time.Second}
	conn, err := grpc.NewClient(d.Options.Endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"), grpc.WithConnectParams(quick), grpc.WithUnaryInterceptor(AddPassphrase))
	if err != nil {
		tb.Fatal(err)
	}
	d.conn = conn
	d.Identity, d.Control, d.Node = csi.NewIdentityClient(conn), controllerserver.NewClients(conn), csi.NewNodeClient(conn)
	d.awaitReady(tb)
}

// passphrase is the passphrase of encrypted volumes.
const passphrase = "correct horse battery staple"

// AddPassphrase is a grpc.UnaryClientInterceptor that adds the passphrase to requests of a kubelet that have no secrets.
func AddPassphrase(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	secrets := map[string]string{volume.SecretPassphrase: passphrase}
	switch r := req.(type) {
	case *csi.NodeStageVolumeRequest:
		if r.GetSecrets() == nil {
			r.Secrets = secrets
		}
	case *csi.NodeExpandVolumeRequest:
		if r.GetSecrets() == nil {
			r.Secrets = secrets
		}
	}
	return invoke(ctx, method, req, reply, conn, opts...)
}

// awaitReady waits until Probe returns ready. It fails the test if the driver ends first.
func (d *Driver) awaitReady(tb testing.TB) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), 2*time.Minute)
	defer cancel()
	for {
		resp, err := d.Identity.Probe(ctx, &csi.ProbeRequest{}, grpc.WaitForReady(true))
		if err == nil && resp.GetReady().GetValue() {
			return
		}
		select {
		case err := <-d.done:
			tb.Fatalf("the driver ended: %v", err)
		case <-ctx.Done():
			tb.Fatalf("timed out waiting until the driver is ready: %v", err)
		case <-time.After(time.Millisecond):
		}
	}
}

// Stop stops the driver and waits for its end.
func (d *Driver) Stop(tb testing.TB) {
	tb.Helper()
	if d.cancel == nil {
		return
	}
	d.cancel()
	if err := <-d.done; err != nil {
		tb.Errorf("the driver ended with an error: %v", err)
	}
	_ = d.conn.Close()
	d.cancel = nil
}

// Restart stops the driver and starts it again on the same state.
func (d *Driver) Restart(tb testing.TB) {
	tb.Helper()
	d.Stop(tb)
	d.start(tb)
}

// logBuffer contains the log of all drivers in this process, at the highest verbosity.
var logBuffer struct {
	once sync.Once
	mu   sync.Mutex
	buf  bytes.Buffer
}

// lockedLog appends to logBuffer.
type lockedLog struct{}

func (lockedLog) Write(b []byte) (int, error) {
	logBuffer.mu.Lock()
	defer logBuffer.mu.Unlock()
	return logBuffer.buf.Write(b)
}

// captureLog makes klog write to logBuffer.
func captureLog() {
	logBuffer.once.Do(func() {
		flags := flag.NewFlagSet("klog", flag.PanicOnError)
		klog.InitFlags(flags)
		_ = flags.Set("v", "10")
		_ = flags.Set("logtostderr", "false")
		_ = flags.Set("stderrthreshold", "FATAL")
		klog.SetOutput(lockedLog{})
	})
}

// Log returns the log so far.
func Log() string {
	klog.Flush()
	logBuffer.mu.Lock()
	defer logBuffer.mu.Unlock()
	return logBuffer.buf.String()
}
