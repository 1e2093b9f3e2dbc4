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
	"github.com/trivet-csi/trivet/cluster/transfer"
	"github.com/trivet-csi/trivet/export"
	"github.com/trivet-csi/trivet/internal/connlimit"
	"github.com/trivet-csi/trivet/internal/errtext"
	"github.com/trivet-csi/trivet/internal/relay"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// handshakeTimeout limits the TLS handshake of a connection to the forwarding port.
const handshakeTimeout = 5 * time.Second

// forwards reports whether this driver runs with --services controller. Such a driver forwards calls to
// the drivers of the nodes.
func (o Options) forwards() bool { return !o.serves("node") }

// receivesForwarded reports whether this driver runs with --services node. Such a driver receives calls
// from the controller's driver.
func (o Options) receivesForwarded() bool { return !o.serves("controller") }

// identity returns the URI in this driver's certificate.
func (o Options) identity() *url.URL {
	if o.forwards() {
		return pki.ControllerURI(o.Name)
	}
	return pki.NodeURI(o.Name, o.NodeID)
}

// checkForwarding refuses a section forwarding, or pools, that do not match --services.
func (o Options) checkForwarding() error {
	f := o.Config.Forwarding
	switch {
	case o.forwards():
		return o.checkController(f, cmp.Or(o.Config.Kubernetes, &Kubernetes{}))
	case o.receivesForwarded():
		return o.checkNode(f)
	case f != nil:
		return volume.Errorf(volume.ErrInvalid, "forwarding: with --services controller,node calls are not forwarded: remove the section forwarding, or use --services controller or --services node")
	}
	return nil
}

// checkController refuses sections and pools that do not match --services controller.
func (o Options) checkController(f *Forwarding, k *Kubernetes) error {
	local := slices.IndexFunc(o.Config.Pools, func(p pool.Config) bool { return !p.Shared() })
	switch {
	case f == nil:
		return volume.Errorf(volume.ErrInvalid, "--services controller forwards calls to the drivers of the nodes, but the configuration has no section forwarding: add it, or use --services controller,node for one node")
	case local >= 0:
		return volume.Errorf(volume.ErrInvalid, "pools[%d] %q is a pool of a node, but --services controller serves no node: configure the pool for --services node, and configure only nfs pools for --services controller", local, o.Config.Pools[local].Name)
	case f.Listen != "":
		return volume.Errorf(volume.ErrInvalid, "forwarding.listen is for --services node: remove it here")
	case len(f.Nodes) == 0 && k.NodeService == "":
		return volume.Errorf(volume.ErrInvalid, "--services controller requires the addresses of the nodes: set forwarding.nodes or kubernetes.nodeService")
	case len(f.Nodes) > 0 && k.NodeService != "":
		return volume.Errorf(volume.ErrInvalid, "forwarding.nodes and kubernetes.nodeService %q both define the nodes: remove one of them", k.NodeService)
	case (k.NodeService == "") != (k.PoolOwners == ""):
		return volume.Errorf(volume.ErrInvalid, "kubernetes.nodeService %q and kubernetes.poolOwners %q must be set together: the Service of the nodes, and the ConfigMap that records the node of each pool", k.NodeService, k.PoolOwners)
	case k.Authority != "" && k.NodeServiceAccount == "":
		return volume.Errorf(volume.ErrInvalid, "kubernetes.nodeServiceAccount is missing: set it to the service account of the node pods: kubernetes.authority %q signs certificates only for that account", k.Authority)
	}
	return nil
}

// checkNode refuses sections and pools that do not match --services node.
func (o Options) checkNode(f *Forwarding) error {
	switch {
	case f == nil || f.Listen == "":
		return volume.Errorf(volume.ErrInvalid, "--services node cannot receive the calls of the controller's driver without an address: set forwarding.listen, or use --services controller,node")
	case o.Config.Pools == nil:
		return errNoPools
	case len(f.Nodes) > 0:
		return volume.Errorf(volume.ErrInvalid, "forwarding.nodes is for --services controller: remove it here")
	}
	return nil
}

// forwardingServerOptions returns the options of the gRPC server for forwarded calls. Only the controller's
// driver may call it.
func (d *Driver) forwardingServerOptions() []grpc.ServerOption {
	config := d.forwardingTLS()
	return []grpc.ServerOption{
		grpc.Creds(&guardedCredentials{TransportCredentials: credentials.NewTLS(config), handshakes: connlimit.New(maxHandshakes), refusals: &refusalLog{last: map[string]time.Time{}}, sender: d.sender}),
		grpc.ConnectionTimeout(handshakeTimeout),
		// These two options reduce the memory of each of the hundreds of connections that the
		// controller's driver may have. Its crypto/tls keeps a buffer of the size of the largest
		// record received; a small write buffer in this server limits the size of records. Its
		// HPACK encoder would add the deadline of each call to its table; size 0 disables the
		// table.
		grpc.WriteBufferSize(4 << 10), grpc.HeaderTableSize(0),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		// These parameters close a connection if the controller's driver does not answer, and
		// limit how long a connection remains open after its certificate expired.
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 10 * time.Second, MaxConnectionAge: time.Hour}),
	}
}

