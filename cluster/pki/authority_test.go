package pki_test

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/volume"
)

// caTemplate is a CA like that of cert-manager.
func caTemplate() *x509.Certificate {
	return &x509.Certificate{
		Subject: pkix.Name{CommonName: "other"}, NotBefore: time.Now(), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature, BasicConstraintsValid: true, IsCA: true,
	}
}

func TestParseAuthority(t *testing.T) {
	ca := newAuthority(t)
	cert, key := must2(ca.PEM())(t)
	_, otherKey := must2(newAuthority(t).PEM())(t)
	leaf, leafKey := newPair(t, ca, controller, x509.ExtKeyUsageClientAuth)
	signed := func(change func(*x509.Certificate)) (cert, key []byte) {
		template := caTemplate()
		change(template)
		pair := sign(t, nil, template)
		return encode(pair.Certificate[0]), keyPEM(t, pair)
	}
	expired, expiredKey := signed(func(c *x509.Certificate) {
		c.NotBefore, c.NotAfter = c.NotBefore.Add(-time.Hour), c.NotBefore.Add(-time.Minute)
	})
	early, earlyKey := signed(func(c *x509.Certificate) { c.NotBefore = c.NotBefore.Add(time.Minute) })
	noSign, noSignKey := signed(func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageDigitalSignature })
	bare, bareKey := signed(func(c *x509.Certificate) { c.KeyUsage = 0 })
	for _, tc := range []struct {
		name      string
		cert, key []byte
		want      string
	}{
		{"its own", cert, key, ""},
		{"with a chain", bytes.Join([][]byte{cert, expired}, nil), key, ""},
		{"no key usages", bare, bareKey, ""},
		{"nothing", nil, nil, "a certificate and its private key (PEM) are needed"},
		{"no key", cert, nil, "a certificate and its private key (PEM) are needed"},
		{"garbage", []byte("garbage"), key, "a certificate and its private key (PEM) are needed"},
		{"another key", cert, otherKey, "does not match"},
		{"the two swapped", key, cert, "a certificate and its private key (PEM) are needed"},
		{"a leaf", leaf, leafKey, "is not a CA certificate"},
		{"may not sign", noSign, noSignKey, "is not a CA certificate"},
		{"expired", expired, expiredKey, "expired on"},
		{"not yet valid", early, earlyKey, "check the clocks"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := pki.ParseAuthority(tc.cert, tc.key)
			if !says(err, tc.want) || (err != nil && !errors.Is(err, volume.ErrInvalid)) {
				t.Fatalf("%v, want %q", err, tc.want)
			}
			if err != nil {
				return
			}
			cert, _ := newPair(t, got, nodeA, x509.ExtKeyUsageServerAuth)
			if err := parse(t, cert).CheckSignatureFrom(got.Certificate()); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestAuthorityKeys: an external CA may have any kind of key in any form.
func TestAuthorityKeys(t *testing.T) {
	rsaKey := must[*rsa.PrivateKey](t)(rsa.GenerateKey(rand.Reader, 2048))
	ecKey := must[*ecdsa.PrivateKey](t)(ecdsa.GenerateKey(elliptic.P384(), rand.Reader))
	_, edKey := must2(ed25519.GenerateKey(rand.Reader))(t)
	for _, tc := range []struct {
		block pem.Block
		pub   any
		key   any
	}{
		{pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(rsaKey)}, rsaKey.Public(), rsaKey},
		{pem.Block{Type: "EC PRIVATE KEY", Bytes: must[[]byte](t)(x509.MarshalECPrivateKey(ecKey))}, ecKey.Public(), ecKey},
		{pem.Block{Type: "PRIVATE KEY", Bytes: must[[]byte](t)(x509.MarshalPKCS8PrivateKey(edKey))}, edKey.Public(), edKey},
	} {
		der := must[[]byte](t)(x509.CreateCertificate(rand.Reader, caTemplate(), caTemplate(), tc.pub, tc.key))
		ca, err := pki.ParseAuthority(encode(der), pem.EncodeToMemory(&tc.block))
		if err != nil {
			t.Errorf("%s: %v", tc.block.Type, err)
			continue
		}
		cert, key := must2(ca.PEM())(t)
		again := must[*pki.Authority](t)(pki.ParseAuthority(cert, key))
		server, _ := newDirectory(t, ca, nodeA, x509.ExtKeyUsageServerAuth)
		client, _ := newDirectory(t, again, controller, x509.ExtKeyUsageClientAuth)
		agree(t, server, client)
	}
}

// TestLifetimes runs in a synctest bubble, whose clock can be advanced by years.
func TestLifetimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		ca := newAuthority(t)
		const years10, week = 10 * 365 * 24 * time.Hour, 7 * 24 * time.Hour
		_, request := must2(pki.NewRequest(nodeA))(t)
		pub, identity := must2(pki.ParseRequest(request))(t)
		issue := func() []byte {
			return must[[]byte](t)(ca.Issue(pub, identity, x509.ExtKeyUsageServerAuth, week))
		}
		span := func(certPEM []byte, notBefore, notAfter time.Time) {
			t.Helper()
			cert := parse(t, certPEM)
			if !cert.NotBefore.Equal(notBefore) || !cert.NotAfter.Equal(notAfter) {
				t.Errorf("valid from %s to %s, want %s to %s", cert.NotBefore, cert.NotAfter, notBefore, notAfter)
			}
			left, of, err := pki.Lifetime(certPEM)
			if left != time.Until(notAfter) || of != notAfter.Sub(notBefore) || err != nil {
				t.Errorf("%s left of %s: %v", left, of, err)
			}
		}
		caStart, caEnd := start.Add(-time.Hour), start.Add(years10)
		span(rootsOf(ca), caStart, caEnd)
		span(issue(), caStart, start.Add(week))
		time.Sleep(24 * time.Hour)
		first := issue()
		span(first, start.Add(23*time.Hour), start.Add(24*time.Hour+week))

		time.Sleep(time.Until(caEnd.Add(-time.Hour)))
		span(issue(), caEnd.Add(-2*time.Hour), caEnd)
		span(first, start.Add(23*time.Hour), start.Add(24*time.Hour+week)) // expired
		cert, key := must2(ca.PEM())(t)

		time.Sleep(2 * time.Hour)
		if _, err := ca.Issue(pub, identity, x509.ExtKeyUsageServerAuth, week); !errors.Is(err, volume.ErrPrecondition) || !says(err, "expired on") {
			t.Errorf("an expired CA issued: %v", err)
		}
		if _, err := pki.ParseAuthority(cert, key); !says(err, "expired on") {
			t.Errorf("an expired CA was read: %v", err)
		}
		if got := pki.JoinRoots(cert); len(got) != 0 {
			t.Errorf("an expired CA is trusted: %s", got)
		}
	})
}

