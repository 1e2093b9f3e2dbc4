package kube

import (
	"cmp"
	"context"
	"net"
	"slices"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/trivet-csi/trivet/internal/translate"
)

// forwardingPort is the name of the Service's port for forwarded calls.
const forwardingPort = "forwarding"

// Host is a Node on which a driver runs or ran.
type Host struct {
	// Name is the name of the Node.
	Name string
	// Address is host:port of the node's driver, empty if no driver runs now.
	Address string
}

// WatchHosts calls update with all hosts, sorted by name, until ctx ends: once when all objects are read,
// and after each change. service is the Service that selects the drivers of the nodes.
//
// A Node is a host if it has the label that the kubelet sets when it registers the driver and never
// removes, or if the Service has an endpoint on it, ready or not. A deleted Node is not a host. While the
// API server does not answer, the hosts do not change.
func WatchHosts(ctx context.Context, connect func() (*Client, error), namespace, service string, update func([]Host)) {
	c := dial(ctx, connect)
	if c == nil {
		return
	}
	changed := newSignal()
	found := watchObjects(ctx, "nodes", c.metadata.Resource(nodes), metav1.ListOptions{}, viewNode, changed)
	inService := metav1.ListOptions{LabelSelector: labels.Set{"kubernetes.io/service-name": service}.String()}
	endpoints := watchObjects(ctx, "endpoints of service "+service, c.watches.Resource(endpointSlices).Namespace(namespace), inService, viewObject[endpointSlice], changed)
	var last []Host
	for first := true; ; {
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
		if !found.synced() || !endpoints.synced() {
			continue
		}
		if hosts := join(found.all(), driverAddresses(endpoints.all())); first || !slices.Equal(hosts, last) {
			update(slices.Clone(hosts))
			first, last = false, hosts
		}
	}
}

// nodeView contains the fields in use of a Node.
type nodeView struct {
	name       string
	registered bool   // the kubelet registered the driver at some time
	value      string // the node's value in CSI topologies, if it is registered
	created    time.Time
}

func viewNode(o runtime.Object) (nodeView, error) {
	m := o.(*metav1.PartialObjectMetadata)
	value, registered := m.Labels[translate.TopologyKey]
	return nodeView{m.Name, registered, value, m.CreationTimestamp.Time}, nil
}

// join returns the hosts among nodes. addresses contains the address of the driver, which may be empty, for
// each node with an endpoint.
func join(nodes []nodeView, addresses map[string]string) []Host {
	var hosts []Host
	for _, n := range nodes {
		if address, ok := addresses[n.name]; ok || n.registered {
			hosts = append(hosts, Host{n.name, address})
		}
	}
	slices.SortFunc(hosts, func(a, b Host) int { return cmp.Compare(a.Name, b.Name) })
	return hosts
}

// candidate is an endpoint on a node.
type candidate struct {
	endpoint endpoint
	address  string
}

// driverAddresses returns the address of the driver on each node that has an endpoint. While one pod replaces
// another, a node has two endpoints; betterThan chooses one.
func driverAddresses(all []endpointSlice) map[string]string {
	best := map[string]candidate{}
	addresses := map[string]string{}
	for _, s := range all {
		for _, e := range s.Endpoints {
			c := candidate{e, s.address(e)}
			if known, ok := best[e.NodeName]; !ok || c.betterThan(known) {
				best[e.NodeName], addresses[e.NodeName] = c, c.address
			}
		}
	}
	return addresses
}

// address returns host:port for calls forwarded to an endpoint. It is empty if the endpoint has no address or
// the slice has no such port.
func (s endpointSlice) address(e endpoint) string {
	for _, p := range s.Ports {
		if p.Name == forwardingPort && len(e.Addresses) > 0 {
			return net.JoinHostPort(e.Addresses[0], strconv.Itoa(p.Port))
		}
	}
	return ""
}

// betterThan prefers an endpoint with an address, then one that is not terminating, then a ready one.
// Between equal endpoints the address decides, so that the choice is stable.
func (c candidate) betterThan(d candidate) bool {
	return cmp.Or(
		-compareBool(c.address != "", d.address != ""),
		compareBool(c.endpoint.Conditions.Terminating, d.endpoint.Conditions.Terminating),
		-compareBool(c.endpoint.Conditions.Ready, d.endpoint.Conditions.Ready),
		cmp.Compare(c.address, d.address),
	) < 0
}

// compareBool orders false before true.
func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}
