package router

import (
	"context"
	"crypto/tls"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/volume"
)

// fanOut bounds how many nodes are called at once for one call.
const fanOut = 32

// Host is a node that there is.
type Host struct {
	// Name is the node's name, which is also its CSI node ID.
	Name string
	// Address is host:port of its driver; empty where none runs now.
	Address string
}

// nodes are all there are, and which of them has which pool.
type nodes struct {
	client func(node string) *tls.Config
	begin  func(*node) // keeps its connection from now on
	tasks  sync.WaitGroup

	setting sync.Mutex // held by whoever changes which nodes there are

	mu     sync.RWMutex
	told   bool // which nodes there are
	byName map[string]*node
	sorted []*node // by name; never changed, but replaced
	owners map[poolKey][]*node
	// gone remembers who had the pools of nodes that are no more.
	gone map[poolKey]string
}

func newNodes(ctx context.Context, client func(node string) *tls.Config) *nodes {
	ns := &nodes{client: client, byName: map[string]*node{}, owners: map[poolKey][]*node{}, gone: map[poolKey]string{}}
	ns.begin = func(n *node) {
		ctx, stop := context.WithCancel(ctx)
		n.stop = stop
		ns.tasks.Go(func() { n.run(ctx) })
	}
	return ns
}

// set makes the nodes those of a list.
func (ns *nodes) set(hosts []Host) {
	addresses := map[string]string{}
	for _, h := range hosts {
		addresses[h.Name] = h.Address
	}
	ns.setting.Lock()
	defer ns.setting.Unlock()
	ns.mu.Lock()
	ns.told = true
	for name, address := range addresses {
		if ns.byName[name] == nil {
			ns.add(name, address)
		}
	}
	for name, n := range ns.byName {
		if _, there := addresses[name]; !there {
			ns.remove(n)
		}
	}
	ns.sorted = slices.SortedFunc(maps.Values(ns.byName), func(a, b *node) int { return strings.Compare(a.name, b.name) })
	current := ns.sorted
	ns.mu.Unlock()
	for _, n := range current {
		n.setAddress(addresses[n.name])
	}
	ns.index()
}

// add is called with mu held.
func (ns *nodes) add(name, address string) {
	maps.DeleteFunc(ns.gone, func(_ poolKey, node string) bool { return node == name }) // it is back
	n, err := newNode(name, address, ns.client(name), ns.index)
	if err != nil { // no target that is always the same is refused
		klog.Background().Error(err, "Preparing a connection failed", "node", name)
		return
	}
	ns.byName[name] = n
	ns.begin(n)
}

// remove is called with mu held.
func (ns *nodes) remove(n *node) {
	n.stop()
	delete(ns.byName, n.name)
	for _, key := range n.view().pools {
		if key.uuid != "" {
			ns.gone[key] = n.name
		}
	}
}

// index finds out anew which node has which pool.
func (ns *nodes) index() {
	ns.mu.Lock()
	defer ns.mu.Unlock()
	owners := map[poolKey][]*node{}
	for _, n := range ns.byName {
		for _, key := range n.view().pools {
			if key.uuid != "" {
				owners[key] = append(owners[key], n)
				delete(ns.gone, key)
			}
		}
	}
	for key, claims := range owners {
		if len(claims) > 1 && len(ns.owners[key]) < 2 {
			klog.Background().Error(conflict(key, claims), "A pool is served to nobody")
		}
	}
	ns.owners = owners
}

// wait returns when all connections are closed, after the context has ended.
func (ns *nodes) wait() { ns.tasks.Wait() }

func (ns *nodes) ready() bool {
	ns.mu.RLock()
	defer ns.mu.RUnlock()
	return ns.told
}

// all are the nodes by name (ErrUnavailable as long as it is not known which there
// are).
func (ns *nodes) all() ([]*node, error) {
	ns.mu.RLock()
	defer ns.mu.RUnlock()
	if !ns.told {
		return nil, volume.Errorf(volume.ErrUnavailable, "it is not known yet which nodes there are: is the API server reachable?")
	}
	return ns.sorted, nil
}

// knows is nil if there is a node of a name (ErrNotFound).
func (ns *nodes) knows(name string) error {
	if _, err := ns.all(); err != nil {
		return err
	}
	if ns.named(name) == nil {
		return volume.Errorf(volume.ErrNotFound, "node_id %q: there is no such node now", name)
	}
	return nil
}