func TestRemaining(t *testing.T) {
	for _, in := range []string{"", "garbage", string(encode(nil)), string(keyPEM(t, sign(t, nil, caTemplate())))} {
		if _, _, err := pki.Lifetime([]byte(in)); !errors.Is(err, volume.ErrInvalid) {
			t.Errorf("%q: %v", in, err)
		}
	}
}

// TestOpenSSL verifies the certificates by another implementation, which checks more of RFC 5280 than
// Go does.
func TestOpenSSL(t *testing.T) {
	ca, dir := newAuthority(t), t.TempDir()
	write := func(name string, data []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	roots := write("ca.crt", rootsOf(newAuthority(t), ca)) // two of one name
	clientCert, _ := newPair(t, ca, controller, x509.ExtKeyUsageClientAuth)
	serverCert, _ := newPair(t, ca, nodeA, x509.ExtKeyUsageServerAuth)
	for purpose, cert := range map[string][]byte{"sslclient": clientCert, "sslserver": serverCert} {
		testenv.Run(t, "openssl", "verify", "-x509_strict", "-purpose", purpose, "-CAfile", roots, write(purpose, cert))
	}
	text := testenv.Run(t, "openssl", "x509", "-noout", "-text", "-in", write("own.crt", rootsOf(ca)))
	for _, want := range []string{"X509v3 Basic Constraints: critical\n                CA:TRUE\n", "X509v3 Key Usage: critical\n                Certificate Sign\n", "X509v3 Subject Key Identifier"} {
		if !bytes.Contains([]byte(text), []byte(want)) {
			t.Errorf("the CA has no %q:\n%s", want, text)
		}
	}
	_, request := must2(pki.NewRequest(nodeA))(t)
	testenv.Run(t, "openssl", "req", "-verify", "-noout", "-in", write("request", request))
}

func TestJoinRoots(t *testing.T) {
	one, two := newAuthority(t), newAuthority(t)
	leaf, key := newPair(t, one, nodeA, x509.ExtKeyUsageServerAuth)
	old := caTemplate()
	old.NotBefore, old.NotAfter = old.NotBefore.Add(-time.Hour), old.NotBefore.Add(-time.Minute)
	expired := encode(sign(t, nil, old).Certificate[0])
	block, _ := pem.Decode(rootsOf(one))
	block.Headers = map[string]string{"Comment": "of mine"}
	for _, tc := range []struct {
		name    string
		bundles [][]byte
		want    []byte
	}{
		{"none", nil, nil},
		{"nothing", [][]byte{nil, {}}, nil},
		{"one", [][]byte{rootsOf(one)}, rootsOf(one)},
		{"two, in order", [][]byte{rootsOf(two), rootsOf(one)}, rootsOf(two, one)},
		{"twice", [][]byte{rootsOf(one, two), rootsOf(two, one), rootsOf(one)}, rootsOf(one, two)},
		{"with headers", [][]byte{pem.EncodeToMemory(block), rootsOf(one)}, rootsOf(one)},
		{"text between them", [][]byte{[]byte("# one\n"), append([]byte("two\n"), rootsOf(two)...)}, rootsOf(two)},
		{"a leaf", [][]byte{leaf, rootsOf(one)}, rootsOf(one)},
		{"another kind of block", [][]byte{pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: two.Certificate().Raw}), rootsOf(one)}, rootsOf(one)},
		{"a key", [][]byte{key, rootsOf(one)}, rootsOf(one)},
		{"expired", [][]byte{expired, rootsOf(one)}, rootsOf(one)},
		{"garbage in a block", [][]byte{encode([]byte("garbage")), rootsOf(one)}, rootsOf(one)},
		{"cut short", [][]byte{rootsOf(one), rootsOf(two)[:99]}, rootsOf(one)},
	} {
		if got := pki.JoinRoots(tc.bundles...); !bytes.Equal(got, tc.want) {
			t.Errorf("%s: %s, want %s", tc.name, got, tc.want)
		}
	}
}

