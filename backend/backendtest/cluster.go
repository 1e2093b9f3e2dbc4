package backendtest

import (
	"crypto/x509"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/pool"
)

// DriverName is the name of all drivers in the tests.
const DriverName = "csi.trivet.dev"

// Cluster is the drivers of some nodes, each with its own pool, and the controller's driver, which forwards
// calls to them. All run in this process.
type Cluster struct {
	Router *Driver
	Nodes  []*Driver
	CA     *pki.Authority
}

// NewCluster returns a cluster without drivers.
func NewCluster(tb testing.TB) *Cluster {
	tb.Helper()
	ca, err := pki.NewAuthority(DriverName)
	if err != nil {
		tb.Fatal(err)
	}
	return &Cluster{CA: ca}
}

// StartCluster starts a driver for each pool directory and the controller's driver, and waits
// until the controller has found all pools. All are stopped when the test ends.
func StartCluster(tb testing.TB, pools []string, kinds ...backend.Kind) *Cluster {
	tb.Helper()
	var configs []pool.Config
	for _, dir := range pools {
		configs = append(configs, poolAt(dir)...)
	}
	return StartClusterOn(tb, configs, nil, kinds...)
}

// StartClusterOn is StartCluster for a configuration of the pool of each node. change, if not nil, changes the options of the
// nodes.
func StartClusterOn(tb testing.TB, pools []pool.Config, change func(*driver.Options), kinds ...backend.Kind) *Cluster {
	tb.Helper()
	c := NewCluster(tb)
	var nodes []driver.ForwardingNode
	for i, config := range pools {
		o := c.NodeOptions(tb, fmt.Sprintf("node-%d.example", i+1), "", kinds...)
		o.Config.Pools = []pool.Config{config}
		if change != nil {
			change(&o)
		}
		c.Nodes = append(c.Nodes, StartWith(tb, o))
		nodes = append(nodes, driver.ForwardingNode{Name: o.NodeID, Address: o.Config.Forwarding.Listen})
	}
	c.Router = StartWith(tb, c.RouterOptions(tb, nodes, kinds...))
	c.Await(tb)
	return c
}

// Await waits until all nodes have reported their pools to the controller.
func (c *Cluster) Await(tb testing.TB) {
	tb.Helper()
	await(tb, "the pools of all nodes", func() bool {
		_, err := c.Router.Control.ListVolumes(tb.Context(), &csi.ListVolumesRequest{MaxEntries: 1})
		return err == nil
	})
}

// Member returns the services that an orchestrator uses for a node: the node's Node service and the
// cluster's Controller service.
func (c *Cluster) Member(i int) *Driver {
	n := c.Nodes[i]
	return &Driver{Options: n.Options, Identity: c.Router.Identity, Control: c.Router.Control, Node: n.Node}
}

// NodeOptions returns the options of a node's driver with one pool in the directory pool.
func (c *Cluster) NodeOptions(tb testing.TB, name, pool string, kinds ...backend.Kind) driver.Options {
	tb.Helper()
	o := memberOptions(tb, "node", kinds)
	o.NodeID = name
	o.Config.Pools = poolAt(pool)
	o.Config.Forwarding = &driver.Forwarding{Listen: FreeAddress(tb)}
	c.Certify(tb, filepath.Join(o.StateDir, "certificates"), pki.NodeURI(DriverName, name), x509.ExtKeyUsageServerAuth)
	return o
}

// RouterOptions returns the options of the controller's driver.
func (c *Cluster) RouterOptions(tb testing.TB, nodes []driver.ForwardingNode, kinds ...backend.Kind) driver.Options {
	tb.Helper()
	o := memberOptions(tb, "controller", kinds)
	o.Config.Forwarding = &driver.Forwarding{Nodes: nodes}
	c.Certify(tb, filepath.Join(o.StateDir, "certificates"), pki.ControllerURI(DriverName), x509.ExtKeyUsageClientAuth)
	return o
}

// memberOptions returns the options that all drivers have.
func memberOptions(tb testing.TB, service string, kinds backend.Kinds) driver.Options {
	tb.Helper()
	// tb.TempDir contains the name of the test, and would be too long for the path of a socket.
	state, err := os.MkdirTemp("", "state-")
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := os.RemoveAll(state); err != nil {
			tb.Error(err)
		}
	})
	return driver.Options{
		Endpoint: "unix://" + filepath.Join(state, "csi.sock"), StateDir: state,
		Name: DriverName, Version: "test", Services: []string{service},
		Config: driver.Config{MaxVolumesPerNode: 1000}, Kinds: kinds,
	}
}

func poolAt(dir string) []pool.Config {
	return []pool.Config{{Name: "default", Directory: pool.Directory{Path: dir}}}
}

// Certify issues a certificate, and writes it into the directory from which a driver reads it.
func (c *Cluster) Certify(tb testing.TB, dir string, who *url.URL, usage x509.ExtKeyUsage) {
	tb.Helper()
	key, request, err := pki.NewRequest(who)
	if err != nil {
		tb.Fatal(err)
	}
	public, _, err := pki.ParseRequest(request)
	if err != nil {
		tb.Fatal(err)
	}
	cert, err := c.CA.Issue(public, who, usage, time.Hour)
	if err != nil {
		tb.Fatal(err)
	}
	roots, _, err := c.CA.PEM()
	if err != nil {
		tb.Fatal(err)
	}
	if err := pki.OpenDirectory(dir).Write(cert, key, roots); err != nil {
		tb.Fatal(err)
	}
}

// FreeAddress returns an address on which no process listens.
func FreeAddress(tb testing.TB) string {
	tb.Helper()
	l, err := (&net.ListenConfig{}).Listen(tb.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}
