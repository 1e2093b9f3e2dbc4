package router

import (
	"slices"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
)

// announcements are the last announcements of the nodes. They change with each node by itself, because a pass over
// thousands of nodes for each of them would take longer than all of their answers.
type announcements struct {
	views    map[*node]view     // the announcements that the other fields include
	open     poolNodes          // the nodes that announce each open pool
	expected poolNodes          // the nodes that had each pool open before, and have it closed now
	usable   map[usablePool]int // the number of nodes with such a pool, open or closed
	answered int                // the number of nodes that have answered
	changes  uint64             // the number of calls of replace
}

func newAnnouncements() announcements {
	return announcements{views: map[*node]view{}, open: poolNodes{}, expected: poolNodes{}, usable: map[usablePool]int{}}
}

// usablePool is the name and the kind of a configured pool. The kind is not known if the driver of the node has an earlier
// version.
type usablePool struct {
	name, kind string
	known      bool
}

// poolNodes are the nodes by pool. The slices are replaced, never changed.
type poolNodes map[poolKey][]*node

// replace replaces the pools of a node, and returns those whose nodes have changed.
func (p poolNodes) replace(n *node, before, now []poolKey) (changed []poolKey) {
	for _, key := range before {
		if slices.Contains(now, key) {
			continue
		}
		changed = append(changed, key)
		p[key] = slices.DeleteFunc(slices.Clone(p[key]), func(other *node) bool { return other == n })
		if len(p[key]) == 0 {
			delete(p, key)
		}
	}
	for _, key := range now {
		if !slices.Contains(before, key) {
			changed = append(changed, key)
			p[key] = append(slices.Clip(p[key]), n)
		}
	}
	return changed
}

// replace replaces the announcement of a node, and returns the open pools whose nodes have changed. The announcement of a
// node that no longer exists is empty.
func (a *announcements) replace(n *node, now view) (changed []poolKey) {
	before := a.views[n]
	a.changes++
	a.views[n] = now
	a.count(before, -1)
	a.count(now, 1)
	a.expected.replace(n, before.expected, now.expected)
	return a.open.replace(n, before.openPools(), now.openPools())
}

// count adds times to the numbers for an announcement.
func (a *announcements) count(v view, times int) {
	if v.answered {
		a.answered += times
	}
	for _, key := range v.pools {
		kind, known := v.kinds[key.name]
		pool := usablePool{key.name, kind, known}
		a.usable[pool] += times
		if a.usable[pool] == 0 {
			delete(a.usable, pool)
		}
	}
}

// remove removes a node, and returns the open pools whose nodes have changed.
func (a *announcements) remove(n *node) (changed []poolKey) {
	changed = a.replace(n, view{})
	delete(a.views, n)
	return changed
}

// index updates announced after a change of a node's pools, and logs pools that are not served.
func (ns *nodes) index(n *node) {
	var changed []poolKey
	ns.mu.Lock()
	if ns.byName[n.name] == n { // otherwise the node was removed
		changed = ns.announced.replace(n, n.view())
	}
	ns.mu.Unlock()
	ns.logUnserved(changed)
}

// logUnserved logs which of these pools are not served.
func (ns *nodes) logUnserved(pools []poolKey) {
	for _, key := range pools {
		announcing := ns.announcing(key)
		for _, n := range announcing {
			if ns.ownedByOther(n, key) {
				klog.Background().Error(moved(key, ns.owner(key), n), "A node announces a pool that is recorded for another node")
			}
		}
		if ns.owner(key) == "" && len(announcing) > 1 {
			klog.Background().Error(conflict(key, announcing), "A pool is served by no node")
		}
	}
}

// announcing returns the nodes that announce a pool.
func (ns *nodes) announcing(key poolKey) []*node {
	ns.mu.RLock()
	defer ns.mu.RUnlock()
	return ns.announced.open[key]
}

// usable returns the sorted names of the nodes' pools that can contain volumes of a kind. complete is false while a
// node has not announced its pools, and if the cluster has no nodes.
func (ns *nodes) usable(k backend.Kind) (pools []string, complete bool) {
	ns.mu.RLock()
	defer ns.mu.RUnlock()
	for pool := range ns.announced.usable {
		if !pool.known || k.Uses(pool.kind) {
			pools = append(pools, pool.name)
		}
	}
	slices.Sort(pools)
	return slices.Compact(pools), len(ns.sorted) > 0 && ns.announced.answered == len(ns.sorted)
}

// unanswered returns the nodes that have not answered since the controller started. The caller holds mu.
func (ns *nodes) unanswered() []*node {
	if ns.announced.answered == len(ns.sorted) {
		return nil
	}
	return slices.DeleteFunc(slices.Clone(ns.sorted), func(n *node) bool { return ns.announced.views[n].answered })
}