// FuzzJoinRoots: all joined certificates can be trusted, and joining them again, with themselves and
// with their source, changes nothing.
func FuzzJoinRoots(f *testing.F) {
	one, two := newAuthority(f), newAuthority(f)
	leaf, _ := newPair(f, one, nodeA, x509.ExtKeyUsageServerAuth)
	for _, bundle := range [][]byte{rootsOf(one), append(rootsOf(two), leaf...), encode([]byte("garbage")), []byte("garbage")} {
		f.Add(bundle)
	}
	f.Fuzz(func(t *testing.T, bundle []byte) {
		joined := pki.JoinRoots(bundle, rootsOf(one))
		if !x509.NewCertPool().AppendCertsFromPEM(joined) {
			t.Errorf("%s cannot be read", joined)
		}
		if again := pki.JoinRoots(joined, joined, bundle); !bytes.Equal(again, joined) {
			t.Errorf("%s became %s", joined, again)
		}
	})
}

// FuzzParseAuthority: the PEM of a parsed CA parses to the same CA.
func FuzzParseAuthority(f *testing.F) {
	ca := newAuthority(f)
	cert, key := must2(ca.PEM())(f)
	leaf, leafKey := newPair(f, ca, controller, x509.ExtKeyUsageClientAuth)
	f.Add(cert, key)
	f.Add(leaf, leafKey)
	f.Add([]byte{}, []byte("garbage"))
	f.Fuzz(func(t *testing.T, cert, key []byte) {
		ca, err := pki.ParseAuthority(cert, key)
		if err != nil {
			return
		}
		cert, key, err = ca.PEM()
		if err != nil {
			t.Fatal(err)
		}
		again, err := pki.ParseAuthority(cert, key)
		if err != nil || !again.Certificate().Equal(ca.Certificate()) {
			t.Errorf("%s became %v: %v", cert, again, err)
		}
	})
}