// maxHandshakes is the maximum number of connections that have not completed their handshake. Each
// of these uses memory and a descriptor.
const maxHandshakes = 256

var errTooManyHandshakes = fmt.Errorf("more than %d connections have not completed the TLS handshake: the server closed the oldest connection of the address that has the most", maxHandshakes)

// guardedCredentials limits the number of unauthenticated connections, logs refused connections, and passes those of other
// nodes to the sender, so that the gRPC server has only connections of the controller's driver.
type guardedCredentials struct {
	credentials.TransportCredentials
	handshakes *connlimit.Limit
	refusals   *refusalLog
	sender     *transfer.Server
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
	if dispatch(c.sender, conn, info) {
		return nil, nil, credentials.ErrConnDispatched
	}
	return conn, info, nil
}

// Clone implements credentials.TransportCredentials.
func (c *guardedCredentials) Clone() credentials.TransportCredentials {
	return &guardedCredentials{c.TransportCredentials.Clone(), c.handshakes, c.refusals, c.sender}
}

// refusalLog logs each kind of refusal at most once per refusalInterval. A kind consists of the address
// of the peer and the error text without numbers such as times and ports.
type refusalLog struct {
	mu   sync.Mutex
	last map[string]time.Time // time of the last log line, by kind
}

const (
	refusalInterval = 10 * time.Minute
	// maxRefusalKinds bounds the memory and the log lines that unauthenticated peers can cause in
	// one interval.
	maxRefusalKinds = 1000
)

// log logs a refused connection from an address, if a log line is due.
func (r *refusalLog) log(from net.Addr, err error) {
	if errors.Is(err, io.EOF) || errors.Is(err, os.ErrDeadlineExceeded) {
		return // a port scan or a health check
	}
	host, _, _ := net.SplitHostPort(from.String())
	if r.due(host + " " + errtext.Kind(err)) {
		klog.Background().Info("Refused a connection to the forwarding port", "from", host, "reason", err.Error())
	}
}

// due reports whether a kind of refusal must be logged now. If so, it records the time.
func (r *refusalLog) due(kind string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	maps.DeleteFunc(r.last, func(_ string, at time.Time) bool { return time.Since(at) >= refusalInterval })
	if _, logged := r.last[kind]; logged || len(r.last) == maxRefusalKinds {
		return false
	}
	r.last[kind] = time.Now()
	return true
}

// renewCertificates obtains this driver's certificate through the Kubernetes API, and renews it until ctx ends.
// The controller's driver also signs the certificates of the nodes' drivers.
func (d *Driver) renewCertificates(ctx context.Context) {
	o, k := d.options, d.config.Kubernetes
	if o.forwards() {
		kube.MaintainAuthority(ctx, kube.InCluster, kube.AuthorityOptions{
			Namespace: o.Namespace, Name: k.Authority, Driver: o.Name,
			NodeServiceAccount: k.NodeServiceAccount, Certificates: d.certificates,
		})
		return
	}
	kube.Enrol(ctx, kube.InCluster, kube.EnrolOptions{
		Namespace: o.Namespace, Authority: k.Authority, Driver: o.Name, Node: o.NodeID, Certificates: d.certificates,
	})
}

// poolOwners opens the record of the node that owns each pool. The record is a ConfigMap, or a file in
// the state directory.
func (d *Driver) poolOwners() (router.Owners, error) {
	if k := d.config.Kubernetes; k != nil && k.PoolOwners != "" {
		return kube.NewPoolOwners(d.options.Namespace, k.PoolOwners), nil
	}
	return router.OpenOwners(d.state)
}

// updateHosts sets the router's list of nodes. If the list is read from Kubernetes, updateHosts updates it
// until ctx ends.
func (d *Driver) updateHosts(ctx context.Context) {
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

// forwardedService is the relay.Service that the driver of a node provides to the controller's driver. It
// serves calls for the node's local pools, and those calls for shared pools that copy a volume: only the
// node where the volume is staged can freeze its filesystem.
type forwardedService struct {
	relay.Service
	exports *export.Relay
}

// Call implements relay.Service.
func (s *forwardedService) Call(ctx context.Context, method string, req proto.Message) (proto.Message, error) {
	switch r := req.(type) {
	case *csi.CreateSnapshotRequest, *csi.CreateVolumeGroupSnapshotRequest:
		return s.exports.Call(ctx, method, req)
	case *csi.CreateVolumeRequest:
		if id, err := volume.ParseID(r.GetVolumeContentSource().GetVolume().GetVolumeId()); err == nil && id.Shared() {
			return s.exports.Call(ctx, method, req)
		}
	}
	return s.Service.Call(ctx, method, req)
}
