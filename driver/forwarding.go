package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/url"
	"os"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/internal/crowd"
	"github.com/trivet-csi/trivet/internal/errtext"
	"github.com/trivet-csi/trivet/kube"
	"github.com/trivet-csi/trivet/pki"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/router"
	"github.com/trivet-csi/trivet/volume"
)

// handshakeTime bounds how long somebody may take to say who he is.
const handshakeTime = 5 * time.Second

// forwards tells whether this is the controller's driver, which sends calls to those
// of the nodes; isForwardedTo whether it is the driver of such a node.
func (o Options) forwards() bool { return !o.serves("node") }

func (o Options) isForwardedTo() bool { return !o.serves("controller") }

// identity is who this driver is in its certificate.
func (o Options) identity() *url.URL {
	if o.forwards() {
		return pki.ControllerURI(o.Name)
	}
	return pki.NodeURI(o.Name, o.NodeID)
}

// checkForwarding refuses a configuration that is another role's.
func (o Options) checkForwarding() error {
	f := o.Config.Forwarding
	switch {
	case o.forwards():
		return o.checkController(f, cmp.Or(o.Config.Kubernetes, &Kubernetes{}))
	case o.isForwardedTo():
		return o.checkNode(f)
	case f != nil:
		return volume.Errorf(volume.ErrInvalid, "forwarding: with --services controller,node no call is forwarded: remove the section, or serve one of them")
	}
	return nil
}

func (o Options) checkController(f *Forwarding, k *Kubernetes) error {
	local := slices.IndexFunc(o.Config.Pools, func(p pool.Config) bool { return !p.Shared() })
	switch {
	case f == nil:
		return volume.Errorf(volume.ErrInvalid, "--services controller forwards calls to the drivers of nodes, and the configuration has no section forwarding: add it, or serve controller,node for one node")
	case local >= 0:
		return volume.Errorf(volume.ErrInvalid, "pools[%d] %q is a directory of a node, and --services controller serves no node: configure it where --services node runs, and here nfs pools alone", local, o.Config.Pools[local].Name)
	case f.Listen != "":
		return volume.Errorf(volume.ErrInvalid, "forwarding.listen is for --services node: remove it here")
	case len(f.Nodes) == 0 && k.NodeService == "":
		return volume.Errorf(volume.ErrInvalid, "--services controller does not know where the nodes are: give forwarding.nodes, or kubernetes.nodeService")
	case len(f.Nodes) > 0 && k.NodeService != "":
		return volume.Errorf(volume.ErrInvalid, "forwarding.nodes and kubernetes.nodeService %q both say where the nodes are: remove one of them", k.NodeService)
	case (k.NodeService == "") != (k.PoolOwners == ""):
		return volume.Errorf(volume.ErrInvalid, "kubernetes.nodeService %q and kubernetes.poolOwners %q go together: name the Service of the nodes, and the ConfigMap where it is recorded which node has which pool", k.NodeService, k.PoolOwners)
	case k.Authority != "" && k.NodeServiceAccount == "":
		return volume.Errorf(volume.ErrInvalid, "kubernetes.nodeServiceAccount is missing: name what the nodes' pods run as, whose certificates kubernetes.authority %q signs", k.Authority)
	}
	return nil
}

func (o Options) checkNode(f *Forwarding) error {
	switch {
	case f == nil || f.Listen == "":
		return volume.Errorf(volume.ErrInvalid, "--services node makes no volumes of its own accord: give forwarding.listen, for the controller's driver, or serve controller,node")
	case o.Config.Pools == nil:
		return errNoPools
	case len(f.Nodes) > 0:
		return volume.Errorf(volume.ErrInvalid, "forwarding.nodes is for --services controller: remove it here")
	}
	return nil
}

// forwardedOptions are those of a server that only the controller's driver may call.
func (d *Driver) forwardedOptions() []grpc.ServerOption {
	config := d.certificates.Server(pki.ControllerURI(d.options.Name))
	return []grpc.ServerOption{
		grpc.Creds(&doorkeeper{TransportCredentials: credentials.NewTLS(config), strangers: crowd.NewLimit(maxStrangers), refusals: &refusals{said: map[string]time.Time{}}}),
		grpc.ConnectionTimeout(handshakeTime),
		// These keep the controller's connections small, of which it may have hundreds:
		// crypto/tls keeps a buffer for the largest record that it has seen, and a
		// deadline is another header each time.
		grpc.WriteBufferSize(4 << 10), grpc.HeaderTableSize(0),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		// A controller that is gone without a word is not kept, and no connection
		// for long after its certificate has expired.
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 10 * time.Second, MaxConnectionAge: time.Hour}),
	}
}

