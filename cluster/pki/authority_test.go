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

// caTemplate returns the template of a CA like those that cert-manager creates.
func caTemplate() *x509.Certificate {
	return &x509.Certificate{
		Subject: pkix.Name{CommonName: "other"}, NotBefore: time.Now(), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature, BasicConstraintsValid: true, IsCA: true,
	}
}

// TestParseAuthority: a valid CA is accepted and can issue certificates. Any other input is refused with the reason.
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
		{"created by NewAuthority", cert, key, ""},
		{"two certificates", bytes.Join([][]byte{cert, expired}, nil), key, ""},
		{"no key usage extension", bare, bareKey, ""},
		{"no certificate and no key", nil, nil, "a certificate and its private key (PEM) are needed"},
		{"no key", cert, nil, "a certificate and its private key (PEM) are needed"},
		{"garbage", []byte("garbage"), key, "a certificate and its private key (PEM) are needed"},
		{"another key", cert, otherKey, "does not match"},
		{"certificate and key swapped", key, cert, "a certificate and its private key (PEM) are needed"},
		{"leaf certificate", leaf, leafKey, "is not a CA certificate"},
		{"key usage without certSign", noSign, noSignKey, "is not a CA certificate"},
		{"expired", expired, expiredKey, "expired on"},
		{"not yet valid", early, earlyKey, "check the clocks"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := pki.ParseAuthority(tc.cert, tc.key)
			if !hasText(err, tc.want) || (err != nil && !errors.Is(err, volume.ErrInvalid)) {
				t.Fatalf("got %v, want %q", err, tc.want)
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
		mustConnect(t, server, client)
	}
}

// TestLifetimes checks the validity of certificates over ten years.
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
		wantValid := func(certPEM []byte, notBefore, notAfter time.Time) {
			t.Helper()
			cert := parse(t, certPEM)
			if !cert.NotBefore.Equal(notBefore) || !cert.NotAfter.Equal(notAfter) {
				t.Errorf("got a certificate valid from %s to %s, want %s to %s", cert.NotBefore, cert.NotAfter, notBefore, notAfter)
			}
			left, total, err := pki.Lifetime(certPEM)
			if left != time.Until(notAfter) || total != notAfter.Sub(notBefore) || err != nil {
				t.Errorf("Lifetime: got %s of %s, %v, want %s of %s", left, total, err, time.Until(notAfter), notAfter.Sub(notBefore))
			}
		}
		caStart, caEnd := start.Add(-time.Hour), start.Add(years10)
		wantValid(certificatesOf(ca), caStart, caEnd)
		wantValid(issue(), caStart, start.Add(week))
		time.Sleep(24 * time.Hour)
		first := issue()
		wantValid(first, start.Add(23*time.Hour), start.Add(24*time.Hour+week))

		time.Sleep(time.Until(caEnd.Add(-time.Hour)))
		wantValid(issue(), caEnd.Add(-2*time.Hour), caEnd)
		wantValid(first, start.Add(23*time.Hour), start.Add(24*time.Hour+week)) // expired
		cert, key := must2(ca.PEM())(t)

		time.Sleep(2 * time.Hour)
		if _, err := ca.Issue(pub, identity, x509.ExtKeyUsageServerAuth, week); !errors.Is(err, volume.ErrPrecondition) || !hasText(err, "expired on") {
			t.Errorf("Issue with an expired CA: got %v, want ErrPrecondition", err)
		}
		if _, err := pki.ParseAuthority(cert, key); !hasText(err, "expired on") {
			t.Errorf("ParseAuthority of an expired CA: got %v, want an error", err)
		}
		if got := pki.JoinRoots(cert); len(got) != 0 {
			t.Errorf("JoinRoots of an expired CA: got %s, want nothing", got)
		}
	})
}

// TestLifetimeInvalid: Lifetime refuses input that is not a certificate.
func TestLifetimeInvalid(t *testing.T) {
	for _, in := range []string{"", "garbage", string(encode(nil)), string(keyPEM(t, sign(t, nil, caTemplate())))} {
		if _, _, err := pki.Lifetime([]byte(in)); !errors.Is(err, volume.ErrInvalid) {
			t.Errorf("Lifetime(%q): got %v, want ErrInvalid", in, err)
		}
	}
}

