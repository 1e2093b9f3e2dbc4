package router_test

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/backend/lvm"
	"github.com/trivet-csi/trivet/backend/nfs"
	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/cluster/router"
	"github.com/trivet-csi/trivet/cluster/transfer"
	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/identity"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/internal/relay/relaytest"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
)

func TestMain(m *testing.M) { backendtest.Main(m) }

const ownersFile = "pool-owners.json"

// testCluster is a router and the drivers of its nodes. All pools are on one XFS filesystem.
type testCluster struct {
	*backendtest.Cluster
	*router.Server
	controllerserver.Clients
	t         *testing.T
	dir       string   // contains the directories of the pools
	state     *os.Root // state directory of the controller
	options   router.Options
	drivers   map[string]*backendtest.Driver
	addresses map[string]string // of the drivers, by node
	hosts     map[string]string // addresses by node that updateHosts passes to SetHosts
	owners    *owners
	stop      func() // stops the router
}

// owners is a router.FileOwners that a test can replace. Record fails while unavailable is set.
type owners struct {
	atomic.Pointer[router.FileOwners]
	unavailable atomic.Bool
}

func (o *owners) Known() map[string]string { return o.Load().Known() }

func (o *owners) Record(ctx context.Context, owners map[string]string) error {
	if o.unavailable.Load() {
		return errors.New("the API server is unavailable")
	}
	return o.Load().Record(ctx, owners)
}

func (o *owners) MoveCommand(pool, node string) string { return o.Load().MoveCommand(pool, node) }

// newCluster starts a driver with one pool for each node, and waits until the router knows the pools. Each
// argument is a node "NAME" or "NAME:SIZE" with the size of its pool.
func newCluster(t *testing.T, nodes ...string) *testCluster {
	t.Helper()
	w := newEmptyCluster(t)
	for _, node := range nodes {
		name, size, _ := strings.Cut(node, ":")
		w.start(name, w.pool("default", name, cmp.Or(size, "1Gi")))
	}
	w.updateHostsAndWait()
	return w
}

// newEmptyCluster starts a router without nodes.
func newEmptyCluster(t *testing.T, change ...func(*router.Options)) *testCluster {
	t.Helper()
	w := &testCluster{
		Cluster: backendtest.NewCluster(t), t: t, dir: testenv.Filesystem(t, "xfs", "64G"), owners: &owners{},
		drivers: map[string]*backendtest.Driver{}, addresses: map[string]string{}, hosts: map[string]string{},
	}
	state := t.TempDir()
	w.Certify(t, state, pki.ControllerURI(backendtest.DriverName), x509.ExtKeyUsageClientAuth)
	certificates := pki.OpenDirectory(state)
	w.state = openRoot(t, state)
	w.options = router.Options{
		// The nodes do not know lvm.Kind, as those of an earlier version.
		Shared: serviceWithoutPools(t), Kinds: backend.Kinds{loop.Kind, nfs.Kind, lvm.Kind}, Owners: w.owners,
		Client: func(node string) *tls.Config {
			return certificates.Client(pki.NodeURI(backendtest.DriverName, node))
		},
		Transfers: func(kind string) bool { return kind == loop.Name },
		Sign:      func(t transfer.Ticket) ([]byte, error) { return t.Sign(certificates) },
	}
	for _, c := range change {
		c(&w.options)
	}
	w.restart()
	return w
}

// serviceWithoutPools returns a controller service without pools.
func serviceWithoutPools(t *testing.T) relay.Service {
	t.Helper()
	return relay.Controller(controllerserver.New(backend.Kinds{loop.Kind}.Registry(pool.NewSet(nil, nil, openRoot(t, t.TempDir()))), "", 1))
}

func openRoot(t *testing.T, dir string) *os.Root {
	t.Helper()
	root, err := os.OpenRoot(dir)
	must(t, err)
	t.Cleanup(func() { _ = root.Close() })
	return root
}

// restart replaces the router with a new one that has the same nodes.
func (w *testCluster) restart() {
	w.t.Helper()
	if w.stop != nil {
		w.stop()
	}
	w.readOwners()
	ctx, cancel := context.WithCancel(context.WithoutCancel(w.t.Context()))
	server := router.New(ctx, w.options)
	w.stop = func() {
		cancel()
		server.Wait()
	}
	w.t.Cleanup(w.stop)
	w.Server, w.Clients = server, relaytest.Controller(server)
	if len(w.hosts) > 0 {
		w.updateHosts()
	}
}

// removeOwners deletes the recorded owners of all pools and restarts the router.
func (w *testCluster) removeOwners() {
	w.t.Helper()
	w.stop()
	must(w.t, w.state.Remove(ownersFile))
	w.restart()
}

// readOwners reads the owners from the file again.
func (w *testCluster) readOwners() {
	w.t.Helper()
	file, err := router.OpenOwners(w.state)
	must(w.t, err)
	w.owners.Store(file)
}

// replaceOwner records the node to as the owner of all pools of the node from, as an administrator does.
func (w *testCluster) replaceOwner(from, to string) {
	w.t.Helper()
	b, err := w.state.ReadFile(ownersFile)
	must(w.t, err)
	must(w.t, w.state.WriteFile(ownersFile, bytes.ReplaceAll(b, []byte(`"`+from+`"`), []byte(`"`+to+`"`)), 0o600))
	w.readOwners()
}

// recordOwner records the owner of a pool, as an administrator does.
func (w *testCluster) recordOwner(pool, node string) {
	w.t.Helper()
	must(w.t, w.owners.Load().Record(w.t.Context(), map[string]string{pool: node}))
}

