package pki

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/volume"
)

const (
	certFile  = "tls.crt"
	keyFile   = "tls.key"
	rootsFile = "ca.crt"
)

// maxAge is the time for which the content of the files is used before they are read again.
const maxAge = time.Second

// Directory contains a process's certificate and key (tls.crt, tls.key) and the CA certificates that
// it trusts (ca.crt), all PEM. Changed files are read again. While the new files are incomplete or do
// not match each other, the previous content remains in use.
type Directory struct {
	path string

	mu   sync.Mutex
	read time.Time // when the files were last read
	last content
}

// content is the last valid content of the files, and the error of the current files.
type content struct {
	pair  *tls.Certificate // nil until the files were valid
	roots *x509.CertPool   // nil until the file was valid
	fault error            // why the current files are invalid; nil if they are valid
}

// OpenDirectory returns the directory at path, which may be created later.
func OpenDirectory(path string) *Directory { return &Directory{path: path} }

// Server returns the TLS 1.3 configuration of a server that accepts only client.
func (d *Directory) Server(client *url.URL) *tls.Config {
	return &tls.Config{
		MinVersion:             tls.VersionTLS13,
		GetCertificate:         func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return d.pair() },
		ClientAuth:             tls.RequireAnyClientCert, // VerifyConnection verifies it
		VerifyConnection:       d.accept(client, x509.ExtKeyUsageClientAuth),
		SessionTicketsDisabled: true, // a resumed session would outlive its certificate
	}
}

// Client returns the TLS 1.3 configuration of a client that accepts only server.
func (d *Directory) Client(server *url.URL) *tls.Config {
	return &tls.Config{
		MinVersion:           tls.VersionTLS13,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return d.pair() },
		// VerifyConnection verifies the server, because it is identified by its URI instead of a
		// host name, and because the CA may change.
		InsecureSkipVerify: true,
		VerifyConnection:   d.accept(server, x509.ExtKeyUsageServerAuth),
	}
}

// PeerServer returns the TLS 1.3 configuration of a server that accepts all nodes of a driver, and only the protocol (ALPN).
// The nodes present the certificate that they have as servers.
func (d *Directory) PeerServer(driver, protocol string) *tls.Config {
	return &tls.Config{
		MinVersion:     tls.VersionTLS13,
		NextProtos:     []string{protocol},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return d.pair() },
		ClientAuth:     tls.RequireAnyClientCert, // VerifyConnection verifies it
		VerifyConnection: func(s tls.ConnectionState) error {
			node, ok := PeerNode(driver, s)
			switch {
			case s.NegotiatedProtocol != protocol:
				return fmt.Errorf("protocol %q was negotiated, expected %q", s.NegotiatedProtocol, protocol)
			case !ok:
				return fmt.Errorf("certificate is not that of a node of %s", driver)
			}
			return d.accept(NodeURI(driver, node), x509.ExtKeyUsageServerAuth)(s)
		},
		SessionTicketsDisabled: true, // a resumed session would outlive its certificate
	}
}

// PeerClient returns the configuration of a client of PeerServer that accepts only server.
func (d *Directory) PeerClient(server *url.URL, protocol string) *tls.Config {
	config := d.Client(server)
	config.NextProtos = []string{protocol}
	return config
}

// PeerNode returns the name of the node in the certificate of a connection. It does not verify the certificate.
func PeerNode(driver string, s tls.ConnectionState) (node string, ok bool) {
	if len(s.PeerCertificates) == 0 || len(s.PeerCertificates[0].URIs) != 1 {
		return "", false
	}
	return nodeIn(driver, s.PeerCertificates[0].URIs[0])
}

// Usable fails with ErrPrecondition if the directory has no valid certificate or no CA certificate.
func (d *Directory) Usable() error {
	c, err := d.current()
	if err != nil {
		return err
	}
	if err := checkTime(c.pair.Leaf, time.Now()); err != nil {
		return cmp.Or(c.fault, volume.Errorf(volume.ErrPrecondition, "certificate in %s %w", d.file(certFile), err))
	}
	return nil
}

