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
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/backend/nfs"
	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/cluster/router"
	"github.com/trivet-csi/trivet/controllerserver"
	"github.com/trivet-csi/trivet/identity"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/internal/relay/relaytest"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/pool"
)

func TestMain(m *testing.M) { backendtest.Main(m) }

const ownersFile = "pool-owners.json"

// world is a router and the drivers of nodes, whose pools are on one XFS filesystem.
type world struct {
	*backendtest.Cluster
	*router.Server
	controllerserver.Clients
	t         *testing.T
	dir       string   // contains the pools' directories
	state     *os.Root // of the controller
	options   router.Options
	drivers   map[string]*backendtest.Driver
	addresses map[string]string // of the drivers, by node
	hosts     map[string]string // the nodes of the router, with the addresses that it is given
	owners    *owners
	stop      func() // ends the router
}

// owners are FileOwners that an administrator may change, and that cannot be written while
// unavailable is set.
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

// newCluster starts a driver for each node and waits until the router has their pools. A node is "name" or
// "name:size"; see start.
func newCluster(t *testing.T, nodes ...string) *world {
	t.Helper()
	w := newWorld(t)
	for _, node := range nodes {
		name, size, _ := strings.Cut(node, ":")
		w.start(name, w.pool("default", name, cmp.Or(size, "1Gi")))
	}
	w.know()
	return w
}

// newWorld returns a router without nodes.
func newWorld(t *testing.T, change ...func(*router.Options)) *world {
	t.Helper()
	w := &world{
		Cluster: backendtest.NewCluster(t), t: t, dir: testenv.Filesystem(t, "xfs", "64G"), owners: &owners{},
		drivers: map[string]*backendtest.Driver{}, addresses: map[string]string{}, hosts: map[string]string{},
	}
	state := t.TempDir()
	w.Certify(t, state, pki.ControllerURI(backendtest.DriverName), x509.ExtKeyUsageClientAuth)
	certificates := pki.OpenDirectory(state)
	w.state = openRoot(t, state)
	w.options = router.Options{
		Shared: noPools(t), Kinds: backend.Kinds{loop.Kind, nfs.Kind}, Owners: w.owners,
		Client: func(node string) *tls.Config {
			return certificates.Client(pki.NodeURI(backendtest.DriverName, node))
		},
	}
	for _, c := range change {
		c(&w.options)
	}
	w.restart()
	return w
}

// noPools serves no pool.
func noPools(t *testing.T) relay.Service {
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

// restart replaces the router by a new one with the same nodes.
func (w *world) restart() {
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
		w.tell()
	}
}

// loseOwners restarts the router without the record of owners.
func (w *world) loseOwners() {
	w.t.Helper()
	w.stop()
	must(w.t, w.state.Remove(ownersFile))
	w.restart()
}

func (w *world) readOwners() {
	w.t.Helper()
	file, err := router.OpenOwners(w.state)
	must(w.t, err)
	w.owners.Store(file)
}

// move replaces the owner of pools, as an administrator does.
func (w *world) move(from, to string) {
	w.t.Helper()
	b, err := w.state.ReadFile(ownersFile)
	must(w.t, err)
	must(w.t, w.state.WriteFile(ownersFile, bytes.ReplaceAll(b, []byte(`"`+from+`"`), []byte(`"`+to+`"`)), 0o600))
	w.readOwners()
}

// record records the owner of a pool, as an administrator does.
func (w *world) record(pool, node string) {
	w.t.Helper()
	must(w.t, w.owners.Load().Record(w.t.Context(), map[string]string{pool: node}))
}

// pool returns a pool of a name and size in a directory of w.dir.
func (w *world) pool(name, dir, size string) pool.Config {
	return pool.Config{Name: name, Directory: pool.Directory{Path: filepath.Join(w.dir, dir)}, Size: size}
}

// closedPool returns a pool that does not open, because nothing is mounted at its directory.
func (w *world) closedPool(name, dir string) pool.Config {
	p := w.pool(name, dir, "2Gi")
	p.RequireMount = true
	return p
}

