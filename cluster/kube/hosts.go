package kube

import (
	"cmp"
	"context"
	"net"
	"slices"
	"strconv"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/trivet-csi/trivet/internal/translate"
)

// forwardingPort is the name of the port in the Service.
const forwardingPort = "forwarding"

// Host is a Node on which a driver runs or ran.
type Host struct {
	// Name is the name of the Node.
	Name string
	// Address is host:port of its driver, empty if none runs now.
	Address string
}

// WatchHosts calls update with all hosts, sorted by name, after all are read and after each change, until
// ctx ends. service is the Service that selects the drivers of the nodes.
//
// A host is a Node with the label that the kubelet sets when it registers the driver and never removes, or
// a Node with an endpoint of the Service, ready or not. A deleted Node is not a host. While the API server
// does not answer, the hosts do not change.
func WatchHosts(ctx context.Context, connect func() (*Client, error), namespace, service string, update func([]Host)) {
	c := dial(ctx, connect)
	if c == nil {
		return
	}
	changed := newSignal()
	members := watchObjects(ctx, "nodes", c.metadata.Resource(nodes), metav1.ListOptions{}, memberOf, changed)
	ofService := metav1.ListOptions{LabelSelector: labels.Set{"kubernetes.io/service-name": service}.String()}
	endpoints := watchObjects(ctx, "endpoints of service "+service, c.watches.Resource(endpointSlices).Namespace(namespace), ofService, whole[endpointSlice], changed)
	var last []Host
	for first := true; ; {
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
		if !members.synced() || !endpoints.synced() {
			continue
		}
		if hosts := join(members.all(), addresses(endpoints.all())); first || !slices.Equal(hosts, last) {
			update(slices.Clone(hosts))
			first, last = false, hosts
		}
	}
}

// member is the view of a Node.
type member struct {
	name       string
	registered bool // the kubelet registered the driver at some time
}

func memberOf(o runtime.Object) (member, error) {
	m := o.(*metav1.PartialObjectMetadata)
	_, registered := m.Labels[translate.TopologyKey]
	return member{m.Name, registered}, nil
}

func join(members []member, address map[string]string) []Host {
	var hosts []Host
	for _, m := range members {
		if a, there := address[m.name]; there || m.registered {
			hosts = append(hosts, Host{m.name, a})
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

// addresses returns the address of each node's driver. While a pod replaces another on its
// node there are two endpoints; the one that is terminating is not used.
func addresses(all []endpointSlice) map[string]string {
	best := map[string]candidate{}
	found := map[string]string{}
	for _, s := range all {
		for _, e := range s.Endpoints {
			c := candidate{e, s.address(e)}
			if known, has := best[e.NodeName]; !has || c.before(known) {
				best[e.NodeName], found[e.NodeName] = c, c.address
			}
		}
	}
	return found
}

func (s endpointSlice) address(e endpoint) string {
	for _, p := range s.Ports {
		if p.Name == forwardingPort && len(e.Addresses) > 0 {
			return net.JoinHostPort(e.Addresses[0], strconv.Itoa(p.Port))
		}
	}
	return ""
}

// before reports whether c is a better endpoint than d: with an address, not terminating, ready.
// The address decides between equal ones, so that the choice is stable.
func (c candidate) before(d candidate) bool {
	return cmp.Or(
		-compare(c.address != "", d.address != ""),
		compare(c.endpoint.Conditions.Terminating, d.endpoint.Conditions.Terminating),
		-compare(c.endpoint.Conditions.Ready, d.endpoint.Conditions.Ready),
		cmp.Compare(c.address, d.address),
	) < 0
}

// compare orders false before true.
func compare(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}
