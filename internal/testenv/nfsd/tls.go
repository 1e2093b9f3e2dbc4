package nfsd

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	_ "embed"
	"encoding/pem"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/internal/testenv"
)

//go:embed tlshd.sh
var tlshdScript string

// tlshdVariable is the path of tlshd(8), which test/vm provides.
const tlshdVariable = "TRIVET_TEST_TLSHD"

// Authority issues the certificates with which servers and nodes use TLS.
type Authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// NewAuthority returns a new authority. No server or node trusts it yet.
func NewAuthority(tb testing.TB) *Authority {
	tb.Helper()
	a := &Authority{cert: template("authority"), key: newKey(tb)}
	a.cert.IsCA, a.cert.BasicConstraintsValid = true, true
	a.cert.KeyUsage = x509.KeyUsageCertSign
	return a
}

// ServeTLS starts the server's tlshd with a certificate of an authority, whose other certificates it trusts. Clients that do not ask
// for TLS can still mount all exports. The name of the server is ServerName.
func (s *Server) ServeTLS(tb testing.TB, a *Authority) {
	tb.Helper()
	requireVM(tb)
	testenv.Run(tb, "modprobe", "tls")
	addLine(tb, "/etc/hosts", s.Address()+" "+ServerName)
	startTlshd(tb, s.pid, "server", a, a.issue(tb, ServerName))
}

// StartTlshd starts tlshd on a node with a certificate of an authority. It trusts the certificates of another, which may be the same.
func (n *Node) StartTlshd(tb testing.TB, own, trusted *Authority) {
	tb.Helper()
	startTlshd(tb, n.pid, "client", trusted, own.issue(tb, fmt.Sprint("node-", n.n)))
}

// certificate is a certificate and its key, in PEM.
type certificate struct{ cert, key []byte }

// startTlshd starts tlshd in the namespaces of a process. role is client or server. If the test fails, the output is logged.
func startTlshd(tb testing.TB, pid int, role string, trusted *Authority, c certificate) {
	tb.Helper()
	program := os.Getenv(tlshdVariable)
	if program == "" {
		tb.Fatalf("%s is not set to the path of tlshd: run this test with test/vm", tlshdVariable)
	}
	dir := tb.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	for name, content := range map[string][]byte{
		"trusted.pem": trusted.pem(tb), "cert.pem": c.cert, "key.pem": c.key,
		"tlshd.conf": fmt.Appendf(nil, "[authenticate.%s]\nx509.truststore=%s\nx509.certificate=%s\nx509.private_key=%s\n",
			role, path("trusted.pem"), path("cert.pem"), path("key.pem")),
	} {
		if err := os.WriteFile(path(name), content, 0o600); err != nil { // tlshd refuses files that others can read
			tb.Fatal(err)
		}
	}
	startNamespaces(tb, daemonsOf(pid), tlshdScript, program, path("tlshd.conf"), path("log"))
	tb.Cleanup(func() { logEnd(tb, "tlshd of a "+role, path("log")) })
}

// issue returns a certificate for a name.
func (a *Authority) issue(tb testing.TB, name string) certificate {
	tb.Helper()
	cert, key := template(name), newKey(tb)
	cert.DNSNames = []string{name}
	cert.KeyUsage = x509.KeyUsageDigitalSignature
	cert.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		tb.Fatal(err)
	}
	return certificate{a.sign(tb, cert, key), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})}
}

// pem returns the authority's own certificate.
func (a *Authority) pem(tb testing.TB) []byte {
	tb.Helper()
	return a.sign(tb, a.cert, a.key)
}

// sign returns a certificate for a key.
func (a *Authority) sign(tb testing.TB, cert *x509.Certificate, key *ecdsa.PrivateKey) []byte {
	tb.Helper()
	der, err := x509.CreateCertificate(rand.Reader, cert, a.cert, key.Public(), a.key)
	if err != nil {
		tb.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// template returns a certificate without the fields that depend on its use.
func template(name string) *x509.Certificate {
	return &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
	}
}

func newKey(tb testing.TB) *ecdsa.PrivateKey {
	tb.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		tb.Fatal(err)
	}
	return key
}
