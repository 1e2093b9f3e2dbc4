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

// minWait is the shortest time between two certificates. It matters while the CA is about to expire,
// because each certificate then expires with the CA.
const minWait = time.Minute

// parseLeaf parses a certificate. It fails if the certificate is not for the given identity or does
// not match the key.
func parseLeaf(cert, key []byte, identity *url.URL) (*x509.Certificate, error) {
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, err
	}
	if uris := pair.Leaf.URIs; len(uris) != 1 || uris[0].String() != identity.String() {
		return nil, fmt.Errorf("the certificate is for %v, expected %s", uris, identity)
	}
	return pair.Leaf, nil
}

// validLeaf returns the certificate in a directory and the time until its renewal. It returns nil if the
// certificate cannot be read, is not for the given identity, or is not verified by the roots. If roots is
// empty, validLeaf does not verify the certificate with them.
func validLeaf(d *pki.Directory, identity *url.URL, roots []byte) (*x509.Certificate, time.Duration) {
	cert, key, _, _ := d.Read() // an unreadable certificate is not valid
	leaf, err := parseLeaf(cert, key, identity)
	if err != nil || len(roots) > 0 && verify(leaf, roots) != nil {
		return nil, 0
	}
	wait, err := untilRenewal(cert)
	if err != nil {
		return nil, 0
	}
	return leaf, wait
}

// writeRoots writes CA certificates to a directory unless it contains exactly these, and reports
// whether it wrote them.
func writeRoots(d *pki.Directory, roots []byte) (changed bool, err error) {
	if _, _, have, _ := d.Read(); bytes.Equal(have, roots) {
		return false, nil
	}
	return true, d.Write(nil, nil, roots)
}

// verify fails if no root (PEM) verifies the certificate, or if the certificate is not valid now.
func verify(leaf *x509.Certificate, roots []byte) error {
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(roots)
	_, err := leaf.Verify(x509.VerifyOptions{Roots: pool, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
	return err
}

// untilRenewal returns the time until two thirds of the lifetime of a certificate (PEM) have passed.
func untilRenewal(cert []byte) (time.Duration, error) {
	left, total, err := pki.Lifetime(cert)
	return left - total/3, err
}
