package driver_test

import (
	"context"
	"crypto"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/loop"
	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/pool"
)

var (
	controllerURI = pki.ControllerURI(backendtest.DriverName)
	nodeURI       = pki.NodeURI(backendtest.DriverName, "a")
)

// forwardedTo starts the driver of node a, and returns its forwarding address.
func forwardedTo(tb testing.TB, c *backendtest.Cluster) (*backendtest.Driver, string) {
	tb.Helper()
	d := backendtest.StartWith(tb, c.NodeOptions(tb, "a", filepath.Join(tb.TempDir(), "pool"), loop.Kind))
	return d, d.Options.Config.Forwarding.Listen
}

// controllerOf returns a TLS configuration with the certificate of the controller.
func controllerOf(tb testing.TB, c *backendtest.Cluster) *tls.Config {
	tb.Helper()
	dir := tb.TempDir()
	c.Certify(tb, dir, controllerURI, x509.ExtKeyUsageClientAuth)
	return pki.OpenDirectory(dir).Client(nodeURI)
}

// dial connects to a driver; config is nil for a connection without TLS.
func dial(tb testing.TB, address string, config *tls.Config) csi.IdentityClient {
	tb.Helper()
	with := insecure.NewCredentials()
	if config != nil {
		with = credentials.NewTLS(config)
	}
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(with))
	must(tb, err)
	tb.Cleanup(func() { _ = conn.Close() })
	return csi.NewIdentityClient(conn)
}

func probe(ctx context.Context, who csi.IdentityClient, o ...grpc.CallOption) error {
	limited, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	_, err := who.Probe(limited, &csi.ProbeRequest{}, o...)
	return err
}

// stranger returns a TLS configuration that does not verify the server. change sets its certificate.
func stranger(t *testing.T, c *backendtest.Cluster, change func(*tls.Config)) *tls.Config {
	t.Helper()
	config := controllerOf(t, c)
	config.VerifyConnection = nil
	if change != nil {
		change(config)
	}
	return config
}

// shown returns a change that sets a certificate that issue signs.
func shown(t *testing.T, issue func(public crypto.PublicKey) []byte) func(*tls.Config) {
	t.Helper()
	key, request, err := pki.NewRequest(controllerURI)
	must(t, err)
	public, _, err := pki.ParseRequest(request)
	must(t, err)
	pair, err := tls.X509KeyPair(issue(public), key)
	must(t, err)
	return func(config *tls.Config) {
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
	}
}

// selfSigned returns a change that sets a self-signed certificate.
func selfSigned(t *testing.T) func(*tls.Config) {
	t.Helper()
	cert, key, err := backendtest.NewCluster(t).CA.PEM()
	must(t, err)
	pair, err := tls.X509KeyPair(cert, key)
	must(t, err)
	return func(config *tls.Config) {
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
	}
}

// TestStrangers: only the controller may call. Other clients are refused, and each refusal is logged
// once.
func TestStrangers(t *testing.T) {
	c := backendtest.NewCluster(t)
	with := func(who string, usage x509.ExtKeyUsage, lifetime time.Duration) func(*tls.Config) {
		uri := controllerURI
		if who == "node" {
			uri = nodeURI
		}
		return shown(t, func(public crypto.PublicKey) []byte {
			cert, err := c.CA.Issue(public, uri, usage, lifetime)
			must(t, err)
			return cert
		})
	}
	for name, tc := range map[string]struct {
		cluster *backendtest.Cluster
		change  func(*tls.Config)
		says    string
	}{
		"no certificate":               {c, func(c *tls.Config) { c.GetClientCertificate = nil }, "didn't provide a certificate"},
		"another CA's":                 {backendtest.NewCluster(t), nil, "signed by another CA"},
		"self-signed":                  {c, selfSigned(t), "signed by another CA"},
		"expired":                      {c, with("controller", x509.ExtKeyUsageClientAuth, -time.Minute), "certificate expired on"},
		"a node's":                     {c, with("node", x509.ExtKeyUsageServerAuth, time.Hour), "is not for client authentication"},
		"a node's, for clients":        {c, with("node", x509.ExtKeyUsageClientAuth, time.Hour), "certificate of spiffe://csi.trivet.dev/node/a, expected is spiffe://csi.trivet.dev/controller"},
		"the controller's, as servers": {c, with("controller", x509.ExtKeyUsageServerAuth, time.Hour), "is not for client authentication"},
		"TLS 1.2":                      {c, func(c *tls.Config) { c.MinVersion, c.MaxVersion = tls.VersionTLS12, tls.VersionTLS12 }, "unsupported versions"},
	} {
		t.Run(name, func(t *testing.T) {
			_, address := forwardedTo(t, c)
			wantOnce(t, tc.says, func() {
				for range 3 {
					who := dial(t, address, stranger(t, tc.cluster, tc.change))
					wantCode(t, probe(t.Context(), who), codes.Unavailable)
				}
			})
			must(t, probe(t.Context(), dial(t, address, controllerOf(t, c))))
		})
	}
}