// TestOpenSSL verifies certificates with OpenSSL, which checks more rules of RFC 5280 than Go.
func TestOpenSSL(t *testing.T) {
	ca, dir := newAuthority(t), t.TempDir()
	write := func(name string, data []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	roots := write("ca.crt", certificatesOf(newAuthority(t), ca)) // two CAs with the same name
	clientCert, _ := newPair(t, ca, controller, x509.ExtKeyUsageClientAuth)
	serverCert, _ := newPair(t, ca, nodeA, x509.ExtKeyUsageServerAuth)
	for purpose, cert := range map[string][]byte{"sslclient": clientCert, "sslserver": serverCert} {
		testenv.Run(t, "openssl", "verify", "-x509_strict", "-purpose", purpose, "-CAfile", roots, write(purpose, cert))
	}
	text := testenv.Run(t, "openssl", "x509", "-noout", "-text", "-in", write("own.crt", certificatesOf(ca)))
	for _, want := range []string{"X509v3 Basic Constraints: critical\n                CA:TRUE\n", "X509v3 Key Usage: critical\n                Certificate Sign\n", "X509v3 Subject Key Identifier"} {
		if !bytes.Contains([]byte(text), []byte(want)) {
			t.Errorf("the CA certificate does not contain %q:\n%s", want, text)
		}
	}
	_, request := must2(pki.NewRequest(nodeA))(t)
	testenv.Run(t, "openssl", "req", "-verify", "-noout", "-in", write("request", request))
}

// TestJoinRoots: the result contains each valid CA certificate once, in order, and nothing else.
func TestJoinRoots(t *testing.T) {
	one, two := newAuthority(t), newAuthority(t)
	leaf, key := newPair(t, one, nodeA, x509.ExtKeyUsageServerAuth)
	old := caTemplate()
	old.NotBefore, old.NotAfter = old.NotBefore.Add(-time.Hour), old.NotBefore.Add(-time.Minute)
	expired := encode(sign(t, nil, old).Certificate[0])
	block, _ := pem.Decode(certificatesOf(one))
	block.Headers = map[string]string{"Comment": "text"}
	for _, tc := range []struct {
		name    string
		bundles [][]byte
		want    []byte
	}{
		{"no bundle", nil, nil},
		{"empty bundles", [][]byte{nil, {}}, nil},
		{"one certificate", [][]byte{certificatesOf(one)}, certificatesOf(one)},
		{"two certificates, in order", [][]byte{certificatesOf(two), certificatesOf(one)}, certificatesOf(two, one)},
		{"duplicates", [][]byte{certificatesOf(one, two), certificatesOf(two, one), certificatesOf(one)}, certificatesOf(one, two)},
		{"with headers", [][]byte{pem.EncodeToMemory(block), certificatesOf(one)}, certificatesOf(one)},
		{"text between blocks", [][]byte{[]byte("# one\n"), append([]byte("two\n"), certificatesOf(two)...)}, certificatesOf(two)},
		{"leaf certificate", [][]byte{leaf, certificatesOf(one)}, certificatesOf(one)},
		{"another block type", [][]byte{pem.EncodeToMemory(&pem.Block{Type: "X509 CRL", Bytes: two.Certificate().Raw}), certificatesOf(one)}, certificatesOf(one)},
		{"private key", [][]byte{key, certificatesOf(one)}, certificatesOf(one)},
		{"expired", [][]byte{expired, certificatesOf(one)}, certificatesOf(one)},
		{"garbage in a block", [][]byte{encode([]byte("garbage")), certificatesOf(one)}, certificatesOf(one)},
		{"truncated block", [][]byte{certificatesOf(one), certificatesOf(two)[:99]}, certificatesOf(one)},
	} {
		if got := pki.JoinRoots(tc.bundles...); !bytes.Equal(got, tc.want) {
			t.Errorf("%s: got %s, want %s", tc.name, got, tc.want)
		}
	}
}

// FuzzJoinRoots: the result can be used as roots, and JoinRoots of the result, the result again and the
// original bundle returns the same result.
func FuzzJoinRoots(f *testing.F) {
	one, two := newAuthority(f), newAuthority(f)
	leaf, _ := newPair(f, one, nodeA, x509.ExtKeyUsageServerAuth)
	for _, bundle := range [][]byte{certificatesOf(one), append(certificatesOf(two), leaf...), encode([]byte("garbage")), []byte("garbage")} {
		f.Add(bundle)
	}
	f.Fuzz(func(t *testing.T, bundle []byte) {
		joined := pki.JoinRoots(bundle, certificatesOf(one))
		if !x509.NewCertPool().AppendCertsFromPEM(joined) {
			t.Errorf("%s cannot be used as roots", joined)
		}
		if again := pki.JoinRoots(joined, joined, bundle); !bytes.Equal(again, joined) {
			t.Errorf("JoinRoots of its own result: got %s, want %s", again, joined)
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
			t.Errorf("ParseAuthority of %s: got %v, %v, want the same CA", cert, again, err)
		}
	})
}
