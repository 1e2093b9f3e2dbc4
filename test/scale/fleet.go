package main

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/driver"
)

// fleet is the controller's driver and its nodes.
type fleet struct {
	ground     *ground
	dir        string
	ca         *pki.Authority
	nodes      []*member
	volumes    []*vol // that exist all the time, equally many on each node
	controller *process
	web        string // host:port of its metrics
	routed     csi.ControllerClient
	conns      []*grpc.ClientConn
	// The nodes' drivers are in three processes. drop ends one and halts another.
	healthy, ending, silent *group
}

// member is one node.
type member struct {
	name, dir, address string
	// direct is a connection to the node without the controller's driver.
	direct csi.ControllerClient
}

// group is a number of nodes whose drivers share a process.
type group struct {
	name  string
	nodes []*member
	*process
}

// newFleet starts all drivers and fills the nodes.
func (g *ground) newFleet(ctx context.Context, binary string, nodes, volumesPerNode int) (*fleet, error) {
	ca, err := pki.NewAuthority(driver.DefaultName)
	if err != nil {
		return nil, err
	}
	f := &fleet{ground: g, ca: ca, dir: filepath.Join(g.disk, fmt.Sprint(nodes))}
	ports, err := freePorts(nodes + 1)
	if err != nil {
		return nil, err
	}
	f.web = ports[nodes]
	for i, address := range ports[:nodes] {
		if err := f.addNode(fmt.Sprintf("node-%03d.example", i), address); err != nil {
			return nil, err
		}
	}
	tenth := nodes / 10
	f.healthy = &group{name: "healthy", nodes: f.nodes[:nodes-2*tenth]}
	f.ending = &group{name: "ending", nodes: f.nodes[nodes-2*tenth : nodes-tenth]}
	f.silent = &group{name: "silent", nodes: f.nodes[nodes-tenth:]}
	for _, group := range []*group{f.healthy, f.ending, f.silent} {
		if err := f.serve(ctx, group); err != nil {
			return nil, err
		}
	}
	if err := f.startController(ctx, binary); err != nil {
		return nil, err
	}
	return f, f.fill(ctx, volumesPerNode)
}

// freePorts returns unused addresses. They are outside the range of outgoing connections, so that they
// are still free when a node comes back.
func freePorts(n int) ([]string, error) {
	const first, afterLast = 12_000, 32_000
	var free []string
	for port := first; port < afterLast && len(free) < n; port++ {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			continue
		}
		free = append(free, l.Addr().String())
		if err := l.Close(); err != nil {
			return nil, err
		}
	}
	if len(free) < n {
		return nil, fmt.Errorf("want %d free ports from %d to %d, and there are %d", n, first, afterLast, len(free))
	}
	return free, nil
}

func (f *fleet) addNode(name, address string) error {
	n := &member{name: name, dir: filepath.Join(f.dir, name), address: address}
	f.nodes = append(f.nodes, n)
	if err := f.certify(n.dir, pki.NodeURI(driver.DefaultName, name), x509.ExtKeyUsageServerAuth); err != nil {
		return err
	}
	config := fmt.Sprintf("pools: [{name: default, directory: {path: %s}}]\nforwarding: {listen: %q}\n", filepath.Join(n.dir, poolFolder), address)
	return os.WriteFile(filepath.Join(n.dir, configFile), []byte(config), 0o600)
}

// certificates returns the certificates' directory in a driver's state directory.
func certificates(dir string) *pki.Directory {
	return pki.OpenDirectory(filepath.Join(dir, "certificates"))
}

func (f *fleet) certify(dir string, who *url.URL, usage x509.ExtKeyUsage) error {
	key, request, err := pki.NewRequest(who)
	if err != nil {
		return err
	}
	public, _, err := pki.ParseRequest(request)
	if err != nil {
		return err
	}
	cert, err := f.ca.Issue(public, who, usage, 24*time.Hour)
	if err != nil {
		return err
	}
	roots, _, err := f.ca.PEM()
	if err != nil {
		return err
	}
	return certificates(dir).Write(cert, key, roots)
}