// wantOnce fails the test unless do causes one log line for a refusal with the text.
func wantOnce(t *testing.T, says string, do func()) {
	t.Helper()
	before := refusals(says)
	do()
	if n := refusals(says) - before; n != 1 {
		t.Errorf("%q was logged %d times", says, n)
	}
}

func refusals(says string) int {
	n := 0
	for line := range strings.Lines(backendtest.Log()) {
		if strings.Contains(line, "Refused a connection") && strings.Contains(line, says) {
			n++
		}
	}
	return n
}

// TestExpiredLater: a refusal is not logged again only because its text contains a later time.
func TestExpiredLater(t *testing.T) {
	c := backendtest.NewCluster(t)
	_, address := forwardedTo(t, c)
	expired := stranger(t, c, shown(t, func(public crypto.PublicKey) []byte {
		cert, err := c.CA.Issue(public, controllerURI, x509.ExtKeyUsageClientAuth, -time.Minute)
		must(t, err)
		return cert
	}))
	wantOnce(t, "certificate expired on", func() {
		for first := time.Now(); time.Since(first) < 1100*time.Millisecond; {
			if err := probe(t.Context(), dial(t, address, expired)); err == nil {
				t.Fatal("the call succeeded")
			}
		}
	})
}

// TestNoTLS: a client without TLS gets no response.
func TestNoTLS(t *testing.T) {
	c := backendtest.NewCluster(t)
	for name, call := range map[string]func(address string) error{
		"gRPC": func(address string) error { return probe(t.Context(), dial(t, address, nil)) },
		"HTTP": func(address string) error {
			resp, err := http.Get("http://" + address + "/metrics")
			if err == nil {
				_ = resp.Body.Close()
			}
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, address := forwardedTo(t, c)
			wantOnce(t, "does not look like a TLS handshake", func() {
				for range 3 {
					if err := call(address); err == nil {
						t.Error("the call succeeded")
					}
				}
			})
			must(t, probe(t.Context(), dial(t, address, controllerOf(t, c))))
		})
	}
}

// TestNodeOfAnotherName: the controller's driver verifies the name of the node.
func TestNodeOfAnotherName(t *testing.T) {
	c := backendtest.NewCluster(t)
	_, address := forwardedTo(t, c)
	router := backendtest.StartWith(t, c.RouterOptions(t, []driver.ForwardingNode{{Name: "b", Address: address}}, loop.Kind))
	_, err := router.Control.GetCapacity(t.Context(), &csi.GetCapacityRequest{AccessibleTopology: &csi.Topology{
		Segments: map[string]string{"csi.trivet.dev/node": "b"},
	}})
	wantCode(t, err, codes.Unavailable, "certificate of spiffe://csi.trivet.dev/node/a, expected is spiffe://csi.trivet.dev/node/b")
}

// TestNewAuthority: running drivers use new certificates, and then refuse the old ones.
func TestNewAuthority(t *testing.T) {
	old := backendtest.NewCluster(t)
	d, address := forwardedTo(t, old)
	oldOne := controllerOf(t, old)
	must(t, probe(t.Context(), dial(t, address, oldOne)))
	router := backendtest.StartWith(t, old.RouterOptions(t, []driver.ForwardingNode{{Name: "a", Address: address}}, loop.Kind))
	forwards := func() bool {
		_, err := router.Control.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
		return err == nil
	}
	await(t, "the first list", forwards)
	renewed := backendtest.NewCluster(t)
	renewed.Certify(t, filepath.Join(d.Options.StateDir, "certificates"), nodeURI, x509.ExtKeyUsageServerAuth)
	renewed.Certify(t, filepath.Join(router.Options.StateDir, "certificates"), controllerURI, x509.ExtKeyUsageClientAuth)
	must(t, probe(t.Context(), dial(t, address, controllerOf(t, renewed)), grpc.WaitForReady(true)))
	wantCode(t, probe(t.Context(), dial(t, address, stranger(t, old, nil))), codes.Unavailable)
	if !forwards() {
		t.Error("the existing connection was closed")
	}
	d.Restart(t)
	await(t, "a list after that", forwards)
}

