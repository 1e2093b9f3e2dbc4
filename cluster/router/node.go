package router

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/identity"
	"github.com/trivet-csi/trivet/internal/errtext"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/volume"
)

const (
	// The pools of a node are requested every requestInterval; requestTimeout bounds one request.
	requestInterval = 30 * time.Second
	requestTimeout  = 5 * time.Second
	// dueInterval is the interval of the search for nodes whose pools must be requested.
	dueInterval = 250 * time.Millisecond
	// recordInterval is the interval at which the owners of new pools are recorded.
	recordInterval = time.Second
	// maxConnecting is the number of connections that are made at the same time. Thousands of concurrent handshakes need much
	// memory, and some would exceed their timeout. A node that does not answer delays the others by at most connectTurn.
	maxConnecting = 64
	connectTurn   = 250 * time.Millisecond
	// freshness is the maximum age of a request whose result is used instead of a new request.
	freshness = time.Second
)

// poolKey identifies a node-local pool, as in volume IDs.
type poolKey struct{ name, uuid string }

func keyOf(id volume.ID) poolKey { return poolKey{id.Pool, id.PoolUUID} }

// compare orders pools by UUID, then by name.
func (k poolKey) compare(other poolKey) int {
	return cmp.Or(strings.Compare(k.uuid, other.uuid), strings.Compare(k.name, other.name))
}

// valid reports whether volume IDs can contain the name and the UUID.
func (k poolKey) valid() bool {
	id := volume.ID{Backend: "any", Pool: k.name, PoolUUID: k.uuid, Name: "any"}
	parsed, err := volume.ParseID(id.String())
	return err == nil && parsed == id
}

func (k poolKey) String() string { return k.name + "." + k.uuid }

// node is the connection to a node's driver, and the pools that it announced last.
type node struct {
	*link
	name string
	// topology is the node's value in CSI topologies.
	topology   string
	service    relay.Service // the Controller services
	controller csi.ControllerClient
	identity   csi.IdentityClient
	announced  func(*node)   // called after a change of the pools
	requesting chan struct{} // a semaphore for requestPools

	mu sync.Mutex
	// requested is the time of the last request for the pools, and lastError is its error.
	requested time.Time
	lastError error
	answered  bool // the node has answered at least one request
	// pools are the configured pools. A closed pool has an empty UUID. expected are the closed pools with
	// the UUIDs that they had when they were open.
	pools, expected []poolKey
	kinds           map[string]string // the kinds of the pools by name; replaced, never changed
}

// newNode returns a node without an address. After each change of its connection, refresh is called, which must not block.
func newNode(name string, ls *links, announced, refresh func(*node)) *node {
	n := &node{name: name, topology: volume.TopologyValue(name), announced: announced, requesting: make(chan struct{}, 1)}
	n.link = &link{links: ls, node: name, changed: func() { refresh(n) }}
	n.service, n.controller, n.identity = relay.Remote(n.link), csi.NewControllerClient(n.link), csi.NewIdentityClient(n.link)
	return n
}

// refresh makes the connection of a node. If it is made or has failed, refresh requests the pools. turns is a semaphore for
// the connections that are made at the same time.
func (n *node) refresh(ctx context.Context, turns chan struct{}) {
	if n.answers() {
		n.requestPools(ctx, 0)
		return
	}
	select {
	case turns <- struct{}{}:
	case <-ctx.Done():
		return
	}
	defer func() { <-turns }()
	limited, cancel := context.WithTimeout(ctx, connectTurn)
	defer cancel()
	n.connect(limited)
}

// due reports whether the last request for the pools ended before a time, and no request is running.
func (n *node) due(before time.Time) bool {
	n.mu.Lock()
	earlier := n.requested.Before(before)
	n.mu.Unlock()
	return earlier && len(n.requesting) == 0 && n.answers()
}

// requestPools requests the pools of the node, unless the last request is younger than maxAge. Concurrent calls
// wait for each other until their contexts end.
func (n *node) requestPools(ctx context.Context, maxAge time.Duration) {
	select {
	case n.requesting <- struct{}{}:
	case <-ctx.Done():
		return
	}
	defer func() { <-n.requesting }()
	n.mu.Lock()
	recent := time.Since(n.requested) < maxAge
	n.mu.Unlock()
	if recent {
		return
	}
	limited, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	info, err := n.identity.GetPluginInfo(limited, &csi.GetPluginInfoRequest{})
	if ctx.Err() != nil || n.removed() { // err says nothing about the node
		return
	}
	n.setError(ctx, n.explain(limited, err))
	if err == nil {
		n.setPools(info.GetManifest())
	}
}

// setError stores the error of a request, nil if it succeeded, and logs a change.
func (n *node) setError(ctx context.Context, err error) {
	n.mu.Lock()
	before := n.lastError
	n.lastError, n.requested = err, time.Now()
	n.mu.Unlock()
	log := klog.LoggerWithValues(klog.FromContext(ctx), "node", n.name)
	switch {
	case err != nil && errtext.Kind(before) != errtext.Kind(err):
		log.Info("A node does not answer; retrying", "reason", err.Error())
	case err == nil && before != nil:
		log.Info("A node answers again")
	}
}

