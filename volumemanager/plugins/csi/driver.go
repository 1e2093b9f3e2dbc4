package csi

import (
	"context"
	"errors"
	"fmt"
	"maps"
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

// askAgain is how soon a driver is asked again that came back and is not ready.
const askAgain = time.Second

// driver is one that is registered, with the one connection to it.
type driver struct {
	name     string
	endpoint string
	version  *version.Version

	conn       *grpc.ClientConn
	identity   csi.IdentityClient
	controller csi.ControllerClient
	node       csi.NodeClient

	mu    sync.Mutex
	about about
	// failed is why it cannot be used although it is registered.
	failed error
}

// about is what a driver tells of itself. It is never changed.
type about struct {
	nodeID   string
	limit    int64
	topology map[string]string
	plugin   map[csi.PluginCapability_Service_Type]bool
	nodes    map[csi.NodeServiceCapability_RPC_Type]bool
	control  map[csi.ControllerServiceCapability_RPC_Type]bool
}

// dial connects to a Unix socket, and connects again by itself. The path is no URL: it may
// have any character.
func dial(path string) (*grpc.ClientConn, error) {
	if err := plugins.CheckSocket(path); err != nil {
		return nil, err
	}
	return grpc.NewClient("passthrough:///"+socketTarget,
		grpc.WithContextDialer(unixDialer(path)),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority("localhost"),
		grpc.WithNoProxy(),
		grpc.WithIdleTimeout(0),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, MaxDelay: 2 * time.Second},
			MinConnectTimeout: connectTimeout,
		}))
}

func newDriver(name, endpoint string, v *version.Version) (*driver, error) {
	conn, err := dial(endpoint)
	if err != nil {
		return nil, fmt.Errorf("driver %s: its endpoint: %w", name, err)
	}
	return &driver{
		name: name, endpoint: endpoint, version: v, conn: conn,
		identity: csi.NewIdentityClient(conn), controller: csi.NewControllerClient(conn), node: csi.NewNodeClient(conn),
	}, nil
}

// ability is what the driver said of itself last.
func (d *driver) ability() about {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.about
}

// nodeCan tells whether the Node service has a capability.
func (d *driver) nodeCan(c csi.NodeServiceCapability_RPC_Type) bool { return d.ability().nodes[c] }

// controllerCan tells whether there is a Controller service at the endpoint, and it has a
// capability.
func (d *driver) controllerCan(c csi.ControllerServiceCapability_RPC_Type) bool {
	return d.ability().control[c]
}

// ask asks the driver what it is. If it cannot be used, why is kept for its callers.
func (d *driver) ask(ctx context.Context) error {
	a, err := d.inquire(ctx)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.failed = certain(err); err == nil {
		d.about = a
	}
	return d.failed
}

func (d *driver) inquire(ctx context.Context) (about, error) {
	var a about
	if err := d.identify(ctx); err != nil {
		return a, err
	}
	services, err := call(ctx, d, d.identity.GetPluginCapabilities, &csi.GetPluginCapabilitiesRequest{})
	if err != nil {
		return a, err
	}
	a.plugin = set(services.GetCapabilities(), func(c *csi.PluginCapability) csi.PluginCapability_Service_Type { return c.GetService().GetType() })
	nodes, err := call(ctx, d, d.node.NodeGetCapabilities, &csi.NodeGetCapabilitiesRequest{})
	if err != nil {
		return a, err
	}
	a.nodes = set(nodes.GetCapabilities(), func(c *csi.NodeServiceCapability) csi.NodeServiceCapability_RPC_Type { return c.GetRpc().GetType() })
	if a.plugin[csi.PluginCapability_Service_CONTROLLER_SERVICE] {
		if a.control, err = d.controls(ctx); err != nil {
			return a, err
		}
	}
	return a, d.locate(ctx, &a)
}

// controls are the capabilities of the Controller service; none if that is elsewhere: a
// plugin has it, and need not serve it at each of its endpoints (csi-spec, "Architecture").
func (d *driver) controls(ctx context.Context) (map[csi.ControllerServiceCapability_RPC_Type]bool, error) {
	control, err := call(ctx, d, d.controller.ControllerGetCapabilities, &csi.ControllerGetCapabilitiesRequest{})
	if failed, ok := errors.AsType[*CallError](err); ok && failed.Code == codes.Unimplemented {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return set(control.GetCapabilities(), func(c *csi.ControllerServiceCapability) csi.ControllerServiceCapability_RPC_Type {
		return c.GetRpc().GetType()
	}), nil
}

// identify makes sure that it is this driver that answers, and that it is ready.
func (d *driver) identify(ctx context.Context) error {
	soon, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	info, err := call(soon, d, d.identity.GetPluginInfo, &csi.GetPluginInfoRequest{})
	if err != nil {
		return err
	}
	if info.GetName() != d.name {
		return fmt.Errorf("driver %s: at its endpoint %s is a driver that calls itself %q: give each driver a socket of its own", d.name, d.endpoint, info.GetName())
	}
	probe, err := call(ctx, d, d.identity.Probe, &csi.ProbeRequest{})
	if err != nil {
		return err
	}
	if ready := probe.GetReady(); ready != nil && !ready.GetValue() {
		return fmt.Errorf("driver %s: Probe: it is not ready yet: look at the driver's log", d.name)
	}
	return nil
}

func (d *driver) locate(ctx context.Context, a *about) error {
	info, err := call(ctx, d, d.node.NodeGetInfo, &csi.NodeGetInfoRequest{})
	if err != nil {
		return err
	}
	if info.GetNodeId() == "" {
		return fmt.Errorf("driver %s: NodeGetInfo: the node ID is empty: tell the driver the node's name", d.name)
	}
	a.nodeID, a.limit, a.topology = info.GetNodeId(), info.GetMaxVolumesPerNode(), info.GetAccessibleTopology().GetSegments()
	return nil
}

// follow asks the driver again each time that it was away, until ctx ends or the
// connection is closed. back is called when it is ready again.
func (d *driver) follow(ctx context.Context, back func()) {
	away := false
	for ctx.Err() == nil {
		state := d.conn.GetState()
		switch state {
		case connectivity.Shutdown:
			return
		case connectivity.Ready:
			if away && d.ask(ctx) == nil {
				away = false
				back()
			}
		case connectivity.Idle:
			d.conn.Connect()
			away = true
		default:
			away = true
		}
		pause, cancel := context.WithTimeout(ctx, askAgain)
		d.conn.WaitForStateChange(pause, state)
		cancel()
	}
}

// capabilities are those of its services, by their names in csi-spec, sorted.
func (a about) capabilities() []string {
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

func set[C any, K comparable](all []C, key func(C) K) map[K]bool {
	keys := make(map[K]bool, len(all))
	for _, c := range all {
		keys[key(c)] = true
	}
	return keys
}

// inTopology tells whether a node with the segments is in a topology.
func inTopology(segments, topology map[string]string) bool {
	for key, value := range topology {
		if segments[key] != value {
			return false
		}
	}
	return true
}

// merged is first with second's entries before its own.
func merged(first, second map[string]string) map[string]string {
	all := maps.Clone(first)
	if all == nil {
		all = map[string]string{}
	}
	maps.Copy(all, second)
	return all
}