// TestIdleConnections: many idle connections do not block other clients for long, and their number is
// limited.
func TestIdleConnections(t *testing.T) {
	c := backendtest.NewCluster(t)
	_, address := forwardedTo(t, c)
	known := dial(t, address, controllerOf(t, c))
	must(t, probe(t.Context(), known))
	const many = 400
	closed := make(chan struct{}, many)
	for range many {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address)
		must(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		go func() {
			_, _ = conn.Read(make([]byte, 1))
			closed <- struct{}{}
		}()
	}
	<-closed
	await(t, "the log", func() bool { return refusals("have not completed the TLS handshake") == 1 }) // one too many
	must(t, probe(t.Context(), known))
	must(t, probe(t.Context(), dial(t, address, controllerOf(t, c)), grpc.WaitForReady(true)))
	for range many - 1 { // every idle connection is closed
		<-closed
	}
}

// TestUnfinishedHandshakes: continuously opened connections without a handshake do not block the
// controller, from its own address or from another.
func TestUnfinishedHandshakes(t *testing.T) {
	c := backendtest.NewCluster(t)
	for _, from := range []string{"127.0.0.1", "127.0.0.2"} {
		t.Run(from, func(t *testing.T) {
			_, address := forwardedTo(t, c)
			config := controllerOf(t, c)
			config.NextProtos = []string{"h2"}
			opened := crowdAt(t, address, from, 2*time.Millisecond, nil)
			await(t, "the crowd", func() bool { return opened.Load() > 600 })
			var longest time.Duration
			for i := range 20 {
				start := time.Now()
				if err := enter(t.Context(), address, config); err != nil {
					t.Fatalf("the controller's connection %d: %v", i, err)
				}
				longest = max(longest, time.Since(start))
			}
			t.Logf("the controller connected 20 times, in at most %v each, beside %d connections", longest, opened.Load())
		})
	}
}

// enter makes a connection that the server accepts, at the first attempt.
func enter(ctx context.Context, address string, config *tls.Config) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	conn, err := (&tls.Dialer{Config: config}).DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	deadline, _ := ctx.Deadline()
	_ = conn.SetReadDeadline(deadline)
	_, err = conn.Read(make([]byte, 1)) // the settings that the server sends after the handshake
	return err
}

// crowdAt opens connections from an address at an interval, and sends the same bytes on each, until the
// test ends. It counts the opened connections.
func crowdAt(t *testing.T, address, from string, interval time.Duration, say []byte) *atomic.Int64 {
	t.Helper()
	var opened atomic.Int64
	var tasks sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	tasks.Go(func() {
		tick := time.NewTicker(interval)
		defer tick.Stop()
		for ctx.Err() == nil {
			conn, err := dialer.DialContext(ctx, "tcp", address)
			if err != nil {
				continue
			}
			opened.Add(1)
			_, _ = conn.Write(say)
			stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
			tasks.Go(func() {
				_, _ = io.Copy(io.Discard, conn) // until it is closed there
				stop()
				_ = conn.Close()
			})
			<-tick.C
		}
	})
	t.Cleanup(func() { cancel(); tasks.Wait() })
	return &opened
}

