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

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/protobuf/proto"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/cluster/kube"
	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/cluster/router"
	"github.com/trivet-csi/trivet/export"
	"github.com/trivet-csi/trivet/internal/connlimit"
	"github.com/trivet-csi/trivet/internal/errtext"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// handshakeTime is the timeout of a TLS handshake.
const handshakeTime = 5 * time.Second

// forwards reports whether this is the controller's driver, which sends calls to the nodes'
// drivers. isForwardedTo reports whether this is the driver of such a node.
func (o Options) forwards() bool { return !o.serves("node") }

func (o Options) isForwardedTo() bool { return !o.serves("controller") }

// identity returns the URI in this driver's certificate.
func (o Options) identity() *url.URL {
	if o.forwards() {
		return pki.ControllerURI(o.Name)
	}
	return pki.NodeURI(o.Name, o.NodeID)
}

// checkForwarding refuses a configuration that does not match --services.
func (o Options) checkForwarding() error {
	f := o.Config.Forwarding
	switch {
	case o.forwards():
		return o.checkController(f, cmp.Or(o.Config.Kubernetes, &Kubernetes{}))
	case o.isForwardedTo():
		return o.checkNode(f)
	case f != nil:
		return volume.Errorf(volume.ErrInvalid, "forwarding: with --services controller,node no call is forwarded: remove the section, or use one of the services")
	}
	return nil
}

func (o Options) checkController(f *Forwarding, k *Kubernetes) error {
	local := slices.IndexFunc(o.Config.Pools, func(p pool.Config) bool { return !p.Shared() })
	switch {
	case f == nil:
		return volume.Errorf(volume.ErrInvalid, "--services controller forwards calls to the drivers of nodes, but the configuration has no section forwarding: add it, or use --services controller,node for one node")
	case local >= 0:
		return volume.Errorf(volume.ErrInvalid, "pools[%d] %q is a directory of a node, but --services controller serves no node: configure it for --services node, and only nfs pools here", local, o.Config.Pools[local].Name)
	case f.Listen != "":
		return volume.Errorf(volume.ErrInvalid, "forwarding.listen is for --services node: remove it here")
	case len(f.Nodes) == 0 && k.NodeService == "":
		return volume.Errorf(volume.ErrInvalid, "--services controller requires the addresses of the nodes: set forwarding.nodes or kubernetes.nodeService")
	case len(f.Nodes) > 0 && k.NodeService != "":
		return volume.Errorf(volume.ErrInvalid, "forwarding.nodes and kubernetes.nodeService %q both define the nodes: remove one of them", k.NodeService)
	case (k.NodeService == "") != (k.PoolOwners == ""):
		return volume.Errorf(volume.ErrInvalid, "kubernetes.nodeService %q and kubernetes.poolOwners %q must be set together: the Service of the nodes, and the ConfigMap that records the node of each pool", k.NodeService, k.PoolOwners)
	case k.Authority != "" && k.NodeServiceAccount == "":
		return volume.Errorf(volume.ErrInvalid, "kubernetes.nodeServiceAccount is missing: set the service account of the nodes' pods, whose certificates kubernetes.authority %q signs", k.Authority)
	}
	return nil
}

func (o Options) checkNode(f *Forwarding) error {
	switch {
	case f == nil || f.Listen == "":
		return volume.Errorf(volume.ErrInvalid, "--services node creates volumes only for the controller's driver: set forwarding.listen, or use --services controller,node")
	case o.Config.Pools == nil:
		return errNoPools
	case len(f.Nodes) > 0:
		return volume.Errorf(volume.ErrInvalid, "forwarding.nodes is for --services controller: remove it here")
	}
	return nil
}

// forwardedOptions returns the options of a server that only the controller's driver may call.
func (d *Driver) forwardedOptions() []grpc.ServerOption {
	config := d.certificates.Server(pki.ControllerURI(d.options.Name))
	return []grpc.ServerOption{
		grpc.Creds(&guardedCredentials{TransportCredentials: credentials.NewTLS(config), handshakes: connlimit.New(maxHandshakes), refusals: &refusalLog{last: map[string]time.Time{}}}),
		grpc.ConnectionTimeout(handshakeTime),
		// These reduce the memory of the controller's connections, of which it may have
		// hundreds. crypto/tls keeps a buffer for the largest record that it has received.
		// Each deadline is another header for HPACK's table.
		grpc.WriteBufferSize(4 << 10), grpc.HeaderTableSize(0),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		// These close the connection of a controller that does not answer, and bound how
		// long a connection outlives its certificate.
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 10 * time.Second, MaxConnectionAge: time.Hour}),
	}
}

