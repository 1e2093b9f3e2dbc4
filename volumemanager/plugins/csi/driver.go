package csi

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/apimachinery/pkg/util/version"

	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

// retryInterval is the interval between queries of a driver that has reconnected but is not ready.
const retryInterval = time.Second

// driver is a registered driver with its connection.
type driver struct {
	name     string
	endpoint string
	version  *version.Version

	conn       *grpc.ClientConn
	identity   csi.IdentityClient
	controller csi.ControllerClient
	node       csi.NodeClient

	mu   sync.Mutex
	last driverInfo
	// unusable is the reason why the registered driver cannot be used; nil if it can be used.
	unusable error
}

// driverInfo is the information that a driver reports about itself. It is immutable.
type driverInfo struct {
	nodeID string
	// limit is the maximum number of volumes on this node; 0 if there is none.
	limit int64
	// topology has the segments of this node.
	topology map[string]string
	// plugin, nodes and control are the capabilities of the driver, of its Node service, and of the
	// Controller service at this endpoint.
	plugin  map[csi.PluginCapability_Service_Type]bool
	nodes   map[csi.NodeServiceCapability_RPC_Type]bool
	control map[csi.ControllerServiceCapability_RPC_Type]bool
}

// dial connects to a Unix socket, and reconnects automatically. The path may contain any
// character, because it is not parsed as a URL.
func dial(path string) (*grpc.ClientConn, error) {
	if err := plugins.CheckSocket(path); err != nil {
		return nil, err
	}
	return grpc.NewClient("passthrough:///"+socketTarget,
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority("localhost"),
		grpc.WithNoProxy(),
		grpc.WithIdleTimeout(0),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, MaxDelay: 2 * time.Second},
			MinConnectTimeout: connectTimeout,
		}))
}

// newDriver returns a driver that connects to its endpoint, but was not queried yet.
func newDriver(name, endpoint string, v *version.Version) (*driver, error) {
	conn, err := dial(endpoint)
	if err != nil {
		return nil, fmt.Errorf("driver %s: endpoint: %w", name, err)
	}
	return &driver{
		name: name, endpoint: endpoint, version: v, conn: conn,
		identity: csi.NewIdentityClient(conn), controller: csi.NewControllerClient(conn), node: csi.NewNodeClient(conn),
	}, nil
}

// info returns the last information that the driver reported about itself.
func (d *driver) info() driverInfo {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.last
}

// nodeCan reports whether the Node service has a capability.
func (d *driver) nodeCan(c csi.NodeServiceCapability_RPC_Type) bool { return d.info().nodes[c] }

// controllerCan reports whether the endpoint has a Controller service with a capability.
func (d *driver) controllerCan(c csi.ControllerServiceCapability_RPC_Type) bool {
	return d.info().control[c]
}

// refresh queries the driver. If that fails, the driver cannot be used until a later refresh succeeds.
func (d *driver) refresh(ctx context.Context) error {
	info, err := d.query(ctx)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.unusable = certain(err); err == nil {
		d.last = info
	}
	return d.unusable
}

// query checks the driver's identity, and returns the information that the driver reports about itself.
func (d *driver) query(ctx context.Context) (driverInfo, error) {
	var a driverInfo
	if err := d.identify(ctx); err != nil {
		return a, err
	}
	services, err := call(ctx, d, d.identity.GetPluginCapabilities, &csi.GetPluginCapabilitiesRequest{})
	if err != nil {
		return a, err
	}
	a.plugin = setOf(services.GetCapabilities(), func(c *csi.PluginCapability) csi.PluginCapability_Service_Type { return c.GetService().GetType() })
	nodes, err := call(ctx, d, d.node.NodeGetCapabilities, &csi.NodeGetCapabilitiesRequest{})
	if err != nil {
		return a, err
	}
	a.nodes = setOf(nodes.GetCapabilities(), func(c *csi.NodeServiceCapability) csi.NodeServiceCapability_RPC_Type { return c.GetRpc().GetType() })
	if a.plugin[csi.PluginCapability_Service_CONTROLLER_SERVICE] {
		if a.control, err = d.controllerCapabilities(ctx); err != nil {
			return a, err
		}
	}
	info, err := call(ctx, d, d.node.NodeGetInfo, &csi.NodeGetInfoRequest{})
	if err != nil {
		return a, err
	}
	if info.GetNodeId() == "" {
		return a, fmt.Errorf("driver %s: NodeGetInfo: the node ID is empty: configure the node's name in the driver", d.name)
	}
	a.nodeID, a.limit, a.topology = info.GetNodeId(), info.GetMaxVolumesPerNode(), info.GetAccessibleTopology().GetSegments()
	return a, nil
}

