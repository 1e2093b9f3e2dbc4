package router

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/attributes"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"

	"github.com/trivet-csi/trivet/internal/grpcserver"
)

// links are the connections to the drivers of all nodes. They share one grpc.ClientConn, because a ClientConn for each of
// thousands of nodes needs as much memory as its connection.
type links struct {
	client  func(node string) *tls.Config
	conn    *grpc.ClientConn
	manager balancer.ClientConn // creates the connections of conn
	started chan struct{}       // closed when manager is set
}

// newLinks returns links without nodes.
func newLinks(client func(node string) *tls.Config) *links {
	ls := &links{client: client, started: make(chan struct{})}
	self := manual.NewBuilderWithScheme("nodes")
	self.InitialState(resolver.State{Attributes: attributes.New(linksKey{}, ls)})
	var err error
	ls.conn, err = grpc.NewClient("nodes:///nodes", append(grpcserver.TraceClient("node", calledNode),
		grpc.WithResolvers(self),
		grpc.WithDefaultServiceConfig(`{"loadBalancingConfig": [{"`+balancerName+`": {}}]}`),
		grpc.WithDisableServiceConfig(),
		grpc.WithTransportCredentials(handshakes{credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS13}), ls}),
		grpc.WithNoProxy(),      // the environment may set a proxy for addresses outside the cluster
		grpc.WithIdleTimeout(0), // keeps idle connections, so that calls need no handshake
		// Each time a node refuses pings, gRPC doubles Time, without a limit, for the later connections to all nodes. Then the
		// probes of dial find a machine that does not answer, and only the deadlines of calls and of the requests for pools find
		// a suspended driver.
		grpc.WithContextDialer(dial),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 5 * time.Second, PermitWithoutStream: true}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 5 * time.Second},
			MinConnectTimeout: 3 * time.Second,
		}),
		// Small buffers, because there may be thousands of idle connections. crypto/tls has its
		// own read buffer.
		grpc.WithReadBufferSize(0), grpc.WithWriteBufferSize(4<<10),
	)...)
	if err != nil {
		panic(err) // the options are constant
	}
	ls.conn.Connect()
	<-ls.started
	return ls
}

// dial connects to a node. The kernel probes a connection on which nothing was received for longer than gRPC waits between two pings,
// and closes it if a probe gets no answer. gRPC limits the wait for the acknowledgement of sent data (TCP_USER_TIMEOUT), whatever the
// time between two pings is.
func dial(ctx context.Context, address string) (net.Conn, error) {
	d := net.Dialer{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 1}}
	return d.DialContext(ctx, "tcp", address)
}

// close closes the connections to all nodes.
func (ls *links) close() { _ = ls.conn.Close() }

// repick lets the calls that wait for a connection select one again.
func (ls *links) repick() {
	ls.manager.UpdateState(balancer.State{ConnectivityState: connectivity.Ready, Picker: picker{}})
}

// link is the connection to the driver of a node.
type link struct {
	links   *links
	node    string
	changed func() // called when the connection is made, has failed or is lost; it must not block

	mu      sync.Mutex
	address string
	current *connection        // nil without an address
	state   connectivity.State // of current
	failure error              // of the last attempt to connect; nil after a success
}

// connection is a connection of a link to one address.
type connection struct {
	link      *link
	sub       balancer.SubConn
	raw       net.Conn      // of the last handshake
	attempted chan struct{} // closed when the connection is made or has failed
}

var (
	errNoDriver = errors.New("no driver runs on the node")
	errRemoved  = errors.New("the node was removed")
)

// setAddress changes the address for later calls. Pending calls continue at the previous address. An empty address means
// that no driver runs. The caller serializes the calls of setAddress and close.
func (l *link) setAddress(address string) error {
	l.mu.Lock()
	before := l.current
	isSet := before != nil || l.failure != nil // setAddress was called before
	same := isSet && address == l.address
	l.mu.Unlock()
	if same {
		return nil
	}
	var current *connection
	failure := errNoDriver
	if address != "" {
		var err error
		if current, err = l.newConnection(address); err != nil {
			return err
		}
		failure = nil
	}
	l.replace(address, current, failure)
	if before != nil {
		before.sub.Shutdown()
	}
	l.links.repick()
	l.changed()
	return nil
}

// newConnection returns a connection that is not made yet.
func (l *link) newConnection(address string) (c *connection, err error) {
	c = &connection{link: l, attempted: make(chan struct{})}
	addresses := []resolver.Address{{Addr: address, Attributes: attributes.New(connectionKey{}, c)}}
	c.sub, err = l.links.manager.NewSubConn(addresses, balancer.NewSubConnOptions{StateListener: c.update}) //nolint:staticcheck // deprecated only for several addresses
	return c, err
}

// replace replaces the connection.
func (l *link) replace(address string, c *connection, failure error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.address, l.current, l.failure, l.state = address, c, failure, connectivity.Idle
}

// close ends the link. Pending calls fail.
func (l *link) close() {
	l.mu.Lock()
	c := l.current
	var raw net.Conn
	if c != nil {
		raw = c.raw
	}
	l.mu.Unlock()
	l.replace("", nil, errRemoved)
	if c != nil {
		c.sub.Shutdown()
	}
	if raw != nil {
		_ = raw.Close() // Shutdown waits for pending calls
	}
	l.links.repick()
}