// maxHandshakes is the maximum number of connections that have not completed their handshake.
// Each holds memory and a descriptor.
const maxHandshakes = 256

var errTooManyHandshakes = fmt.Errorf("more than %d connections have not completed the TLS handshake: the oldest is closed", maxHandshakes)

// guardedCredentials limits the number of unauthenticated connections and logs those that the
// server refuses.
type guardedCredentials struct {
	credentials.TransportCredentials
	handshakes *connlimit.Limit
	refusals   *refusalLog
}

// ServerHandshake implements credentials.TransportCredentials.
func (c *guardedCredentials) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c.handshakes.Add(raw)
	conn, info, err := c.TransportCredentials.ServerHandshake(raw)
	if !c.handshakes.Remove(raw) {
		err = errTooManyHandshakes
	}
	if err != nil {
		c.refusals.log(raw.RemoteAddr(), err)
		return nil, nil, err
	}
	return conn, info, nil
}

// Clone implements credentials.TransportCredentials.
func (c *guardedCredentials) Clone() credentials.TransportCredentials {
	return &guardedCredentials{c.TransportCredentials.Clone(), c.handshakes, c.refusals}
}

// refusalLog logs each kind of refusal at most once per refusalInterval. Errors that differ only
// in numbers, such as times and ports, are of one kind.
type refusalLog struct {
	mu   sync.Mutex
	last map[string]time.Time // when a kind was last logged
}

const (
	refusalInterval = 10 * time.Minute
	// maxRefusals bounds the memory and the log lines that unauthenticated peers can cause in
	// one interval.
	maxRefusals = 1000
)

func (r *refusalLog) log(from net.Addr, err error) {
	if errors.Is(err, io.EOF) || errors.Is(err, os.ErrDeadlineExceeded) {
		return // a port scan or a health check
	}
	host, _, _ := net.SplitHostPort(from.String())
	if r.due(host + " " + errtext.Kind(err)) {
		klog.Background().Info("Refused a connection to the forwarding port", "from", host, "reason", err.Error())
	}
}

// due reports whether a kind of refusal is to be logged, and records that it is.
func (r *refusalLog) due(kind string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.last, func(_ string, at time.Time) bool { return time.Since(at) >= refusalInterval })
	if _, logged := r.last[kind]; logged || len(r.last) == maxRefusals {
		return false
	}
	r.last[kind] = time.Now()
	return true
}

// keepCertificates maintains this driver's certificate with the Kubernetes API until ctx ends.
// The controller's driver also signs the certificates of the nodes.
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

// poolOwners returns the record of the node of each pool: a ConfigMap, or a file in the state
// directory.
func (d *Driver) poolOwners() (router.Owners, error) {
	if k := d.config.Kubernetes; k != nil && k.PoolOwners != "" {
		return kube.NewPoolOwners(d.options.Namespace, k.PoolOwners), nil
	}
	return router.OpenOwners(d.state)
}

// followHosts keeps the router's list of nodes up to date until ctx ends.
func (d *Driver) followHosts(ctx context.Context) {
	if nodes := d.config.Forwarding.Nodes; len(nodes) > 0 {
		var hosts []router.Host
		for _, n := range nodes {
			hosts = append(hosts, router.Host(n))
		}
		d.router.SetHosts(hosts)
		return
	}
	kube.WatchHosts(ctx, kube.InCluster, d.options.Namespace, d.config.Kubernetes.NodeService, func(found []kube.Host) {
		var hosts []router.Host
		for _, h := range found {
			hosts = append(hosts, router.Host(h))
		}
		d.router.SetHosts(hosts)
	})
}

// member is the Service that a node's driver serves to the controller's driver. It answers the calls
// for the node's own pools and, for shared pools, those that copy a volume: only the node where
// the volume is staged can freeze it.
type member struct {
	relay.Service
	exports *export.Relay
}

// Call implements relay.Service.
func (m *member) Call(ctx context.Context, method string, req proto.Message) (proto.Message, error) {
	switch r := req.(type) {
	case *csi.CreateSnapshotRequest, *csi.CreateVolumeGroupSnapshotRequest:
		return m.exports.Call(ctx, method, req)
	case *csi.CreateVolumeRequest:
		if id, err := volume.ParseID(r.GetVolumeContentSource().GetVolume().GetVolumeId()); err == nil && id.Shared() {
			return m.exports.Call(ctx, method, req)
		}
	}
	return m.Service.Call(ctx, method, req)
}
