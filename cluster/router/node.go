package router

import (
	"cmp"
	"context"
	"crypto/tls"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/identity"
	"github.com/trivet-csi/trivet/internal/errtext"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/volume"
)

const (
	// askInterval is how often a node is asked for its pools; askTimeout bounds one
	// such call.
	askInterval = 30 * time.Second
	askTimeout  = 5 * time.Second
	// freshness is how long an answer is good when a pool is looked for in vain.
	freshness = time.Second
)

// poolKey names a node-local pool as volume IDs do.
type poolKey struct{ name, uuid string }

func keyOf(id volume.ID) poolKey { return poolKey{id.Pool, id.PoolUUID} }

func (k poolKey) compare(other poolKey) int {
	return cmp.Or(strings.Compare(k.uuid, other.uuid), strings.Compare(k.name, other.name))
}

// valid tells whether there can be volumes in a pool of that name and UUID.
func (k poolKey) valid() bool {
	id := volume.ID{Backend: "any", Pool: k.name, PoolUUID: k.uuid, Name: "any"}
	parsed, err := volume.ParseID(id.String())
	return err == nil && parsed == id
}

func (k poolKey) String() string { return k.name + "." + k.uuid }

// node is the connection to one node's driver, and what it last said of its pools.
type node struct {
	name string
	// topology is the value that stands for the node in topology segments.
	topology   string
	conn       *grpc.ClientConn
	addresses  *manual.Resolver
	service    relay.Service // the Controller services
	controller csi.ControllerClient
	identity   csi.IdentityClient
	changed    func() // its pools are others than before
	stop       context.CancelFunc
	asking     chan struct{} // held by whoever asks it

	mu      sync.Mutex
	address string
	// tried is when it was last asked, known whether it has ever answered.
	tried time.Time
	known bool
	// pools are all that its configuration has; of one that is not open the UUID is
	// empty.
	pools []poolKey
	// trouble is why it was not reached the last time; nil: it was.
	trouble error
}

// newNode prepares a connection, which run makes and keeps.
func newNode(name, address string, config *tls.Config, changed func()) (*node, error) {
	n := &node{name: name, address: address, topology: volume.TopologyValue(name), addresses: manual.NewBuilderWithScheme("node"), changed: changed, asking: make(chan struct{}, 1)}
	n.addresses.InitialState(resolved(address))
	var err error
	n.conn, err = grpc.NewClient("node:///node",
		grpc.WithResolvers(n.addresses),
		grpc.WithTransportCredentials(credentials.NewTLS(config)),
		grpc.WithNoProxy(),      // the environment's is for what is outside the cluster
		grpc.WithIdleTimeout(0), // a connection that is there costs no call a handshake
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 5 * time.Second, PermitWithoutStream: true}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 5 * time.Second},
			MinConnectTimeout: 3 * time.Second,
		}),
		// There may be hundreds of connections, most of them quiet. crypto/tls has a
		// buffer of its own to read from.
		grpc.WithReadBufferSize(0), grpc.WithWriteBufferSize(4<<10),
		grpc.WithDisableServiceConfig(),
	)
	if err != nil {
		return nil, err
	}
	n.service, n.controller, n.identity = relay.Remote(n.conn), csi.NewControllerClient(n.conn), csi.NewIdentityClient(n.conn)
	return n, nil
}

// setAddress points the connection elsewhere; calls under way end where they are.
// Empty: the driver runs nowhere now.
func (n *node) setAddress(address string) {
	n.mu.Lock()
	same := address == n.address
	n.address = address
	n.mu.Unlock()
	if same {
		return
	}
	n.addresses.UpdateState(resolved(address))
}

func resolved(address string) (state resolver.State) {
	if address != "" {
		state.Endpoints = []resolver.Endpoint{{Addresses: []resolver.Address{{Addr: address}}}}
	}
	return state
}

// run keeps the connection, and asks for the pools whenever it is there again and
// now and then, until ctx ends. asked is called after each answer.
func (n *node) run(ctx context.Context, asked func(context.Context)) {
	defer n.conn.Close()
	for ctx.Err() == nil {
		state := n.conn.GetState()
		if state == connectivity.Idle {
			n.conn.Connect()
		}
		if state == connectivity.Ready || state == connectivity.TransientFailure {
			n.ask(ctx, 0)
			asked(ctx)
		}
		waiting, cancel := context.WithTimeout(ctx, askInterval)
		n.conn.WaitForStateChange(waiting, state)
		cancel()
	}
}

