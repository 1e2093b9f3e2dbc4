package pki

import (
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"
)

// purposes describes key usages in errors.
var purposes = map[x509.ExtKeyUsage]string{
	x509.ExtKeyUsageClientAuth: "client authentication",
	x509.ExtKeyUsageServerAuth: "server authentication",
}

// verify fails unless the leaf of a chain is valid now, is verified by the roots, allows the usage, and
// names only the identity. Errors contain names from a certificate only if its signature is valid.
func verify(chain []*x509.Certificate, roots *x509.CertPool, identity *url.URL, usage x509.ExtKeyUsage) error {
	now := time.Now()
	leaf, intermediates := chain[0], x509.NewCertPool()
	for _, c := range chain[1:] {
		intermediates.AddCert(c)
	}
	_, err := leaf.Verify(x509.VerifyOptions{
		Roots: roots, Intermediates: intermediates, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{usage},
	})
	var invalid x509.CertificateInvalidError
	if err != nil && (!errors.As(err, &invalid) || invalid.Reason != x509.IncompatibleUsage) {
		return explain(err, now)
	}
	// Verify accepts a certificate without usages.
	if err != nil || !slices.Contains(leaf.ExtKeyUsage, usage) {
		return fmt.Errorf("certificate of %s is not for %s, expected %s", uriNames(leaf), purposes[usage], identity)
	}
	if len(leaf.URIs) != 1 || leaf.URIs[0].String() != identity.String() {
		return fmt.Errorf("certificate of %s, expected %s", uriNames(leaf), identity)
	}
	return nil
}

// uriNames formats the URIs of a certificate for errors.
func uriNames(cert *x509.Certificate) string {
	if len(cert.URIs) == 0 {
		return "no URI"
	}
	var uris []string
	for _, u := range cert.URIs {
		uris = append(uris, u.String())
	}
	return strings.Join(uris, " and ")
}

// explain replaces an error of x509 by one with a remedy.
func explain(err error, now time.Time) error {
	var unknown x509.UnknownAuthorityError
	if errors.As(err, &unknown) {
		// The text of x509 contains names from the unverified certificate.
		return fmt.Errorf("certificate is signed by another CA, which %s does not have", rootsFile)
	}
	var invalid x509.CertificateInvalidError
	if errors.As(err, &invalid) && invalid.Reason == x509.Expired {
		return fmt.Errorf("certificate %w", checkTime(invalid.Cert, now))
	}
	return fmt.Errorf("certificate: %w", err)
}

// checkTime fails if a certificate is not valid at the time now. The text of the error has no subject, so
// callers put the certificate before it.
func checkTime(cert *x509.Certificate, now time.Time) error {
	const layout = time.RFC3339
	at := now.UTC().Format(layout)
	switch {
	case now.After(cert.NotAfter):
		return fmt.Errorf("expired on %s, the clock here says %s: renew it", cert.NotAfter.UTC().Format(layout), at)
	case now.Before(cert.NotBefore):
		return fmt.Errorf("is not valid before %s, the clock here says %s: check the clocks", cert.NotBefore.UTC().Format(layout), at)
	}
	return nil
}