// maxStrangers bounds how many connections at once have not yet said who they are:
// each takes memory and a descriptor.
const maxStrangers = 256

var errCrowd = fmt.Errorf("more than %d connections have not said who they are, and the oldest is closed", maxStrangers)

// doorkeeper logs whom a server refuses, and does not let strangers crowd it.
type doorkeeper struct {
	credentials.TransportCredentials
	strangers *crowd.Limit
	refusals  *refusals
}

// ServerHandshake implements credentials.TransportCredentials.
func (c *doorkeeper) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c.strangers.Add(raw)
	conn, info, err := c.TransportCredentials.ServerHandshake(raw)
	if !c.strangers.Remove(raw) {
		err = errCrowd
	}
	if err != nil {
		c.refusals.log(raw.RemoteAddr(), err)
		return nil, nil, err
	}
	return conn, info, nil
}

// Clone implements credentials.TransportCredentials.
func (c *doorkeeper) Clone() credentials.TransportCredentials {
	return &doorkeeper{c.TransportCredentials.Clone(), c.strangers, c.refusals}
}

// refusals says each one once in a while. Those that differ in numbers alone (times,
// ports) are one.
type refusals struct {
	mu   sync.Mutex
	said map[string]time.Time
}

const (
	refusalInterval = 10 * time.Minute
	// maxRefusals bounds what strangers can make this process remember, and log in
	// an interval.
	maxRefusals = 1000
)

func (r *refusals) log(from net.Addr, err error) {
	if errors.Is(err, io.EOF) || errors.Is(err, os.ErrDeadlineExceeded) {
		return // somebody looked whether the port is open
	}
	host, _, _ := net.SplitHostPort(from.String())
	if r.first(host + " " + errtext.Kind(err)) {
		klog.Background().Info("Refused a connection to the forwarding port", "from", host, "reason", err.Error())
	}
}

func (r *refusals) first(what string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.said, func(_ string, at time.Time) bool { return time.Since(at) >= refusalInterval })
	if _, said := r.said[what]; said || len(r.said) == maxRefusals {
		return false
	}
	r.said[what] = time.Now()
	return true
}

// keepCertificates gets this driver's certificates from Kubernetes, and for the
// controller those of the nodes signed, until ctx ends.
func (d *Driver) keepCertificates(ctx context.Context) {
	o, k := d.options, d.config.Kubernetes
	if o.forwards() {
		kube.KeepAuthority(ctx, kube.InCluster, kube.AuthorityOptions{
			Namespace: o.Namespace, Name: k.Authority, Driver: o.Name,
			NodeServiceAccount: k.NodeServiceAccount, Certificates: d.certificates,
		})
		return
	}
	kube.Enrol(ctx, kube.InCluster, kube.EnrolOptions{
		Namespace: o.Namespace, Authority: k.Authority, Driver: o.Name, Node: o.NodeID, Certificates: d.certificates,
	})
}

// poolOwners is where this controller records which node has which pool.
func (d *Driver) poolOwners() (router.Owners, error) {
	if k := d.config.Kubernetes; k != nil && k.PoolOwners != "" {
		return kube.NewPoolOwners(kube.PoolOwnersOptions{Namespace: d.options.Namespace, Name: k.PoolOwners}), nil
	}
	return router.OpenOwners(d.state)
}

// followHosts tells the router which nodes there are, until ctx ends.
func (d *Driver) followHosts(ctx context.Context) {
	if nodes := d.config.Forwarding.Nodes; len(nodes) > 0 {
		var hosts []router.Host
		for _, n := range nodes {
			hosts = append(hosts, router.Host(n))
		}
		d.router.SetHosts(hosts)
		return
	}
	kube.WatchHosts(ctx, kube.InCluster, kube.HostsOptions{Namespace: d.options.Namespace, Service: d.config.Kubernetes.NodeService}, func(found []kube.Host) {
		var hosts []router.Host
		for _, h := range found {
			hosts = append(hosts, router.Host(h))
		}
		d.router.SetHosts(hosts)
	})
}