// ask asks the node for its pools, unless that was done within a time before. It
// does not wait longer than ctx for somebody else who does.
func (n *node) ask(ctx context.Context, within time.Duration) {
	select {
	case n.asking <- struct{}{}:
	case <-ctx.Done():
		return
	}
	defer func() { <-n.asking }()
	if n.triedWithin(within) {
		return
	}
	limited, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	info, err := n.identity.GetPluginInfo(limited, &csi.GetPluginInfoRequest{})
	if ctx.Err() != nil { // the caller has gone
		return
	}
	n.note(ctx, n.explain(limited, err))
	if err == nil {
		n.setPools(info.GetManifest())
	}
}

func (n *node) triedWithin(d time.Duration) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return time.Since(n.tried) < d
}

// note remembers how the node was reached, and logs when that changes.
func (n *node) note(ctx context.Context, err error) {
	n.mu.Lock()
	before := n.trouble
	n.trouble, n.tried = err, time.Now()
	n.mu.Unlock()
	log := klog.LoggerWithValues(klog.FromContext(ctx), "node", n.name)
	switch {
	case err != nil && errtext.Kind(before) != errtext.Kind(err):
		log.Info("A node does not answer; it is tried again", "reason", err.Error())
	case err == nil && before != nil:
		log.Info("A node answers again")
	}
}

func (n *node) setPools(manifest map[string]string) {
	var pools []poolKey
	for name, uuid := range identity.Pools(manifest) {
		key := poolKey{name, uuid}
		if key.valid() {
			pools = append(pools, key)
		}
	}
	slices.SortFunc(pools, poolKey.compare)
	n.mu.Lock()
	same := n.known && slices.Equal(pools, n.pools)
	n.known, n.pools = true, pools
	n.mu.Unlock()
	if !same {
		n.changed()
	}
}

// view is what is known of a node.
type view struct {
	pools   []poolKey
	tried   bool // it was asked once
	known   bool // it has answered once
	trouble error
}

func (n *node) view() view {
	n.mu.Lock()
	defer n.mu.Unlock()
	return view{n.pools, !n.tried.IsZero(), n.known, n.trouble}
}

// viewFor is view for a call about the pools of a name. A node that has just started
// is asked anew.
func (n *node) viewFor(ctx context.Context, pool string) view {
	v := n.view()
	if v.known && !v.closed(pool) {
		return v
	}
	n.ask(ctx, freshness)
	return n.view()
}

// named are the pools of a name; all if it is empty.
func (v view) named(name string) []poolKey {
	return slices.DeleteFunc(slices.Clone(v.pools), func(k poolKey) bool { return name != "" && k.name != name })
}

// open tells whether one of them is open.
func (v view) open(name string) bool {
	return slices.ContainsFunc(v.named(name), func(k poolKey) bool { return k.uuid != "" })
}

func (v view) has(name string) bool { return len(v.named(name)) > 0 }

// closed tells whether one of the pools of a name, any if it is empty, is not open.
func (v view) closed(name string) bool {
	return slices.ContainsFunc(v.named(name), func(k poolKey) bool { return k.uuid == "" })
}

// connected tells whether a call would go out at once.
func (n *node) connected() bool { return n.conn.GetState() == connectivity.Ready }

// explain says which node an error is of, where the code speaks of the way to it;
// every other error is the node's own word, and stays as it is. A call that its
// caller did not cancel was cut off on the way, or by the end of the node's driver.
func (n *node) explain(ctx context.Context, err error) error {
	s, _ := status.FromError(err) // of nil: OK
	switch s.Code() {
	case codes.Unavailable, codes.DeadlineExceeded:
	case codes.Canceled:
		if ctx.Err() == nil {
			s = status.New(codes.Unavailable, s.Message())
		}
	default:
		return err
	}
	n.mu.Lock()
	address := n.address
	n.mu.Unlock()
	switch {
	case address == "":
		return status.Errorf(s.Code(), "node %q: its driver is not running: look at the driver's pod on that node; if the node is gone for good, delete its Node object", n.name)
	case s.Code() == codes.Unavailable && !n.connected():
		return status.Errorf(s.Code(), "node %q cannot be reached at %s: %s", n.name, address, s.Message())
	}
	return status.Errorf(s.Code(), "node %q: %s", n.name, s.Message())
}
