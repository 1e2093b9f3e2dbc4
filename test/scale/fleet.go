package main

import (
	"context"
	"crypto/x509"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/test/measure"
)

// fleet is the controller's driver and its nodes.
type fleet struct {
	testbed    *measure.Testbed
	dir        string // contains the directories of all drivers
	ca         *pki.Authority
	nodes      []*node
	volumes    []*vol // the volumes that exist during all measurements, as many on each node
	controller *measure.Process
	// launchController starts the controller's driver, and sets controller.
	launchController func()
	web              string // host:port of the controller's metrics
	routed           csi.ControllerClient
	conns            []*grpc.ClientConn
	// drop ends the processes of ending and stops those of silent.
	healthy, ending, silent *group
}

// node is a node whose driver is called.
type node struct {
	name, dir, address string
	// direct is a connection to the node's driver that bypasses the controller's driver.
	direct csi.ControllerClient
}

// group is a group of nodes whose drivers run in processes of their own.
type group struct {
	name      string
	nodes     []*node
	processes []*measure.Process
}

// nodesPerProcess limits the nodes in a process, because of its limit of open files.
const nodesPerProcess = 500

// signal sends a signal to all processes of the group.
func (g *group) signal(s syscall.Signal) {
	for _, p := range g.processes {
		measure.Must(p.Signal(s))
	}
}

// awaitEnd returns when all processes of the group have ended.
func (g *group) awaitEnd() {
	for _, p := range g.processes {
		<-p.Ended()
	}
}

// newFleet starts all drivers and creates the volumes that exist during all measurements.
func newFleet(ctx context.Context, g *measure.Testbed, binary string, nodes, volumesPerNode int) *fleet {
	f := &fleet{testbed: g, ca: measure.Get(pki.NewAuthority(driver.DefaultName)), dir: filepath.Join(g.Disk, fmt.Sprint(nodes))}
	progressf("%d nodes: starting the drivers", nodes)
	ports := freePorts(nodes + 1)
	f.web = ports[nodes]
	for i, address := range ports[:nodes] {
		name := fmt.Sprintf("node-%04d.example", i)
		f.nodes = append(f.nodes, &node{name: name, dir: filepath.Join(f.dir, name), address: address})
	}
	measure.ForAll(ctx, manyCallers, f.nodes, func(_ context.Context, _ int, n *node) error { return f.prepare(n) })
	tenth := nodes / 10
	f.healthy = &group{name: "healthy", nodes: f.nodes[:nodes-2*tenth]}
	f.ending = &group{name: "ending", nodes: f.nodes[nodes-2*tenth : nodes-tenth]}
	f.silent = &group{name: "silent", nodes: f.nodes[nodes-tenth:]}
	for _, group := range []*group{f.healthy, f.ending, f.silent} {
		f.serve(ctx, group)
	}
	progressf("%d nodes: starting the controller's driver", nodes)
	f.startController(ctx, binary)
	progressf("%d nodes: creating %d volumes", nodes, nodes*volumesPerNode)
	f.fill(ctx, volumesPerNode)
	return f
}

// freePorts returns unused addresses. Their ports are outside the range of outgoing connections, so
// that they are still free when a node recovers.
func freePorts(n int) []string {
	const first, afterLast = 12_000, 32_000
	var free []string
	for port := first; port < afterLast && len(free) < n; port++ {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			continue
		}
		free = append(free, l.Addr().String())
		measure.Must(l.Close())
	}
	if len(free) < n {
		measure.Must(fmt.Errorf("only %d ports from %d to %d are free, need %d", len(free), first, afterLast-1, n))
	}
	return free
}

// prepare writes the certificate and the configuration of a node's driver.
func (f *fleet) prepare(n *node) error {
	if err := f.certify(n.dir, pki.NodeURI(driver.DefaultName, n.name), x509.ExtKeyUsageServerAuth); err != nil {
		return err
	}
	config := fmt.Sprintf("pools: [{name: default, directory: {path: %s}}]\nforwarding: {listen: %q}\n", filepath.Join(n.dir, poolDir), n.address)
	return os.WriteFile(filepath.Join(n.dir, configFile), []byte(config), 0o600)
}

// certificates opens the directory of certificates in a driver's state directory.
func certificates(dir string) *pki.Directory {
	return pki.OpenDirectory(filepath.Join(dir, "certificates"))
}

// certify writes a key and a certificate for a driver to its state directory.
func (f *fleet) certify(dir string, who *url.URL, usage x509.ExtKeyUsage) error {
	key, request, err := pki.NewRequest(who)
	if err != nil {
		return err
	}
	public, _, err := pki.ParseRequest(request)
	if err != nil {
		return err
	}
	roots, _, err := f.ca.PEM()
	if err != nil {
		return err
	}
	cert, err := f.ca.Issue(public, who, usage, 24*time.Hour)
	if err != nil {
		return err
	}
	return certificates(dir).Write(cert, key, roots)
}

