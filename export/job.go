package export

import (
	"io"
	"net"
	"sync"
	"time"

	"github.com/trivet-csi/trivet/internal/logging"
	"github.com/trivet-csi/trivet/pool"
)

// Job is the configuration of a worker process.
type Job struct {
	// Pool is the pool that the process serves.
	Pool pool.Config
	// Static is true if the process serves the static volumes of one server, which have no
	// records. Pool then contains only the server and is never opened.
	Static     bool
	DriverName string
	Version    string
	Log        logging.Options
	// NodeID is empty if the driver does not serve the Node service.
	NodeID   string
	StateDir string
	// Controller is true if the driver serves the Controller service.
	Controller bool
	// MaxVolumes is the maximum number of volumes on the node.
	MaxVolumes int
	// MountsDir is the directory of private mounts of images.
	MountsDir string
	// KubeletDir is empty outside Kubernetes.
	KubeletDir string
	// SilentSince is the time since which the server does not answer. It is zero if the server answers.
	SilentSince time.Time
	// SilentFor is how long the server has not answered when the process is started. ReadJob
	// computes SilentSince from SilentFor, so that a change of the clock does not end the outage.
	SilentFor time.Duration
}

// Role is the reexec role of a worker process (Run).
const Role = "worker"

// ReadJob reads the Job of a worker process. decode is reexec.Input.Decode.
func ReadJob(decode func(any) error) (job Job, err error) {
	err = decode(&job)
	if !job.SilentSince.IsZero() {
		job.SilentSince = time.Now().Add(-job.SilentFor)
	}
	return job, err
}

// Report is the state of a worker's pool. It is JSON in the manifest of the worker's GetPluginInfo
// (ReportKey).
type Report struct {
	// Err is the reason why the pool is not open. It is empty if the pool is open.
	Err string
	// Version is the negotiated version of NFS.
	Version string
	Usage   pool.Usage
	// Volumes is the number of volumes by backend.
	Volumes map[string]int
}

// ReportKey is the key of the Report in the manifest.
const ReportKey = "report"

// listen returns a listener whose first Accept returns conn. Later calls of Accept wait until the
// listener is closed, and return io.EOF.
func listen(conn net.Conn) net.Listener {
	l := &listener{Conn: conn, fresh: make(chan net.Conn, 1), closed: make(chan struct{})}
	l.fresh <- l
	return l
}

// listener is both a connection and the listener that accepts the connection once.
type listener struct {
	net.Conn
	fresh  chan net.Conn // contains the connection until it is accepted
	closed chan struct{}
	once   sync.Once
}

func (l *listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.fresh:
		return c, nil
	case <-l.closed:
		return nil, io.EOF
	}
}

func (l *listener) Close() error {
	err := l.Conn.Close()
	l.once.Do(func() { close(l.closed) })
	return err
}

func (l *listener) Addr() net.Addr { return l.LocalAddr() }
