package kube

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"net/url"
	"time"

	"github.com/trivet-csi/trivet/cluster/pki"
)

// minWait bounds how often certificates are issued while the CA is about to expire.
const minWait = time.Minute

// owned parses a certificate. It fails if the certificate is not for the given identity or does
// not match the key.
func owned(cert, key []byte, identity *url.URL) (*x509.Certificate, error) {
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, err
	}
	if uris := pair.Leaf.URIs; len(uris) != 1 || uris[0].String() != identity.String() {
		return nil, fmt.Errorf("the certificate is for %v, expected %s", uris, identity)
	}
	return pair.Leaf, nil
}

// validLeaf returns the certificate in a directory and the time until its renewal; nil if the certificate
// cannot be read, is not for the given identity, or is not trusted by the roots. Without roots it is trusted.
func validLeaf(d *pki.Directory, identity *url.URL, roots []byte) (*x509.Certificate, time.Duration) {
	cert, key, _, _ := d.Read() // an unreadable certificate is not valid
	leaf, err := owned(cert, key, identity)
	if err != nil || len(roots) > 0 && trusted(leaf, roots) != nil {
		return nil, 0
	}
	wait, err := untilRenewal(cert)
	if err != nil {
		return nil, 0
	}
	return leaf, wait
}

// writeRoots replaces the CA certificates in a directory, and reports whether they differ. An unreadable
// file is replaced.
func writeRoots(d *pki.Directory, roots []byte) (changed bool, err error) {
	if _, _, have, _ := d.Read(); bytes.Equal(have, roots) {
		return false, nil
	}
	return true, d.Write(nil, nil, roots)
}

// trusted returns an error if no root (PEM) verifies the certificate, or if it is not valid now.
func trusted(leaf *x509.Certificate, roots []byte) error {
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(roots)
	_, err := leaf.Verify(x509.VerifyOptions{Roots: pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
	return err
}

// untilRenewal returns the time until two thirds of a certificate's (PEM) lifetime are over.
func untilRenewal(cert []byte) (time.Duration, error) {
	left, total, err := pki.Lifetime(cert)
	return left - total/3, err
}