// controllerCapabilities returns nil if this endpoint does not serve the Controller service, because
// a driver may serve it at another endpoint (csi-spec, "Architecture").
func (d *driver) controllerCapabilities(ctx context.Context) (map[csi.ControllerServiceCapability_RPC_Type]bool, error) {
	control, err := call(ctx, d, d.controller.ControllerGetCapabilities, &csi.ControllerGetCapabilitiesRequest{})
	if callErr, ok := errors.AsType[*CallError](err); ok && callErr.Code == codes.Unimplemented {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return setOf(control.GetCapabilities(), func(c *csi.ControllerServiceCapability) csi.ControllerServiceCapability_RPC_Type {
		return c.GetRpc().GetType()
	}), nil
}

// identify checks that the expected driver serves the endpoint, and that it is ready.
func (d *driver) identify(ctx context.Context) error {
	callCtx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	info, err := call(callCtx, d, d.identity.GetPluginInfo, &csi.GetPluginInfoRequest{})
	if err != nil {
		return err
	}
	if info.GetName() != d.name {
		return fmt.Errorf("driver %s: endpoint %s is served by driver %q: give each driver its own socket", d.name, d.endpoint, info.GetName())
	}
	probe, err := call(ctx, d, d.identity.Probe, &csi.ProbeRequest{})
	if err != nil {
		return err
	}
	if ready := probe.GetReady(); ready != nil && !ready.GetValue() {
		return fmt.Errorf("driver %s: Probe: the driver is not ready yet: see its log", d.name)
	}
	return nil
}

// watch queries the driver after each interruption of the connection, until ctx ends or the
// connection is closed. It calls ready when the driver is ready again.
func (d *driver) watch(ctx context.Context, ready func()) {
	interrupted := false
	for ctx.Err() == nil {
		state := d.conn.GetState()
		switch state {
		case connectivity.Shutdown:
			return
		case connectivity.Ready:
			if interrupted && d.refresh(ctx) == nil {
				interrupted = false
				ready()
			}
		case connectivity.Idle:
			d.conn.Connect()
			interrupted = true
		default:
			interrupted = true
		}
		waitCtx, cancel := context.WithTimeout(ctx, retryInterval)
		d.conn.WaitForStateChange(waitCtx, state)
		cancel()
	}
}

// capabilities returns the driver's capabilities by their names in csi-spec, sorted.
func (a driverInfo) capabilities() []string {
	var names []string
	for c := range a.nodes {
		names = append(names, "Node/"+c.String())
	}
	for c := range a.control {
		names = append(names, "Controller/"+c.String())
	}
	for c := range a.plugin {
		names = append(names, "Plugin/"+c.String())
	}
	return slices.Sorted(slices.Values(names))
}

// setOf returns the set of the keys of all elements.
func setOf[C any, K comparable](all []C, key func(C) K) map[K]bool {
	keys := make(map[K]bool, len(all))
	for _, c := range all {
		keys[key(c)] = true
	}
	return keys
}

// merged returns a map with the entries of both maps. For equal keys the entry of second is used.
func merged(first, second map[string]string) map[string]string {
	all := map[string]string{}
	maps.Copy(all, first)
	maps.Copy(all, second)
	return all
}
