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

// rereadAfter is how old at most what a handshake goes by is.
const rereadAfter = time.Second

// Directory is a process's own certificate and key (tls.crt, tls.key) and the CA
// certificates that it trusts (ca.crt), all PEM, and read again as they change. Of
// files that are half written or do not match, what was good before stays in use.
type Directory struct {
	path string

	mu   sync.Mutex
	read time.Time // when the files were last read
	last content
}

// content is what was last good of the files. Without pair or roots there is a fault.
type content struct {
	pair  *tls.Certificate
	roots *x509.CertPool
	fault error // why not all that the files have now is in use
}

// OpenDirectory is the directory at path, which need not be there yet.
func OpenDirectory(path string) *Directory { return &Directory{path: path} }

// Server is the side that is called: TLS 1.3, and client alone may call.
func (d *Directory) Server(client *url.URL) *tls.Config {
	return &tls.Config{
		MinVersion:             tls.VersionTLS13,
		GetCertificate:         func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return d.pair() },
		ClientAuth:             tls.RequireAnyClientCert, // VerifyConnection verifies it
		VerifyConnection:       d.accept(client, x509.ExtKeyUsageClientAuth),
		SessionTicketsDisabled: true, // a resumed session would outlive its certificate
	}
}

// Client is the side that calls: TLS 1.3, and server alone may answer.
func (d *Directory) Client(server *url.URL) *tls.Config {
	return &tls.Config{
		MinVersion:           tls.VersionTLS13,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return d.pair() },
		// The server is known by its URI, not by a host name, and its CA may change
		// while this is in use: VerifyConnection does all that is skipped here.
		InsecureSkipVerify: true,
		VerifyConnection:   d.accept(server, x509.ExtKeyUsageServerAuth),
	}
}

// Usable is nil if there is something to serve or call with, and otherwise says why
// not (ErrPrecondition).
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

// UsableAs is Usable for who, and refuses a certificate of somebody else.
func (d *Directory) UsableAs(who *url.URL) error {
	if err := d.Usable(); err != nil {
		return err
	}
	c, err := d.current()
	if err != nil {
		return err
	}
	if got := names(c.pair.Leaf); got != who.String() {
		return volume.Errorf(volume.ErrPrecondition, "certificate in %s is that of %s, expected is %s: put this driver's own there", d.file(certFile), got, who)
	}
	return nil
}

// Read gives what the files have, nil where one is not there or cannot be read; err
// is then of the first such file, fs.ErrNotExist if it is not there.
func (d *Directory) Read() (cert, key, roots []byte, err error) {
	cert, certErr := os.ReadFile(d.file(certFile))
	key, keyErr := os.ReadFile(d.file(keyFile))
	roots, rootsErr := os.ReadFile(d.file(rootsFile))
	return cert, key, roots, cmp.Or(certErr, keyErr, rootsErr)
}

// Write replaces files, each at once; of nil, the file stays as it is. A certificate
// and its key are written together: alone neither matches what is there.
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

func (d *Directory) accept(who *url.URL, usage x509.ExtKeyUsage) func(tls.ConnectionState) error {
	return func(s tls.ConnectionState) error {
		c, err := d.current()
		if err != nil {
			return err
		}
		return verify(s.PeerCertificates, c.roots, who, usage)
	}
}

// current is what to go by now. It fails if there has been no pair, or no roots.
func (d *Directory) current() (content, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if time.Since(d.read) >= rereadAfter {
		d.reread()
	}
	if d.last.pair == nil || d.last.roots == nil {
		return content{}, d.last.fault
	}
	return d.last, nil
}

// reread parses the files even if they look unchanged: it takes less than a
// handshake, and times and sizes of files can mislead.
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
		d.last.fault = volume.Errorf(volume.ErrPrecondition, "certificates in %s: %w: want %s, its key %s, and CA certificates %s (PEM)",
			d.path, d.last.fault, certFile, keyFile, rootsFile)
	}
}

func parseRoots(bundle []byte) (*x509.CertPool, error) {
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(JoinRoots(bundle)) {
		return nil, fmt.Errorf("%s has no CA certificate that has not expired", rootsFile)
	}
	return pool, nil
}
