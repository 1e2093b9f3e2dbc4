package worker

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"os"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/internal/command"
)

// process is one run of a worker.
type process struct {
	conn       *grpc.ClientConn
	controller controllerserver.Clients
	node       csi.NodeClient
	identity   csi.IdentityClient
	// ctx ends when the process answers no calls any more; its cause is the reason.
	ctx  context.Context
	fail context.CancelCauseFunc

	kill func()
	// ended is closed when the process and all its threads are gone; exit is how.
	ended <-chan struct{}
	exit  func() error

	started time.Time
	silent  bool // it was started while the server was silent
	killed  bool
}

// launch starts a process for a job.
func launch(ctx context.Context, words []string, job Job) (*process, error) {
	if len(words) == 0 {
		return nil, errors.New("no command is given for it")
	}
	input, err := json.Marshal(job)
	if err != nil {
		return nil, err
	}
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	run := command.Command{Name: words[0], Args: append(words[1:len(words):len(words)], job.Pool.Name), Hold: []*os.File{theirs}}
	child, err := run.Start(input)
	if err != nil {
		ours.Close() //nolint:errcheck // nothing was sent
		return nil, err
	}
	p := &process{kill: child.Kill, ended: child.Done(), exit: child.Err, started: time.Now(), silent: !job.SilentSince.IsZero()}
	p.ctx, p.fail = context.WithCancelCause(ctx)
	return p, p.connect(ours)
}

// connect makes the clients. There is one connection: when it breaks, the process is
// of no use.
func (p *process) connect(ours net.Conn) (err error) {
	var dialed atomic.Bool
	p.conn, err = grpc.NewClient("passthrough:///worker", grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"),
		grpc.WithIdleTimeout(0), grpc.WithInitialWindowSize(windowSize), grpc.WithInitialConnWindowSize(windowSize),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			if dialed.Swap(true) {
				return nil, errors.New("the connection to the worker is gone")
			}
			return ours, nil
		}))
	if err != nil {
		p.kill()
		return err
	}
	p.conn.Connect()
	p.controller, p.node, p.identity = controllerserver.NewClients(p.conn), csi.NewNodeClient(p.conn), csi.NewIdentityClient(p.conn)
	return nil
}

// windowSize is that of the driver's own server: calls are small.
const windowSize = 256 << 10

// broken tells whether a call that failed was not answered by the process: its
// connection is told so in a moment.
func (p *process) broken(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	return p.conn.WaitForStateChange(ctx, connectivity.Ready)
}

// report asks the process about its pool.
func (p *process) report(ctx context.Context) (Report, error) {
	var r Report
	resp, err := p.identity.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	if err != nil {
		return r, err
	}
	return r, json.Unmarshal([]byte(resp.GetManifest()[ReportKey]), &r)
}

// stop lets the process end by itself, and kills it if it takes too long.
func (p *process) stop(atMost time.Duration) {
	p.conn.Close()
	select {
	case <-p.ended:
	case <-time.After(atMost):
		p.kill()
	}
}
