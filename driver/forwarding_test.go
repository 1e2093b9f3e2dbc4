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
	"github.com/trivet-csi/trivet/cluster/transfer"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/pool"
)

var (
	controllerURI = pki.ControllerURI(backendtest.DriverName)
	nodeURI       = pki.NodeURI(backendtest.DriverName, "a")
)

// startNode starts the driver of node a, and returns its forwarding address.
func startNode(tb testing.TB, c *backendtest.Cluster) (*backendtest.Driver, string) {
	tb.Helper()
	d := backendtest.StartWith(tb, c.NodeOptions(tb, "a", filepath.Join(tb.TempDir(), "pool"), loop.Kind))
	return d, d.Options.Config.Forwarding.Listen
}

// controllerTLS returns a client's TLS configuration with the certificate of the cluster's controller.
func controllerTLS(tb testing.TB, c *backendtest.Cluster) *tls.Config {
	tb.Helper()
	dir := tb.TempDir()
	c.Certify(tb, dir, controllerURI, x509.ExtKeyUsageClientAuth)
	return pki.OpenDirectory(dir).Client(nodeURI)
}

// dial returns a client of the driver at an address. A nil config means a connection without TLS.
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

func probe(ctx context.Context, client csi.IdentityClient, o ...grpc.CallOption) error {
	limited, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	_, err := client.Probe(limited, &csi.ProbeRequest{}, o...)
	return err
}

// changedTLS returns the TLS configuration of the controller with a change. It does not verify the server.
func changedTLS(t *testing.T, c *backendtest.Cluster, change func(*tls.Config)) *tls.Config {
	t.Helper()
	config := controllerTLS(t, c)
	config.VerifyConnection = nil
	if change != nil {
		change(config)
	}
	return config
}

