package pki_test

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"errors"
	"net"
	"net/url"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/volume"
)

// rawNames returns a subject alternative name extension that x509 does not write.
func rawNames(tb testing.TB, names ...asn1.RawValue) []pkix.Extension {
	tb.Helper()
	return []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Value: must[[]byte](tb)(asn1.Marshal(names))}}
}

func generalName(tag int, text string) asn1.RawValue {
	return asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: tag, IsCompound: tag == 0 || tag == 4, Bytes: []byte(text)}
}

func TestParseRequest(t *testing.T) {
	p256 := must[*ecdsa.PrivateKey](t)(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	p384 := must[*ecdsa.PrivateKey](t)(ecdsa.GenerateKey(elliptic.P384(), rand.Reader))
	rsaKey := must[*rsa.PrivateKey](t)(rsa.GenerateKey(rand.Reader, 2048))
	_, edKey := must2(ed25519.GenerateKey(rand.Reader))(t)
	one := []*url.URL{nodeA}
	uri := generalName(6, nodeA.String())
	for _, tc := range []struct {
		name     string
		key      crypto.Signer
		template x509.CertificateRequest
		want     string
	}{
		{"right", p256, x509.CertificateRequest{URIs: one}, ""},
		{"with a subject, which is not taken over", p256, x509.CertificateRequest{URIs: one, Subject: pkix.Name{CommonName: "x"}}, ""},
		{"written by hand", p256, x509.CertificateRequest{ExtraExtensions: rawNames(t, uri)}, ""},
		{"no URI", p256, x509.CertificateRequest{}, "exactly one URI"},
		{"two URIs", p256, x509.CertificateRequest{URIs: []*url.URL{nodeA, nodeB}}, "exactly one URI"},
		{"one URI twice", p256, x509.CertificateRequest{URIs: []*url.URL{nodeA, nodeA}}, "exactly one URI"},
		{"DNS name", p256, x509.CertificateRequest{URIs: one, DNSNames: []string{"a"}}, "exactly one URI"},
		{"DNS name alone", p256, x509.CertificateRequest{DNSNames: []string{"a"}}, "exactly one URI"},
		{"IP address", p256, x509.CertificateRequest{URIs: one, IPAddresses: []net.IP{net.IPv4(10, 0, 0, 1)}}, "exactly one URI"},
		{"email address", p256, x509.CertificateRequest{URIs: one, EmailAddresses: []string{"a@b.c"}}, "exactly one URI"},
		{"other name", p256, x509.CertificateRequest{ExtraExtensions: rawNames(t, uri, generalName(0, "\x06\x01\x2a"))}, "exactly one URI"},
		{"directory name", p256, x509.CertificateRequest{ExtraExtensions: rawNames(t, generalName(4, "0\x00"), uri)}, "exactly one URI"},
		{"registered ID", p256, x509.CertificateRequest{ExtraExtensions: rawNames(t, uri, generalName(8, "\x2a"))}, "exactly one URI"},
		{"URI in another spelling", p256, x509.CertificateRequest{ExtraExtensions: rawNames(t, generalName(6, "SPIFFE://csi.trivet.dev/node/a"))}, "exactly one URI"},
		{"P-384", p384, x509.CertificateRequest{URIs: one}, "ECDSA P-256 is needed"},
		{"RSA", rsaKey, x509.CertificateRequest{URIs: one}, "key is RSA: ECDSA P-256 is needed"},
		{"Ed25519", edKey, x509.CertificateRequest{URIs: one}, "ECDSA P-256 is needed"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			der := must[[]byte](t)(x509.CreateCertificateRequest(rand.Reader, &tc.template, tc.key))
			pub, who, err := pki.ParseRequest(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}))
			if !says(err, tc.want) {
				t.Fatalf("%v, want %q", err, tc.want)
			}
			if err != nil && (!errors.Is(err, volume.ErrInvalid) || pub != nil || who != nil) {
				t.Errorf("%v with %v, %v", err, pub, who)
			}
			if err == nil && (who.String() != nodeA.String() || !p256.PublicKey.Equal(pub)) {
				t.Errorf("it is of %s, key %v", who, pub)
			}
		})
	}
}