// named is the node of a name; nil if there is none.
func (ns *nodes) named(name string) *node {
	ns.mu.RLock()
	defer ns.mu.RUnlock()
	return ns.byName[name]
}

// claims are the nodes that have a pool; more than one is an error of theirs.
func (ns *nodes) claims(key poolKey) []*node {
	ns.mu.RLock()
	defer ns.mu.RUnlock()
	return ns.owners[key]
}

// disputed is nil if no other node has one of a node's pools of a name.
func (ns *nodes) disputed(v view, pool string) error {
	for _, key := range v.named(pool) {
		if claims := ns.claims(key); len(claims) > 1 {
			return conflict(key, claims)
		}
	}
	return nil
}

// owner finds the node that has the pool of a volume or snapshot. If none is known, or more than one,
// the nodes are asked anew.
func (ns *nodes) owner(ctx context.Context, id volume.ID) (*node, error) {
	key := keyOf(id)
	doubtful := ns.claims(key)
	if len(doubtful) == 1 {
		return doubtful[0], nil
	}
	all, err := ns.all()
	if err != nil {
		return nil, err
	}
	if len(doubtful) == 0 {
		doubtful = all
	}
	ns.ask(ctx, doubtful)
	switch claims := ns.claims(key); len(claims) {
	case 1:
		return claims[0], nil
	case 0:
		return nil, ns.missing(id, all)
	default:
		return nil, conflict(key, claims)
	}
}

func (ns *nodes) ask(ctx context.Context, all []*node) {
	var group errgroup.Group
	group.SetLimit(fanOut)
	for _, n := range all {
		group.Go(func() error {
			n.ask(ctx, freshness)
			return nil
		})
	}
	_ = group.Wait() // none returns one
}

// missing says why no node has the pool of a volume or snapshot. That may well exist:
// never ErrNotFound.
func (ns *nodes) missing(id volume.ID, all []*node) error {
	key := keyOf(id)
	ns.mu.RLock()
	gone := ns.gone[key]
	ns.mu.RUnlock()
	silent, closed := unsure(all, id.Pool)
	switch {
	case gone != "":
		return volume.Errorf(volume.ErrPrecondition, "%s: its node %q is gone, and no other node has pool %s: bring the node or its disk back, or remove the PersistentVolume by hand (docs/kubernetes.md, \"A node is gone\")", id, gone, key)
	case len(silent) > 0:
		return volume.Errorf(volume.ErrUnavailable, "%s: none of the nodes that answer has pool %s; those that do not answer are %s", id, key, list(names(silent)))
	case len(closed) > 0:
		return volume.Errorf(volume.ErrUnavailable, "%s: no node has pool %s open; pool %q is closed on %s: see the driver's log there", id, key, id.Pool, list(names(closed)))
	}
	return volume.Errorf(volume.ErrPrecondition, "%s: no node has pool %s: bring its node or its disk back, or remove the PersistentVolume by hand (docs/kubernetes.md, \"A node is gone\")", id, key)
}

// unsure are the nodes that have not answered lately, and those that have a pool of
// a name (empty: any) which is not open.
func unsure(all []*node, pool string) (silent, closed []*node) {
	for _, n := range all {
		switch v := n.view(); {
		case !v.known || v.trouble != nil:
			silent = append(silent, n)
		case v.closed(pool):
			closed = append(closed, n)
		}
	}
	return silent, closed
}

func conflict(key poolKey, claims []*node) error {
	silent, _ := unsure(claims, key.name)
	if len(silent) > 0 {
		return volume.Errorf(volume.ErrPrecondition, "pool %s is on nodes %s, and %s does not answer: if its disk was moved, delete its Node object; if one of the disks is a copy of the other, take it out, or empty its directory, and restart the driver there", key, list(names(claims)), list(names(silent)))
	}
	return volume.Errorf(volume.ErrPrecondition, "pool %s is on nodes %s: one of their disks is a copy of the other's; take it out, or empty its directory, and restart the driver there", key, list(names(claims)))
}

func names(nodes []*node) []string {
	var names []string
	for _, n := range nodes {
		names = append(names, n.name)
	}
	slices.Sort(names)
	return names
}

// list writes names, the first few of many.
func list(names []string) string {
	const most = 5
	quoted := make([]string, 0, most)
	for i, name := range names {
		if i == most {
			return fmt.Sprintf("%s and %d more", strings.Join(quoted, ", "), len(names)-most)
		}
		quoted = append(quoted, fmt.Sprintf("%q", name))
	}
	return strings.Join(quoted, ", ")
}
