package export

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/trivet-csi/trivet/internal/grpcserver"
	"github.com/trivet-csi/trivet/internal/reexec"
	"github.com/trivet-csi/trivet/internal/relay"
)

// process is one run of a worker.
type process struct {
	conn     *grpc.ClientConn
	service  relay.Service // its Controller and Node services
	node     csi.NodeClient
	identity csi.IdentityClient
	// ctx ends when the process can no longer answer calls. The cause of ctx is the error of the
	// calls.
	ctx  context.Context
	fail context.CancelCauseFunc

	kill func()
	// ended is closed when the process and all its threads have ended. exit returns its exit
	// status as an error.
	ended <-chan struct{}
	exit  func() error

	started time.Time
	silent  bool // the server was silent at the start
	killed  bool
}

// launch starts a process for a job.
func launch(ctx context.Context, program string, job Job) (*process, error) {
	if program == "" {
		return nil, errors.New("the driver has no worker program")
	}
	child, err := reexec.Child{Program: program, Role: Role, Label: []string{job.Pool.Name}, Args: job}.Start()
	if err != nil {
		return nil, err
	}
	p := &process{kill: child.Kill, ended: child.Done(), exit: child.Err, started: time.Now(), silent: !job.SilentSince.IsZero()}
	p.ctx, p.fail = context.WithCancelCause(ctx)
	return p, p.connect(child.Conn, job.Pool.Name)
}

// connect creates the clients of the worker of a pool, which all use one connection. After the connection has ended, the
// process cannot be used.
func (p *process) connect(connection net.Conn, pool string) (err error) {
	var dialed atomic.Bool
	p.conn, err = grpc.NewClient("passthrough:///worker", append(grpcserver.TraceClient("pool", func(context.Context) string { return pool }), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"),
		grpc.WithIdleTimeout(0), grpc.WithInitialWindowSize(grpcserver.WindowSize), grpc.WithInitialConnWindowSize(grpcserver.WindowSize),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			if dialed.Swap(true) {
				return nil, errors.New("the connection to the worker process has ended")
			}
			return connection, nil
		}))...)
	if err != nil {
		p.kill()
		return err
	}
	p.conn.Connect()
	p.service, p.node, p.identity = relay.Remote(p.conn), csi.NewNodeClient(p.conn), csi.NewIdentityClient(p.conn)
	return nil
}

// broken reports whether a call failed because the connection broke. It waits for a moment, because the state
// of the client changes shortly after the call.
func (p *process) broken(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	return p.conn.WaitForStateChange(ctx, connectivity.Ready)
}

// report requests the report of the process.
func (p *process) report(ctx context.Context) (Report, error) {
	var r Report
	resp, err := p.identity.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	if err != nil {
		return r, err
	}
	return r, json.Unmarshal([]byte(resp.GetManifest()[ReportKey]), &r)
}

// stop closes the connection, which makes the process end. It kills the process after the timeout.
func (p *process) stop(timeout time.Duration) {
	p.conn.Close()
	select {
	case <-p.ended:
	case <-time.After(timeout):
		p.kill()
	}
}