func TestParseRequestText(t *testing.T) {
	_, request := must2(pki.NewRequest(nodeA))(t)
	block, _ := pem.Decode(request)
	forged := bytes.Clone(block.Bytes)
	forged[len(forged)-1] ^= 1 // in the signature
	renamed := bytes.Replace(block.Bytes, []byte("/node/a"), []byte("/node/b"), 1)
	csr := func(der []byte) []byte {
		return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
	}
	for _, tc := range []struct{ name, in, want string }{
		{"right", string(request), ""},
		{"blank lines after it", string(request) + "\n\n", ""},
		{"empty", "", "exactly one PEM block"},
		{"garbage", "garbage", "exactly one PEM block"},
		{"twice", string(request) + string(request), "exactly one PEM block"},
		{"more after it", string(request) + "x", "exactly one PEM block"},
		{"another block", string(rootsOf(newAuthority(t))), "exactly one PEM block"},
		{"empty block", string(csr(nil)), "certificate request: "},
		{"cut short", string(csr(block.Bytes[:len(block.Bytes)-1])), "certificate request: "},
		{"forged signature", string(csr(forged)), "certificate request: "},
		{"another name, signed for this one", string(csr(renamed)), "certificate request: "},
	} {
		if _, _, err := pki.ParseRequest([]byte(tc.in)); !says(err, tc.want) || (err != nil && !errors.Is(err, volume.ErrInvalid)) {
			t.Errorf("%s: %v, want %q", tc.name, err, tc.want)
		}
	}
}

// FuzzParseRequest: a certificate can be issued for every parsed request.
func FuzzParseRequest(f *testing.F) {
	ca := newAuthority(f)
	for _, who := range []*url.URL{controller, nodeA, pki.NodeURI(driverName, "rack/1 ü")} {
		_, request := must2(pki.NewRequest(who))(f)
		f.Add(request)
	}
	f.Add([]byte("-----BEGIN CERTIFICATE REQUEST-----\n-----END CERTIFICATE REQUEST-----\n"))
	f.Fuzz(func(t *testing.T, request []byte) {
		if pub, who, err := pki.ParseRequest(request); err == nil {
			granted(t, ca, pub, who)
		}
	})
}

// FuzzRequestNames signs requests for any names: the certificate for a parsed one has one name.
func FuzzRequestNames(f *testing.F) {
	ca := newAuthority(f)
	key := must[*ecdsa.PrivateKey](f)(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	for _, names := range [][]asn1.RawValue{
		{generalName(6, nodeA.String())},
		{generalName(6, "mailto:a@b")},
		{generalName(6, "//user:pass@host:1/%2F?q#f")},
		{generalName(6, nodeA.String()), generalName(0, "\x06\x01\x2a")},
	} {
		f.Add(rawNames(f, names...)[0].Value)
	}
	f.Fuzz(func(t *testing.T, names []byte) {
		template := &x509.CertificateRequest{ExtraExtensions: rawNames(t)}
		template.ExtraExtensions[0].Value = names
		der, err := x509.CreateCertificateRequest(rand.Reader, template, key)
		if err != nil {
			return
		}
		if pub, who, err := pki.ParseRequest(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})); err == nil {
			granted(t, ca, pub, who)
		}
	})
}

// granted fails the test unless the certificate has the name and the key, and no other names.
func granted(t *testing.T, ca *pki.Authority, pub crypto.PublicKey, who *url.URL) {
	t.Helper()
	got := parse(t, must[[]byte](t)(ca.Issue(pub, who, x509.ExtKeyUsageServerAuth, time.Hour)))
	names := len(got.URIs) + len(got.DNSNames) + len(got.IPAddresses) + len(got.EmailAddresses)
	if names != 1 || got.URIs[0].String() != who.String() || !got.PublicKey.(*ecdsa.PublicKey).Equal(pub) || got.IsCA {
		t.Errorf("%s became %s, key %v", who, got.URIs, got.PublicKey)
	}
}
