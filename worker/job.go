package worker

import (
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/trivet-csi/trivet/pool"
)

// Job is what a worker process is told, as JSON on its standard input.
type Job struct {
	// Pool is the one that it serves.
	Pool pool.Config
	// Static: it serves volumes that have no records, of one server: Pool is no pool
	// then, and never opened.
	Static     bool
	DriverName string
	Version    string
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

// ReadJob is the worker's side of a Job.
func ReadJob(r io.Reader) (job Job, err error) {
	err = json.NewDecoder(r).Decode(&job)
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

// supervisor is the worker's descriptor of the socket pair: the first after the
// standard ones.
const supervisor = 3

// Listen is the worker's side of the connection to the driver. The listener accepts
// it, and fails with io.EOF when it is gone.
func Listen() (net.Listener, error) {
	file := os.NewFile(supervisor, "supervisor")
	defer file.Close()
	conn, err := net.FileConn(file)
	if err != nil {
		return nil, errors.New("descriptor 3 is no socket: only the driver starts workers")
	}
	l := &listener{Conn: conn, fresh: make(chan net.Conn, 1), closed: make(chan struct{})}
	l.fresh <- l
	return l, nil
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

// socketPair is the driver's side, and the file that the worker inherits.
func socketPair() (ours net.Conn, theirs *os.File, err error) {
	fds, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	file := os.NewFile(uintptr(fds[0]), "worker")
	defer file.Close()
	theirs = os.NewFile(uintptr(fds[1]), "supervisor")
	if ours, err = net.FileConn(file); err != nil {
		theirs.Close()
		return nil, nil, err
	}
	return ours, theirs, nil
}