// UsableAs fails like Usable, and also if the certificate does not name the identity.
func (d *Directory) UsableAs(identity *url.URL) error {
	if err := d.Usable(); err != nil {
		return err
	}
	c, err := d.current()
	if err != nil {
		return err
	}
	if got := uriNames(c.pair.Leaf); got != identity.String() {
		return volume.Errorf(volume.ErrPrecondition, "certificate in %s is that of %s, expected %s: replace it with this driver's certificate", d.file(certFile), got, identity)
	}
	return nil
}

// Expires returns the time when the certificate expires.
func (d *Directory) Expires() (time.Time, error) {
	c, err := d.current()
	if err != nil {
		return time.Time{}, err
	}
	return c.pair.Leaf.NotAfter, nil
}

// Read returns the content of the files. For a file that cannot be read, the content is nil; err is the
// error of the first such file.
func (d *Directory) Read() (cert, key, roots []byte, err error) {
	cert, certErr := os.ReadFile(d.file(certFile))
	key, keyErr := os.ReadFile(d.file(keyFile))
	roots, rootsErr := os.ReadFile(d.file(rootsFile))
	return cert, key, roots, cmp.Or(certErr, keyErr, rootsErr)
}

// Write replaces files atomically, one by one. A file whose content is nil is not changed. A certificate and
// its key must be written in one call.
func (d *Directory) Write(cert, key, roots []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.read = time.Time{}
	if err := os.MkdirAll(d.path, 0o700); err != nil {
		return err
	}
	dir, err := os.OpenRoot(d.path)
	if err != nil {
		return err
	}
	defer dir.Close()
	for _, f := range []struct {
		name string
		data []byte
	}{{rootsFile, roots}, {keyFile, key}, {certFile, cert}} {
		if f.data == nil {
			continue
		}
		if err := atomicfile.Write(dir, f.name, f.data); err != nil {
			return fmt.Errorf("writing %s: %w", d.file(f.name), err)
		}
	}
	return nil
}

func (d *Directory) file(name string) string { return filepath.Join(d.path, name) }

func (d *Directory) pair() (*tls.Certificate, error) {
	c, err := d.current()
	return c.pair, err
}

// accept returns a VerifyConnection function that accepts only the identity.
func (d *Directory) accept(identity *url.URL, usage x509.ExtKeyUsage) func(tls.ConnectionState) error {
	return func(s tls.ConnectionState) error {
		c, err := d.current()
		if err != nil {
			return err
		}
		return verify(s.PeerCertificates, c.roots, identity, usage)
	}
}

// current returns the content in use. It fails if the directory has had no valid pair or no valid roots.
func (d *Directory) current() (content, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if time.Since(d.read) >= maxAge {
		d.reread()
	}
	if d.last.pair == nil || d.last.roots == nil {
		return content{}, d.last.fault
	}
	return d.last, nil
}

// reread parses the files even if their times and sizes are unchanged, because this takes less time
// than a handshake and is reliable.
func (d *Directory) reread() {
	d.read = time.Now()
	cert, key, roots, err := d.Read()
	pair, pairErr := tls.X509KeyPair(cert, key)
	if pairErr == nil {
		d.last.pair = &pair
	}
	pool, rootsErr := parseRoots(roots)
	if rootsErr == nil {
		d.last.roots = pool
	}
	d.last.fault = cmp.Or(err, pairErr, rootsErr)
	if d.last.fault != nil {
		d.last.fault = volume.Errorf(volume.ErrPrecondition, "certificates in %s: %w: %s, its key %s and CA certificates %s (PEM) are needed",
			d.path, d.last.fault, certFile, keyFile, rootsFile)
	}
}

// parseRoots returns the valid CA certificates of a bundle. It fails if there are none.
func parseRoots(bundle []byte) (*x509.CertPool, error) {
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(JoinRoots(bundle)) {
		return nil, fmt.Errorf("%s contains no valid CA certificate", rootsFile)
	}
	return pool, nil
}
