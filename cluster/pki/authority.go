package pki

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"net/url"
	"slices"
	"time"

	"github.com/trivet-csi/trivet/volume"
)

const (
	authorityLifetime = 10 * 365 * 24 * time.Hour
	// backdate is how far the clock of who verifies may be behind.
	backdate = time.Hour
)

const (
	certificateBlock = "CERTIFICATE"
	keyBlock         = "PRIVATE KEY"
)

// Authority is a certificate authority (CA) and its private key.
type Authority struct {
	cert *x509.Certificate
	key  crypto.PrivateKey
}

// NewAuthority makes a CA of a driver's own, for 10 years.
func NewAuthority(driver string) (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	template := &x509.Certificate{
		Subject:               pkix.Name{CommonName: driver},
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(authorityLifetime),
		KeyUsage:              x509.KeyUsageCertSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	return &Authority{cert, key}, err
}

// ParseAuthority reads a CA that may come from elsewhere: its certificate is the
// first in cert. ErrInvalid tells why it can sign nothing.
func ParseAuthority(cert, key []byte) (*Authority, error) {
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, volume.Errorf(volume.ErrInvalid, "CA: %w: want a certificate and its private key (PEM)", err)
	}
	if !isAuthority(pair.Leaf) {
		return nil, volume.Errorf(volume.ErrInvalid, "CA: certificate %q is no CA's: it needs basic constraint CA:TRUE and key usage certSign", pair.Leaf.Subject)
	}
	if err := checkTime(pair.Leaf, time.Now()); err != nil {
		return nil, volume.Errorf(volume.ErrInvalid, "CA: certificate %q: %w", pair.Leaf.Subject, err)
	}
	return &Authority{pair.Leaf, pair.PrivateKey}, nil
}

// PEM is what ParseAuthority reads.
func (a *Authority) PEM() (cert, key []byte, err error) {
	key, err = encodeKey(a.key)
	return encodeCertificate(a.cert.Raw), key, err
}

// Certificate is the CA's own.
func (a *Authority) Certificate() *x509.Certificate { return a.cert }

// Issue signs a certificate (PEM) by which the owner of a key is who, for one use.
// It is good for lifetime from now, but never longer than the CA's own.
func (a *Authority) Issue(pub crypto.PublicKey, who *url.URL, usage x509.ExtKeyUsage, lifetime time.Duration) ([]byte, error) {
	now := time.Now()
	if err := checkTime(a.cert, now); err != nil {
		return nil, volume.Errorf(volume.ErrPrecondition, "CA: certificate %q: %w", a.cert.Subject, err)
	}
	template := &x509.Certificate{
		NotBefore:             now.Add(-backdate),
		NotAfter:              slices.MinFunc([]time.Time{now.Add(lifetime), a.cert.NotAfter}, time.Time.Compare),
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{usage},
		BasicConstraintsValid: true,
		URIs:                  []*url.URL{who},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, pub, a.key)
	if err != nil {
		return nil, err
	}
	return encodeCertificate(der), nil
}

// JoinRoots puts bundles of CA certificates (PEM) together, each certificate once
// and in the order it is met. What has expired or is no CA's certificate is left out.
func JoinRoots(bundles ...[]byte) []byte {
	var joined []byte
	for _, bundle := range bundles {
		for block, rest := pem.Decode(bundle); block != nil; block, rest = pem.Decode(rest) {
			root := encodeCertificate(block.Bytes)
			if isRoot(block) && !bytes.Contains(joined, root) {
				joined = append(joined, root...)
			}
		}
	}
	return joined
}

// Remaining tells how long the first certificate in certPEM is still good, less
// than nothing if it has expired, and of how long altogether.
func Remaining(certPEM []byte) (left, of time.Duration, err error) {
	block, _ := pem.Decode(certPEM)
	if block == nil {
		return 0, 0, volume.Errorf(volume.ErrInvalid, "certificate: want a PEM block %s", certificateBlock)
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return 0, 0, volume.Errorf(volume.ErrInvalid, "certificate: %w", err)
	}
	return time.Until(cert.NotAfter), cert.NotAfter.Sub(cert.NotBefore), nil
}

func isRoot(block *pem.Block) bool {
	cert, err := x509.ParseCertificate(block.Bytes)
	return err == nil && block.Type == certificateBlock && isAuthority(cert) && time.Now().Before(cert.NotAfter)
}

// isAuthority tells whether a certificate may sign others. One without key usages
// is not bound to any.
func isAuthority(cert *x509.Certificate) bool {
	return cert.BasicConstraintsValid && cert.IsCA && (cert.KeyUsage == 0 || cert.KeyUsage&x509.KeyUsageCertSign != 0)
}

func encodeCertificate(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: certificateBlock, Bytes: der})
}

func encodeKey(key crypto.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	return pem.EncodeToMemory(&pem.Block{Type: keyBlock, Bytes: der}), err
}
