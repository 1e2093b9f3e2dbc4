package pki_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"io"
	"net"
	"net/url"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

const driverName = "csi.trivet.dev"

var (
	controller = pki.ControllerURI(driverName)
	nodeA      = pki.NodeURI(driverName, "a")
	nodeB      = pki.NodeURI(driverName, "b")
)

// must returns a function that fails the test if err is not nil, and otherwise returns the value.
func must[T any](tb testing.TB) func(T, error) T {
	return func(v T, err error) T {
		tb.Helper()
		if err != nil {
			tb.Fatal(err)
		}
		return v
	}
}

// must2 is must for functions with two values. Its arguments are in the other order: must2(f())(t).
func must2[A, B any](a A, b B, err error) func(testing.TB) (A, B) {
	return func(tb testing.TB) (A, B) {
		tb.Helper()
		if err != nil {
			tb.Fatal(err)
		}
		return a, b
	}
}

func newAuthority(tb testing.TB) *pki.Authority {
	tb.Helper()
	return must[*pki.Authority](tb)(pki.NewAuthority(driverName))
}

// certificatesOf returns the certificates of authorities (PEM).
func certificatesOf(authorities ...*pki.Authority) []byte {
	var bundle []byte
	for _, a := range authorities {
		bundle = append(bundle, encode(a.Certificate().Raw)...)
	}
	return bundle
}

func encode(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func parse(tb testing.TB, certPEM []byte) *x509.Certificate {
	tb.Helper()
	block, _ := pem.Decode(certPEM)
	if block == nil {
		tb.Fatalf("got %q, want a PEM block", certPEM)
	}
	return must[*x509.Certificate](tb)(x509.ParseCertificate(block.Bytes))
}

// newPair requests a certificate from an authority as a node does.
func newPair(tb testing.TB, ca *pki.Authority, identity *url.URL, usage x509.ExtKeyUsage) (cert, key []byte) {
	tb.Helper()
	key, request := must2(pki.NewRequest(identity))(tb)
	pub, parsed, err := pki.ParseRequest(request)
	if err != nil || parsed.String() != identity.String() {
		tb.Fatalf("ParseRequest: got identity %s, %v, want %s", parsed, err, identity)
	}
	return must[[]byte](tb)(ca.Issue(pub, parsed, usage, 7*24*time.Hour)), key
}

// newDirectory returns a directory that contains a new certificate issued by ca, and trusts ca.
func newDirectory(tb testing.TB, ca *pki.Authority, identity *url.URL, usage x509.ExtKeyUsage) (d *pki.Directory, path string) {
	tb.Helper()
	path = filepath.Join(tb.TempDir(), "certificates")
	d = pki.OpenDirectory(path)
	cert, key := newPair(tb, ca, identity, usage)
	if err := d.Write(cert, key, certificatesOf(ca)); err != nil {
		tb.Fatal(err)
	}
	return d, path
}

// sign signs a certificate that Authority.Issue would not issue. If ca is nil, it is self-signed.
func sign(tb testing.TB, ca *pki.Authority, template *x509.Certificate) tls.Certificate {
	tb.Helper()
	key := must[*ecdsa.PrivateKey](tb)(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	issuer := tls.Certificate{Leaf: template, PrivateKey: key}
	if ca != nil {
		cert, caKey := must2(ca.PEM())(tb)
		issuer = must[tls.Certificate](tb)(tls.X509KeyPair(cert, caKey))
	}
	der := must[[]byte](tb)(x509.CreateCertificate(rand.Reader, template, issuer.Leaf, key.Public(), issuer.PrivateKey))
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// keyPEM returns the private key of a certificate (PEM).
func keyPEM(tb testing.TB, pair tls.Certificate) []byte {
	tb.Helper()
	der := must[[]byte](tb)(x509.MarshalPKCS8PrivateKey(pair.PrivateKey))
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
}

// connect connects a client to a server over TCP. The client reads one byte, because in TLS 1.3 its
// handshake may succeed before the server rejects its certificate (RFC 8446, section 4.4).
func connect(tb testing.TB, server, client *tls.Config) (state tls.ConnectionState, serverErr, clientErr error) {
	tb.Helper()
	listener := must[net.Listener](tb)(net.Listen("tcp", "127.0.0.1:0"))
	defer func() { _ = listener.Close() }()
	done := make(chan error, 1)
	go func() {
		raw, err := listener.Accept()
		if err == nil {
			_, err = tls.Server(raw, server).Write([]byte("."))
			_ = raw.Close()
		}
		done <- err
	}()
	raw := must[net.Conn](tb)(net.Dial("tcp", listener.Addr().String()))
	conn := tls.Client(raw, client)
	_, clientErr = io.ReadFull(conn, make([]byte, 1))
	_ = raw.Close()
	return conn.ConnectionState(), <-done, clientErr
}

// mustConnect fails the test unless server and client accept each other. It returns the state of the
// connection as the client sees it.
func mustConnect(tb testing.TB, server, client *pki.Directory) tls.ConnectionState {
	tb.Helper()
	state, serverErr, clientErr := connect(tb, server.Server(controller), client.Client(nodeA))
	if err := errors.Join(serverErr, clientErr); err != nil {
		tb.Fatal(err)
	}
	return state
}

// hasText reports whether an error contains a text. If the text is empty, it reports whether err is nil.
func hasText(err error, text string) bool {
	if err == nil || text == "" {
		return err == nil && text == ""
	}
	return strings.Contains(err.Error(), text)
}