// pool returns the configuration of a pool in the subdirectory dir of w.dir.
func (w *testCluster) pool(name, dir, size string) pool.Config {
	return pool.Config{Name: name, Directory: pool.Directory{Path: filepath.Join(w.dir, dir)}, Size: size}
}

// closedPool returns the configuration of a pool that cannot be opened, because nothing is mounted at its
// directory.
func (w *testCluster) closedPool(name, dir string) pool.Config {
	p := w.pool(name, dir, "2Gi")
	p.RequireMount = true
	return p
}

// start starts the driver of a node. Without pools, the driver has one pool: "default", 1 GiB, in the
// subdirectory named after the node. updateHosts adds the node to the router.
func (w *testCluster) start(name string, pools ...pool.Config) *backendtest.Driver {
	w.t.Helper()
	return w.startWith(name, loop.Kind, pools...)
}

// startWith is start for a kind of backend.
func (w *testCluster) startWith(name string, kind backend.Kind, pools ...pool.Config) *backendtest.Driver {
	w.t.Helper()
	if len(pools) == 0 {
		pools = []pool.Config{w.pool("default", name, "1Gi")}
	}
	return w.startChanged(name, kind, func(o *driver.Options) { o.Config.Pools = pools })
}

// startChanged starts the driver of a node with changed options.
func (w *testCluster) startChanged(name string, kind backend.Kind, change func(*driver.Options)) *backendtest.Driver {
	w.t.Helper()
	o := w.NodeOptions(w.t, name, "", kind)
	o.Config.Pools, o.DrainTime = []pool.Config{w.pool("default", name, "1Gi")}, 2*time.Second
	change(&o)
	w.addresses[name] = o.Config.Forwarding.Listen
	w.hosts[name] = w.addresses[name]
	w.drivers[name] = backendtest.StartWith(w.t, o)
	return w.drivers[name]
}

// stopDriver stops the driver of a node and waits until the router is disconnected from the node.
func (w *testCluster) stopDriver(name string) {
	w.t.Helper()
	w.drivers[name].Stop(w.t)
	w.awaitDisconnect(name)
}

// restartWith restarts the driver of a node with other pools.
func (w *testCluster) restartWith(name string, pools ...pool.Config) {
	w.t.Helper()
	w.drivers[name].Stop(w.t)
	w.drivers[name].Options.Config.Pools = pools
	w.drivers[name].Restart(w.t)
}

// updateHosts sets the nodes of the router to w.hosts.
func (w *testCluster) updateHosts() {
	var hosts []router.Host
	for name, address := range w.hosts {
		hosts = append(hosts, router.Host{Name: name, Address: address})
	}
	w.SetHosts(hosts)
}

// setHost adds a node to the router, or changes its address.
func (w *testCluster) setHost(name, address string) {
	w.hosts[name] = address
	w.updateHosts()
}

// addHost adds a node to the router, with the address of the node's driver.
func (w *testCluster) addHost(name string) { w.setHost(name, w.addresses[name]) }

// removeHosts removes nodes from the router.
func (w *testCluster) removeHosts(names ...string) {
	for _, name := range names {
		delete(w.hosts, name)
	}
	w.updateHosts()
}

// updateHostsAndWait sets the nodes of the router to w.hosts and waits until the router knows their pools.
func (w *testCluster) updateHostsAndWait() {
	w.t.Helper()
	w.updateHosts()
	w.awaitNode("")
}

// awaitDisconnect waits until the router is disconnected from a node.
func (w *testCluster) awaitDisconnect(name string) {
	w.t.Helper()
	await(w.t, "the router to disconnect from node "+name, func() bool {
		return !slices.ContainsFunc(w.States(), func(s router.State) bool { return s.Name == name && s.Connected })
	})
}

// awaitNode waits until the router knows the capacity of a node, or of all nodes if the name is empty.
func (w *testCluster) awaitNode(name string) {
	w.t.Helper()
	await(w.t, "the capacity of node "+strconv.Quote(name), func() bool {
		_, err := w.capacity(name)
		return err == nil
	})
}

// poolID returns the pool part (NAME.UUID) of the IDs of volumes in a node's pool.
func (w *testCluster) poolID(node, pool string) string {
	w.t.Helper()
	info, err := w.drivers[node].Identity.GetPluginInfo(w.t.Context(), &csi.GetPluginInfoRequest{})
	must(w.t, err)
	pools, _ := identity.Pools(info.GetManifest())
	return pool + "." + pools[pool]
}

// wantVolumes fails the test unless the pools contain these numbers of volumes. The keys of want are
// subdirectories of w.dir.
func (w *testCluster) wantVolumes(want map[string]int) {
	w.t.Helper()
	for dir, n := range want {
		entries, err := os.ReadDir(filepath.Join(w.dir, dir, "volumes"))
		must(w.t, err)
		if len(entries) != n {
			w.t.Errorf("pool directory %s contains volumes %v, want %d volumes", dir, entries, n)
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// await waits up to 30 seconds until a condition holds.
func await(t *testing.T, description string, condition func() bool) {
	t.Helper()
	awaitWithin(t, 30*time.Second, description, condition)
}

// awaitWithin waits up to limit until a condition holds.
func awaitWithin(t *testing.T, limit time.Duration, description string, condition func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(limit); !condition(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("timed out waiting for %s", description)
		}
	}
}

// awaitError repeats a call until its error contains a text.
func awaitError(t *testing.T, text string, call func() error) {
	t.Helper()
	await(t, "error "+strconv.Quote(text), func() bool {
		err := call()
		return err != nil && strings.Contains(err.Error(), text)
	})
}
