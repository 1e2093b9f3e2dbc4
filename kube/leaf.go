package kube

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/url"
	"time"

	"github.com/trivet-csi/trivet/pki"
)

// leastWait keeps a CA that is about to expire from being asked ever faster.
const leastWait = time.Minute

// owned reads a certificate that is who's and goes with the key.
func owned(cert, key []byte, who *url.URL) (*x509.Certificate, error) {
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, err
	}
	if uris := pair.Leaf.URIs; len(uris) != 1 || uris[0].String() != who.String() {
		return nil, fmt.Errorf("certificate of %v, expected is %s", uris, who)
	}
	return pair.Leaf, nil
}

// trusted refuses a certificate that none of the roots (PEM) stands for, or whose
// time is not now.
func trusted(leaf *x509.Certificate, roots []byte) error {
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(roots)
	_, err := leaf.Verify(x509.VerifyOptions{Roots: pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
	return err
}

// untilRenewal is two thirds of a certificate's life (PEM), from its beginning.
func untilRenewal(cert []byte) (time.Duration, error) {
	left, of, err := pki.Remaining(cert)
	return left - of/3, err
}