// FuzzForwardingPort: the port serves the controller, whatever other clients send.
func FuzzForwardingPort(f *testing.F) {
	c := backendtest.NewCluster(f)
	_, address := forwardedTo(f, c)
	f.Add([]byte{})
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Add([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
	f.Add([]byte{22, 3, 1, 0xff, 0xff, 1, 0xff, 0xff, 0xff})
	hello := clientHello(f, controllerOf(f, c))
	f.Add(hello)
	f.Add(append(hello, hello...))
	for i := range 20 { // with one changed byte
		broken := append([]byte(nil), hello...)
		broken[i*len(hello)/20] ^= 0xff
		f.Add(broken)
	}
	known := dial(f, address, controllerOf(f, c))
	newcomer := controllerOf(f, c)
	f.Fuzz(func(t *testing.T, b []byte) {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address)
		must(t, err)
		defer func() { _ = conn.Close() }()
		_, _ = conn.Write(b) // which it may refuse to read
		_ = conn.(*net.TCPConn).CloseWrite()
		_, _ = io.Copy(io.Discard, conn) // until it is closed there
		must(t, probe(t.Context(), known))
		must(t, probe(t.Context(), dial(t, address, newcomer)))
	})
}

// clientHello returns the first message of a client.
func clientHello(tb testing.TB, config *tls.Config) []byte {
	tb.Helper()
	here, there := net.Pipe()
	client := tls.Client(here, config)
	ended := make(chan struct{})
	go func() {
		_ = client.HandshakeContext(tb.Context())
		close(ended)
	}()
	b := make([]byte, 16<<10)
	n, err := there.Read(b)
	must(tb, err)
	_ = there.Close()
	<-ended
	return b[:n]
}

// TestRoles: each role accepts its own configuration, and refuses that of the other.
func TestRoles(t *testing.T) {
	nodes := []driver.ForwardingNode{{Name: "a", Address: "a:1"}}
	nas := pool.Config{Name: "nas", NFS: &pool.NFS{Server: "nas.lan", Export: "/e"}}
	for _, tc := range []struct {
		name, services string
		change         func(*driver.Options)
		says           string
	}{
		{"controller without nodes", "controller", func(o *driver.Options) { o.Config.Pools = nil }, "has no section forwarding: add it, or use --services controller,node"},
		{"controller with a pool", "controller", func(o *driver.Options) { o.Config.Forwarding = &driver.Forwarding{Nodes: nodes} }, `pools[0] "default"`},
		{"controller with pools of both kinds", "controller", func(o *driver.Options) {
			o.Config.Pools, o.Config.Forwarding = []pool.Config{nas, o.Config.Pools[0]}, &driver.Forwarding{Nodes: nodes}
		}, `pools[1] "default"`},
		{"controller with an nfs pool, without nodes", "controller", func(o *driver.Options) {
			o.Config.Pools, o.Config.Forwarding = []pool.Config{nas}, &driver.Forwarding{}
		}, "set forwarding.nodes or kubernetes.nodeService"},
		{"controller that listens", "controller", func(o *driver.Options) {
			o.Config.Pools, o.Config.Forwarding = nil, &driver.Forwarding{Listen: ":1", Nodes: nodes}
		}, "forwarding.listen is for --services node: remove it"},
		{"controller with neither nodes nor a Service", "controller", func(o *driver.Options) {
			o.Config.Pools, o.Config.Forwarding = nil, &driver.Forwarding{}
		}, "set forwarding.nodes or kubernetes.nodeService"},
		{"controller with nodes and a Service", "controller", func(o *driver.Options) {
			o.Config.Pools, o.Config.Forwarding = nil, &driver.Forwarding{Nodes: nodes}
			o.Config.Kubernetes, o.Namespace = &driver.Kubernetes{NodeService: "nodes"}, "trivet"
		}, `forwarding.nodes and kubernetes.nodeService "nodes" both define the nodes`},
		{"controller without a record of pools", "controller", func(o *driver.Options) {
			o.Config.Pools, o.Config.Forwarding = nil, &driver.Forwarding{}
			o.Config.Kubernetes, o.Namespace = &driver.Kubernetes{NodeService: "nodes"}, "trivet"
		}, `nodeService "nodes" and kubernetes.poolOwners "" must be set together`},
		{"controller with a damaged record of pools", "controller", func(o *driver.Options) {
			o.Config.Pools, o.Config.Forwarding = nil, &driver.Forwarding{Nodes: nodes}
			must(t, os.MkdirAll(o.StateDir, 0o700))
			must(t, os.WriteFile(filepath.Join(o.StateDir, "pool-owners.json"), []byte(`{"default`), 0o600))
		}, "pool-owners.json: unexpected end of JSON input: restore the file"},
		{"controller without a namespace", "controller", func(o *driver.Options) {
			o.Config.Pools, o.Config.Forwarding = nil, &driver.Forwarding{}
			o.Config.Kubernetes = &driver.Kubernetes{NodeService: "nodes"}
		}, "POD_NAMESPACE"},
		{"node alone", "node", func(*driver.Options) {}, "set forwarding.listen, or use --services controller,node"},
		{"node that listens nowhere", "node", func(o *driver.Options) { o.Config.Forwarding = &driver.Forwarding{} }, "set forwarding.listen"},
		{"node with nodes", "node", func(o *driver.Options) {
			o.Config.Forwarding = &driver.Forwarding{Listen: ":1", Nodes: nodes}
		}, "forwarding.nodes is for --services controller: remove it"},
		{"both", "controller,node", func(o *driver.Options) { o.Config.Forwarding = &driver.Forwarding{Listen: ":1"} }, "calls are not forwarded: remove the section forwarding"},
		{"address in use", "node", func(o *driver.Options) {
			l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
			must(t, err)
			t.Cleanup(func() { _ = l.Close() })
			o.Config.Forwarding = &driver.Forwarding{Listen: l.Addr().String()}
		}, "forwarding.listen 127.0.0.1:"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			o := options(t)
			o.Services = strings.Split(tc.services, ",")
			tc.change(&o)
			wantRefused(t, o, tc.says)
		})
	}
}

