package router_test

import (
	"bytes"
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
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

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
	"github.com/trivet-csi/trivet/internal/translate"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

func TestMain(m *testing.M) { backendtest.Main(m) }

const mib = int64(1) << 20

// world is a router whose hosts the test tells, and drivers of nodes with real pools.
type world struct {
	*backendtest.Cluster
	*router.Server
	controllerserver.Clients
	t       *testing.T
	dir     string // where pools are
	state   *os.Root
	options router.Options
	hosts   map[string]string
	owners  *owners
	stop    func() // ends the router
}

// owners are those in a file, which an administrator may change, and which cannot be written
// while the API server is away.
type owners struct {
	atomic.Pointer[router.FileOwners]
	away atomic.Bool
}

func (o *owners) Known() map[string]string { return o.Load().Known() }

func (o *owners) Record(ctx context.Context, owners map[string]string) error {
	if o.away.Load() {
		return errors.New("the API server is away")
	}
	return o.Load().Record(ctx, owners)
}

func (o *owners) MoveCommand(pool, node string) string { return o.Load().MoveCommand(pool, node) }

func newWorld(t *testing.T, change ...func(*router.Options)) *world {
	t.Helper()
	w := &world{Cluster: backendtest.NewCluster(t), t: t, dir: testenv.Filesystem(t, "xfs", "64G"), hosts: map[string]string{}, owners: &owners{}}
	own := t.TempDir()
	w.Certify(t, own, pki.ControllerURI(backendtest.DriverName), x509.ExtKeyUsageClientAuth)
	certificates := pki.OpenDirectory(own)
	w.state = openRoot(t, own)
	w.options = router.Options{
		Shared: relay.Controller(noPools(t)), Kinds: backend.Kinds{loop.Kind, nfs.Kind},
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
func noPools(t *testing.T) controllerserver.Services {
	t.Helper()
	return controllerserver.New(backend.Kinds{loop.Kind}.Registry(pool.NewSet(nil, openRoot(t, t.TempDir()))), "", 1)
}

func openRoot(t *testing.T, dir string) *os.Root {
	t.Helper()
	root, err := os.OpenRoot(dir)
	must(t, err)
	t.Cleanup(func() { _ = root.Close() })
	return root
}

// restart makes another router in place of the one that there is, and tells it the nodes.
func (w *world) restart() {
	w.t.Helper()
	if w.stop != nil {
		w.stop()
	}
	w.readOwners()
	w.options.Owners = w.owners
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

// move records that a pool is on another node, as an administrator does.
func (w *world) move(from, to string) {
	w.t.Helper()
	const file = "pool-owners.json"
	b, err := w.state.ReadFile(file)
	must(w.t, err)
	must(w.t, w.state.WriteFile(file, bytes.ReplaceAll(b, []byte(`"`+from+`"`), []byte(`"`+to+`"`)), 0o600))
	w.readOwners()
}

// record records the owner of a pool, as an administrator does.
func (w *world) record(pool, node string) {
	w.t.Helper()
	must(w.t, w.owners.Load().Record(w.t.Context(), map[string]string{pool: node}))
}

func (w *world) readOwners() {
	w.t.Helper()
	file, err := router.OpenOwners(w.state)
	must(w.t, err)
	w.owners.Store(file)
}

// pool is one of a name and size, in a directory of that name.
func (w *world) pool(name, dir, size string) pool.Config {
	return pool.Config{Name: name, Directory: pool.Directory{Path: filepath.Join(w.dir, dir)}, Size: size}
}

// start starts the driver of a node, which the router is not told yet.
func (w *world) start(name string, pools ...pool.Config) *backendtest.Driver {
	w.t.Helper()
	return w.startWith(name, loop.Kind, pools...)
}

func (w *world) startWith(name string, kind backend.Kind, pools ...pool.Config) *backendtest.Driver {
	w.t.Helper()
	o := w.NodeOptions(w.t, name, "", kind)
	o.Config.Pools = pools
	o.DrainTime = 2 * time.Second
	w.hosts[name] = o.Config.Forwarding.Listen
	return backendtest.StartWith(w.t, o)
}

// tell tells the router which nodes there are.
func (w *world) tell() {
	var hosts []router.Host
	for name, address := range w.hosts {
		hosts = append(hosts, router.Host{Name: name, Address: address})
	}
	w.SetHosts(hosts)
}

// know waits until the router has heard of all pools.
func (w *world) know() {
	w.t.Helper()
	w.tell()
	await(w.t, "all nodes' pools", func() bool {
		_, err := w.GetCapacity(w.t.Context(), &csi.GetCapacityRequest{})
		return err == nil
	})
}

// forget takes nodes from the list.
func (w *world) forget(names ...string) {
	for _, name := range names {
		delete(w.hosts, name)
	}
	w.tell()
}

// down waits until a node that was stopped is known not to answer.
func (w *world) down(name string) {
	w.t.Helper()
	await(w.t, "the end of the connection to "+name, func() bool {
		return !slices.ContainsFunc(w.States(), func(s router.State) bool { return s.Name == name && s.Connected })
	})
}

// up waits until node a answers.
func (w *world) up() {
	w.t.Helper()
	await(w.t, "node a", func() bool {
		_, err := w.GetCapacity(w.t.Context(), &csi.GetCapacityRequest{AccessibleTopology: translate.Topology("a")})
		return err == nil
	})
}

// make makes a volume on a node and gives its ID.
func (w *world) make(node, name string, change ...func(*csi.CreateVolumeRequest)) string {
	w.t.Helper()
	resp, err := w.CreateVolume(w.t.Context(), request(name, append(change, preferring(node))...))
	must(w.t, err)
	return resp.GetVolume().GetVolumeId()
}

// request asks for a small volume.
func request(name string, change ...func(*csi.CreateVolumeRequest)) *csi.CreateVolumeRequest {
	req := &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: 32 * mib},
		VolumeCapabilities: []*csi.VolumeCapability{capability()},
	}
	for _, c := range change {
		c(req)
	}
	return req
}

func capability() *csi.VolumeCapability {
	return backendtest.Kind{FSType: "ext4"}.Capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER)
}

func preferring(nodes ...string) func(*csi.CreateVolumeRequest) {
	return func(req *csi.CreateVolumeRequest) {
		req.AccessibilityRequirements = &csi.TopologyRequirement{Preferred: topologies(nodes), Requisite: topologies(nodes)}
	}
}

func within(nodes ...string) func(*csi.CreateVolumeRequest) {
	return func(req *csi.CreateVolumeRequest) {
		req.AccessibilityRequirements = &csi.TopologyRequirement{Requisite: topologies(nodes)}
	}
}

func inPool(name string) func(*csi.CreateVolumeRequest) {
	return func(req *csi.CreateVolumeRequest) { req.Parameters = map[string]string{"pool": name} }
}

func sized(bytes int64) func(*csi.CreateVolumeRequest) {
	return func(req *csi.CreateVolumeRequest) { req.CapacityRange.RequiredBytes = bytes }
}

func topologies(nodes []string) []*csi.Topology {
	var out []*csi.Topology
	for _, n := range nodes {
		out = append(out, translate.Topology(n))
	}
	return out
}

// uuid is that of a driver's pool, as volume IDs have it.
func uuid(t *testing.T, d *backendtest.Driver, pool string) string {
	t.Helper()
	info, err := d.Identity.GetPluginInfo(t.Context(), &csi.GetPluginInfoRequest{})
	must(t, err)
	return identity.Pools(info.GetManifest())[pool]
}

// list lists all volumes by pages.
func (w *world) list(pageSize int32) ([]string, error) {
	var ids []string
	for token := ""; ; {
		resp, err := w.ListVolumes(w.t.Context(), &csi.ListVolumesRequest{MaxEntries: pageSize, StartingToken: token})
		if err != nil {
			return nil, err
		}
		for _, e := range resp.GetEntries() {
			ids = append(ids, e.GetVolume().GetVolumeId())
		}
		if token = resp.GetNextToken(); token == "" {
			return ids, nil
		}
	}
}

// folders are the volumes that lie in a pool's directory.
func (w *world) folders(dir string) []string {
	w.t.Helper()
	entries, err := os.ReadDir(filepath.Join(w.dir, dir, "volumes"))
	must(w.t, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// await waits until a condition holds.
func await(t *testing.T, what string, holds func() bool) {
	t.Helper()
	awaitWithin(t, 30*time.Second, what, holds)
}

func awaitWithin(t *testing.T, patience time.Duration, what string, holds func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(patience); !holds(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

// code is what the driver makes of an error.
func code(err error) codes.Code {
	if s, ok := status.FromError(err); ok {
		return s.Code()
	}
	for _, row := range []struct { // in the order of the driver's table
		kind error
		code codes.Code
	}{
		{volume.ErrInvalid, codes.InvalidArgument},
		{volume.ErrUnavailable, codes.Unavailable},
		{volume.ErrNotFound, codes.NotFound},
		{volume.ErrExhausted, codes.ResourceExhausted},
		{volume.ErrPrecondition, codes.FailedPrecondition},
		{volume.ErrStaleToken, codes.Aborted},
	} {
		if errors.Is(err, row.kind) {
			return row.code
		}
	}
	return codes.Unknown
}

// wantCode fails the test unless err has the code and says all of says.
func wantCode(t *testing.T, err error, want codes.Code, says ...string) {
	t.Helper()
	if code(err) != want {
		t.Errorf("got %v, want %v: %v", code(err), want, err)
		return
	}
	for _, s := range says {
		if err != nil && !strings.Contains(err.Error(), s) {
			t.Errorf("%v\ndoes not say %q", err, s)
		}
	}
}

// calls are those for one volume, by name.
func (w *world) calls(ctx context.Context, id string) map[string]func() error {
	return map[string]func() error{
		"delete": func() error {
			_, err := w.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
			return err
		},
		"expand": func() error {
			_, err := w.ControllerExpandVolume(ctx, &csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: 48 * mib}})
			return err
		},
		"get": func() error {
			_, err := w.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{VolumeId: id})
			return err
		},
		"health": func() error {
			_, err := w.ControllerGetVolumeHealth(ctx, &csi.ControllerGetVolumeHealthRequest{VolumeId: id})
			return err
		},
		"validate": func() error {
			_, err := w.ValidateVolumeCapabilities(ctx, &csi.ValidateVolumeCapabilitiesRequest{VolumeId: id, VolumeCapabilities: []*csi.VolumeCapability{capability()}})
			return err
		},
	}
}

// refused fails the test unless every call for a volume, and a publish to a node, is
// refused alike, and unpublish is not.
func (w *world) refused(node, id string, want codes.Code, says ...string) {
	w.t.Helper()
	calls := w.calls(w.t.Context(), id)
	calls["publish"] = func() error { return w.publish(node, id) }
	for name, call := range calls {
		err := call()
		if wantCode(w.t, err, want, says...); w.t.Failed() {
			w.t.Fatalf("so ended %s", name)
		}
	}
	must(w.t, w.unpublish(node, id))
}

func (w *world) publish(node, id string) error {
	_, err := w.ControllerPublishVolume(w.t.Context(), &csi.ControllerPublishVolumeRequest{VolumeId: id, NodeId: node, VolumeCapability: capability()})
	return err
}

func (w *world) unpublish(node, id string) error {
	_, err := w.ControllerUnpublishVolume(w.t.Context(), &csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: node})
	return err
}

func (w *world) get(id string) error { return w.calls(w.t.Context(), id)["get"]() }