// setPools stores the pools in a manifest (identity.Pools). It ignores pools that volume IDs cannot contain.
func (n *node) setPools(manifest map[string]string) {
	open, closed := identity.Pools(manifest)
	pools, expected := validKeys(open), validKeys(closed)
	n.mu.Lock()
	same := n.answered && slices.Equal(pools, n.pools) && slices.Equal(expected, n.expected)
	n.answered, n.pools, n.expected, n.kinds = true, pools, expected, identity.Kinds(manifest)
	n.mu.Unlock()
	if !same {
		n.announced(n)
	}
}

// validKeys returns the sorted keys of pools by name that volume IDs can contain.
func validKeys(uuids map[string]string) []poolKey {
	var keys []poolKey
	for name, uuid := range uuids {
		if key := (poolKey{name, uuid}); key.valid() {
			keys = append(keys, key)
		}
	}
	slices.SortFunc(keys, poolKey.compare)
	return keys
}

// view is a copy of a node's state.
type view struct {
	pools     []poolKey
	expected  []poolKey
	kinds     map[string]string
	requested bool // the pools were requested at least once
	answered  bool // the node has answered at least once
	lastError error
}

func (n *node) view() view {
	n.mu.Lock()
	defer n.mu.Unlock()
	return view{n.pools, n.expected, n.kinds, !n.requested.IsZero(), n.answered, n.lastError}
}

// viewFor returns the view for a call that uses the pools with a name. If the node has never answered or one of
// these pools is closed, viewFor requests the pools again, because the node may have opened them since.
func (n *node) viewFor(ctx context.Context, pool string) view {
	v := n.view()
	if v.answered && !v.closed(pool) {
		return v
	}
	n.requestPools(ctx, freshness)
	return n.view()
}

// named returns the pools with a name, or all pools if the name is empty.
func (v view) named(name string) []poolKey {
	return slices.DeleteFunc(slices.Clone(v.pools), func(k poolKey) bool { return name != "" && k.name != name })
}

// openPools returns the open pools.
func (v view) openPools() []poolKey {
	return slices.DeleteFunc(slices.Clone(v.pools), func(k poolKey) bool { return k.uuid == "" })
}

// open reports whether at least one pool with a name is open.
func (v view) open(name string) bool {
	return slices.ContainsFunc(v.named(name), func(k poolKey) bool { return k.uuid != "" })
}

// mayContain reports whether a pool with a name can contain volumes of a kind, or the node does not announce the kind of
// the pool, because its driver has an earlier version.
func (v view) mayContain(k backend.Kind, pool string) bool {
	kind, known := v.kinds[pool]
	return !known || k.Uses(kind)
}

// usable returns the names of the configured pools, open or closed, that may contain volumes of a kind.
func (v view) usable(k backend.Kind) (names []string) {
	for _, key := range v.pools {
		if v.mayContain(k, key.name) {
			names = append(names, key.name)
		}
	}
	return names
}

// has reports whether a pool with a name, or any pool if the name is empty, can contain volumes of a kind.
func (v view) has(k backend.Kind, name string) bool {
	pools := v.usable(k)
	return slices.Contains(pools, name) || name == "" && len(pools) > 0
}

// closed reports whether at least one pool with a name is not open.
func (v view) closed(name string) bool {
	return slices.ContainsFunc(v.named(name), func(k poolKey) bool { return k.uuid == "" })
}

// explain adds the node to an error that the connection may have caused, and to an error about the capacity, which
// names a pool that several nodes may have. It returns other errors unchanged. If the caller did not cancel, it replaces CANCELLED with UNAVAILABLE, because the connection
// or the node's driver ended.
func (n *node) explain(ctx context.Context, err error) error {
	s, _ := status.FromError(err) // the code of a nil error is OK
	switch s.Code() {
	case codes.Unavailable, codes.DeadlineExceeded:
	case codes.Canceled:
		if ctx.Err() == nil {
			s = status.New(codes.Unavailable, s.Message())
		}
	case codes.ResourceExhausted, codes.OutOfRange:
		return status.Errorf(s.Code(), "node %q: %s", n.name, s.Message())
	default:
		return err
	}
	address := n.currentAddress()
	switch {
	case address == "":
		return status.Errorf(s.Code(), "node %q: its driver is not running: check the driver's pod on that node, and whether an EndpointSlice of its Service lists it; if the node no longer exists, delete its Node object", n.name)
	case s.Code() == codes.Unavailable && !n.connected():
		return status.Errorf(s.Code(), "node %q cannot be reached at %s: %s", n.name, address, s.Message())
	}
	return status.Errorf(s.Code(), "node %q: %s", n.name, s.Message())
}