// update handles a new state of the connection. gRPC calls it for one connection after the other.
func (c *connection) update(s balancer.SubConnState) {
	l := c.link
	if l.setState(c, s) {
		l.changed()
	}
	l.links.repick()
}

// setState stores the state of a connection. It returns true if changed must be called.
func (l *link) setState(c *connection, s balancer.SubConnState) (changed bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c != l.current {
		return false
	}
	l.state = s.ConnectivityState
	switch l.state {
	case connectivity.Ready, connectivity.TransientFailure:
		if l.failure == nil {
			close(c.attempted)
		}
		changed = l.failure == nil || l.state == connectivity.Ready
		l.failure = s.ConnectionError // nil if the connection is made
	case connectivity.Idle:
		if l.failure != nil { // the delay after a failed attempt has ended
			c.sub.Connect()
			break
		}
		changed = true // the connection is lost
		c.attempted = make(chan struct{})
	default:
	}
	return changed
}

// connect makes the connection. It returns when the connection is made or has failed, or when ctx ends.
func (l *link) connect(ctx context.Context) {
	l.mu.Lock()
	c := l.current
	if c == nil {
		l.mu.Unlock()
		return
	}
	attempted := c.attempted
	c.sub.Connect()
	l.mu.Unlock()
	select {
	case <-attempted:
	case <-ctx.Done():
	}
}

// currentAddress returns the address of the node's driver; empty if no driver runs.
func (l *link) currentAddress() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.address
}

// connected reports whether a call would be sent immediately.
func (l *link) connected() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.state == connectivity.Ready
}

// failing reports whether a call would fail immediately.
func (l *link) failing() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.failure != nil
}

// answers reports whether a call would be sent or fail immediately.
func (l *link) answers() bool { return l.connected() || l.failing() }

// removed reports whether close was called.
func (l *link) removed() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return errors.Is(l.failure, errRemoved)
}

// pick selects the connection of a call.
func (l *link) pick() (balancer.PickResult, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.state == connectivity.Ready:
		return balancer.PickResult{SubConn: l.current.sub}, nil
	case l.failure != nil:
		return balancer.PickResult{}, l.failure
	case l.current != nil:
		l.current.sub.Connect()
	}
	return balancer.PickResult{}, balancer.ErrNoSubConnAvailable
}

// Invoke implements grpc.ClientConnInterface.
func (l *link) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	return l.links.conn.Invoke(context.WithValue(ctx, linkKey{}, l), method, args, reply, opts...)
}

// NewStream implements grpc.ClientConnInterface.
func (l *link) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	return l.links.conn.NewStream(context.WithValue(ctx, linkKey{}, l), desc, method, opts...)
}

// Keys of the links of a resolver's state, of the connection of an address, and of the link of a call.
type (
	linksKey      struct{}
	connectionKey struct{}
	linkKey       struct{}
)

// calledNode returns the name of the node that a call is sent to.
func calledNode(ctx context.Context) string { return ctx.Value(linkKey{}).(*link).node }

// picker is the balancer.Picker of links.
type picker struct{}

// Pick implements balancer.Picker.
func (picker) Pick(info balancer.PickInfo) (balancer.PickResult, error) {
	return info.Ctx.Value(linkKey{}).(*link).pick()
}

// handshakes are the credentials of links. The address of a connection contains the node whose certificate is accepted.
type handshakes struct {
	credentials.TransportCredentials
	links *links
}

// ClientHandshake implements credentials.TransportCredentials.
func (h handshakes) ClientHandshake(ctx context.Context, authority string, raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c := credentials.ClientHandshakeInfoFromContext(ctx).Attributes.Value(connectionKey{}).(*connection)
	c.link.mu.Lock()
	c.raw = raw
	c.link.mu.Unlock()
	return credentials.NewTLS(h.links.client(c.link.node)).ClientHandshake(ctx, authority, raw)
}

// Clone implements credentials.TransportCredentials.
func (h handshakes) Clone() credentials.TransportCredentials { return h }

// balancerName is the name of the balancer of links in gRPC's registry.
const balancerName = "trivet_nodes"

// gRPC finds a balancer only in its registry, which must not change later.
func init() { balancer.Register(balancerBuilder{}) }

type balancerBuilder struct{}

// Name implements balancer.Builder.
func (balancerBuilder) Name() string { return balancerName }

// Build implements balancer.Builder.
func (balancerBuilder) Build(manager balancer.ClientConn, _ balancer.BuildOptions) balancer.Balancer {
	return linkBalancer{manager}
}

// linkBalancer is the balancer.Balancer of links. It only passes its balancer.ClientConn to the links, which create the
// connections themselves.
type linkBalancer struct{ manager balancer.ClientConn }

// UpdateClientConnState implements balancer.Balancer. It is called once, because the resolver's state does not change.
func (b linkBalancer) UpdateClientConnState(s balancer.ClientConnState) error {
	ls := s.ResolverState.Attributes.Value(linksKey{}).(*links)
	ls.manager = b.manager
	ls.repick()
	close(ls.started)
	return nil
}

// ResolverError implements balancer.Balancer.
func (linkBalancer) ResolverError(error) {}

// UpdateSubConnState implements balancer.Balancer.
func (linkBalancer) UpdateSubConnState(balancer.SubConn, balancer.SubConnState) {}

// ExitIdle implements balancer.Balancer.
func (linkBalancer) ExitIdle() {}

// Close implements balancer.Balancer.
func (linkBalancer) Close() {}
