package pki_test

import (
	"crypto/tls"
	"crypto/x509"
	"net/url"
	"testing"
	"testing/synctest"
	"time"

	"github.com/trivet-csi/trivet/cluster/pki"
)

// side is one end of a connection.
type side struct {
	name     string
	identity *url.URL
	usage    x509.ExtKeyUsage
}

var (
	clientSide = side{"client", controller, x509.ExtKeyUsageClientAuth}
	serverSide = side{"server", nodeA, x509.ExtKeyUsageServerAuth}
)

// present presents a certificate to the verifier, the pki.Directory of the other side, and returns the
// verifier's error. The presenting side accepts every certificate, so that only the verifier can fail.
func (s side) present(t *testing.T, verifier *pki.Directory, presented ...tls.Certificate) error {
	t.Helper()
	plain := &tls.Config{Certificates: presented, InsecureSkipVerify: true, MinVersion: tls.VersionTLS13, ClientAuth: tls.RequireAnyClientCert}
	server, client := verifier.Server(controller), plain
	if s == serverSide {
		server, client = plain, verifier.Client(nodeA)
	}
	_, serverErr, clientErr := connect(t, server, client)
	if (serverErr == nil) != (clientErr == nil) {
		t.Errorf("got server error %v and client error %v, want errors of both or of neither", serverErr, clientErr)
	}
	if s == serverSide {
		return clientErr
	}
	return serverErr
}

// other returns the side at the other end of the connection.
func (s side) other() side {
	if s == serverSide {
		return clientSide
	}
	return serverSide
}

// template returns the template of a valid certificate.
func (s side) template() *x509.Certificate {
	now := time.Now()
	return &x509.Certificate{
		NotBefore: now.Add(-time.Hour), NotAfter: now.Add(time.Hour), KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{s.usage}, URIs: []*url.URL{s.identity},
	}
}

// TestVerify presents to both sides certificates with one fault each.
func TestVerify(t *testing.T) {
	type change func(*x509.Certificate, side)
	uris := func(uris ...*url.URL) change {
		return func(c *x509.Certificate, _ side) { c.URIs = uris }
	}
	usages := func(usages ...x509.ExtKeyUsage) change {
		return func(c *x509.Certificate, _ side) { c.ExtKeyUsage = usages }
	}
	type signer int
	const (
		trusted signer = iota
		another
		self
	)
	for _, tc := range []struct {
		name   string
		signer signer
		change change
		want   string
	}{
		{"valid", trusted, nil, ""},
		{"valid for both usages", trusted, usages(x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth), ""},
		{"valid with a DNS name", trusted, func(c *x509.Certificate, _ side) { c.DNSNames = []string{"a"} }, ""},
		{"self-signed", self, nil, "signed by another CA"},
		{"self-signed CA", self, func(c *x509.Certificate, _ side) {
			c.IsCA, c.BasicConstraintsValid, c.KeyUsage = true, true, c.KeyUsage|x509.KeyUsageCertSign
		}, "signed by another CA"},
		{"another CA of the same name", another, nil, "signed by another CA"},
		{
			"expired", trusted, func(c *x509.Certificate, _ side) { c.NotAfter = time.Now().Add(-time.Second) },
			"certificate expired on 1999-12-31T23:59:59Z, the clock here says 2000-01-01T00:00:00Z",
		},
		{
			"not yet valid", trusted, func(c *x509.Certificate, _ side) { c.NotBefore = time.Now().Add(time.Second) },
			"certificate is not valid before 2000-01-01T00:00:01Z, the clock here says 2000-01-01T00:00:00Z: check the clocks",
		},
		{"the other side's name and usage", trusted, func(c *x509.Certificate, s side) {
			c.URIs, c.ExtKeyUsage = []*url.URL{s.other().identity}, []x509.ExtKeyUsage{s.other().usage}
		}, " is not for "},
		{"the other side's usage", trusted, func(c *x509.Certificate, s side) { c.ExtKeyUsage = []x509.ExtKeyUsage{s.other().usage} }, " is not for "},
		{"no usage", trusted, usages(), " is not for "},
		{"any usage", trusted, usages(x509.ExtKeyUsageAny), " is not for "},
		{"the other side's name", trusted, func(c *x509.Certificate, s side) { c.URIs = []*url.URL{s.other().identity} }, ", expected spiffe://csi.trivet.dev/"},
		{"another node's name", trusted, uris(nodeB), "certificate of spiffe://csi.trivet.dev/node/b, expected spiffe://csi.trivet.dev/"},
		{"another driver's name", trusted, func(c *x509.Certificate, s side) {
			c.URIs = []*url.URL{{Scheme: "spiffe", Host: "other", Path: s.identity.Path}}
		}, "certificate of spiffe://other/"},
		{"another scheme", trusted, func(c *x509.Certificate, s side) {
			c.URIs = []*url.URL{{Scheme: "https", Host: s.identity.Host, Path: s.identity.Path}}
		}, "certificate of https://"},
		{"two URIs", trusted, func(c *x509.Certificate, s side) { c.URIs = []*url.URL{s.identity, nodeB} }, " and spiffe://csi.trivet.dev/node/b, expected "},
		{"one URI twice", trusted, func(c *x509.Certificate, s side) { c.URIs = []*url.URL{s.identity, s.identity} }, ", expected "},
		{"no URI", trusted, func(c *x509.Certificate, s side) { c.URIs, c.DNSNames = nil, []string{s.identity.Host} }, "certificate of no URI, expected "},
	} {
		for _, s := range []side{clientSide, serverSide} {
			t.Run(s.name+"/"+tc.name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					ca := newAuthority(t)
					verifier, _ := newDirectory(t, ca, s.other().identity, s.other().usage)
					template := s.template()
					if tc.change != nil {
						tc.change(template, s)
					}
					issuer := map[signer]*pki.Authority{trusted: ca, another: newAuthority(t), self: nil}[tc.signer]
					if err := s.present(t, verifier, sign(t, issuer, template)); !hasText(err, tc.want) {
						t.Errorf("got %v, want %q", err, tc.want)
					}
				})
			})
		}
	}
}