// serve starts the drivers of a group and returns when all of them listen.
func (f *fleet) serve(ctx context.Context, group *group) {
	group.processes = nil
	for nodes := range slices.Chunk(group.nodes, nodesPerProcess) {
		args := []string{argNodes}
		for _, n := range nodes {
			args = append(args, n.dir)
		}
		group.processes = append(group.processes, f.testbed.Launch(group.name, "/proc/self/exe", args...))
	}
	for i, n := range group.nodes {
		p := group.processes[i/nodesPerProcess]
		measure.Must(p.Await(ctx, n.name, poll, startTimeout, func() bool { return listens(ctx, n.address) }))
	}
}

const (
	// poll is the interval at which the fleet checks whether a driver is ready.
	poll = 5 * time.Millisecond
	// startTimeout is the timeout for the start of thousands of drivers on a busy machine.
	startTimeout = 10 * measure.WaitTimeout
)

// listens reports whether a process listens on a TCP address.
func listens(ctx context.Context, address string) bool {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	return err == nil && conn.Close() == nil
}

// startController starts the controller's driver and returns when it reaches all nodes.
func (f *fleet) startController(ctx context.Context, binary string) {
	dir := filepath.Join(f.dir, "controller")
	measure.Must(f.certify(dir, pki.ControllerURI(driver.DefaultName), x509.ExtKeyUsageClientAuth))
	var config strings.Builder
	config.WriteString("forwarding:\n  nodes:\n")
	for _, n := range f.nodes {
		fmt.Fprintf(&config, "  - {name: %s, address: %q}\n", n.name, n.address)
	}
	measure.Must(os.WriteFile(filepath.Join(dir, configFile), []byte(config.String()), 0o600))
	endpoint := "unix://" + filepath.Join(dir, socketFile)
	f.launchController = func() {
		f.controller = f.testbed.Launch("controller", binary, "driver", "--services", "controller", "--endpoint", endpoint,
			"--config", filepath.Join(dir, configFile), "--state-dir", dir, "--http-address", f.web)
	}
	f.launchController()
	f.connect(dir, endpoint)
	f.awaitComplete(ctx)
}

// awaitComplete waits until the controller's driver reaches all nodes.
func (f *fleet) awaitComplete(ctx context.Context) {
	measure.Must(f.controller.Await(ctx, "all nodes", reachPoll, startTimeout, func() bool {
		_, err := f.routed.ListVolumes(ctx, &csi.ListVolumesRequest{MaxEntries: 1})
		return err == nil
	}))
}

// connect connects to the controller's driver as a sidecar does, and to each node with the
// controller's certificate.
func (f *fleet) connect(dir, endpoint string) {
	dial := func(target string, options ...grpc.DialOption) csi.ControllerClient {
		conn := measure.Get(grpc.NewClient(target, options...))
		f.conns = append(f.conns, conn)
		return csi.NewControllerClient(conn)
	}
	// A short delay, so that the fleet notices when the controller's driver has started again.
	often := grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: poll, Multiplier: 1, MaxDelay: poll}}
	f.routed = dial(endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithConnectParams(often))
	controllerCertificates := certificates(dir)
	for _, n := range f.nodes {
		config := controllerCertificates.Client(pki.NodeURI(driver.DefaultName, n.name))
		n.direct = dial("passthrough:///"+n.address, grpc.WithTransportCredentials(credentials.NewTLS(config)),
			grpc.WithIdleTimeout(0), grpc.WithReadBufferSize(4<<10), grpc.WithWriteBufferSize(4<<10))
	}
}

// fillers is the number of callers that create the volumes that exist during all measurements. With more callers, thousands of drivers on one machine may not
// answer keepalive pings in time.
const fillers = 2

// fill creates the volumes that exist during all measurements.
func (f *fleet) fill(ctx context.Context, perNode int) {
	f.volumes = newVolumes(f.nodes, "permanent", len(f.nodes)*perNode)
	forAll(ctx, fillers, f.volumes, f.on(routed, call{do: createVolume}))
	// The first call to a node opens the direct connection. The measurements use those to the first nodes.
	forAll(ctx, manyCallers, f.volumes[:min(lives, len(f.nodes))], f.on(direct, call{do: getVolume}))
}

// stop ends all processes of the fleet and removes its files.
func (f *fleet) stop() {
	for _, conn := range f.conns {
		measure.Must(conn.Close())
	}
	for _, p := range slices.Concat([]*measure.Process{f.controller}, f.silent.processes, f.ending.processes, f.healthy.processes) {
		measure.Must(p.Stop())
	}
	measure.Must(os.RemoveAll(f.dir))
}