// serve starts the drivers of a group and returns when all of them listen.
func (f *fleet) serve(ctx context.Context, group *group) error {
	args := []string{argNodes}
	for _, n := range group.nodes {
		args = append(args, n.dir)
	}
	var err error
	if group.process, err = f.ground.launch(group.name, "/proc/self/exe", args...); err != nil {
		return err
	}
	for _, n := range group.nodes {
		if err := group.await(ctx, n.name, poll, func() bool { return listens(ctx, n.address) }); err != nil {
			return err
		}
	}
	return nil
}

const poll = 5 * time.Millisecond

func listens(ctx context.Context, address string) bool {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err != nil {
		return false
	}
	return conn.Close() == nil
}

// startController starts the controller's driver and returns when it knows the pools of all nodes.
func (f *fleet) startController(ctx context.Context, binary string) error {
	dir := filepath.Join(f.dir, "controller")
	if err := f.certify(dir, pki.ControllerURI(driver.DefaultName), x509.ExtKeyUsageClientAuth); err != nil {
		return err
	}
	var config strings.Builder
	config.WriteString("forwarding:\n  nodes:\n")
	for _, n := range f.nodes {
		fmt.Fprintf(&config, "  - {name: %s, address: %q}\n", n.name, n.address)
	}
	if err := os.WriteFile(filepath.Join(dir, configFile), []byte(config.String()), 0o600); err != nil {
		return err
	}
	endpoint := "unix://" + filepath.Join(dir, socketFile)
	var err error
	if f.controller, err = f.ground.launch("controller", binary, "driver", "--services", "controller", "--endpoint", endpoint,
		"--config", filepath.Join(dir, configFile), "--state-dir", dir, "--http-address", f.web); err != nil {
		return err
	}
	if err := f.connect(dir, endpoint); err != nil {
		return err
	}
	return f.controller.await(ctx, "all nodes", poll, func() bool { return f.complete(ctx) })
}

// complete tells whether the controller's driver reaches all nodes.
func (f *fleet) complete(ctx context.Context) bool {
	_, err := f.routed.ListVolumes(ctx, &csi.ListVolumesRequest{MaxEntries: 1})
	return err == nil
}

// connect connects to the controller's driver as a sidecar does, and to each node with the
// controller's certificate.
func (f *fleet) connect(dir, endpoint string) error {
	conn, err := grpc.NewClient(endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	f.conns = append(f.conns, conn)
	f.routed = csi.NewControllerClient(conn)
	own := certificates(dir)
	for _, n := range f.nodes {
		config := own.Client(pki.NodeURI(driver.DefaultName, n.name))
		conn, err := grpc.NewClient("passthrough:///"+n.address, grpc.WithTransportCredentials(credentials.NewTLS(config)),
			grpc.WithIdleTimeout(0), grpc.WithReadBufferSize(4<<10), grpc.WithWriteBufferSize(4<<10))
		if err != nil {
			return err
		}
		f.conns = append(f.conns, conn)
		n.direct = csi.NewControllerClient(conn)
	}
	return nil
}

// fill creates the volumes that exist all the time.
func (f *fleet) fill(ctx context.Context, perNode int) error {
	f.volumes = newVolumes(f.nodes, "full", len(f.nodes)*perNode)
	if _, err := forAll(ctx, manyCallers, f.volumes, f.on(routed, call{do: createVolume})); err != nil {
		return err
	}
	// The first call makes each direct connection.
	_, err := forAll(ctx, manyCallers, f.volumes[:len(f.nodes)], f.on(direct, call{do: getVolume}))
	return err
}

// stop ends all processes of the fleet and removes its files.
func (f *fleet) stop() error {
	var errs []error
	for _, conn := range f.conns {
		errs = append(errs, conn.Close())
	}
	for _, p := range []*process{f.controller, f.silent.process, f.ending.process, f.healthy.process} {
		errs = append(errs, p.stop())
	}
	return errors.Join(append(errs, os.RemoveAll(f.dir))...)
}
