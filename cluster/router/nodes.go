package router

import (
	"context"
	"crypto/tls"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/volume"
)

// fanOut bounds the concurrent calls to nodes for one call.
const fanOut = 32

// Host is a node of the cluster.
type Host struct {
	// Name is the node's name, which is also its CSI node ID.
	Name string
	// Address is host:port of the node's driver; empty while no driver runs.
	Address string
}

// nodes are the nodes of the cluster and their pools.
type nodes struct {
	links   *links
	refresh func(*node) // calls the node's refresh in a goroutine
	tasks   sync.WaitGroup

	setting sync.Mutex // serializes set
	closed  bool       // the nodes do not change any more

	mu         sync.RWMutex
	isSet      bool // set was called
	byName     map[string]*node
	byTopology map[string]*node
	sorted     []*node // by name; replaced, never changed
	announced  announcements

	owners    Owners
	recording chan struct{} // a semaphore for record
	recorded  recordState   // that of the last successful call of record
}

func newNodes(ctx context.Context, client func(node string) *tls.Config, owners Owners) *nodes {
	ns := &nodes{links: newLinks(client), byName: map[string]*node{}, byTopology: map[string]*node{}, announced: newAnnouncements(), owners: owners, recording: make(chan struct{}, 1)}
	turns := make(chan struct{}, maxConnecting)
	ns.refresh = func(n *node) { ns.tasks.Go(func() { n.refresh(ctx, turns) }) }
	ns.tasks.Go(func() {
		every(ctx, dueInterval, ns.requestDue)
		ns.close()
	})
	ns.tasks.Go(func() { every(ctx, recordInterval, func() { ns.recordNew(ctx) }) })
	return ns
}

// every calls do at an interval until ctx ends.
func every(ctx context.Context, interval time.Duration, do func()) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			do()
		case <-ctx.Done():
			return
		}
	}
}

// requestDue starts the requests for the pools of all nodes whose last request is older than requestInterval.
func (ns *nodes) requestDue() {
	all, _ := ns.all()
	before := time.Now().Add(-requestInterval)
	for _, n := range all {
		if n.due(before) {
			ns.refresh(n)
		}
	}
}

// close closes the connections to all nodes.
func (ns *nodes) close() {
	ns.setting.Lock()
	ns.closed = true
	ns.setting.Unlock()
	ns.links.close()
}

// set replaces the nodes.
func (ns *nodes) set(hosts []Host) {
	addresses := map[string]string{}
	for _, h := range hosts {
		addresses[h.Name] = h.Address
	}
	ns.setting.Lock()
	defer ns.setting.Unlock()
	if ns.closed {
		return
	}
	ns.mu.Lock()
	ns.isSet = true
	for name := range addresses {
		if ns.byName[name] == nil {
			n := newNode(name, ns.links, ns.index, ns.refresh)
			ns.byName[name], ns.byTopology[n.topology] = n, n
		}
	}
	var changed []poolKey
	var removed []*node
	for name, n := range ns.byName {
		if _, exists := addresses[name]; !exists {
			removed = append(removed, n)
			delete(ns.byName, name)
			delete(ns.byTopology, n.topology)
			changed = append(changed, ns.announced.remove(n)...)
		}
	}
	ns.sorted = slices.SortedFunc(maps.Values(ns.byName), func(a, b *node) int { return strings.Compare(a.name, b.name) })
	current := ns.sorted
	ns.mu.Unlock()
	for _, n := range removed {
		n.close()
	}
	for _, n := range current {
		if err := n.setAddress(addresses[n.name]); err != nil {
			klog.Background().Error(err, "Preparing a connection failed", "node", n.name)
		}
	}
	ns.logUnserved(changed)
}

// all returns the nodes, sorted by name. It fails with ErrUnavailable before set was called.
func (ns *nodes) all() ([]*node, error) {
	ns.mu.RLock()
	defer ns.mu.RUnlock()
	if !ns.isSet {
		return nil, volume.Errorf(volume.ErrUnavailable, "the nodes of the cluster are not known yet: check that the API server is reachable")
	}
	return ns.sorted, nil
}

// named returns the node with a name, or nil if it does not exist.
func (ns *nodes) named(name string) *node {
	ns.mu.RLock()
	defer ns.mu.RUnlock()
	return ns.byName[name]
}

// withTopology returns the node with a value in topologies, or nil if it does not exist.
func (ns *nodes) withTopology(value string) *node {
	ns.mu.RLock()
	defer ns.mu.RUnlock()
	return ns.byTopology[value]
}