// start starts the driver of a node. Without pools it has the pool default of 1 GiB in the
// directory of the node's name. tell or know gives the node to the router.
func (w *world) start(name string, pools ...pool.Config) *backendtest.Driver {
	w.t.Helper()
	return w.startWith(name, loop.Kind, pools...)
}

func (w *world) startWith(name string, kind backend.Kind, pools ...pool.Config) *backendtest.Driver {
	w.t.Helper()
	if len(pools) == 0 {
		pools = []pool.Config{w.pool("default", name, "1Gi")}
	}
	o := w.NodeOptions(w.t, name, "", kind)
	o.Config.Pools, o.DrainTime = pools, 2*time.Second
	w.addresses[name] = o.Config.Forwarding.Listen
	w.hosts[name] = w.addresses[name]
	w.drivers[name] = backendtest.StartWith(w.t, o)
	return w.drivers[name]
}

// kill stops the driver of a node and waits until the router is not connected to it.
func (w *world) kill(name string) {
	w.t.Helper()
	w.drivers[name].Stop(w.t)
	w.down(name)
}

// restartWith restarts the driver of a node with other pools.
func (w *world) restartWith(name string, pools ...pool.Config) {
	w.t.Helper()
	w.drivers[name].Stop(w.t)
	w.drivers[name].Options.Config.Pools = pools
	w.drivers[name].Restart(w.t)
}

// tell gives the router its nodes.
func (w *world) tell() {
	var hosts []router.Host
	for name, address := range w.hosts {
		hosts = append(hosts, router.Host{Name: name, Address: address})
	}
	w.SetHosts(hosts)
}

// setHost gives the router a node with an address.
func (w *world) setHost(name, address string) {
	w.hosts[name] = address
	w.tell()
}

// register gives the router a node with the address of its driver.
func (w *world) register(name string) { w.setHost(name, w.addresses[name]) }

// forget takes nodes from the router.
func (w *world) forget(names ...string) {
	for _, name := range names {
		delete(w.hosts, name)
	}
	w.tell()
}

// know gives the router its nodes and waits until it has their pools.
func (w *world) know() {
	w.t.Helper()
	w.tell()
	w.up("")
}

// down waits until the router is not connected to a node.
func (w *world) down(name string) {
	w.t.Helper()
	await(w.t, "the end of the connection to "+name, func() bool {
		return !slices.ContainsFunc(w.States(), func(s router.State) bool { return s.Name == name && s.Connected })
	})
}

// up waits until a node answers; all nodes if the name is empty.
func (w *world) up(name string) {
	w.t.Helper()
	await(w.t, "node "+name, func() bool {
		_, err := w.capacity(name)
		return err == nil
	})
}

// poolID returns NAME.UUID of a pool of a node, as volume IDs contain it.
func (w *world) poolID(node, pool string) string {
	w.t.Helper()
	info, err := w.drivers[node].Identity.GetPluginInfo(w.t.Context(), &csi.GetPluginInfoRequest{})
	must(w.t, err)
	return pool + "." + identity.Pools(info.GetManifest())[pool]
}

// wantImages fails the test unless the pools in directories have these numbers of volumes.
func (w *world) wantImages(want map[string]int) {
	w.t.Helper()
	for dir, n := range want {
		entries, err := os.ReadDir(filepath.Join(w.dir, dir, "volumes"))
		must(w.t, err)
		if len(entries) != n {
			w.t.Errorf("directory %s has volumes %v, want %d", dir, entries, n)
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// await waits until a condition holds, 30 seconds at most.
func await(t *testing.T, what string, holds func() bool) {
	t.Helper()
	awaitWithin(t, 30*time.Second, what, holds)
}

func awaitWithin(t *testing.T, limit time.Duration, what string, holds func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(limit); !holds(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("timed out waiting for %s", what)
		}
	}
}

// awaitError repeats a call until its error contains a text.
func awaitError(t *testing.T, text string, call func() error) {
	t.Helper()
	await(t, text, func() bool {
		err := call()
		return err != nil && strings.Contains(err.Error(), text)
	})
}
