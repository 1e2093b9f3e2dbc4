package main

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/trivet-csi/trivet/test/measure"
)

const nodeID = "bench"

// ground is where the servers are measured.
type ground struct {
	*measure.Ground
	fsType string // xfs, ext4 or btrfs; empty for an export
	served string // the path of the export on the server; empty: no NFS
}

// server is a process that is measured.
type server struct {
	*measure.Process
	socket string
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
func (g *ground) launch(name, program string, args func(socket string) []string) *server {
	socket := g.Socket(name)
	return &server{Process: g.Launch(name, program, args(socket)...), socket: socket}
}

// folder creates a directory on the filesystem or the export.
func (g *ground) folder(name string) string {
	path := filepath.Join(g.Disk, name)
	measure.Must(os.MkdirAll(path, 0o755))
	return path
}

// kubelet creates a directory for the mounts of a server's volumes.
func (g *ground) kubelet(name string) string {
	path := filepath.Join(g.Disk, "kubelet", name)
	if g.served != "" {
		path = filepath.Join(g.Dir, "kubelet", name)
	}
	measure.Must(os.MkdirAll(path, 0o755))
	return path
}

// launchTrivet starts the driver with one pool on the ground. State and pool have the same
// name, so that a second start finds them.
func (g *ground) launchTrivet(binary, name string, flags ...string) *server {
	return g.launchTrivetWith(binary, name, g.poolConfig(name), flags...)
}

// launchTrivetWith is launchTrivet for a pool with a configuration.
func (g *ground) launchTrivetWith(binary, name, pool string, flags ...string) *server {
	config := filepath.Join(g.Dir, name+".yaml")
	text := fmt.Sprintf("pools:\n- name: %s\n  %s\n", poolName, pool)
	measure.Must(os.WriteFile(config, []byte(text), 0o600))
	return g.launch(name, binary, func(socket string) []string {
		return append([]string{
			"driver", "--endpoint", "unix://" + socket, "--node-id", nodeID, "--config", config,
			"--state-dir", g.state(name), "--http-address", "",
		}, flags...)
	})
}

const poolName = "bench"

func (g *ground) state(name string) string { return filepath.Join(g.Dir, name+"-state") }

// poolPath is the path of a pool; with NFS, the path on the server.
func (g *ground) poolPath(name string) string {
	return filepath.Join(cmp.Or(g.served, g.Disk), name+"-pool")
}

// poolConfig is the configuration of a pool without its name. The sizes of 10,000 sparse images
// exceed the disk.
func (g *ground) poolConfig(name string) string {
	medium := fmt.Sprintf("directory: {path: %s}", g.poolPath(name))
	if g.served != "" {
		medium = fmt.Sprintf("nfs: {server: %s, export: /%s, init: true}", nfsServer, filepath.Base(g.poolPath(name)))
	}
	return medium + "\n  overcommit: 100"
}

// trash is the path of the driver's trash.
func (g *ground) trash(name string) string { return filepath.Join(g.poolPath(name), ".trivet/trash") }

// launchFloor starts a floor; flags choose its kind.
func (g *ground) launchFloor(name string, flags ...string) *server {
	dir := g.folder(name)
	return g.launch(name, "/proc/self/exe", func(socket string) []string {
		return append([]string{argFloor, "--socket", socket, "--dir", dir}, flags...)
	})
}

// patience is the maximum time until a server is ready.
const patience = 30 * time.Second

// poll is short compared with the measured times.
const poll = 500 * time.Microsecond

// awaitSocket waits until the server listens.
func (s *server) awaitSocket(ctx context.Context) {
	measure.Must(s.Await(ctx, s.socket, poll, patience, func() bool {
		conn, err := (&net.Dialer{}).DialContext(ctx, "unix", s.socket)
		return err == nil && conn.Close() == nil
	}))
}

// connect creates n connections when the server is ready.
func (s *server) connect(ctx context.Context, n int) []*client {
	s.awaitSocket(ctx)
	clients := make([]*client, n)
	for i := range clients {
		conn := measure.Get(grpc.NewClient("unix://"+s.socket, grpc.WithTransportCredentials(insecure.NewCredentials())))
		s.conns = append(s.conns, conn)
		c := &client{csi.NewIdentityClient(conn), csi.NewControllerClient(conn), csi.NewNodeClient(conn), csi.NewSnapshotMetadataClient(conn)}
		measure.Must(s.Await(ctx, s.Name, poll, patience, func() bool {
			probe, err := c.Probe(ctx, &csi.ProbeRequest{})
			return err == nil && probe.GetReady().GetValue()
		}))
		clients[i] = c
	}
	return clients
}

// stop ends the process and waits for its end.
func (s *server) stop() {
	for _, conn := range s.conns {
		measure.Must(conn.Close())
	}
	measure.Must(s.Stop())
}
