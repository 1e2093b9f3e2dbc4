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

var purposes = map[x509.ExtKeyUsage]string{
	x509.ExtKeyUsageClientAuth: "client authentication",
	x509.ExtKeyUsageServerAuth: "server authentication",
}

// verify is the one rule of whom to talk to: a certificate in its time, signed below
// roots, for that usage, that names who and nobody else. What a certificate says of
// its owner is not repeated before its signature is known to be good.
func verify(chain []*x509.Certificate, roots *x509.CertPool, who *url.URL, usage x509.ExtKeyUsage) error {
	now := time.Now()
	leaf, intermediates := chain[0], x509.NewCertPool()
	for _, c := range chain[1:] {
		intermediates.AddCert(c)
	}
	_, err := leaf.Verify(x509.VerifyOptions{
		Roots: roots, Intermediates: intermediates, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{usage},
	})
	if err != nil && !isUsage(err) {
		return explain(err, now)
	}
	// Verify lets a certificate pass that is bound to no usage at all.
	if err != nil || !slices.Contains(leaf.ExtKeyUsage, usage) {
		return fmt.Errorf("certificate of %s is not for %s, expected is %s", names(leaf), purposes[usage], who)
	}
	if len(leaf.URIs) != 1 || leaf.URIs[0].String() != who.String() {
		return fmt.Errorf("certificate of %s, expected is %s", names(leaf), who)
	}
	return nil
}

func isUsage(err error) bool {
	var invalid x509.CertificateInvalidError
	return errors.As(err, &invalid) && invalid.Reason == x509.IncompatibleUsage
}

func names(cert *x509.Certificate) string {
	if len(cert.URIs) == 0 {
		return "no URI"
	}
	var uris []string
	for _, u := range cert.URIs {
		uris = append(uris, u.String())
	}
	return strings.Join(uris, " and ")
}

// explain says what the administrator can do about it.
func explain(err error, now time.Time) error {
	var unknown x509.UnknownAuthorityError
	if errors.As(err, &unknown) {
		// What x509 adds is a stranger's text.
		return fmt.Errorf("certificate is signed by another CA, which %s does not have", rootsFile)
	}
	var invalid x509.CertificateInvalidError
	if errors.As(err, &invalid) && invalid.Reason == x509.Expired {
		return fmt.Errorf("certificate %w", checkTime(invalid.Cert, now))
	}
	return fmt.Errorf("certificate: %w", err)
}

// checkTime goes into a sentence that begins with the certificate.
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
