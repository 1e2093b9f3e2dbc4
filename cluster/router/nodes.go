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
	// announced are the nodes that say to have a pool.
	announced map[poolKey][]*node
	// heard are the nodes whose answers are in announced. Both maps are replaced, never
	// changed.
	heard map[*node]bool

	owners    Owners
	recording chan struct{} // held by whoever writes owners
}

func newNodes(ctx context.Context, client func(node string) *tls.Config, owners Owners) *nodes {
	ns := &nodes{client: client, byName: map[string]*node{}, owners: owners, recording: make(chan struct{}, 1)}
	ns.begin = func(n *node) {
		ctx, stop := context.WithCancel(ctx)
		n.stop = stop
		ns.tasks.Go(func() { n.run(ctx, ns.recordSoon) })
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
}

// index finds out anew which node announces which pool.
func (ns *nodes) index() {
	ns.mu.Lock()
	before := ns.announced
	ns.announced, ns.heard = map[poolKey][]*node{}, map[*node]bool{}
	for _, n := range ns.byName {
		v := n.view()
		ns.heard[n] = v.known
		for _, key := range v.pools {
			if key.uuid != "" {
				ns.announced[key] = append(ns.announced[key], n)
			}
		}
	}
	now := ns.announced
	ns.mu.Unlock()
	for key, announcing := range now {
		if slices.Equal(names(announcing), names(before[key])) {
			continue
		}
		for _, n := range announcing {
			if ns.foreign(n, key) {
				klog.Background().Error(moved(key, ns.owner(key), n), "A node announces a pool that is another's")
			}
		}
		if ns.owner(key) == "" && len(announcing) > 1 {
			klog.Background().Error(conflict(key, announcing), "A pool is served to nobody")
		}
	}
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

// announcing are the nodes that say to have a pool.
func (ns *nodes) announcing(key poolKey) []*node {
	ns.mu.RLock()
	defer ns.mu.RUnlock()
	return ns.announced[key]
}

// having finds the node that has the pool of a volume or snapshot. If none is known, or it is
// in doubt which, nodes are asked anew.
func (ns *nodes) having(ctx context.Context, id volume.ID) (*node, error) {
	key := keyOf(id)
	if n, _ := ns.holder(ctx, key); n != nil {
		return n, nil
	}
	all, err := ns.all()
	if err != nil {
		return nil, err
	}
	ns.ask(ctx, ns.doubtful(key, all))
	n, err := ns.holder(ctx, key)
	if n == nil && err == nil {
		err = ns.missing(id, all)
	}
	return n, err
}

// doubtful are the nodes that may have a pool: those that announce it and its owner,
// otherwise all.
func (ns *nodes) doubtful(key poolKey, all []*node) []*node {
	doubtful := ns.announcing(key)
	if len(doubtful) == 0 {
		return all
	}
	if owner := ns.named(ns.owner(key)); owner != nil {
		return append(slices.Clone(doubtful), owner)
	}
	return doubtful
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
	owner := ns.owner(key)
	n := ns.named(owner)
	if n != nil { // the others do not matter
		all = []*node{n}
	}
	silent, closed := unsure(all, id.Pool)
	switch {
	case owner != "" && n == nil:
		return volume.Errorf(volume.ErrPrecondition, "%s: its node %q is gone, and no other node has pool %s: bring the node or its disk back, or remove the PersistentVolume by hand (docs/kubernetes.md, \"A node is gone\")", id, owner, key)
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

// conflict refuses a pool that several nodes announce and that is recorded for none.
func conflict(key poolKey, claims []*node) error {
	remedy := "one of their disks is a copy of the other's; take it out, or empty its directory, and restart the driver there"
	if silent, _ := unsure(claims, key.name); len(silent) > 0 {
		remedy = fmt.Sprintf("%s does not answer: if its disk was moved, delete its Node object; if one of the disks is a copy of the other, take it out, or empty its directory, and restart the driver there", list(names(silent)))
	}
	return &ownerError{
		volume.Errorf(volume.ErrPrecondition, "pool %s is on nodes %s: %s; or record the node that has the original (`trivet doctor` in the controller's pod prints the command)", key, list(names(claims)), remedy),
		key, claims, `"NODE" has the original disk`,
	}
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
