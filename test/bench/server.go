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

// testbed is the filesystem or the export on which the servers are measured.
type testbed struct {
	*measure.Testbed
	fsType string // xfs, ext4 or btrfs; empty for an export
	served string // the path of the export on the NFS server; empty for a filesystem
}

// server is a gRPC server that is measured: the driver, a floor, a mounter or the volume manager.
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

// launch starts a server that listens on a new socket. args returns its arguments for the
// socket's path.
func (g *testbed) launch(name, program string, args func(socket string) []string) *server {
	socket := g.Socket(name)
	return &server{Process: g.Launch(name, program, args(socket)...), socket: socket}
}

// directory creates a directory on the filesystem or the export.
func (g *testbed) directory(name string) string {
	path := filepath.Join(g.Disk, name)
	measure.Must(os.MkdirAll(path, 0o755))
	return path
}

// kubelet creates the directory below which a server's volumes are staged and published. It is not
// on an export.
func (g *testbed) kubelet(name string) string {
	path := filepath.Join(g.Disk, "kubelet", name)
	if g.served != "" {
		path = filepath.Join(g.Dir, "kubelet", name)
	}
	measure.Must(os.MkdirAll(path, 0o755))
	return path
}

// launchTrivet starts the driver with one pool on the filesystem or the export. A second start with
// the same name finds the state and the pool of the first one.
func (g *testbed) launchTrivet(binary, name string, flags ...string) *server {
	return g.launchTrivetWith(binary, name, g.poolConfig(name), flags...)
}

// launchTrivetWith starts the driver with the given configuration of its pool.
func (g *testbed) launchTrivetWith(binary, name, pool string, flags ...string) *server {
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

func (g *testbed) state(name string) string { return filepath.Join(g.Dir, name+"-state") }

// poolPath returns the path of a pool. For a pool on an export, it is the path on the NFS server.
func (g *testbed) poolPath(name string) string {
	return filepath.Join(cmp.Or(g.served, g.Disk), name+"-pool")
}

// poolConfig returns the configuration of a pool without its name. It needs overcommit because the
// sum of the sizes of 10,000 sparse images exceeds the disk.
func (g *testbed) poolConfig(name string) string {
	medium := fmt.Sprintf("directory: {path: %s}", g.poolPath(name))
	if g.served != "" {
		medium = fmt.Sprintf("nfs: {server: %s, export: /%s, init: true}", nfsServer, filepath.Base(g.poolPath(name)))
	}
	return medium + "\n  overcommit: 100"
}

// trash returns the path of the trash of a pool.
func (g *testbed) trash(name string) string { return filepath.Join(g.poolPath(name), ".trivet/trash") }

// launchFloor starts a floor. flags are those of serveFloor.
func (g *testbed) launchFloor(name string, flags ...string) *server {
	dir := g.directory(name)
	return g.launch(name, "/proc/self/exe", func(socket string) []string {
		return append([]string{argFloor, "--socket", socket, "--dir", dir}, flags...)
	})
}

// startTimeout is the maximum time until a server is ready.
const startTimeout = 30 * time.Second

// poll is the interval of polling. It is short compared with the measured times.
const poll = 500 * time.Microsecond

// awaitSocket waits until the server listens.
func (s *server) awaitSocket(ctx context.Context) {
	measure.Must(s.Await(ctx, s.socket, poll, startTimeout, func() bool {
		conn, err := (&net.Dialer{}).DialContext(ctx, "unix", s.socket)
		return err == nil && conn.Close() == nil
	}))
}

// connect creates n connections, and returns when the server is ready on all of them.
func (s *server) connect(ctx context.Context, n int) []*client {
	s.awaitSocket(ctx)
	clients := make([]*client, n)
	for i := range clients {
		conn := measure.Get(grpc.NewClient("unix://"+s.socket, grpc.WithTransportCredentials(insecure.NewCredentials())))
		s.conns = append(s.conns, conn)
		c := &client{csi.NewIdentityClient(conn), csi.NewControllerClient(conn), csi.NewNodeClient(conn), csi.NewSnapshotMetadataClient(conn)}
		measure.Must(s.Await(ctx, s.Name, poll, startTimeout, func() bool {
			probe, err := c.Probe(ctx, &csi.ProbeRequest{})
			return err == nil && probe.GetReady().GetValue()
		}))
		clients[i] = c
	}
	return clients
}

// stop closes the connections, ends the process, and waits for its end.
func (s *server) stop() {
	for _, conn := range s.conns {
		measure.Must(conn.Close())
	}
	measure.Must(s.Stop())
}
