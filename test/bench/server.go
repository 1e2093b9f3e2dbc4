package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

const nodeID = "bench"

// server is a process that is measured.
type server struct {
	name   string
	socket string
	log    string
	cmd    *exec.Cmd
	ended  chan struct{} // closed when the process is gone
	err    error         // how it ended; read it after ended
	conns  []*grpc.ClientConn
}

// client is one caller's connection.
type client struct {
	csi.IdentityClient
	csi.ControllerClient
	csi.NodeClient
	csi.SnapshotMetadataClient
}

// launch starts a server that listens on its own socket. args returns the arguments for the
// socket's path.
func (g *ground) launch(name, program string, args func(socket string) []string) (*server, error) {
	at := filepath.Join(g.base, fmt.Sprintf("%02d-%s", len(g.servers), name))
	s := &server{name: name, socket: at + ".sock", log: at + ".log", ended: make(chan struct{})}
	log, err := os.Create(s.log)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	// Not CommandContext: servers are stopped in order, after their clients, and not by a
	// Ctrl-C of the terminal.
	s.cmd = exec.Command(program, args(s.socket)...)
	s.cmd.Stdout, s.cmd.Stderr = log, log
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	g.servers = append(g.servers, s)
	go func() {
		s.err = s.cmd.Wait()
		close(s.ended)
	}()
	return s, nil
}

// launchTrivet starts the driver with one pool on the ground. State and pool have the same
// name, so that a second start finds them.
func (g *ground) launchTrivet(binary, name string, flags ...string) (*server, error) {
	config := filepath.Join(g.base, name+".yaml")
	// The sizes of 10,000 sparse images exceed the disk.
	text := fmt.Sprintf("pools:\n- name: %s\n  %s\n  overcommit: 100\n", poolName, g.poolKind(name))
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return nil, err
	}
	return g.launch(name, binary, func(socket string) []string {
		return append([]string{
			"driver", "--endpoint", "unix://" + socket, "--node-id", nodeID, "--config", config,
			"--state-dir", filepath.Join(g.base, name+"-state"), "--http-address", "",
		}, flags...)
	})
}

const poolName = "bench"

// poolPath is the path of a pool; with NFS, the path on the server.
func (g *ground) poolPath(name string) string {
	return filepath.Join(cmp.Or(g.served, g.disk), name+"-pool")
}

func (g *ground) poolKind(name string) string {
	if g.served == "" {
		return fmt.Sprintf("directory: {path: %s}", g.poolPath(name))
	}
	return fmt.Sprintf("nfs: {server: %s, export: /%s, init: true}", nfsServer, filepath.Base(g.poolPath(name)))
}

// trash is the path of the driver's trash.
func (g *ground) trash(name string) string { return filepath.Join(g.poolPath(name), ".trivet/trash") }

// launchFloor starts a floor; flags choose its kind.
func (g *ground) launchFloor(name string, flags ...string) (*server, error) {
	dir, err := g.folder(name)
	if err != nil {
		return nil, err
	}
	return g.launch(name, "/proc/self/exe", func(socket string) []string {
		return append([]string{argFloor, "--socket", socket, "--dir", dir}, flags...)
	})
}

// connect creates n connections when the server is ready.
func (s *server) connect(ctx context.Context, n int) ([]*client, error) {
	if err := s.awaitSocket(ctx); err != nil {
		return nil, err
	}
	clients := make([]*client, n)
	for i := range clients {
		conn, err := grpc.NewClient("unix://"+s.socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			return nil, err
		}
		s.conns = append(s.conns, conn)
		clients[i] = &client{csi.NewIdentityClient(conn), csi.NewControllerClient(conn), csi.NewNodeClient(conn), csi.NewSnapshotMetadataClient(conn)}
		if err := s.awaitReady(ctx, clients[i]); err != nil {
			return nil, err
		}
	}
	return clients, nil
}

// patience is the maximum time until a server is ready, and until it has ended.
const patience = 30 * time.Second

// poll is short compared with the measured times.
const poll = 500 * time.Microsecond

func (s *server) awaitSocket(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		conn, err := (&net.Dialer{}).DialContext(ctx, "unix", s.socket)
		if err == nil {
			return conn.Close()
		}
		if err := s.pause(ctx); err != nil {
			return err
		}
	}
}

func (s *server) awaitReady(ctx context.Context, c *client) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		probe, err := c.Probe(ctx, &csi.ProbeRequest{})
		if err == nil && probe.GetReady().GetValue() {
			return nil
		}
		if err := errors.Join(err, s.pause(ctx)); err != nil {
			return fmt.Errorf("waiting for %s: %w", s.name, err)
		}
	}
}

func (s *server) pause(ctx context.Context) error {
	select {
	case <-s.ended:
		return fmt.Errorf("%s ended: %w\n%s", s.name, s.err, s.tail())
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(poll):
		return nil
	}
}

// stop ends the process and waits for its end.
func (s *server) stop() error {
	var errs []error
	for _, conn := range s.conns {
		errs = append(errs, conn.Close())
	}
	s.conns = nil
	select {
	case <-s.ended: // before, and what used it knows
		return errors.Join(errs...)
	default:
	}
	errs = append(errs, s.cmd.Process.Signal(syscall.SIGTERM))
	select {
	case <-s.ended:
	case <-time.After(patience):
		errs = append(errs, fmt.Errorf("%s did not stop when told to", s.name), s.cmd.Process.Kill())
		<-s.ended
	}
	if s.err != nil && !s.terminated() {
		errs = append(errs, fmt.Errorf("%s: %w\n%s", s.name, s.err, s.tail()))
	}
	return errors.Join(errs...)
}

// terminated reports whether SIGTERM ended the process before it handled the signal.
func (s *server) terminated() bool {
	status, ok := s.cmd.ProcessState.Sys().(syscall.WaitStatus)
	return ok && status.Signaled() && status.Signal() == syscall.SIGTERM
}

// tail is the end of the server's log.
func (s *server) tail() string {
	b, _ := os.ReadFile(s.log) // without it the error still says enough
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return strings.Join(lines[max(0, len(lines)-5):], "\n")
}
