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
	// backdate is how long before its issue a certificate becomes valid. It allows for clock skew.
	backdate = time.Hour
)

// Types of PEM blocks.
const (
	certificateBlock = "CERTIFICATE"
	keyBlock         = "PRIVATE KEY"
)

// Authority is a certificate authority (CA) and its private key.
type Authority struct {
	cert *x509.Certificate
	key  crypto.PrivateKey
}

// NewAuthority creates a CA that is valid for 10 years.
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

// ParseAuthority parses a CA (PEM). It uses the first certificate in cert. It fails with ErrInvalid if
// the key does not match, if the certificate is not a CA certificate, or if it is not valid now.
func ParseAuthority(cert, key []byte) (*Authority, error) {
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, volume.Errorf(volume.ErrInvalid, "CA: %w: a certificate and its private key (PEM) are needed", err)
	}
	if !canSign(pair.Leaf) {
		return nil, volume.Errorf(volume.ErrInvalid, "CA: certificate %q is not a CA certificate: it needs basic constraint CA:TRUE and key usage certSign", pair.Leaf.Subject)
	}
	if err := checkTime(pair.Leaf, time.Now()); err != nil {
		return nil, volume.Errorf(volume.ErrInvalid, "CA: certificate %q: %w", pair.Leaf.Subject, err)
	}
	return &Authority{pair.Leaf, pair.PrivateKey}, nil
}

// PEM returns the CA in the form that ParseAuthority reads.
func (a *Authority) PEM() (cert, key []byte, err error) {
	key, err = encodeKey(a.key)
	return encodeCertificate(a.cert.Raw), key, err
}

// Certificate returns the CA's certificate.
func (a *Authority) Certificate() *x509.Certificate { return a.cert }

// Issue returns a signed certificate (PEM) for a public key, with a URI as identity and one extended key
// usage. The certificate expires after lifetime, but not later than the CA's certificate. Issue fails with
// ErrPrecondition if the CA's certificate is not valid now.
func (a *Authority) Issue(pub crypto.PublicKey, identity *url.URL, usage x509.ExtKeyUsage, lifetime time.Duration) ([]byte, error) {
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
		URIs:                  []*url.URL{identity},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, pub, a.key)
	if err != nil {
		return nil, err
	}
	return encodeCertificate(der), nil
}

// JoinRoots concatenates bundles of CA certificates (PEM) in order. It omits duplicates, expired
// certificates and everything that is not a CA certificate.
func JoinRoots(bundles ...[]byte) []byte {
	var joined []byte
	for _, bundle := range bundles {
		for block, rest := pem.Decode(bundle); block != nil; block, rest = pem.Decode(rest) {
			root := encodeCertificate(block.Bytes)
			cert, err := x509.ParseCertificate(block.Bytes)
			if err != nil || block.Type != certificateBlock || !canSign(cert) || !time.Now().Before(cert.NotAfter) {
				continue
			}
			if !bytes.Contains(joined, root) {
				joined = append(joined, root...)
			}
		}
	}
	return joined
}

// Lifetime returns the remaining and the total lifetime of the first certificate in certPEM. left is
// negative if the certificate has expired.
func Lifetime(certPEM []byte) (left, total time.Duration, err error) {
	block, _ := pem.Decode(certPEM)
	if block == nil {
		return 0, 0, volume.Errorf(volume.ErrInvalid, "certificate: a PEM block %s is needed", certificateBlock)
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return 0, 0, volume.Errorf(volume.ErrInvalid, "certificate: %w", err)
	}
	return time.Until(cert.NotAfter), cert.NotAfter.Sub(cert.NotBefore), nil
}

// canSign reports whether a certificate may sign other certificates. A certificate without the key usage
// extension may be used for everything.
func canSign(cert *x509.Certificate) bool {
	return cert.BasicConstraintsValid && cert.IsCA && (cert.KeyUsage == 0 || cert.KeyUsage&x509.KeyUsageCertSign != 0)
}

func encodeCertificate(der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: certificateBlock, Bytes: der})
}

func encodeKey(key crypto.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	return pem.EncodeToMemory(&pem.Block{Type: keyBlock, Bytes: der}), err
}