// TestNoCertificates: a driver without certificates runs, and reports that they are missing.
func TestNoCertificates(t *testing.T) {
	o := options(t)
	o.Services, o.HTTPAddress = []string{"node"}, backendtest.FreeAddress(t)
	o.Config.Forwarding = &driver.Forwarding{Listen: backendtest.FreeAddress(t)}
	d := backendtest.StartWith(t, o)
	if code, body := get(t, o.HTTPAddress, "/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(body, "tls.crt") {
		t.Errorf("/readyz: %d %s", code, body)
	}
	c := backendtest.NewCluster(t)
	wantCode(t, probe(t.Context(), dial(t, o.Config.Forwarding.Listen, stranger(t, c, nil))), codes.Unavailable)
	c.Certify(t, filepath.Join(d.Options.StateDir, "certificates"), pki.NodeURI(backendtest.DriverName, o.NodeID), x509.ExtKeyUsageServerAuth)
	must(t, probe(t.Context(), dial(t, o.Config.Forwarding.Listen, stranger(t, c, nil)), grpc.WaitForReady(true)))
	await(t, "readiness", func() bool { code, _ := get(t, o.HTTPAddress, "/readyz"); return code == http.StatusOK })
	c.Certify(t, filepath.Join(o.StateDir, "certificates"), pki.NodeURI(backendtest.DriverName, "other-node"), x509.ExtKeyUsageServerAuth)
	await(t, "unreadiness with the certificate of another node", func() bool {
		_, body := get(t, o.HTTPAddress, "/readyz")
		return strings.Contains(body, "other-node")
	})
}

// await waits until a condition holds.
func await(t *testing.T, what string, holds func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(30 * time.Second); !holds(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("timed out waiting for %s", what)
		}
	}
}

// TestStatic runs drivers with the files of deploy/static, for a cluster without Kubernetes, and with
// certificates of its script.
func TestStatic(t *testing.T) {
	const files = "../deploy/static/"
	dir := t.TempDir()
	for range 2 { // the second time the CA exists
		if out, err := exec.CommandContext(t.Context(), files+"certificates.sh", dir, "worker-1", "worker-2").CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	config := func(file string, oldnew ...string) driver.Config {
		b, err := os.ReadFile(files + file)
		must(t, err)
		c, err := driver.ParseConfig([]byte(strings.NewReplacer(oldnew...).Replace(string(b))), poolKinds)
		must(t, err)
		return c
	}
	member := func(service, node string, c driver.Config) *backendtest.Driver {
		o := options(t, loop.Kind)
		o.Services, o.NodeID, o.Config, o.HTTPAddress = []string{service}, node, c, backendtest.FreeAddress(t)
		return backendtest.StartWith(t, o)
	}
	addresses := []string{backendtest.FreeAddress(t), backendtest.FreeAddress(t)}
	for i, address := range addresses {
		node := fmt.Sprintf("worker-%d", i+1)
		member("node", node, config("node.yaml",
			"/var/lib/trivet/pools", t.TempDir(), "/etc/trivet/certificates", filepath.Join(dir, "nodes", node), ":9811", address))
	}
	router := member("controller", "", config("controller.yaml",
		"/etc/trivet/certificates", filepath.Join(dir, "controller"), "10.0.0.11:9811", addresses[0], "10.0.0.12:9811", addresses[1]))
	(&backendtest.Cluster{Router: router}).Await(t)
	wantMetrics(t, router.Options.HTTPAddress,
		`trivet_node_up{csi_node="worker-1"} 1`, `trivet_node_up{csi_node="worker-2"} 1`, `trivet_node_conflicting_pools{csi_node="worker-2"} 0`, `services="controller"`)
	for _, node := range []string{"worker-1", "worker-2"} {
		resp, err := router.Control.GetCapacity(t.Context(), &csi.GetCapacityRequest{
			AccessibleTopology: &csi.Topology{Segments: map[string]string{"csi.trivet.dev/node": node}},
		})
		if err != nil || resp.GetAvailableCapacity() == 0 {
			t.Errorf("%s: %v, %v", node, resp, err)
		}
	}
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}
