package export

import (
	"io"
	"net"
	"sync"
	"time"

	"github.com/trivet-csi/trivet/pool"
)

// Job is what a worker process is told.
type Job struct {
	// Pool is the one that it serves.
	Pool pool.Config
	// Static: it serves volumes that have no records, of one server: Pool is no pool
	// then, and never opened.
	Static     bool
	DriverName string
	Version    string
	// LogLevel is the verbosity of its log.
	LogLevel string
	// NodeID is empty where the driver serves no node.
	NodeID   string
	StateDir string
	// Controller: the driver serves the Controller service.
	Controller bool
	// MaxVolumes is how many the node takes.
	MaxVolumes int
	// MountsDir is where private mounts of images stand.
	MountsDir string
	// KubeletDir is empty where no kubelet runs the driver.
	KubeletDir string
	// SilentSince is when the server stopped to answer; zero: it answers.
	SilentSince time.Time
	// SilentFor is how long that had been when the process was started. ReadJob makes
	// SilentSince of it: a clock that is set meanwhile must not end the outage.
	SilentFor time.Duration
}

// Role is that of a worker process (Run).
const Role = "worker"

// ReadJob reads the Job of a worker process, by reexec.Input.Decode.
func ReadJob(decode func(any) error) (job Job, err error) {
	err = decode(&job)
	if !job.SilentSince.IsZero() {
		job.SilentSince = time.Now().Add(-job.SilentFor)
	}
	return job, err
}

// Report is what a worker says about its pool, as JSON in the manifest of its
// GetPluginInfo (ReportKey).
type Report struct {
	// Err is why the pool is not open; empty: it is.
	Err string
	// Version of NFS that was agreed on.
	Version string
	Usage   pool.Usage
	// Volumes counts them by backend.
	Volumes map[string]int
}

// ReportKey is the Report's in the manifest.
const ReportKey = "report"

// listen makes a listener that accepts one connection, and fails with io.EOF when that ends.
func listen(conn net.Conn) net.Listener {
	l := &listener{Conn: conn, fresh: make(chan net.Conn, 1), closed: make(chan struct{})}
	l.fresh <- l
	return l
}

// listener is a connection, and what accepts it once.
type listener struct {
	net.Conn
	fresh  chan net.Conn
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