// forID returns the node that serves the pool of a volume or snapshot. If no node serves the pool, forID requests
// the pools of its owner again. If the owner does not have the pool either, it requests those of the nodes that announce the
// pool and of its possible owners, or of all nodes if no node announces the pool.
func (ns *nodes) forID(ctx context.Context, id volume.ID) (*node, error) {
	key := keyOf(id)
	if n, _ := ns.serving(ctx, key); n != nil {
		return n, nil
	}
	all, err := ns.all()
	if err != nil {
		return nil, err
	}
	owner := ns.named(ns.owner(key))
	if owner != nil { // after a restart, the answers of thousands of other nodes take long
		owner.requestPools(ctx, freshness)
		if n, _ := ns.serving(ctx, key); n != nil {
			return n, nil
		}
	}
	candidates := slices.Clone(ns.announcing(key))
	if len(candidates) == 0 {
		candidates = all
	} else if owner == nil {
		_, expecting := ns.possibleOwners(key)
		candidates = append(candidates, expecting...)
	}
	ns.requestPools(ctx, candidates)
	n, err := ns.serving(ctx, key)
	if n == nil && err == nil {
		err = ns.missing(id, all)
	}
	return n, err
}

// requestPools requests the pools of nodes.
func (ns *nodes) requestPools(ctx context.Context, all []*node) {
	_ = each(ctx, all, func(ctx context.Context, n *node) error {
		n.requestPools(ctx, freshness)
		return nil
	})
}

// each calls do for nodes, up to fanOut at a time, and returns the first error.
func each(ctx context.Context, all []*node, do func(context.Context, *node) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(fanOut)
	for _, n := range all {
		group.Go(func() error { return do(ctx, n) })
	}
	return group.Wait()
}

// missing returns the error for a volume or snapshot whose pool no node announces. The error is never
// ErrNotFound, because the volume may exist.
func (ns *nodes) missing(id volume.ID, all []*node) error {
	key := keyOf(id)
	owner := ns.owner(key)
	n := ns.named(owner)
	if n != nil { // only the owner can serve the pool
		all = []*node{n}
	}
	silent, closed := unavailable(all, id.Pool)
	switch {
	case owner != "" && n == nil:
		return volume.Errorf(volume.ErrPrecondition, "%s: its node %q no longer exists, and no other node has pool %s: restore the node or its disk, or remove the PersistentVolume by hand (docs/operations/nodes.md, \"A node is gone\")", id, owner, key)
	case len(silent) > 0:
		return volume.Errorf(volume.ErrUnavailable, "%s: none of the nodes that answer has pool %s; those that do not answer are %s: check the driver's pods there", id, key, quoted(names(silent)))
	case len(closed) > 0:
		return volume.Errorf(volume.ErrUnavailable, "%s: no node has pool %s open; pool %q is closed on %s: check the driver's log there", id, key, id.Pool, quoted(names(closed)))
	}
	return volume.Errorf(volume.ErrPrecondition, "%s: no node has pool %s: restore its node or its disk, or remove the PersistentVolume by hand (docs/operations/nodes.md, \"A node is gone\" or \"A disk is lost\")", id, key)
}

// unavailable returns the nodes that did not answer the last request (silent), and the other nodes that
// have a closed pool with the given name (closed). An empty name matches all pools.
func unavailable(all []*node, pool string) (silent, closed []*node) {
	for _, n := range all {
		switch v := n.view(); {
		case !v.answered || v.lastError != nil:
			silent = append(silent, n)
		case v.closed(pool):
			closed = append(closed, n)
		}
	}
	return silent, closed
}

// names returns the sorted names of nodes.
func names(nodes []*node) []string {
	var names []string
	for _, n := range nodes {
		names = append(names, n.name)
	}
	slices.Sort(names)
	return names
}

// quoted quotes the names and joins the first five.
func quoted(names []string) string {
	out := make([]string, len(names))
	for i, name := range names {
		out[i] = strconv.Quote(name)
	}
	return firstFew(out, ", ")
}

// firstFew joins the first five texts, and adds the number of the others.
func firstFew(texts []string, separator string) string {
	const most = 5
	if len(texts) > most {
		return fmt.Sprintf("%s and %d more", strings.Join(texts[:most], separator), len(texts)-most)
	}
	return strings.Join(texts, separator)
}