// TestNoCertificate: the server refuses a client without a certificate.
func TestNoCertificate(t *testing.T) {
	verifier, _ := newDirectory(t, newAuthority(t), nodeA, x509.ExtKeyUsageServerAuth)
	if err := clientSide.present(t, verifier); !hasText(err, "didn't provide a certificate") {
		t.Errorf("got %v, want an error about the missing certificate", err)
	}
}

// TestOldTLS: both sides refuse TLS 1.2.
func TestOldTLS(t *testing.T) {
	ca := newAuthority(t)
	server, _ := newDirectory(t, ca, nodeA, x509.ExtKeyUsageServerAuth)
	client, _ := newDirectory(t, ca, controller, x509.ExtKeyUsageClientAuth)
	old := client.Client(nodeA)
	old.MinVersion, old.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
	if _, err, _ := connect(t, server.Server(controller), old); !hasText(err, "unsupported versions") {
		t.Errorf("client with TLS 1.2: got server error %v, want unsupported versions", err)
	}
	old = server.Server(controller)
	old.MinVersion, old.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
	if _, _, err := connect(t, old, client.Client(nodeA)); !hasText(err, "protocol version not supported") {
		t.Errorf("server with TLS 1.2: got client error %v, want protocol version not supported", err)
	}
	if state := mustConnect(t, server, client); state.Version != tls.VersionTLS13 {
		t.Errorf("got TLS version %x, want 1.3", state.Version)
	}
}

// TestNoResumption: the server resumes no session, because only a full handshake verifies certificates.
func TestNoResumption(t *testing.T) {
	ca := newAuthority(t)
	server, _ := newDirectory(t, ca, nodeA, x509.ExtKeyUsageServerAuth)
	client, _ := newDirectory(t, ca, controller, x509.ExtKeyUsageClientAuth)
	serving, calling := server.Server(controller), client.Client(nodeA)
	calling.ServerName = "a" // the key of the client's session cache
	calling.ClientSessionCache = tls.NewLRUClientSessionCache(1)
	for range 2 {
		state, serverErr, clientErr := connect(t, serving, calling)
		if serverErr != nil || clientErr != nil || state.DidResume {
			t.Errorf("got resumed=%t, server error %v, client error %v; want a full handshake", state.DidResume, serverErr, clientErr)
		}
	}
}

// TestIntermediate: tls.crt may contain intermediate certificates.
func TestIntermediate(t *testing.T) {
	root := newAuthority(t)
	newIntermediate := func(change func(*x509.Certificate)) *pki.Authority {
		template := caTemplate()
		if change != nil {
			change(template)
		}
		pair := sign(t, root, template)
		return must[*pki.Authority](t)(pki.ParseAuthority(encode(pair.Certificate[0]), keyPEM(t, pair)))
	}
	intermediate := newIntermediate(nil)
	forServers := newIntermediate(func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} })
	for _, tc := range []struct {
		name         string
		issuer       *pki.Authority
		chain, roots []byte // chain is appended to the client's certificate
		want         string
	}{
		{"chain without the root", intermediate, certificatesOf(intermediate), certificatesOf(root), ""},
		{"chain with the root", intermediate, certificatesOf(intermediate, root), certificatesOf(root), ""},
		{"intermediate is a trusted root", intermediate, nil, certificatesOf(intermediate), ""},
		{"missing intermediate", intermediate, nil, certificatesOf(root), "signed by another CA"},
		{"chain of an unrelated CA", intermediate, certificatesOf(newAuthority(t)), certificatesOf(root), "signed by another CA"},
		{"root only in the chain", intermediate, certificatesOf(intermediate, root), certificatesOf(newAuthority(t)), "signed by another CA"},
		{"intermediate only for servers", forServers, certificatesOf(forServers), certificatesOf(root), "is not for client authentication"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			server, _ := newDirectory(t, root, nodeA, x509.ExtKeyUsageServerAuth)
			client, _ := newDirectory(t, root, controller, x509.ExtKeyUsageClientAuth)
			cert, key := newPair(t, tc.issuer, controller, x509.ExtKeyUsageClientAuth)
			if err := client.Write(append(cert, tc.chain...), key, nil); err != nil {
				t.Fatal(err)
			}
			if err := server.Write(nil, nil, tc.roots); err != nil {
				t.Fatal(err)
			}
			if _, err, _ := connect(t, server.Server(controller), client.Client(nodeA)); !hasText(err, tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}