// withIssued returns a change of a TLS configuration: it sets a certificate that issue signs.
func withIssued(t *testing.T, issue func(public crypto.PublicKey) []byte) func(*tls.Config) {
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

// withSelfSigned returns a change of a TLS configuration: it sets a self-signed certificate.
func withSelfSigned(t *testing.T) func(*tls.Config) {
	t.Helper()
	cert, key, err := backendtest.NewCluster(t).CA.PEM()
	must(t, err)
	pair, err := tls.X509KeyPair(cert, key)
	must(t, err)
	return func(config *tls.Config) {
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
	}
}

// TestForeignClients: a node's driver accepts only the controller's certificate. It refuses other clients, and
// logs each refusal once.
func TestForeignClients(t *testing.T) {
	c := backendtest.NewCluster(t)
	issued := func(role string, usage x509.ExtKeyUsage, lifetime time.Duration) func(*tls.Config) {
		uri := controllerURI
		if role == "node" {
			uri = nodeURI
		}
		return withIssued(t, func(public crypto.PublicKey) []byte {
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
		"no certificate":                     {c, func(c *tls.Config) { c.GetClientCertificate = nil }, "didn't provide a certificate"},
		"certificate of another CA":          {backendtest.NewCluster(t), nil, "signed by another CA"},
		"self-signed certificate":            {c, withSelfSigned(t), "signed by another CA"},
		"expired certificate":                {c, issued("controller", x509.ExtKeyUsageClientAuth, -time.Minute), "certificate expired on"},
		"node certificate for servers":       {c, issued("node", x509.ExtKeyUsageServerAuth, time.Hour), "is not for client authentication"},
		"node certificate for clients":       {c, issued("node", x509.ExtKeyUsageClientAuth, time.Hour), "certificate of spiffe://csi.trivet.dev/node/a, expected spiffe://csi.trivet.dev/controller"},
		"controller certificate for servers": {c, issued("controller", x509.ExtKeyUsageServerAuth, time.Hour), "is not for client authentication"},
		"TLS 1.2":                            {c, func(c *tls.Config) { c.MinVersion, c.MaxVersion = tls.VersionTLS12, tls.VersionTLS12 }, "unsupported versions"},
	} {
		t.Run(name, func(t *testing.T) {
			_, address := startNode(t, c)
			wantOneRefusal(t, tc.says, func() {
				for range 3 {
					client := dial(t, address, changedTLS(t, tc.cluster, tc.change))
					wantCode(t, probe(t.Context(), client), codes.Unavailable)
				}
			})
			must(t, probe(t.Context(), dial(t, address, controllerTLS(t, c))))
		})
	}
}

// TestNodeAsClient: a node that offers the protocol of transfers beside HTTP/2 gets no answer to a call.
func TestNodeAsClient(t *testing.T) {
	c := backendtest.NewCluster(t)
	_, address := startNode(t, c)
	as := withIssued(t, func(public crypto.PublicKey) []byte {
		cert, err := c.CA.Issue(public, pki.NodeURI(backendtest.DriverName, "b"), x509.ExtKeyUsageServerAuth, time.Hour)
		must(t, err)
		return cert
	})
	for _, protocols := range [][]string{{transfer.Protocol, "h2"}, {"h2", transfer.Protocol}} {
		client := dial(t, address, changedTLS(t, c, func(config *tls.Config) {
			as(config)
			config.NextProtos = protocols
		}))
		wantCode(t, probe(t.Context(), client), codes.Unavailable)
	}
	if !strings.Contains(backendtest.Log(), "no ticket was presented") {
		t.Error("the connection was not one for transfers, want that it is")
	}
	// The controller gets no calls over a connection for transfers either.
	controller := dial(t, address, changedTLS(t, c, func(config *tls.Config) { config.NextProtos = []string{transfer.Protocol, "h2"} }))
	wantCode(t, probe(t.Context(), controller), codes.Unavailable)
	must(t, probe(t.Context(), dial(t, address, controllerTLS(t, c))))
}

// wantOneRefusal runs do, and fails the test unless one refused connection with the text is logged meanwhile.
func wantOneRefusal(t *testing.T, says string, do func()) {
	t.Helper()
	before := refusals(says)
	do()
	if n := refusals(says) - before; n != 1 {
		t.Errorf("%q was logged %d times, want once", says, n)
	}
}

// refusals returns the number of log lines for a refused connection that contain a text.
func refusals(says string) int {
	n := 0
	for line := range strings.Lines(backendtest.Log()) {
		if strings.Contains(line, "Refused a connection") && strings.Contains(line, says) {
			n++
		}
	}
	return n
}

// TestExpiredLoggedOnce: a refusal is not logged again only because the time in its text has changed.
func TestExpiredLoggedOnce(t *testing.T) {
	c := backendtest.NewCluster(t)
	_, address := startNode(t, c)
	expired := changedTLS(t, c, withIssued(t, func(public crypto.PublicKey) []byte {
		cert, err := c.CA.Issue(public, controllerURI, x509.ExtKeyUsageClientAuth, -time.Minute)
		must(t, err)
		return cert
	}))
	wantOneRefusal(t, "certificate expired on", func() {
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
			_, address := startNode(t, c)
			wantOneRefusal(t, "does not look like a TLS handshake", func() {
				for range 3 {
					if err := call(address); err == nil {
						t.Error("the call succeeded")
					}
				}
			})
			must(t, probe(t.Context(), dial(t, address, controllerTLS(t, c))))
		})
	}
}

// TestNodeOfAnotherName: the controller's driver refuses a node's driver whose certificate names another node.
func TestNodeOfAnotherName(t *testing.T) {
	c := backendtest.NewCluster(t)
	_, address := startNode(t, c)
	router := backendtest.StartWith(t, c.RouterOptions(t, []driver.ForwardingNode{{Name: "b", Address: address}}, loop.Kind))
	_, err := router.Control.GetCapacity(t.Context(), &csi.GetCapacityRequest{AccessibleTopology: &csi.Topology{
		Segments: map[string]string{"csi.trivet.dev/node": "b"},
	}})
	wantCode(t, err, codes.Unavailable, "certificate of spiffe://csi.trivet.dev/node/a, expected spiffe://csi.trivet.dev/node/b")
}

// TestNewAuthority: running drivers use certificates of a new CA as soon as they are installed, and then refuse
// those of the old CA.
func TestNewAuthority(t *testing.T) {
	old := backendtest.NewCluster(t)
	d, address := startNode(t, old)
	must(t, probe(t.Context(), dial(t, address, controllerTLS(t, old))))
	router := backendtest.StartWith(t, old.RouterOptions(t, []driver.ForwardingNode{{Name: "a", Address: address}}, loop.Kind))
	forwards := func() bool {
		_, err := router.Control.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
		return err == nil
	}
	await(t, "the first successful ListVolumes", forwards)
	renewed := backendtest.NewCluster(t)
	renewed.Certify(t, filepath.Join(d.Options.StateDir, "certificates"), nodeURI, x509.ExtKeyUsageServerAuth)
	renewed.Certify(t, filepath.Join(router.Options.StateDir, "certificates"), controllerURI, x509.ExtKeyUsageClientAuth)
	must(t, probe(t.Context(), dial(t, address, controllerTLS(t, renewed)), grpc.WaitForReady(true)))
	wantCode(t, probe(t.Context(), dial(t, address, changedTLS(t, old, nil))), codes.Unavailable)
	if !forwards() {
		t.Error("the existing connection was closed")
	}
	d.Restart(t)
	await(t, "ListVolumes after the restart of the node's driver", forwards)
}

// TestIdleConnections: many idle connections do not block other clients for long, and their number is
// limited.
func TestIdleConnections(t *testing.T) {
	c := backendtest.NewCluster(t)
	_, address := startNode(t, c)
	known := dial(t, address, controllerTLS(t, c))
	must(t, probe(t.Context(), known))
	const many, reason = 400, "have not completed the TLS handshake"
	before := refusals(reason)
	var closed sync.WaitGroup
	// On a busy machine, the first connections may end by the timeout of the handshake before the limit is
	// exceeded. Then it is exceeded by the next ones.
	await(t, "the log line for closed connections", func() bool {
		for range many {
			closed.Go(func() { awaitClose(t, address) })
		}
		<-time.After(100 * time.Millisecond)
		return refusals(reason) == before+1
	})
	must(t, probe(t.Context(), known))
	must(t, probe(t.Context(), dial(t, address, controllerTLS(t, c)), grpc.WaitForReady(true)))
	closed.Wait()
}

// awaitClose opens a connection, sends nothing, and waits until the server closes the connection.
func awaitClose(t *testing.T, address string) {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address)
	if err != nil {
		t.Error(err)
		return
	}
	defer func() { _ = conn.Close() }()
	_, _ = conn.Read(make([]byte, 1))
}

// TestUnfinishedHandshakes: continuously opened connections without a handshake do not block the
// controller, from its own address or from another.
func TestUnfinishedHandshakes(t *testing.T) {
	c := backendtest.NewCluster(t)
	for _, from := range []string{"127.0.0.1", "127.0.0.2"} {
		t.Run(from, func(t *testing.T) {
			_, address := startNode(t, c)
			config := controllerTLS(t, c)
			config.NextProtos = []string{"h2"}
			opened := keepConnecting(t, address, from)
			await(t, "600 unfinished connections", func() bool { return opened.Load() > 600 })
			var longest time.Duration
			for i := range 20 {
				start := time.Now()
				if err := connect(t.Context(), address, config); err != nil {
					t.Fatalf("the controller's connection %d: %v", i, err)
				}
				longest = max(longest, time.Since(start))
			}
			t.Logf("20 connections of the controller took at most %v each, beside %d unfinished connections", longest, opened.Load())
		})
	}
}

// connect makes one attempt to connect, and returns an error unless the server accepts the connection.
func connect(ctx context.Context, address string, config *tls.Config) error {
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

// keepConnecting opens a connection from an address every two milliseconds until the test ends, and sends
// nothing. It returns the number of opened connections.
func keepConnecting(t *testing.T, address, from string) *atomic.Int64 {
	t.Helper()
	var opened atomic.Int64
	var tasks sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	tasks.Go(func() {
		tick := time.NewTicker(2 * time.Millisecond)
		defer tick.Stop()
		for ctx.Err() == nil {
			conn, err := dialer.DialContext(ctx, "tcp", address)
			if err != nil {
				continue
			}
			opened.Add(1)
			stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
			tasks.Go(func() {
				_, _ = io.Copy(io.Discard, conn) // until the server closes it
				stop()
				_ = conn.Close()
			})
			<-tick.C
		}
	})
	t.Cleanup(func() { cancel(); tasks.Wait() })
	return &opened
}

// FuzzForwardingPort: whatever other clients send to the forwarding port, it continues to serve the controller.
func FuzzForwardingPort(f *testing.F) {
	c := backendtest.NewCluster(f)
	_, address := startNode(f, c)
	f.Add([]byte{})
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Add([]byte("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
	f.Add([]byte{22, 3, 1, 0xff, 0xff, 1, 0xff, 0xff, 0xff})
	hello := clientHello(f, controllerTLS(f, c))
	f.Add(hello)
	f.Add(append(hello, hello...))
	for i := range 20 { // a hello with one changed byte
		broken := append([]byte(nil), hello...)
		broken[i*len(hello)/20] ^= 0xff
		f.Add(broken)
	}
	known := dial(f, address, controllerTLS(f, c))
	newcomer := controllerTLS(f, c)
	f.Fuzz(func(t *testing.T, b []byte) {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address)
		must(t, err)
		defer func() { _ = conn.Close() }()
		_, _ = conn.Write(b) // fails if the server closes the connection
		_ = conn.(*net.TCPConn).CloseWrite()
		_, _ = io.Copy(io.Discard, conn) // until the server closes it
		must(t, probe(t.Context(), known))
		must(t, probe(t.Context(), dial(t, address, newcomer)))
	})
}

// clientHello returns the first TLS message that a client sends.
func clientHello(tb testing.TB, config *tls.Config) []byte {
	tb.Helper()
	local, remote := net.Pipe()
	client := tls.Client(local, config)
	ended := make(chan struct{})
	go func() {
		_ = client.HandshakeContext(tb.Context())
		close(ended)
	}()
	b := make([]byte, 16<<10)
	n, err := remote.Read(b)
	must(tb, err)
	_ = remote.Close()
	<-ended
	return b[:n]
}

// TestRoles: a driver refuses a configuration that does not match --services.
func TestRoles(t *testing.T) {
	nodes := []driver.ForwardingNode{{Name: "a", Address: "a:1"}}
	nas := pool.Config{Name: "nas", NFS: &pool.NFS{Server: "nas.lan", Export: "/e"}}
	for _, tc := range []struct {
		name, services string
		change         func(*driver.Options)
		says           string
	}{
		{"controller without forwarding", "controller", func(o *driver.Options) { o.Config.Pools = nil }, "has no section forwarding: add it, or use --services controller,node"},
		{"controller with a directory pool", "controller", func(o *driver.Options) { o.Config.Forwarding = &driver.Forwarding{Nodes: nodes} }, `pools[0] "default"`},
		{"controller with an nfs pool and a directory pool", "controller", func(o *driver.Options) {
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
		{"node without forwarding", "node", func(*driver.Options) {}, "set forwarding.listen, or use --services controller,node"},
		{"node without listen", "node", func(o *driver.Options) { o.Config.Forwarding = &driver.Forwarding{} }, "set forwarding.listen"},
		{"node with a list of nodes", "node", func(o *driver.Options) {
			o.Config.Forwarding = &driver.Forwarding{Listen: ":1", Nodes: nodes}
		}, "forwarding.nodes is for --services controller: remove it"},
		{"both services with forwarding", "controller,node", func(o *driver.Options) { o.Config.Forwarding = &driver.Forwarding{Listen: ":1"} }, "calls are not forwarded: remove the section forwarding"},
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

// TestNoCertificates: a driver without usable certificates runs but is not ready, and /readyz states the reason.
func TestNoCertificates(t *testing.T) {
	o := options(t)
	o.Services, o.HTTPAddress = []string{"node"}, backendtest.FreeAddress(t)
	o.Config.Forwarding = &driver.Forwarding{Listen: backendtest.FreeAddress(t)}
	d := backendtest.StartWith(t, o)
	if code, body := get(t, o.HTTPAddress, "/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(body, "tls.crt") {
		t.Errorf("/readyz: got %d %s, want 503 with tls.crt", code, body)
	}
	c := backendtest.NewCluster(t)
	wantCode(t, probe(t.Context(), dial(t, o.Config.Forwarding.Listen, changedTLS(t, c, nil))), codes.Unavailable)
	c.Certify(t, filepath.Join(d.Options.StateDir, "certificates"), pki.NodeURI(backendtest.DriverName, o.NodeID), x509.ExtKeyUsageServerAuth)
	must(t, probe(t.Context(), dial(t, o.Config.Forwarding.Listen, changedTLS(t, c, nil)), grpc.WaitForReady(true)))
	await(t, "readiness", func() bool { code, _ := get(t, o.HTTPAddress, "/readyz"); return code == http.StatusOK })
	c.Certify(t, filepath.Join(o.StateDir, "certificates"), pki.NodeURI(backendtest.DriverName, "other-node"), x509.ExtKeyUsageServerAuth)
	await(t, "an error of /readyz that names the other node", func() bool {
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

// TestStatic runs a cluster without Kubernetes: drivers with the configurations of deploy/static and the
// certificates that its script creates.
func TestStatic(t *testing.T) {
	const files = "../deploy/static/"
	dir := t.TempDir()
	for range 2 { // the second run uses the existing CA
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
	start := func(service, node string, c driver.Config) *backendtest.Driver {
		o := options(t, loop.Kind)
		o.Services, o.NodeID, o.Config, o.HTTPAddress = []string{service}, node, c, backendtest.FreeAddress(t)
		return backendtest.StartWith(t, o)
	}
	addresses := []string{backendtest.FreeAddress(t), backendtest.FreeAddress(t)}
	for i, address := range addresses {
		node := fmt.Sprintf("worker-%d", i+1)
		start("node", node, config("node.yaml",
			"/var/lib/trivet/pools", t.TempDir(), "/etc/trivet/certificates", filepath.Join(dir, "nodes", node), ":9811", address))
	}
	router := start("controller", "", config("controller.yaml",
		"/etc/trivet/certificates", filepath.Join(dir, "controller"), "10.0.0.11:9811", addresses[0], "10.0.0.12:9811", addresses[1]))
	(&backendtest.Cluster{Router: router}).Await(t)
	wantMetrics(t, router.Options.HTTPAddress,
		`trivet_node_up{csi_node="worker-1"} 1`, `trivet_node_up{csi_node="worker-2"} 1`, `trivet_node_conflicting_pools{csi_node="worker-2"} 0`, `services="controller"`)
	for _, node := range []string{"worker-1", "worker-2"} {
		resp, err := router.Control.GetCapacity(t.Context(), &csi.GetCapacityRequest{
			AccessibleTopology: &csi.Topology{Segments: map[string]string{"csi.trivet.dev/node": node}},
		})
		if err != nil || resp.GetAvailableCapacity() == 0 {
			t.Errorf("GetCapacity of %s: got %v, error %v, want some capacity", node, resp, err)
		}
	}
}

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}
