package main

import (
	"context"
	"crypto/x509"
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
	"github.com/trivet-csi/trivet/test/measure"
)

// fleet is the controller's driver and its nodes.
type fleet struct {
	ground     *measure.Ground
	dir        string
	ca         *pki.Authority
	nodes      []*member
	volumes    []*vol // that exist all the time, equally many on each node
	controller *measure.Process
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
	*measure.Process
}

// newFleet starts all drivers and fills the nodes.
func newFleet(ctx context.Context, g *measure.Ground, binary string, nodes, volumesPerNode int) *fleet {
	f := &fleet{ground: g, ca: measure.Get(pki.NewAuthority(driver.DefaultName)), dir: filepath.Join(g.Disk, fmt.Sprint(nodes))}
	ports := freePorts(nodes + 1)
	f.web = ports[nodes]
	for i, address := range ports[:nodes] {
		f.addNode(fmt.Sprintf("node-%03d.example", i), address)
	}
	tenth := nodes / 10
	f.healthy = &group{name: "healthy", nodes: f.nodes[:nodes-2*tenth]}
	f.ending = &group{name: "ending", nodes: f.nodes[nodes-2*tenth : nodes-tenth]}
	f.silent = &group{name: "silent", nodes: f.nodes[nodes-tenth:]}
	for _, group := range []*group{f.healthy, f.ending, f.silent} {
		f.serve(ctx, group)
	}
	f.startController(ctx, binary)
	f.fill(ctx, volumesPerNode)
	return f
}

// freePorts returns unused addresses. They are outside the range of outgoing connections, so that they
// are still free when a node comes back.
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
		measure.Must(fmt.Errorf("%d ports from %d to %d are free, want %d", len(free), first, afterLast, n))
	}
	return free
}

func (f *fleet) addNode(name, address string) {
	n := &member{name: name, dir: filepath.Join(f.dir, name), address: address}
	f.nodes = append(f.nodes, n)
	f.certify(n.dir, pki.NodeURI(driver.DefaultName, name), x509.ExtKeyUsageServerAuth)
	config := fmt.Sprintf("pools: [{name: default, directory: {path: %s}}]\nforwarding: {listen: %q}\n", filepath.Join(n.dir, poolFolder), address)
	measure.Must(os.WriteFile(filepath.Join(n.dir, configFile), []byte(config), 0o600))
}

// certificates returns the certificates' directory in a driver's state directory.
func certificates(dir string) *pki.Directory {
	return pki.OpenDirectory(filepath.Join(dir, "certificates"))
}

func (f *fleet) certify(dir string, who *url.URL, usage x509.ExtKeyUsage) {
	key, request, err := pki.NewRequest(who)
	measure.Must(err)
	public, _, err := pki.ParseRequest(request)
	measure.Must(err)
	roots, _, err := f.ca.PEM()
	measure.Must(err)
	measure.Must(certificates(dir).Write(measure.Get(f.ca.Issue(public, who, usage, 24*time.Hour)), key, roots))
}

// serve starts the drivers of a group and returns when all of them listen.
func (f *fleet) serve(ctx context.Context, group *group) {
	args := []string{argNodes}
	for _, n := range group.nodes {
		args = append(args, n.dir)
	}
	group.Process = f.ground.Launch(group.name, "/proc/self/exe", args...)
	for _, n := range group.nodes {
		measure.Must(group.Await(ctx, n.name, poll, measure.Patience, func() bool { return listens(ctx, n.address) }))
	}
}

const poll = 5 * time.Millisecond

func listens(ctx context.Context, address string) bool {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	return err == nil && conn.Close() == nil
}

// startController starts the controller's driver and returns when it has listed the pools of all
// nodes.
func (f *fleet) startController(ctx context.Context, binary string) {
	dir := filepath.Join(f.dir, "controller")
	f.certify(dir, pki.ControllerURI(driver.DefaultName), x509.ExtKeyUsageClientAuth)
	var config strings.Builder
	config.WriteString("forwarding:\n  nodes:\n")
	for _, n := range f.nodes {
		fmt.Fprintf(&config, "  - {name: %s, address: %q}\n", n.name, n.address)
	}
	measure.Must(os.WriteFile(filepath.Join(dir, configFile), []byte(config.String()), 0o600))
	endpoint := "unix://" + filepath.Join(dir, socketFile)
	f.controller = f.ground.Launch("controller", binary, "driver", "--services", "controller", "--endpoint", endpoint,
		"--config", filepath.Join(dir, configFile), "--state-dir", dir, "--http-address", f.web)
	f.connect(dir, endpoint)
	f.awaitComplete(ctx, poll)
}

// awaitComplete waits until the controller's driver reaches all nodes.
func (f *fleet) awaitComplete(ctx context.Context, interval time.Duration) {
	measure.Must(f.controller.Await(ctx, "all nodes", interval, measure.Patience, func() bool {
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
	f.routed = dial(endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()))
	own := certificates(dir)
	for _, n := range f.nodes {
		config := own.Client(pki.NodeURI(driver.DefaultName, n.name))
		n.direct = dial("passthrough:///"+n.address, grpc.WithTransportCredentials(credentials.NewTLS(config)),
			grpc.WithIdleTimeout(0), grpc.WithReadBufferSize(4<<10), grpc.WithWriteBufferSize(4<<10))
	}
}

// fill creates the volumes that exist all the time.
func (f *fleet) fill(ctx context.Context, perNode int) {
	f.volumes = newVolumes(f.nodes, "full", len(f.nodes)*perNode)
	forAll(ctx, manyCallers, f.volumes, f.on(routed, call{do: createVolume}))
	// The first call makes each direct connection.
	forAll(ctx, manyCallers, f.volumes[:len(f.nodes)], f.on(direct, call{do: getVolume}))
}

// stop ends all processes of the fleet and removes its files.
func (f *fleet) stop() {
	for _, conn := range f.conns {
		measure.Must(conn.Close())
	}
	for _, p := range []*measure.Process{f.controller, f.silent.Process, f.ending.Process, f.healthy.Process} {
		measure.Must(p.Stop())
	}
	measure.Must(os.RemoveAll(f.dir))
}
